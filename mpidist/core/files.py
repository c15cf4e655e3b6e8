"""Opening files where others may have planted links, pipes and devices, and writing them whole."""

from __future__ import annotations

import errno
import glob
import os
import shlex
import stat
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# Neither follow a link nor wait for the other end of a pipe, nor take a terminal for that of this process.
_SAFELY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
# What opening a link, a socket and, for writing, a directory fails with.
_NO_FILE = (errno.ELOOP, errno.ENXIO, errno.EISDIR)


class NotAFileError(OSError):
    """Something else than a regular file is where a file belongs.

    >>> raise NotAFileError("/dev/null")
    Traceback (most recent call last):
    mpidist.core.files.NotAFileError: /dev/null is no regular file but a directory, a pipe or a device; type: ...
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        name = os.fspath(path)
        what = "a directory, a pipe or a device"
        if os.path.islink(name):
            what = f"a symbolic link to {os.readlink(name)!r}"
        super().__init__(
            f"{name} is no regular file but {what}; type: rm -r {shlex.quote(name)}, or name another place"
        )


def open_regular(path: str | os.PathLike[str], flags: int, mode: int = 0o666) -> int:
    """Return a descriptor of a regular file, which ``path`` names and no symbolic link does.

    Folders on the way to it may be links: the user has named them.

    Args:
        path: The file.
        flags: Those of ``os.open``.
        mode: Of a file that is made.

    Raises:
        NotAFileError: There is something else, which was neither read nor written.
        OSError: It cannot be opened.
    """
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
    """Raise NotAFileError if a file that is to be written is a symbolic link."""
    if os.path.islink(path):
        raise NotAFileError(path)


@contextmanager
def folder_to_write(folder: str | os.PathLike[str], variable: str, *, is_private: bool = False) -> Iterator[None]:
    """Make the folder that an environment variable names, if need be. Errors of the block name both.

    Args:
        folder: The folder.
        variable: Name of the variable.
        is_private: Whether nobody else may look into it once it is made, nor write there where it was there before.

    Raises:
        OSError: It is no folder, or the block cannot write there.
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
    """Give the descriptor of a new file that replaces ``path`` at the block's end.

    Whoever reads meanwhile finds the old file; an error in the block leaves it there.

    Args:
        path: The file.
        mode: Of the new one, less what the umask takes.

    Raises:
        OSError: It cannot be made, or ``path`` is a symbolic link.
    """
    check_no_link(path)
    target = Path(path)
    temporary = target.with_name(f"{_beside(target.name)}{uuid.uuid4().hex}")
    descriptor = open_regular(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
    try:
        try:
            yield descriptor
        finally:
            os.close(descriptor)
        # A link that has come meanwhile is replaced, and not followed.
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def remove_unfinished(path: str | os.PathLike[str]) -> None:
    """Remove what ``replacing`` left beside ``path`` in processes that were killed."""
    for left in Path(path).parent.glob(f"{glob.escape(_beside(Path(path).name))}*"):
        left.unlink(missing_ok=True)


def _beside(name: str) -> str:
    return f".{name}."
