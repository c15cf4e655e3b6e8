"""Removing checkpoints, and what killed writers have left: put back or removed, never while its writer is alive."""

from __future__ import annotations

import os
import re
import shutil
import uuid
from pathlib import Path

from mpidist.checkpoint.writer_lock import WriterLock

# Being written (tmp), moved away for a new one of the same name (old), and being removed (del).
_LEFTOVER = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{32}\.(?P<kind>tmp|old|del)")
_LOCK = re.compile(r"\.(?P<name>.+)\.lock")


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint, so that a crash leaves all of it or nothing under its name.

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


def clean_leftovers(directory: Path) -> None:
    """Remove what killed writers have left in ``directory``.

    A checkpoint that was moved away to be replaced, and whose place is empty, is put back.

    Raises:
        OSError: Something cannot be removed.
    """
    if not directory.is_dir():
        return
    matches = [_LEFTOVER.fullmatch(entry) or _LOCK.fullmatch(entry) for entry in os.listdir(directory)]
    for name in sorted({match["name"] for match in matches if match is not None}):
        _clean(directory, name)


def _clean(directory: Path, name: str) -> None:
    try:
        lock = WriterLock(directory / name)
    except BlockingIOError:
        return
    try:
        for entry in os.listdir(directory) if lock.is_real else ():
            match = _LEFTOVER.fullmatch(entry)
            if match is None or match["name"] != name:
                continue
            if match["kind"] == "old" and not (directory / name).exists():
                (directory / entry).rename(directory / name)
            else:
                shutil.rmtree(directory / entry)
    finally:
        lock.release()
