"""Remove checkpoints, and leftovers of killed writers."""

from __future__ import annotations

import os
import re
import shutil
import stat
import uuid
from collections.abc import Callable
from pathlib import Path

from mpidist.checkpoint.storage import is_checkpoint
from mpidist.checkpoint.writer import WriterLock, status_of
from mpidist.core.files import NotAFileError

# Being written (tmp), moved away for a new one of the same name (old), and being removed (del).
_LEFTOVER = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{32}\.(?P<kind>tmp|old|del)")
_LOCK = re.compile(r"\.(?P<name>.+)\.lock")
# What writers put into the directory of a checkpoint.
_FILE = re.compile(r"data.*\.safetensors|manifest\.json|rank-\d+\.json(\.part)?")


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint; a crash leaves all of it or nothing under its name.

    Raises:
        OSError: It cannot be removed, or someone writes it just now.
    """
    lock = WriterLock(path)
    try:
        doomed = path.parent / f".{path.name}.{uuid.uuid4().hex}.del"
        try:
            path.rename(doomed)
        except FileNotFoundError:
            return
        shutil.rmtree(doomed)
    finally:
        lock.release()


def clean_leftovers(directory: Path, accepts: Callable[[str], object]) -> None:
    """Remove leftovers of killed writers in ``directory``, of checkpoints that ``accepts`` accepts.

    A checkpoint that was moved away to be replaced, and whose place is empty, is put back. Files that other programs
    may have made, and those of an account that shares the directory for reading only, are left alone.

    Raises:
        OSError: Something cannot be removed.
    """
    if not directory.is_dir() or not os.access(directory, os.W_OK | os.X_OK):
        return
    for name in sorted({match["name"] for match in _leftovers_in(directory) if accepts(match["name"])}):
        _clean(directory, name)


def _leftovers_in(directory: Path) -> list[re.Match[str]]:
    """Return the names of leftovers, which are such by name, kind and content."""
    matches = []
    for entry in os.listdir(directory):
        leftover, lock = _LEFTOVER.fullmatch(entry), _LOCK.fullmatch(entry)
        if leftover is not None and _is_ours(directory / entry):
            matches.append(leftover)
        elif lock is not None:
            status = status_of(directory / entry)
            if status is not None and stat.S_ISREG(status.st_mode) and status.st_size == 0:
                matches.append(lock)
    return matches


def _is_ours(path: Path) -> bool:
    """Return whether it is a directory with nothing but files of checkpoints."""
    try:
        with os.scandir(path) as entries:
            return not path.is_symlink() and all(
                _FILE.fullmatch(entry.name) and entry.is_file(follow_symlinks=False) for entry in entries
            )
    except (NotADirectoryError, FileNotFoundError, PermissionError):
        return False


def _clean(directory: Path, name: str) -> None:
    try:
        lock = WriterLock(directory / name)
    except (BlockingIOError, PermissionError, NotAFileError):
        return  # someone writes it, or it is another account's, or no lock of ours
    try:
        for match in _leftovers_in(directory) if lock.is_real else ():
            if match.re is not _LEFTOVER or match["name"] != name:
                continue
            entry, place = directory / match.string, directory / name
            if match["kind"] != "old" or place.exists():
                shutil.rmtree(entry)
            elif is_checkpoint(entry):
                entry.rename(place)
    finally:
        lock.release()
