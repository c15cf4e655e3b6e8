"""Write a checkpoint, all or nothing, on one rank or on all, possibly in threads."""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import json
import logging
import os
import re
import shutil
import socket
import stat
import sys
import threading
import time
import uuid
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidist.arrays.dtypes import Array
from mpidist.checkpoint import format as files
from mpidist.checkpoint.agreement import spread
from mpidist.checkpoint.directory import is_checkpoint, read_manifest
from mpidist.checkpoint.format import MANIFEST, DamagedCheckpointError, FileRecord, Manifest
from mpidist.core import settings
from mpidist.core.concurrency import Stopwatch
from mpidist.core.errors import PeerError
from mpidist.core.files import NotAFileError, open_regular
from mpidist.core.text import numbered_ranks
from mpidist.values.placement import on_host

if TYPE_CHECKING:
    from mpidist.collectives import Communicator

_log = logging.getLogger("mpidist")
# Smaller tensors than twice this are not cut: many small parts cost more than they save.
SMALLEST_PART_BYTES = 1 << 16
# With less than this for each rank, only some of them write: many small files cost more than they save.
SMALLEST_FILE_BYTES = 1 << 20
# Step in which an array travels if only the first rank's value counts.
_WINDOW_BYTES = 2 << 20
_LONGEST_POLL_SECONDS = 0.1
# Directories being written (tmp), replaced by a new one of the name (old), and removed (del).
_LEFTOVER = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{32}\.(?P<kind>tmp|old|del)")
_LOCK = re.compile(r"\.(?P<name>.+)\.lock")
# Files that writers put into the directory of a checkpoint.
_FILE = re.compile(r"data.*\.safetensors|manifest\.json|rank-\d+\.json(\.part)?")
# Errors of a file system without locks. There, concurrent writers are not detected, and leftovers stay.
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
# Lock files of this process, by device and inode.
_held: set[tuple[int, int]] = set()
_IMPORTED = time.time()
_unsettled: set[Job] = set()
# A forked child has none of the threads, and would wait for them at its end.
os.register_at_fork(after_in_child=_unsettled.clear)
# Who writes which elements of each tensor: (rank, start, stop).
Plan = dict[str, list[tuple[int, int, int]]]
# A FileRecord as JSON, or None if a rank had nothing to write.
Record = dict[str, Any] | None


# Parts ------------------------------------------------------------------------------------------------------------


