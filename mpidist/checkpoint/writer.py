"""Write a checkpoint on one rank, without MPI: all or nothing, by one writer."""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import json
import logging
import os
import shutil
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from mpidist.arrays.dtypes import Array
from mpidist.checkpoint import formats
from mpidist.checkpoint.format_rules import FILE, DamagedCheckpointError, parse
from mpidist.checkpoint.formats import MANIFEST, FileRecord, Manifest, Tensor
from mpidist.checkpoint.parts import Plan
from mpidist.checkpoint.storage import is_checkpoint, read_manifest
from mpidist.core import settings
from mpidist.core.concurrency import Stopwatch
from mpidist.core.errors import PeerError
from mpidist.core.files import open_regular
from mpidist.core.text import numbered_ranks

_log = logging.getLogger("mpidist")
_LONGEST_NAP_SECONDS = 0.1
_IMPORTED = time.time()
_untold: set[Pending] = set()
# A forked child has none of their threads and would wait for them at its end.
os.register_at_fork(after_in_child=_untold.clear)
# A FileRecord in types that JSON has, or None where a rank had nothing to write.
Record = dict[str, Any] | None
# The errors of a file system without locks. Writers of one name are not kept apart there, and leftovers left alone.
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
# The files of the locks that this process has.
_held: set[tuple[int, int]] = set()


@dataclass
class Job:
    """The share of a rank in writing one checkpoint, without MPI calls and forks.

    Attributes:
        path: The directory to be.
        rank: Of this process.
        ranks: How many write.
        plan: The parts of each tensor that each rank writes.
        tensors: Those of the manifest, without their parts.
        arrays: Those that this rank writes, by key: whole, or as a vector its part of it; on the host or a device.
        describe: Called on the first rank; returns the manifest as it is known before the files are written.
        finish: Called on the first rank when the checkpoint is there; its result is that of the job.
        directory: Where the files go for now, once the first rank has begun.
    """

    path: Path
    rank: int
    ranks: int
    plan: Plan
    tensors: Mapping[str, Tensor]
    arrays: dict[str, Array]
    describe: Callable[[], Manifest]
    finish: Callable[[Manifest], list[str]] | None = None
    directory: Path = field(default=Path(), init=False)
    _begun: tuple[Writing, Manifest] | None = field(default=None, init=False)

    def begin(self) -> str:
        """Make the directory for the files and return its path; on the first rank."""
        manifest = self.describe()
        writing = Writing(self.path, manifest.is_shared)
        self._begun, self.directory = (writing, manifest), writing.directory
        return str(self.directory)

    def part(self) -> Record:
        """Write the file of this rank, and wait until it is on the disk."""
        if not self.arrays and self.ranks > 1:
            return None
        if not self.directory.is_dir():
            raise FileNotFoundError(
                f"{self.directory}, which the first rank has made, is not there where this rank looks; expected a "
                "directory that all ranks share: save to one, or without sharded=True"
            )
        return asdict(formats.write_tensors(self.directory / self._file_names()[self.rank], self.arrays))

    def result(self, records: list[Record] | None) -> list[str] | None:
        """Make a checkpoint of the files of all ranks; on the first rank.

        Args:
            records: Of all ranks; None where this one writes everything, which it then does first.
        """
        if self._begun is None:
            self.begin()
        assert self._begun is not None
        writing, manifest = self._begun
        records = [self.part()] if records is None else records
        names = self._file_names()
        tensors = {}
        for key, tensor in self.tensors.items():
            parts = tuple([formats.TensorPart(names[rank], start, stop) for rank, start, stop in self.plan[key]])
            tensors[key] = replace(tensor, parts=parts)
        files = {name: FileRecord(**record) for name, record in zip(names, records, strict=True) if record}
        manifest = replace(manifest, tensors=tensors, files=files, saved_at=time.time(), writer=this_writer())
        writing.publish(manifest)
        return None if self.finish is None else self.finish(manifest)

    def discard(self) -> None:
        """Remove all files, on the first rank."""
        if self._begun is not None:
            notes = [note.name for rank in range(self.ranks) for note in (self._note(rank), self._draft(rank))]
            self._begun[0].discard((*self._file_names(), *notes))

    def _file_names(self) -> list[str]:
        """Return the names of the files of all ranks."""
        if self.ranks == 1:
            return [formats.DATA]
        return [f"data-{rank + 1:05d}-of-{self.ranks:05d}.safetensors" for rank in range(self.ranks)]

    # Without the other ranks at hand, the file system carries the news -----------------------------------------------

    def leave_note(self, record: Record) -> None:
        """Tell the first rank that this rank's file is safe."""
        with open(self._draft(self.rank), "x") as file:  # never what a planted link leads to
            file.write(json.dumps(record))
        os.replace(self._draft(self.rank), self._note(self.rank))

    def await_notes(self, own: Record, gave_up: Callable[[float], bool]) -> list[Record] | None:
        """Return the records of all ranks once they are there, or None if given up.

        Args:
            own: Of this rank, the first.
            gave_up: Sleeps for some seconds, or until it is known that a rank failed.

        Raises:
            TimeoutError: They do not come; the deadline is that of collectives.
            DamagedCheckpointError: One was not written by a rank.
        """
        records, missing = {0: own}, set(range(1, self.ranks))
        stopwatch, limit, nap = Stopwatch(), settings.TIMEOUT.read(), 0.001
        while missing:
            arrived = {rank for rank in missing if os.path.lexists(self._note(rank))}
            for rank in arrived:
                records[rank] = _read_note(self._note(rank))
                self._note(rank).unlink()
            missing -= arrived
            if stopwatch.seconds > limit:
                late = numbered_ranks(sorted(missing))
                raise TimeoutError(f"{late} did not write its part of {self.directory} in time")
            if missing and gave_up(nap):
                return None
            nap = min(2 * nap, _LONGEST_NAP_SECONDS)
        return [records[rank] for rank in range(self.ranks)]

    def _note(self, rank: int) -> Path:
        return self.directory / f"rank-{rank}.json"

    def _draft(self, rank: int) -> Path:
        return self.directory / f"rank-{rank}.json.part"


