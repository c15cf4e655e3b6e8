"""Job: the writing of one checkpoint on one rank, which makes no MPI call; Pending: a job in a thread of its own."""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from mpidist.arrays.convert import Array
from mpidist.checkpoint import safetensors_file
from mpidist.checkpoint.format_rules import FILE, DamagedCheckpointError, parse
from mpidist.checkpoint.manifest import DATA, Manifest, Part, Tensor
from mpidist.checkpoint.safetensors_file import FileRecord, open_to_read
from mpidist.checkpoint.writer import Writing, this_writer
from mpidist.core import settings
from mpidist.core.errors import PeerError
from mpidist.core.wording import ranks_text

_log = logging.getLogger("mpidist")
_LONGEST_NAP_SECONDS = 0.1
_untold: set[Pending] = set()
# Who writes what of each tensor: (rank, start, stop), in elements.
Plan = dict[str, list[tuple[int, int, int]]]
# What a file of a checkpoint came to: its record, or None where a rank had nothing to write.
Record = dict[str, Any] | None


def file_name(rank: int, ranks: int) -> str:
    """Return the name of the file that a rank writes."""
    return DATA if ranks == 1 else f"data-{rank + 1:05d}-of-{ranks:05d}.safetensors"


@dataclass
class Job:
    """The share of a rank in writing one checkpoint. Nothing in it talks to other ranks through MPI, or forks.

    Attributes:
        path: The directory to be.
        rank: Of this process.
        ranks: How many write.
        plan: The parts of each tensor that each rank writes.
        tensors: Those of the manifest, without their parts.
        arrays: Of those that this rank writes a part of: the tensor, or that part of it as a vector.
        describe: Called on the first rank; returns the manifest as it is known before the files are written.
        finish: Called on the first rank when the checkpoint is there; its result, in JSON's types, is that of the job.
        directory: Where the files go for now, once the first rank has begun.
    """

    path: Path
    rank: int
    ranks: int
    plan: Plan
    tensors: Mapping[str, Tensor]
    arrays: dict[str, Array]
    describe: Callable[[], Manifest]
    finish: Callable[[Manifest], Any]
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
        encoded = {
            key: _encode(self.arrays[key], self.tensors[key], stop - start)
            for key, parts in self.plan.items()
            for rank, start, stop in parts
            if rank == self.rank
        }
        if not encoded and self.ranks > 1:
            return None
        if not self.directory.is_dir():
            raise FileNotFoundError(
                f"{self.directory}, which the first rank has made, is not there where this rank looks; expected a "
                "directory that all ranks share: save to one, or without sharded=True"
            )
        return asdict(safetensors_file.write(self.directory / file_name(self.rank, self.ranks), encoded))

    def result(self, records: list[Record] | None) -> Any:
        """Make a checkpoint of the files of all ranks; on the first rank.

        Args:
            records: Of all ranks; None where this one writes everything, which it then does first.
        """
        if self._begun is None:
            self.begin()
        assert self._begun is not None
        writing, manifest = self._begun
        records = [self.part()] if records is None else records
        names = [file_name(rank, self.ranks) for rank in range(self.ranks)]
        manifest = replace(
            manifest,
            tensors={
                key: replace(tensor, parts=tuple([Part(names[rank], a, b) for rank, a, b in self.plan[key]]))
                for key, tensor in self.tensors.items()
            },
            files={name: FileRecord(**record) for name, record in zip(names, records, strict=True) if record},
            saved_at=time.time(),
            writer=this_writer(),
        )
        writing.publish(manifest)
        return self.finish(manifest)

    def discard(self) -> None:
        """Remove all files, on the first rank."""
        if self._begun is not None:
            names = [file_name(rank, self.ranks) for rank in range(self.ranks)]
            notes = [note.name for rank in range(self.ranks) for note in (self._note(rank), self._draft(rank))]
            self._begun[0].discard((*names, *notes))

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
        limit, nap = time.monotonic() + settings.TIMEOUT.read(), 0.001
        while missing:
            arrived = {rank for rank in missing if os.path.lexists(self._note(rank))}
            for rank in arrived:
                records[rank] = _read_note(self._note(rank))
                self._note(rank).unlink()
            missing -= arrived
            if time.monotonic() > limit:
                late = ranks_text(sorted(missing))
                raise TimeoutError(f"rank {late} did not write its part of {self.directory} in time")
            if missing and gave_up(nap):
                return None
            nap = min(2 * nap, _LONGEST_NAP_SECONDS)
        return [records[rank] for rank in range(self.ranks)]

    def _note(self, rank: int) -> Path:
        return self.directory / f"rank-{rank}.json"

    def _draft(self, rank: int) -> Path:
        return self.directory / f"rank-{rank}.json.part"


def _read_note(path: Path) -> Record:
    with safetensors_file.named(path), open_to_read(path) as file:
        record: Record = parse(file.read(), str(path))
    if record is not None and not FILE(record):
        raise DamagedCheckpointError(f"{path} is damaged: it is no record of a file")
    return record


def _encode(array: Array, tensor: Tensor, count: int) -> Array:
    """Return elements as the file holds them: in C order, copied only if needed."""
    flat = array.reshape(-1)
    flat = flat if flat.flags.c_contiguous else flat.copy()
    if tensor.stored_as == "bytes":
        return flat.view(np.uint8)
    return flat.reshape(tensor.shape) if count == tensor.size else flat


# In a thread ------------------------------------------------------------------------------------------------------


class Pending:
    """A job in a thread of its own, which makes no MPI call.

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
        self._result: Any = None
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
        self._raise_error()
        return self._record

    def result(self, records: list[Record] | None = None) -> Any:
        """Wait until the checkpoint is there; on the first rank, which knows the records.

        Raises:
            Exception: That of the thread.
        """
        del records
        self._join()
        self._raise_error()
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

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

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
