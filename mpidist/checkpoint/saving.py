"""Job: the writing of one checkpoint on one rank, after everything it needs of the ranks has been collected."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mpidist.arrays.convert import Array
from mpidist.checkpoint import safetensors_file
from mpidist.checkpoint.errors import DamagedCheckpointError
from mpidist.checkpoint.files import open_to_read
from mpidist.checkpoint.format_rules import FILE, parse
from mpidist.checkpoint.manifest import DATA, Manifest, Part, Tensor
from mpidist.checkpoint.safetensors_file import FileRecord
from mpidist.checkpoint.sharding import Plan
from mpidist.checkpoint.storage import Writing, encode, this_writer
from mpidist.core import settings

_LONGEST_NAP_SECONDS = 0.1
# What a file of a checkpoint came to: its record, or None where a rank had nothing to write.
Record = dict[str, Any] | None


def file_name(rank: int, ranks: int) -> str:
    """Return the name of the file that a rank writes."""
    return DATA if ranks == 1 else f"data-{rank + 1:05d}-of-{ranks:05d}.safetensors"


@dataclass
class Job:
    """What a rank has to write of one checkpoint. Nothing in it talks to other ranks through MPI, or forks.

    Attributes:
        directory: Where the files go for now.
        rank: Of this process.
        ranks: How many write.
        plan: Who writes what.
        tensors: What the manifest says of each tensor, without its parts.
        arrays: Of those that this rank writes a part of: the tensor, or that part of it as a vector.
        writing: On the first rank, the checkpoint that is being written.
        manifest: On the first rank, what is known before the files are written.
        finish: Called on the first rank when the checkpoint is there; its result, in JSON's types, is that of the job.
    """

    directory: Path
    rank: int
    ranks: int
    plan: Plan
    tensors: Mapping[str, Tensor]
    arrays: dict[str, Array]
    writing: Writing | None
    manifest: Manifest | None
    finish: Callable[[Manifest], Any]

    def write_part(self) -> Record:
        """Write what this rank has to write, and wait until it is on the disk."""
        encoded = {}
        for key, parts in self.plan.items():
            for rank, start, stop in parts:
                if rank == self.rank:
                    encoded[key] = encode(self.arrays[key], self.tensors[key], Part("", start, stop))
        if not encoded and self.ranks > 1:
            return None
        if not self.directory.is_dir():
            raise FileNotFoundError(
                f"{self.directory}, which the first rank has made, is not there where this rank looks; expected a "
                "directory that all ranks share: save to one, or without sharded=True"
            )
        return asdict(safetensors_file.write(self.directory / file_name(self.rank, self.ranks), encoded))

    def publish(self, records: list[Record]) -> Any:
        """Make a checkpoint of the files of all ranks; on the first rank."""
        assert self.writing is not None
        assert self.manifest is not None
        tensors = {
            key: replace(tensor, parts=tuple(Part(file_name(rank, self.ranks), a, b) for rank, a, b in self.plan[key]))
            for key, tensor in self.tensors.items()
        }
        files = {
            file_name(rank, self.ranks): FileRecord(**record)
            for rank, record in enumerate(records)
            if record is not None
        }
        manifest = replace(self.manifest, tensors=tensors, files=files, saved_at=time.time(), writer=this_writer())
        self.writing.publish(manifest)
        return self.finish(manifest)

    def discard(self) -> None:
        """Remove what was written, on the first rank."""
        if self.writing is not None:
            names = [file_name(rank, self.ranks) for rank in range(self.ranks)]
            notes = [note.name for rank in range(self.ranks) for note in (self._note(rank), self._draft(rank))]
            self.writing.discard((*names, *notes))

    # Without the other ranks at hand, the file system carries the news -----------------------------------------------

    def leave_note(self, record: Record) -> None:
        """Tell the first rank that this rank's file is safe."""
        with open(self._draft(self.rank), "x") as file:  # never what a planted link leads to
            file.write(json.dumps(record))
        os.replace(self._draft(self.rank), self._note(self.rank))

    def await_notes(self, own: Record, gave_up: Callable[[float], bool]) -> list[Record] | None:
        """Return the records of all ranks as soon as they are there; None where ``gave_up`` says not to wait.

        Args:
            own: Of this rank, the first.
            gave_up: Sleeps for some seconds, or until it is known that a rank failed.

        Raises:
            TimeoutError: They do not come; the deadline is that of collectives.
            DamagedCheckpointError: One is not what a rank has written.
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
                raise TimeoutError(f"rank {sorted(missing)} did not write its part of {self.directory} in time")
            if missing and gave_up(nap):
                return None
            nap = _LONGEST_NAP_SECONDS if nap * 2 > _LONGEST_NAP_SECONDS else nap * 2
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
