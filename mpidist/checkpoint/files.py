"""Opening the files of a checkpoint to read them: what is there instead of a file is damage."""

from __future__ import annotations

import os
import stat
from io import FileIO
from pathlib import Path

from mpidist.checkpoint.errors import DamagedCheckpointError
from mpidist.core.files import NotAFileError, open_regular


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
