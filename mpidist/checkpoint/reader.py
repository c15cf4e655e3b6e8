"""Find the newest undamaged checkpoint, and read it with all ranks, each byte once."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mpidist.arrays.dtypes import Array, DType
from mpidist.checkpoint import directory
from mpidist.checkpoint import format as files
from mpidist.checkpoint.agreement import Agreement, spread
from mpidist.checkpoint.directory import Found
from mpidist.checkpoint.format import (
    MANIFEST,
    DamagedCheckpointError,
    FileRecord,
    Manifest,
    Segment,
    Tensor,
    TensorPart,
    dtype_of,
)

if TYPE_CHECKING:
    from mpidist.collectives import Communicator

# A parallel file system is fast in large reads. A smaller checkpoint is read by fewer ranks.
SMALLEST_READ_BYTES = 16 << 20


class Values:
    """The tensors of a checkpoint, whose bytes are on the ranks that have read them.

    Args:
        comm: Communicator of these ranks, or None for this process alone.
        tensors: Tensors by key.
        holders: Ranks and numbers of bytes of each tensor, in the order of its bytes; the same on all ranks.
        mine: This rank's bytes of each tensor, one array for each entry among the holders.
    """

    def __init__(
        self,
        comm: Communicator | None,
        tensors: Mapping[str, Tensor],
        holders: Mapping[str, Sequence[tuple[int, int]]],
        mine: Mapping[str, Sequence[Array]],
    ) -> None:
        self._comm, self._tensors, self._holders, self._mine = comm, tensors, holders, mine

    def of(self, key: str) -> Array:
        """Return a tensor on every rank (collective). Do not modify it."""
        tensor, holders, own = self._tensors[key], self._holders[key], self._mine.get(key, ())
        data = own[0] if len(own) == 1 else np.concatenate([np.empty(0, np.uint8), *own])
        ranks = [rank for rank, _ in holders]
        if self._comm is not None and len(set(ranks)) == 1:
            size = sum([size for _, size in holders])
            data = self._comm.broadcast(data if self._comm.rank == ranks[0] else np.empty(size, np.uint8), ranks[0])
        elif self._comm is not None and ranks:
            data = self._comm.all_gather(data)
            if ranks != sorted(ranks):
                data = _in_order(data, holders)
        # A file does not align its elements.
        return np.require(data.view(dtype_of(tensor)), requirements="A").reshape(tensor.shape)


def _in_order(data: Array, holders: Sequence[tuple[int, int]]) -> Array:
    """Sort bytes that were gathered rank by rank in the order of their tensor."""
    by_rank = sorted(range(len(holders)), key=lambda index: holders[index][0])
    ends = [*accumulate(holders[index][1] for index in by_rank)]
    pieces = dict(zip(by_rank, np.split(data, ends[:-1]), strict=True))
    return np.concatenate([pieces[index] for index in range(len(holders))])


# Reading together -------------------------------------------------------------------------------------------------


def plan_segments(
    records: Mapping[str, FileRecord], heads: Mapping[str, int], readers: Sequence[int]
) -> list[tuple[int, Segment]]:
    """Divide whole pieces of files over the readers. A header goes to one reader.

    >>> plan_segments({"a": FileRecord(100, ""), "b": FileRecord(300, "")}, {"a": 10, "b": 10}, [0, 2])
    [(0, Segment(file='a', start=0, stop=100)), (2, Segment(file='b', start=0, stop=300))]
    """
    total, before = sum(record.bytes for record in records.values()), 0
    segments: list[tuple[int, Segment]] = []
    for name, record in sorted(records.items()):
        for start in range(0, record.bytes, record.piece_bytes):
            stop = min(start + record.piece_bytes, record.bytes)
            reader = readers[(before + (start + stop) // 2) * len(readers) // total]
            if start and (start < heads[name] or reader == segments[-1][0]):
                reader, (_, start, _) = segments.pop()
            segments.append((reader, Segment(name, start, stop)))
        before += record.bytes
    return segments


def read_together(agreement: Agreement, path: Path, manifest: Manifest) -> Values:
    """Read a checkpoint, each byte of its files on one rank (collective).

    Raises:
        DamagedCheckpointError: The files are damaged, or do not fit the manifest; on all ranks.
        ImportError: The checkpoint needs ml_dtypes, which is missing.
        OSError: The files cannot be read; PeerError on the other ranks.
    """
    comm = agreement.extended.communicator
    rank, ranks = (0, 1) if comm is None else (comm.rank, comm.size)
    size = sum(record.bytes for record in manifest.files.values())
    readers = spread(ranks, size // SMALLEST_READ_BYTES)
    if len(readers) > 1:
        marks = agreement.every_rank_does(lambda: directory.mark_of(path) if rank in readers else None)
        # Other ranks may have another directory of this name, or none.
        readers = [reader for reader in readers if marks[reader] == marks[0]]
    try:
        return _read_by(readers, agreement, path, manifest)
    except DamagedCheckpointError:
        # Another rank may see an older state of a file. The first rank's counts.
        if readers == [0]:
            raise
        return _read_by([0], agreement, path, manifest)


def _read_by(readers: list[int], agreement: Agreement, path: Path, manifest: Manifest) -> Values:
    comm = agreement.extended.communicator
    rank = 0 if comm is None else comm.rank
    parts: dict[str, list[tuple[str, TensorPart]]] = {name: [] for name in manifest.files}
    with agreement.extended.shared_errors("restoring"):
        itemsizes = {key: dtype_of(tensor).itemsize for key, tensor in manifest.tensors.items()}
    heads = {name: record.bytes for name, record in manifest.files.items()}
    for key, tensor in manifest.tensors.items():
        for part in tensor.parts:
            parts[part.file].append((key, part))
            heads[part.file] -= (part.stop - part.start) * itemsizes[key]
    shares = plan_segments(manifest.files, heads, readers)
    mine: dict[Segment, Array] = {}

    def read() -> dict[str, list[int]] | str:
        begins = {}
        try:
            for reader, segment in shares:
                if reader == rank:
                    record = manifest.files[segment.file]
                    mine[segment] = files.read_segment(path, segment, record)
                    if not segment.start:
                        entries = files.entries_of(mine[segment], record.bytes, path / segment.file)
                        begins[segment.file] = _begins(parts[segment.file], entries, manifest, path / segment.file)
        except DamagedCheckpointError as error:
            return str(error)
        return begins

    begins: dict[tuple[str, str], int] = {}
    for answer in agreement.every_rank_does(read):
        if isinstance(answer, str):
            raise DamagedCheckpointError(answer)
        for name, places in answer.items():
            begins.update(zip([(name, key) for key, _ in parts[name]], places, strict=True))
    holders: dict[str, list[tuple[int, int]]] = {key: [] for key in manifest.tensors}
    pieces: dict[str, list[Array]] = {key: [] for key in manifest.tensors}
    by_file = {name: [*of_file] for name, of_file in groupby(shares, key=lambda share: share[1].file)}
    for key, tensor in manifest.tensors.items():
        for part in tensor.parts:
            begin = begins[part.file, key]
            end = begin + (part.stop - part.start) * itemsizes[key]
            for reader, segment, start, stop in _overlaps(by_file[part.file], begin, end):
                holders[key].append((reader, stop - start))
                if segment in mine:
                    pieces[key].append(mine[segment][start - segment.start : stop - segment.start])
    return Values(comm, manifest.tensors, holders, pieces)


def _begins(
    parts: Sequence[tuple[str, TensorPart]],
    entries: Mapping[str, tuple[DType, int, int]],
    manifest: Manifest,
    path: Path,
) -> list[int]:
    """Return the first byte of each part in a file."""
    begins = []
    for key, part in parts:
        tensor, count = manifest.tensors[key], part.stop - part.start
        dtype = dtype_of(tensor)
        stored, begin, stop = entries.get(key, (None, 0, 0))
        is_alike = stored == dtype or (stored is not None and tensor.stored_as == "bytes")
        if not is_alike or stop - begin != count * dtype.itemsize:
            raise DamagedCheckpointError(
                f"{path} does not fit {MANIFEST}: expected {count} elements of {key!r}, of shape "
                f"{tensor.shape} and dtype {tensor.dtype}; restore another checkpoint"
            )
        begins.append(begin)
    return begins


def _overlaps(shares: Sequence[tuple[int, Segment]], begin: int, end: int) -> Iterator[tuple[int, Segment, int, int]]:
    """Yield the reader, segment, first byte and end of each overlap with ``[begin:end]``."""
    index = bisect_right(shares, begin, key=lambda share: share[1].start) - 1
    while begin < end:
        reader, segment = shares[index]
        stop = min(end, segment.stop)
        yield reader, segment, begin, stop
        index, begin = index + 1, stop


# Choosing ---------------------------------------------------------------------------------------------------------


class Candidate(NamedTuple):
    """A checkpoint to read, and the newer ones that cannot be used, with the reasons."""

    path: Path
    manifest: Manifest
    unusable: dict[str, str]


# A generator that receives why its last candidate cannot be used.
Candidates = Generator[Candidate, str | None, None]


def only(path: Path) -> Candidates:
    """Yield one checkpoint."""
    damage = yield Candidate(path, directory.with_sizes(path, directory.read_manifest(path)), {})
    raise DamagedCheckpointError(damage)


def newest(find: Callable[[], Found]) -> Candidates:
    """Yield the checkpoints of a directory, the newest first."""
    found = find()
    while found.checkpoints:
        path, manifest = found.checkpoints.pop()
        damage = yield Candidate(path, manifest, found.unusable)
        if path.exists():
            found.unusable[str(path)] = str(damage)
        else:
            # Another process removed it, after saving a newer one.
            found = find()
    if found.unusable:
        raise DamagedCheckpointError(
            f"none of the checkpoints that are there can be used: {'; '.join(found.unusable.values())}. To start from "
            "scratch, take another directory or move them away"
        )


@dataclass
class Whole:
    """An undamaged checkpoint. ``unusable`` has the newer ones, with reasons."""

    path: str
    manifest: Manifest
    values: Values
    unusable: dict[str, str] = field(default_factory=dict)


# Raises DamagedCheckpointError if a state in the manifest is damaged.
StateCheck = Callable[[Path, Manifest], None]
# Returns a checkpoint to restore (collective).
Source = Callable[[Agreement, StateCheck], Whole | None]


def find_whole(candidates: Candidates, agreement: Agreement, check: StateCheck) -> Whole | None:
    """Return the first undamaged candidate of the first rank, or None without candidates (collective)."""
    damage: str | None = None

    def propose() -> tuple[str, dict[str, object], dict[str, str]] | None:
        reason = damage
        while True:
            try:
                path, manifest, unusable = candidates.send(reason)
            except StopIteration:
                return None
            try:
                check(path, manifest)
            except DamagedCheckpointError as error:
                reason = str(error)
            else:
                return str(path), manifest.to_json(), unusable

    while True:
        answer = agreement.chief_does(propose)
        if answer is None:
            return None
        path, content, unusable = answer
        manifest = Manifest.from_json(content, path)
        try:
            return Whole(path, manifest, read_together(agreement, Path(path), manifest), unusable)
        except DamagedCheckpointError as error:
            damage = str(error)
