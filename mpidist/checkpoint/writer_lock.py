"""WriterLock: one writer per checkpoint, and a way to tell whether it is alive."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path

from mpidist.core.files import open_regular

# What a file system without locks answers. Writers of one name are not kept apart there, and leftovers left alone.
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
# The files of the locks that this process has.
_held: set[tuple[int, int]] = set()


class WriterLock:
    """The right to write one checkpoint, which the system takes back when the process ends, however it ends.

    Args:
        path: The checkpoint.

    Attributes:
        is_real: Whether the file system has locks.

    Raises:
        BlockingIOError: Someone else writes it.
        NotAFileError: Something else is where its file belongs.
        OSError: Its file cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self._file = _file_of(path)
        self._descriptor: int | None = self._take()

    def _take(self) -> int:
        while True:
            descriptor = open_regular(self._file, os.O_RDWR | os.O_CREAT)
            try:
                self.is_real = _lock(descriptor)
                # Whoever had the lock may have removed the file since it was opened.
                if _is_still(self._file, descriptor):
                    _held.add(_identity(descriptor))
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def release(self) -> None:
        """Let others write, and leave no trace; once."""
        if self._descriptor is None:
            return
        # Removed while it is held: nobody may take a lock that then loses its file.
        with contextlib.suppress(FileNotFoundError):
            self._file.unlink()
        _held.discard(_identity(self._descriptor))
        os.close(self._descriptor)
        self._descriptor = None


def is_held_here(path: Path) -> bool:
    """Whether it is this process that writes the checkpoint ``path``."""
    try:
        return _identity(_file_of(path)) in _held
    except FileNotFoundError:
        return False


def _file_of(path: Path) -> Path:
    return path.parent / f".{path.name}.lock"


def _identity(file: Path | int) -> tuple[int, int]:
    status = os.fstat(file) if isinstance(file, int) else file.lstat()
    return status.st_dev, status.st_ino


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


def _is_still(file: Path, descriptor: int) -> bool:
    try:
        found = file.lstat()
    except FileNotFoundError:
        return False
    return os.path.samestat(found, os.fstat(descriptor))
