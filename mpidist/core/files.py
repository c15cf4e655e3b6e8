"""Open files safely, despite links and pipes of other users, and replace them whole."""

from __future__ import annotations

import errno
import os
import shlex
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Do not follow links, wait for the other end of a pipe, or acquire a terminal.
_SAFELY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
# Errors for a link, a socket and, for writing, a directory.
_NO_FILE = (errno.ELOOP, errno.ENXIO, errno.EISDIR)


class NotAFileError(OSError):
    """The path of a file is a link, a directory, a pipe or a device.

    >>> raise NotAFileError("/dev/null")
    Traceback (most recent call last):
    mpidist.core.files.NotAFileError: /dev/null is no regular file but a directory, a pipe or a device; type: ...
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        name = os.fspath(path)
        kind = "a directory, a pipe or a device"
        if os.path.islink(name):
            kind = f"a symbolic link to {os.readlink(name)!r}"
        super().__init__(f"{name} is no regular file but {kind}; type: rm -r {shlex.quote(name)}, or name another path")


def open_regular(path: str | os.PathLike[str], flags: int, mode: int = 0o666) -> int:
    """Return a descriptor of a regular file, or raise NotAFileError. Folders in ``path`` may be links."""
    try:
        descriptor = os.open(path, flags | _SAFELY, mode)
    except OSError as error:
        if error.errno not in _NO_FILE:
            raise
        raise NotAFileError(path) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotAFileError(path)
    return descriptor


def check_no_link(path: str | os.PathLike[str]) -> None:
    """Raise NotAFileError if a file to write is a symbolic link."""
    if os.path.islink(path):
        raise NotAFileError(path)


@contextmanager
def folder_to_write(folder: str | os.PathLike[str], variable: str, *, is_private: bool = False) -> Iterator[None]:
    """Create the folder of an environment variable if it is missing. OSErrors of the block name both.

    Other users cannot read a new private folder. An existing one raises an error if they can write there.
    """
    name = os.fspath(folder)
    try:
        if os.path.exists(name) and not os.path.isdir(name):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), name)
        os.makedirs(name, mode=0o700 if is_private else 0o777, exist_ok=True)
        if is_private:
            _check_private(name)
        yield
    except OSError as error:
        raise OSError(
            f"{variable}={name!r}: {error}; expected a folder that every rank can write to. Type: export "
            f"{variable}=DIR, or unset {variable}"
        ) from error


def _check_private(folder: str) -> None:
    about = os.stat(folder)
    if about.st_uid != os.geteuid() or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(errno.EPERM, "others may write there", folder)


@contextmanager
def replacing(path: str | os.PathLike[str], mode: int = 0o666) -> Iterator[int]:
    """Yield the descriptor of a new file, which replaces ``path`` after the block.

    Until then, and after an error in the block, readers find the old file.
    """
    check_no_link(path)
    target = Path(path)
    temporary = target.with_name(f"{_prefix(target.name)}{os.urandom(16).hex()}")
    descriptor = open_regular(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
    try:
        try:
            yield descriptor
        finally:
            os.close(descriptor)
        # Replaces a link that was created since the check, and does not follow it.
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def remove_unfinished(path: str | os.PathLike[str]) -> None:
    """Remove the temporary files of ``path`` that killed processes left."""
    target = Path(path)
    for left in target.parent.iterdir():
        if left.name.startswith(_prefix(target.name)):
            left.unlink(missing_ok=True)


def _prefix(name: str) -> str:
    return f".{name}."
