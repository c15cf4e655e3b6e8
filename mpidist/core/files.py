"""Opening the files that mpidist writes, through no symbolic link: another user may have put it where others write."""

from __future__ import annotations

import errno
import os
import shlex
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def open_to_write(path: str | os.PathLike[str], flags: int, mode: int = 0o666) -> int:
    """Return a descriptor of a file that is written, which ``path`` names and no symbolic link does.

    Folders on the way to it may be links: the user has named them.

    Args:
        path: The file.
        flags: Those of ``os.open``.
        mode: Of a file that is made.

    Raises:
        OSError: It cannot be opened, or is a symbolic link.
    """
    try:
        return os.open(path, flags | os.O_NOFOLLOW, mode)
    except OSError as error:
        if error.errno == errno.ELOOP:
            check_no_link(path)
        raise


def check_no_link(path: str | os.PathLike[str]) -> None:
    """Raise OSError if a file that is to be written is a symbolic link.

    >>> check_no_link("/proc/self")
    Traceback (most recent call last):
    OSError: [Errno 40] a symbolic link to '...', and mpidist writes through none; type: rm /proc/self, or name ...
    """
    if os.path.islink(path):
        name = os.fspath(path)
        raise OSError(
            errno.ELOOP,
            f"a symbolic link to {os.readlink(name)!r}, and mpidist writes through none; type: rm {shlex.quote(name)}, "
            "or name another place",
            name,
        )


@contextmanager
def folder_to_write(folder: str | os.PathLike[str], variable: str) -> Iterator[None]:
    """Make the folder that an environment variable names, if need be, and name both in errors of the block.

    Raises:
        OSError: It is no folder, or the block cannot write there.
    """
    name = os.fspath(folder)
    try:
        if os.path.exists(name) and not os.path.isdir(name):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), name)
        os.makedirs(name, exist_ok=True)
        yield
    except OSError as error:
        raise OSError(
            f"{variable}={name!r}: {error}; expected a folder that every rank can write to. Type: export "
            f"{variable}=DIR, or unset {variable}"
        ) from error


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[int]:
    """Give the descriptor of a new file, which takes the place of ``path`` at the end of the block.

    Whoever reads meanwhile finds the old file; an error in the block leaves it there.

    Raises:
        OSError: It cannot be made, or ``path`` is a symbolic link.
    """
    check_no_link(path)
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    descriptor = open_to_write(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        try:
            yield descriptor
        finally:
            os.close(descriptor)
        # A link that has come meanwhile is replaced, and not followed.
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