def plan_parts(extents: Mapping[str, tuple[int, int]], ranks: int) -> Plan:
    """Divide tensors, given by number and size of their elements, over the ranks by bytes.

    >>> plan_parts({"w": (300000, 8), "b": (10, 8)}, 2)
    {'w': [(0, 0, 150005), (1, 150005, 300000)], 'b': [(1, 0, 10)]}
    """
    total = sum([size * itemsize for size, itemsize in extents.values()])
    writers = spread(ranks, total // SMALLEST_FILE_BYTES)
    cuts = [total * i // len(writers) for i in range(1, len(writers))]
    plan: Plan = {}
    begin = 0
    for key, (size, itemsize) in extents.items():
        end = begin + size * itemsize
        if end - begin < 2 * SMALLEST_PART_BYTES:
            plan[key] = [(writers[bisect_right(cuts, (begin + end) // 2)], 0, size)]
        else:
            first = bisect_right(cuts, begin)
            inner = [(cut - begin) // itemsize for cut in cuts[first : bisect_left(cuts, end)]]
            parts = zip(writers[first:], pairwise([0, *inner, size]), strict=False)
            plan[key] = [(rank, start, stop) for rank, (start, stop) in parts if stop > start]
        begin = end
    return plan


def elements_of(array: Array, start: int, stop: int) -> Array:
    """Return elements of an array as a vector: a view if the array is contiguous."""
    is_in_order = not isinstance(array, np.ndarray) or array.flags.c_contiguous
    return (array.reshape(-1) if is_in_order else array.flat)[start:stop]


def deal(comm: Communicator, array: Array, parts: Sequence[tuple[int, int, int]]) -> Array:
    """Return this rank's part of the first rank's array (collective).

    It travels in steps, so that no rank needs memory for more than its part.
    """
    start, stop = next(((start, stop) for rank, start, stop in parts if rank == comm.rank), (0, 0))
    mine = np.empty(stop - start, array.dtype)
    step = _WINDOW_BYTES // array.dtype.itemsize
    for begin in range(0, array.size, step):
        end = min(begin + step, array.size)
        counts = [0] * comm.size
        for rank, first, last in parts:
            counts[rank] = max(0, min(last, end) - max(first, begin))
        sent = on_host(elements_of(array, begin, end)) if comm.rank == 0 else np.empty(0, array.dtype)
        offset = max(start, begin) - start
        comm.scatter(sent, counts=counts, out=mine[offset : offset + counts[comm.rank]])
    return mine.reshape(array.shape) if mine.size == array.size else mine


# One save, on one rank --------------------------------------------------------------------------------------------


def file_names(ranks: int) -> list[str]:
    """Return the names of the files of all ranks that write."""
    if ranks == 1:
        return [files.DATA]
    return [f"data-{rank + 1:05d}-of-{ranks:05d}.safetensors" for rank in range(ranks)]


class Job:
    """The share of a rank in writing one checkpoint, without MPI calls and forks.

    The thread is no daemon: the interpreter waits for it before it exits.

    Args:
        path: Final directory.
        rank: Rank of this process among the writers. The first one publishes.
        ranks: Number of writers.
        arrays: Arrays that this rank writes by key: whole, or its part as a vector, on the host or a device.
        describe: Called on the first rank. Returns the manifest as far as it is known before writing.
        finish: Called on the first rank after publishing. Its result is that of the job.
    """

    def __init__(
        self,
        path: Path,
        rank: int,
        ranks: int,
        arrays: dict[str, Array],
        describe: Callable[[], Manifest],
        finish: Callable[[Manifest], list[str]] | None = None,
    ) -> None:
        self.path, self._rank, self._ranks = path, rank, ranks
        self._arrays, self._describe, self._finish = arrays, describe, finish
        # Where the files are written, once the first rank has begun.
        self.directory = Path()
        self._begun: tuple[_Writing, Manifest] | None = None
        self._thread: threading.Thread | None = None
        self._part_is_done, self._gave_up = threading.Event(), threading.Event()
        self._record: Record = None
        self._result: list[str] | None = None
        self._is_whole = False
        self._error: Exception | None = None

    def begin(self) -> str:
        """Create the directory for the files and return its path; on the first rank."""
        manifest = self._describe()
        writing = _Writing(self.path, manifest.is_shared)
        self._begun, self.directory = (writing, manifest), writing.directory
        return str(self.directory)

    def start_thread(self) -> None:
        """Write in a thread."""
        self._thread = threading.Thread(target=self._work, name=f"mpidist-checkpoint {self.path}")
        _unsettled.add(self)
        try:
            self._thread.start()
        except RuntimeError as error:  # no more threads; all ranks raise an error when they settle
            self._error = error
            self._part_is_done.set()

    def part(self) -> Record:
        """Write this rank's file, or wait until the thread has written it."""
        if self._thread is None:
            return self._write()
        self._part_is_done.wait()
        if self._rank > 0:
            self._join()
        if self._error is not None:
            raise self._error
        return self._record

    def result(self, records: list[Record] | None = None) -> list[str] | None:
        """Publish the checkpoint, or wait until the thread has; on the first rank.

        ``records`` are those of all ranks, or None if this rank writes everything.
        """
        if self._thread is None:
            return self._publish(records)
        self._join()
        if self._error is not None:
            raise self._error
        return self._result

    def settle(self, failed: bool) -> None:
        """End the thread and, after a failure, remove all files."""
        if failed:
            self._gave_up.set()
        self._join()
        if failed:
            self.discard()
        _unsettled.discard(self)

    def give_up(self) -> None:
        """End the thread without waiting for other ranks, and remove unfinished files; local."""
        self._gave_up.set()
        self._join()
        if self._is_whole:
            _log.info("mpidist: checkpoint %s was whole when it was given up, and is there", self.path)
        else:
            reason = self._error or PeerError("it was given up, as ranks that were to write parts of it are lost")
            self._error = reason
            self.discard()
            if self._rank == 0:
                _log.warning("mpidist: checkpoint %s was not written: %s", self.path, reason)
        _unsettled.discard(self)

    def discard(self) -> None:
        """Remove all files, on the first rank."""
        if self._begun is not None:
            notes = [note.name for rank in range(self._ranks) for note in self._notes(rank)]
            self._begun[0].discard((*file_names(self._ranks), *notes))

    def _join(self) -> None:
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join()

    def _work(self) -> None:
        try:
            try:
                self._record = self._write()
                if self._rank > 0:
                    self.leave_note(self._record)
            finally:
                self._part_is_done.set()
            records = self.await_notes(self._record, self._gave_up.wait) if self._rank == 0 else None
            if records is not None:
                self._result = self._publish(records)
                self._is_whole = True
        except Exception as error:  # raised by result() or part(), or printed at exit
            self._error = error
            # While other ranks may still be writing, settle() discards.
            if self._ranks == 1:
                self.discard()
        finally:
            self._arrays.clear()

    def _write(self) -> Record:
        """Write the file of this rank, and wait until it is on the disk."""
        if not self._arrays and self._ranks > 1:
            return None
        if not self.directory.is_dir():
            raise FileNotFoundError(
                f"{self.directory}, which the first rank has made, is not there where this rank looks; expected a "
                "directory that all ranks share: save to one, or without sharded=True"
            )
        return asdict(files.write_tensors(self.directory / file_names(self._ranks)[self._rank], self._arrays))

    def _publish(self, records: list[Record] | None) -> list[str] | None:
        if self._begun is None:
            self.begin()
        assert self._begun is not None
        writing, manifest = self._begun
        records = [self._write()] if records is None else records
        written = zip(file_names(self._ranks), records, strict=True)
        found = {name: FileRecord(**record) for name, record in written if record}
        manifest = replace(manifest, files=found, saved_at=time.time(), writer=_this_writer())
        writing.publish(manifest)
        return None if self._finish is None else self._finish(manifest)

    # A thread makes no MPI calls: ranks send their records through the file system -----------------------------------

    def leave_note(self, record: Record) -> None:
        """Publish the record of this rank's file, which is on the disk."""
        note, draft = self._notes(self._rank)
        with open(draft, "x") as file:  # never follows a link
            file.write(json.dumps(record))
        os.replace(draft, note)

    def await_notes(self, own: Record, gave_up: Callable[[float], bool]) -> list[Record] | None:
        """Return the records of all ranks, or None if given up; on the first rank.

        ``gave_up`` sleeps for some seconds, or until a rank is known to have failed.

        Raises:
            TimeoutError: They did not arrive within the deadline of collectives.
            DamagedCheckpointError: A note was not written by a rank.
        """
        records, missing = {0: own}, set(range(1, self._ranks))
        stopwatch, limit, seconds = Stopwatch(), settings.TIMEOUT.read(), 0.001
        while missing:
            arrived = {rank for rank in missing if os.path.lexists(self._notes(rank)[0])}
            for rank in arrived:
                note = self._notes(rank)[0]
                records[rank] = _read_note(note)
                note.unlink()
            missing -= arrived
            if stopwatch.seconds > limit:
                late = numbered_ranks(sorted(missing))
                raise TimeoutError(f"{late} did not write its part of {self.directory} in time")
            if missing and gave_up(seconds):
                return None
            seconds = min(2 * seconds, _LONGEST_POLL_SECONDS)
        return [records[rank] for rank in range(self._ranks)]

    def _notes(self, rank: int) -> tuple[Path, Path]:
        """Return the note of a rank, and its name before it is complete."""
        return self.directory / f"rank-{rank}.json", self.directory / f"rank-{rank}.json.part"


def _read_note(path: Path) -> Record:
    with files.named(path), files.open_to_read(path) as file:
        record: Record = files.parse(file.read(), str(path))
    if record is not None and not files.is_record(record):
        raise DamagedCheckpointError(f"{path} is damaged: it is no record of a file")
    return record


def finish_writing() -> None:
    """Wait until all saves in threads are on the disk. Raise an error of one; local."""
    for job in list(_unsettled):
        try:
            job.result()
        except Exception:
            _unsettled.discard(job)
            raise


def give_up_all() -> None:
    """End the unfinished saves of this process after ranks failed; local.

    Saves that need no other rank are finished. Others are discarded, which frees their names, and logged.
    """
    for job in list(_unsettled):
        job.give_up()


@atexit.register
def _report_at_exit() -> None:
    """Treat errors that nobody waited for as uncaught, which ends a job of several ranks."""
    for job in list(_unsettled):
        _unsettled.discard(job)
        try:
            job.result()
        except Exception as error:
            sys.stderr.write(f"mpidist: checkpoint {job.path} was not written, which its thread found out:\n")
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


def _this_writer() -> tuple[str, int]:
    return socket.gethostname(), os.getpid()


class _Writing:
    """A checkpoint that is being written, in a hidden directory beside its final name.

    Only ``publish`` renames it, so a crash leaves either all of it or nothing under that name.

    Raises:
        FileExistsError: ``path`` is no checkpoint, or another writer saves there.
        OSError: It cannot be written.
    """

    def __init__(self, path: Path, is_shared: bool) -> None:
        self._path = path
        if path.exists() and not is_checkpoint(path):
            raise FileExistsError(f"{path} exists and is no checkpoint; expected a free name: move it away")
        _make_directory(path.parent)
        try:
            lock = _WriterLock(path)
        except BlockingIOError as error:
            if _is_locked_here(path):
                raise FileExistsError(
                    f"this process itself still saves checkpoint {path}, in a thread (async_save=True); expected one "
                    "save under a name at a time: call wait() of the Checkpoint that saves it first"
                ) from error
            raise FileExistsError(_two_writers(path, "another process")) from error
        self.directory = _hidden_name(path, "tmp")
        with contextlib.ExitStack() as undo:
            undo.callback(lock.release)
            if not is_shared:
                _check_sole_writer(path)
            # Opened now, because after the renaming nothing may fail.
            self._parent = os.open(path.parent, os.O_RDONLY | os.O_CLOEXEC)
            undo.callback(os.close, self._parent)
            self.directory.mkdir()
            self._undo = undo.pop_all()

    def publish(self, manifest: Manifest) -> None:
        """Write the manifest, after all files, and rename the directory. After an OSError, call ``discard``."""
        for name, record in manifest.files.items():
            _check_is_there(self.directory / name, record)
        file = self.directory / MANIFEST
        with files.named(file), open(file, "xb") as stream:
            stream.write(manifest.to_text().encode())
            stream.flush()
            os.fsync(stream.fileno())
        _sync(self.directory)
        if self._path.exists():
            self._replace()
        else:
            self.directory.rename(self._path)
            _sync_names(self._parent)
        self._undo.close()

    def _replace(self) -> None:
        # A directory cannot be renamed over one that is not empty.
        old = _hidden_name(self._path, "old")
        self._path.rename(old)
        try:
            self.directory.rename(self._path)
        except BaseException:
            old.rename(self._path)
            raise
        # The new name must be on the disk before the old data are removed.
        _sync_names(self._parent)
        # Files that cannot be removed do not harm the new checkpoint. The next manager removes them.
        with contextlib.suppress(OSError):
            # From now on, a crash must not restore the old one.
            doomed = old.with_suffix(".del")
            old.rename(doomed)
            shutil.rmtree(doomed)

    def discard(self, names: Iterable[str]) -> None:
        """Remove the files of these names, the manifest and the directory.

        A file that stays matters less than the original error. The next manager removes it.
        """
        # By name: without free file descriptors, the directory cannot be listed.
        with contextlib.suppress(OSError):
            for name in (*names, MANIFEST):
                (self.directory / name).unlink(missing_ok=True)
            self.directory.rmdir()
        with contextlib.suppress(OSError):
            self._undo.close()


def _make_directory(path: Path) -> None:
    """Create a directory and its parents, with their names on the disk."""
    if path.is_dir():
        return
    _make_directory(path.parent)
    path.mkdir(exist_ok=True)
    _sync(path.parent)


def _check_sole_writer(path: Path) -> None:
    """Raise if a process that shares no strategy with this one has saved under ``path``."""
    try:
        manifest = read_manifest(path)
    except (FileNotFoundError, ValueError):
        return
    is_own = manifest.writer is None or manifest.writer == _this_writer()
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
    """Raise unless this rank sees a file that another rank may have written."""
    try:
        size = files.size_of(file)
    except FileNotFoundError:
        size = -1
    if size != record.bytes:
        seen = "is not there" if size < 0 else f"has {size} bytes"
        raise OSError(
            f"{file}, which a rank has written with {record.bytes} bytes, {seen} where the first rank looks; expected "
            "a directory that all ranks share: save to one, or without sharded=True"
        )


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
        # Some network file systems write names at once, and cannot sync a directory.
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise


# Locking and removing ---------------------------------------------------------------------------------------------


class _WriterLock:
    """The right to write one checkpoint, until it is released or the process ends.

    ``is_real`` says whether the file system has locks.

    Raises:
        BlockingIOError: Another writer holds it.
        NotAFileError: The path of its file is something else.
        OSError: The file cannot be created.
    """

    def __init__(self, path: Path) -> None:
        self._file = _lock_file(path)
        while True:
            descriptor = open_regular(self._file, os.O_RDWR | os.O_CREAT)
            try:
                self.is_real = _lock(descriptor)
                # The last holder may have removed the file since it was opened.
                own, found = os.fstat(descriptor), _status_of(self._file)
                if found is not None and os.path.samestat(own, found):
                    _held.add((own.st_dev, own.st_ino))
                    self._descriptor: int | None = descriptor
                    return
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def release(self) -> None:
        """Remove the file and release the lock. Further calls do nothing."""
        if self._descriptor is None:
            return
        # Removed while it is locked, so that nobody locks a file without a name.
        descriptor, self._descriptor = self._descriptor, None
        try:
            self._file.unlink(missing_ok=True)
        finally:
            status = os.fstat(descriptor)
            _held.discard((status.st_dev, status.st_ino))
            os.close(descriptor)


def _is_locked_here(path: Path) -> bool:
    """Return whether this process writes the checkpoint ``path``."""
    status = _status_of(_lock_file(path))
    return status is not None and (status.st_dev, status.st_ino) in _held


def _lock_file(path: Path) -> Path:
    return path.parent / f".{path.name}.lock"


def _lock(descriptor: int) -> bool:
    """Lock a file, and return whether its file system has locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


def _status_of(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except FileNotFoundError:
        return None


def _hidden_name(path: Path, kind: str) -> Path:
    """Return an unused name beside the checkpoint, of kind ``tmp``, ``old`` or ``del``."""
    return path.parent / f".{path.name}.{uuid.uuid4().hex}.{kind}"


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint; a crash leaves all of it or nothing under its name. Raises OSError."""
    lock = _WriterLock(path)
    try:
        doomed = _hidden_name(path, "del")
        try:
            path.rename(doomed)
        except FileNotFoundError:
            return
        shutil.rmtree(doomed)
    finally:
        lock.release()


def clean_leftovers(directory: Path, accepts: Callable[[str], object]) -> None:
    """Remove the leftovers of killed writers, of checkpoints whose names ``accepts`` accepts.

    A checkpoint that was moved away but not replaced is moved back. Files of other programs and accounts stay.
    """
    if not directory.is_dir() or not os.access(directory, os.W_OK | os.X_OK):
        return
    for name in sorted({match["name"] for match in _leftovers_in(directory) if accepts(match["name"])}):
        try:
            lock = _WriterLock(directory / name)
        except (BlockingIOError, PermissionError, NotAFileError):
            continue  # another writer is alive, or the lock belongs to another account or program
        try:
            if lock.is_real:
                _clean(directory, name)
        finally:
            lock.release()


def _clean(directory: Path, name: str) -> None:
    for match in _leftovers_in(directory):
        entry, place = directory / match.string, directory / name
        if match.re is not _LEFTOVER or match["name"] != name:
            continue
        if match["kind"] != "old" or place.exists():
            shutil.rmtree(entry)
        elif is_checkpoint(entry):
            entry.rename(place)


def _leftovers_in(directory: Path) -> list[re.Match[str]]:
    """Return the leftovers of a directory, recognized by name, kind and content."""
    matches = []
    for entry in os.listdir(directory):
        leftover, lock = _LEFTOVER.fullmatch(entry), _LOCK.fullmatch(entry)
        if leftover is not None and _is_ours(directory / entry):
            matches.append(leftover)
        elif lock is not None:
            status = _status_of(directory / entry)
            if status is not None and stat.S_ISREG(status.st_mode) and status.st_size == 0:
                matches.append(lock)
    return matches


def _is_ours(path: Path) -> bool:
    """Return whether ``path`` is a directory of nothing but files of checkpoints."""
    try:
        with os.scandir(path) as entries:
            return not path.is_symlink() and all(
                _FILE.fullmatch(entry.name) and entry.is_file(follow_symlinks=False) for entry in entries
            )
    except (NotADirectoryError, FileNotFoundError, PermissionError):
        return False
