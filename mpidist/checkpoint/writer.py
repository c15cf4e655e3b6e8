"""Writing and removing checkpoints on the disk: whole or not at all, and one writer at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import socket
import stat
import time
import uuid
from collections.abc import Callable, Iterable
from pathlib import Path

from mpidist.checkpoint.manifest import Manifest
from mpidist.checkpoint.safetensors_file import FileRecord, named, size_of
from mpidist.checkpoint.storage import MANIFEST, is_checkpoint, read_manifest
from mpidist.core.files import NotAFileError, open_regular

# What a file system without locks answers. Writers of one name are not kept apart there, and leftovers left alone.
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
# The files of the locks that this process has.
_held: set[tuple[int, int]] = set()
# Being written (tmp), moved away for a new one of the same name (old), and being removed (del).
_LEFTOVER = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{32}\.(?P<kind>tmp|old|del)")
_LOCK = re.compile(r"\.(?P<name>.+)\.lock")
# What writers put into the directory of a checkpoint.
_FILE = re.compile(r"data.*\.safetensors|manifest\.json|rank-\d+\.json(\.part)?")


def _program_start() -> float:
    """Return the start of this process in seconds of the epoch, rather too late than too early."""
    with open("/proc/self/stat", encoding="ascii", errors="replace") as file:
        ticks = int(file.read().rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - (ticks + 1) / os.sysconf("SC_CLK_TCK")
    return time.time() - age


def this_writer() -> tuple[str, int]:
    """Return host and process id."""
    return socket.gethostname(), os.getpid()


class Writing:
    """A checkpoint that is being written, in a hidden directory beside its place.

    Only ``publish`` gives it its name, so that a crash leaves either all of it or nothing under that name.

    Args:
        path: The directory to be; a checkpoint that is there already is replaced.
        is_shared: Whether the ranks of a strategy save together.

    Raises:
        FileExistsError: There is something else under ``path``, or someone saves there at the same time.
        OSError: It cannot be written.
    """

    def __init__(self, path: Path, is_shared: bool) -> None:
        self.path = path
        if path.exists() and not is_checkpoint(path):
            raise FileExistsError(f"{path} exists and is no checkpoint; expected a free name: move it away")
        _make_directory(path.parent)
        try:
            self._lock = WriterLock(path)
        except BlockingIOError as error:
            if is_held_here(path):
                raise FileExistsError(
                    f"this process itself still saves checkpoint {path}, in a thread (async_save=True); expected one "
                    "save under a name at a time: call wait() of the Checkpoint that saves it first"
                ) from error
            raise FileExistsError(_two_writers(path, "another process")) from error
        self.directory = path.parent / f".{path.name}.{uuid.uuid4().hex}.tmp"
        with contextlib.ExitStack() as undo:
            undo.callback(self._lock.release)
            if not is_shared:
                _check_sole_writer(path)
            # Opened now: once the checkpoint has its name, nothing may go wrong any more.
            self._parent = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
            undo.callback(os.close, self._parent)
            self.directory.mkdir()
            self._undo = undo.pop_all()

    def publish(self, manifest: Manifest) -> None:
        """Write the manifest, after all files, and give the checkpoint its name.

        Raises:
            OSError: It could not be done; call ``discard``.
        """
        for name, record in manifest.files.items():
            _check_is_there(self.directory / name, record)
        file = self.directory / MANIFEST
        with named(file), open(file, "xb") as stream:
            stream.write(manifest.to_text().encode())
            stream.flush()
            os.fsync(stream.fileno())
        _sync(self.directory)
        self._put()
        self._undo.close()

    def _put(self) -> None:
        if not self.path.exists():
            self.directory.rename(self.path)
            _sync_names(self._parent)
            return
        # A directory cannot be renamed over one that is not empty.
        old = self.path.parent / f".{self.path.name}.{uuid.uuid4().hex}.old"
        self.path.rename(old)
        try:
            self.directory.rename(self.path)
        except BaseException:
            old.rename(self.path)
            raise
        # The new name must be on the disk before the old data go.
        _sync_names(self._parent)
        # What cannot be removed does not make the new one worse; the next manager removes it.
        with contextlib.suppress(OSError):
            # From now on it is no longer what is to be put back after a crash.
            doomed = old.with_suffix(".del")
            old.rename(doomed)
            shutil.rmtree(doomed)

    def discard(self, names: Iterable[str]) -> None:
        """Remove everything written so far; ``names`` are those of the files.

        A file that stays matters less than the error that led here; the next manager removes it.
        """
        # By name: a process without file descriptors left could not list the directory.
        with contextlib.suppress(OSError):
            for name in (*names, MANIFEST):
                with contextlib.suppress(FileNotFoundError):
                    (self.directory / name).unlink()
            self.directory.rmdir()
        with contextlib.suppress(OSError):
            self._undo.close()


def _make_directory(path: Path) -> None:
    """Make a directory and those above it, with their names on the disk."""
    if path.is_dir():
        return
    _make_directory(path.parent)
    path.mkdir(exist_ok=True)
    _sync(path.parent)


def _check_sole_writer(path: Path) -> None:
    """Raise where a process that no strategy joins to this one has saved under ``path``."""
    try:
        manifest = read_manifest(path)
    except (FileNotFoundError, ValueError):
        return
    is_own = manifest.writer is None or manifest.writer == this_writer()
    if not is_own and not manifest.is_shared and manifest.saved_at > _program_start():
        assert manifest.writer is not None
        host, process = manifest.writer
        raise FileExistsError(_two_writers(path, f"process {process} on host {host}"))


def _two_writers(path: Path, other: str) -> str:
    return (
        f"{other} saves checkpoint {path}, too; expected one writer: in a job of several ranks save in the scope of a "
        "strategy of all ranks (with strategy.scope(): checkpoint.save(...)), or on one rank only, or under a name for "
        "each rank"
    )


def _check_is_there(file: Path, record: FileRecord) -> None:
    """Raise unless this rank sees a file that another one may have written."""
    try:
        size = size_of(file)
    except FileNotFoundError:
        size = -1
    if size != record.bytes:
        seen = "is not there" if size < 0 else f"has {size} bytes"
        raise OSError(
            f"{file}, which a rank has written with {record.bytes} bytes, {seen} where the first rank looks; expected "
            "a directory that all ranks share: save to one, or without sharded=True"
        )


# Locks ------------------------------------------------------------------------------------------------------------


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
                own, found = os.fstat(descriptor), _status(self._file)
                if found is not None and os.path.samestat(own, found):
                    _held.add(_identity(own))
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
        _held.discard(_identity(os.fstat(self._descriptor)))
        os.close(self._descriptor)
        self._descriptor = None


def is_held_here(path: Path) -> bool:
    """Return whether it is this process that writes the checkpoint ``path``."""
    status = _status(_file_of(path))
    return status is not None and _identity(status) in _held


def _file_of(path: Path) -> Path:
    return path.parent / f".{path.name}.lock"


def _identity(status: os.stat_result) -> tuple[int, int]:
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


def _status(path: Path) -> os.stat_result | None:
    """Return the status of a file or a link, or None."""
    try:
        return path.lstat()
    except FileNotFoundError:
        return None


# Leftovers --------------------------------------------------------------------------------------------------------


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
            status = _status(directory / entry)
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


def _sync(path: Path) -> None:
    """Wait until the names in a directory are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _sync_names(descriptor)
    finally:
        os.close(descriptor)


def _sync_names(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems write names at once, and know no such call for a directory.
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