def _read_note(path: Path) -> Record:
    with formats.named(path), formats.open_to_read(path) as file:
        record: Record = parse(file.read(), str(path))
    if record is not None and not FILE(record):
        raise DamagedCheckpointError(f"{path} is damaged: it is no record of a file")
    return record


# In a thread ------------------------------------------------------------------------------------------------------


class Pending:
    """A job in a thread of its own.

    The thread is none of the daemons: the interpreter waits for it before it ends.

    Args:
        job: The job.
        path: The checkpoint, for messages.
    """

    def __init__(self, job: Job, path: str) -> None:
        self.job, self.path = job, path
        self._part_is_done = threading.Event()
        self._gave_up = threading.Event()
        self._record: Record = None
        self._result: list[str] | None = None
        self._is_whole = False
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._work, name=f"mpidist-checkpoint {path}")
        _untold.add(self)
        try:
            self._thread.start()
        except RuntimeError as error:  # the system has no more threads; told to all ranks when they settle
            self._error = error
            self._part_is_done.set()

    def _work(self) -> None:
        job = self.job
        try:
            try:
                self._record = job.part()
                if job.rank > 0:
                    job.leave_note(self._record)
            finally:
                self._part_is_done.set()
            records = job.await_notes(self._record, self._gave_up.wait) if job.rank == 0 else None
            if records is not None:
                self._result = job.result(records)
                self._is_whole = True
        except Exception as error:  # raised by result() or part(), or printed at exit
            self._error = error
            # Where other ranks may still be writing, settle() does it.
            if job.ranks == 1:
                job.discard()
        finally:
            self._part_is_done.set()
            job.arrays.clear()

    def part(self) -> Record:
        """Wait until this rank's part is written.

        Raises:
            Exception: That of the thread.
        """
        self._part_is_done.wait()
        if self.job.rank > 0:
            self._join()
        if self._error is not None:
            raise self._error
        return self._record

    def result(self, records: list[Record] | None = None) -> list[str] | None:
        """Wait until the checkpoint is there; on the first rank, which knows the records.

        Raises:
            Exception: That of the thread.
        """
        del records
        self._join()
        if self._error is not None:
            raise self._error
        return self._result

    def settle(self, failed: bool) -> None:
        """End the thread, once all ranks know how it went."""
        if failed:
            self._gave_up.set()
        self._join()
        if failed:
            self.job.discard()
        _untold.discard(self)

    def give_up(self) -> None:
        """End the thread without waiting for other ranks, and discard unfinished files; local."""
        self._gave_up.set()
        self._join()
        if self._is_whole:
            _log.info("mpidist: checkpoint %s was whole when it was given up, and is there", self.path)
        else:
            reason = self._error or PeerError("it was given up, as ranks that were to write parts of it are lost")
            self._error = reason
            self.job.discard()
            if self.job.rank == 0:
                _log.warning("mpidist: checkpoint %s was not written: %s", self.path, reason)
        _untold.discard(self)

    def _join(self) -> None:
        if self._thread.ident is not None:
            self._thread.join()


def finish_writing() -> None:
    """Wait until all saves in threads of this process are on the disk; local.

    Raises:
        Exception: That of one of them; then it is told only here.
    """
    for pending in list(_untold):
        try:
            pending.result()
        except Exception:
            _untold.discard(pending)
            raise


def give_up_all() -> None:
    """End the unfinished saves of this process, since ranks are lost; local.

    Those that need no other rank any more are finished. The others, which would wait for notes of ranks that are gone,
    are discarded, so that the next save under their names finds the place free; the first rank's log says so.
    """
    for pending in list(_untold):
        pending.give_up()


@atexit.register
def _tell_at_exit() -> None:
    """Treat errors that nobody waited for as uncaught, which ends a job of several ranks."""
    for pending in list(_untold):
        _untold.discard(pending)
        try:
            pending.result()
        except Exception as error:
            sys.stderr.write(f"mpidist: checkpoint {pending.path} was not written, which its thread found out:\n")
            sys.excepthook(type(error), error, error.__traceback__)


# The directory ----------------------------------------------------------------------------------------------------


def _program_start() -> float:
    """Return the start of this process in seconds of the epoch, or a later time."""
    if not hasattr(time, "CLOCK_BOOTTIME"):  # macOS, which has no /proc either
        return _IMPORTED
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
        with formats.named(file), open(file, "xb") as stream:
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
        size = formats.size_of(file)
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
    """The right to write one checkpoint; it ends with the process, however that ends.

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
                own, found = os.fstat(descriptor), status_of(self._file)
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
    status = status_of(_file_of(path))
    return status is not None and _identity(status) in _held


def _file_of(path: Path) -> Path:
    return path.parent / f".{path.name}.lock"


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _lock(descriptor: int) -> bool:
    """Lock a file, and return whether its file system has locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


def status_of(path: Path) -> os.stat_result | None:
    """Return the status of a file or a link, or None."""
    try:
        return path.lstat()
    except FileNotFoundError:
        return None


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
