"""Opening the files of a checkpoint, in directories where others may have planted links, pipes and devices."""

from __future__ import annotations

import errno
import os
import stat
from io import FileIO
from pathlib import Path

from mpidist.checkpoint.errors import DamagedCheckpointError

# Neither follow a link nor wait for the other end of a pipe, nor take a terminal for that of this process.
_SAFELY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
# What opening a link, a socket and, for writing, a directory fails with.
_NO_FILE = (errno.ELOOP, errno.ENXIO, errno.EISDIR)


class NotAFileError(OSError):
    """Something else than a regular file is where a file of a checkpoint belongs."""

    def __init__(self, path: Path) -> None:
        super().__init__(f"{path} is a link, a directory, a pipe or a device; expected a regular file: remove it")


def open_regular(path: Path, flags: int) -> int:
    """Return a descriptor of a regular file; the directories above it may be links.

    Raises:
        NotAFileError: There is something else, which was not read.
        OSError: It cannot be opened.
    """
    try:
        descriptor = os.open(path, flags | _SAFELY, 0o666)
    except OSError as error:
        if error.errno not in _NO_FILE:
            raise
        raise NotAFileError(path) from error
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise NotAFileError(path)
    return descriptor


def open_to_read(path: Path) -> FileIO:
    """Open a file of a checkpoint.

    Raises:
        DamagedCheckpointError: There is no regular file, but something else.
        OSError: It cannot be opened.
    """
    try:
        return FileIO(open_regular(path, os.O_RDONLY))
    except NotAFileError as error:
        raise DamagedCheckpointError(f"{path} is damaged: {error}") from error


def size_of(path: Path) -> int:
    """Return the size of a file of a checkpoint, which is not opened.

    Raises:
        DamagedCheckpointError: There is no regular file, but something else.
        OSError: It cannot be looked at.
    """
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise DamagedCheckpointError(f"{path} is damaged: {NotAFileError(path)}")
    return status.st_size
