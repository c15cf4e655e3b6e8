"""Read the files of a checkpoint with all ranks, each byte once."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpidist.arrays.dtypes import Array, DType
from mpidist.checkpoint import checksums, formats, storage
from mpidist.checkpoint.agreement import Agreement
from mpidist.checkpoint.format_rules import DamagedCheckpointError
from mpidist.checkpoint.formats import Manifest, Segment, Tensor, TensorPart, digits, dtype_of
from mpidist.checkpoint.parts import spread

if TYPE_CHECKING:
    from mpidist.collectives import Communicator

# A file system of many disks is fast in large pieces: of less than this for each rank only some of them read.
SMALLEST_READ_BYTES = 16 << 20


class Values:
    """The tensors of a checkpoint, their bytes on the ranks that have read them.

    Args:
        comm: Of these ranks; None for this process alone.
        tensors: By key.
        holders: By key, who holds how many bytes of a tensor, in the order of its bytes; the same on all ranks.
        mine: By key, the bytes that this rank holds, one array for each time that it is among the holders.
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
        """Return a tensor on every rank (collective); not to be written."""
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
        # Files do not care where elements begin in memory; others do.
        return np.require(data.view(dtype_of(tensor)), requirements="A").reshape(tensor.shape)


def _in_order(data: Array, holders: Sequence[tuple[int, int]]) -> Array:
    """Return bytes in the order of their tensor, which came rank by rank."""
    by_rank = sorted(range(len(holders)), key=lambda index: holders[index][0])
    ends = [*accumulate(holders[index][1] for index in by_rank)]
    pieces = dict(zip(by_rank, np.split(data, ends[:-1]), strict=True))
    return np.concatenate([pieces[index] for index in range(len(holders))])


class _Stored(NamedTuple):
    """A part of a tensor that a file has to hold."""

    key: str
    tensor: Tensor
    part: TensorPart
    dtype: DType

    @property
    def nbytes(self) -> int:
        return (self.part.stop - self.part.start) * self.dtype.itemsize


class _Read(NamedTuple):
    """Bytes that one rank has read, as all ranks know them.

    Attributes:
        reader: The rank.
        segment: The bytes.
        checksum: Their CRC-32.
        begins: Where the parts begin that the file has to hold; None unless the bytes are the file's first.
    """

    reader: int
    segment: Segment
    checksum: int
    begins: list[int] | None


class _Files:
    """The files of a checkpoint, as all ranks know them.

    Args:
        path: The checkpoint, as the first rank calls it.
        manifest: Its manifest.
        sizes: Bytes of each file.
    """

    def __init__(self, path: Path, manifest: Manifest, sizes: Mapping[str, int]) -> None:
        self._path, self._manifest = path, manifest
        self.sizes = {name: sizes[name] for name in sorted(sizes)}
        self._parts: dict[str, list[_Stored]] = {name: [] for name in self.sizes}
        for key, tensor in manifest.tensors.items():
            dtype = dtype_of(tensor)
            for part in tensor.parts:
                self._parts[part.file].append(_Stored(key, tensor, part, dtype))

    def heads(self) -> dict[str, int]:
        """Return how many bytes of each are of no known tensor, header included."""
        return {name: self.sizes[name] - sum([each.nbytes for each in parts]) for name, parts in self._parts.items()}

    def read(self, segment: Segment) -> tuple[Array, list[Any]]:
        """Return bytes of a file, and the news of them for other ranks.

        Raises:
            DamagedCheckpointError: The file is not as the manifest says.
            OSError: It cannot be read.
        """
        data, checksum = formats.read_segment(self._path, segment, self.sizes[segment.file])
        return data, [checksum, None if segment.start else self._begins(segment.file, data)]

    def _begins(self, name: str, data: Array) -> list[int]:
        """Return where in a file each part begins that it has to hold."""
        entries = formats.entries_of(data, self.sizes[name], self._path / name)
        begins = []
        for key, tensor, part, dtype in self._parts[name]:
            stored, begin, stop = entries.get(key, (None, 0, 0))
            count = part.stop - part.start
            is_alike = stored == dtype or (stored is not None and tensor.stored_as == "bytes")
            if not is_alike or stop - begin != count * dtype.itemsize:
                raise DamagedCheckpointError(
                    f"{self._path / name} does not fit {formats.MANIFEST}: expected {count} elements of {key!r}, "
                    f"of shape {tensor.shape} and dtype {tensor.dtype}; restore another checkpoint"
                )
            begins.append(begin)
        return begins

    def values(self, comm: Communicator | None, read: Sequence[_Read], mine: Mapping[Segment, Array]) -> Values:
        """Return the tensors that the ranks have read.

        Args:
            comm: Of the ranks.
            read: All that was read, in the order of files and bytes.
            mine: The bytes that this rank has read.

        Raises:
            DamagedCheckpointError: A file has another checksum than it had.
        """
        by_file = {name: [*each] for name, each in groupby(read, key=lambda each: each.segment.file)}
        begins: dict[tuple[str, str], int] = {}
        for name, theirs in by_file.items():
            self._check(name, theirs)
            begins.update(
                zip([(name, stored.key) for stored in self._parts[name]], theirs[0].begins or (), strict=True)
            )
        holders: dict[str, list[tuple[int, int]]] = {key: [] for key in self._manifest.tensors}
        pieces: dict[str, list[Array]] = {key: [] for key in self._manifest.tensors}
        for stored in self._in_order_of_tensors():
            begin, name = begins[stored.part.file, stored.key], stored.part.file
            for reader, segment, start, stop in _overlaps(by_file[name], begin, begin + stored.nbytes):
                holders[stored.key].append((reader, stop - start))
                if segment in mine:
                    pieces[stored.key].append(mine[segment][start - segment.start : stop - segment.start])
        return Values(comm, self._manifest.tensors, holders, pieces)

    def _in_order_of_tensors(self) -> Iterator[_Stored]:
        parts = {(stored.key, stored.part): stored for parts in self._parts.values() for stored in parts}
        for key, tensor in self._manifest.tensors.items():
            yield from [parts[key, part] for part in tensor.parts]

    def _check(self, name: str, read: Sequence[_Read]) -> None:
        checksum = read[0].checksum
        for each in read[1:]:
            checksum = checksums.joined(checksum, each.checksum, each.segment.stop - each.segment.start)
        record = self._manifest.files.get(name)
        if record is not None and record.crc32 != digits(checksum):
            raise DamagedCheckpointError(
                f"{self._path / name} is damaged: its CRC-32 is {digits(checksum)}, expected {record.crc32}"
            )


def _overlaps(read: Sequence[_Read], begin: int, end: int) -> Iterator[tuple[int, Segment, int, int]]:
    """Yield who has read which bytes of a file between two, and in which segment."""
    index = bisect_right(read, begin, key=lambda each: each.segment.start) - 1
    while begin < end:
        segment = read[index].segment
        stop = min(end, segment.stop)
        yield read[index].reader, segment, begin, stop
        index, begin = index + 1, stop


def plan_segments(
    sizes: Mapping[str, int], heads: Mapping[str, int], readers: Sequence[int]
) -> list[tuple[int, Segment]]:
    """Return who reads which bytes: about equally many, in whole files where possible.

    Args:
        sizes: Of the files, at least one.
        heads: By file, how many bytes from its beginning are not divided.
        readers: Those who read.

    >>> plan_segments({"a": 100, "b": 300}, {"a": 10, "b": 10}, [0, 2])
    [(0, Segment(file='a', start=0, stop=100)), (0, Segment(file='b', start=0, stop=100)), \
(2, Segment(file='b', start=100, stop=300))]
    """
    names, total = [*sizes], sum(sizes.values())
    borders, near = [0, *accumulate(sizes.values())], total // len(readers) // 4

    def cut(place: int) -> int:
        index = bisect_right(borders, place) - 1
        begin, end = borders[index : index + 2]
        if place - begin <= max(near, heads[names[index]]):
            return begin
        return end if end - place <= near else place

    cuts = [0, *[cut(total * i // len(readers)) for i in range(1, len(readers))], total]
    segments = []
    for reader, (first, last) in zip(readers, pairwise(cuts), strict=True):
        for index in range(bisect_right(borders, first) - 1, bisect_left(borders, last)):
            begin, end = borders[index : index + 2]
            start, stop = max(first, begin), min(last, end)
            if start < stop:
                segments.append((reader, Segment(names[index], start - begin, stop - begin)))
    return segments


def read_together(agreement: Agreement, path: Path, manifest: Manifest, sizes: Mapping[str, int]) -> Values:
    """Read a checkpoint, each byte of its files on one rank (collective).

    Args:
        agreement: Of the ranks.
        path: The checkpoint, as the first rank calls it.
        manifest: Its manifest.
        sizes: Bytes of its files.

    Raises:
        DamagedCheckpointError: The files are damaged, or do not fit the manifest; on all ranks.
        ImportError: ml_dtypes, for a dtype of its, is not installed.
        OSError: They cannot be read; on the rank where that was. The others raise PeerError.
    """
    comm = agreement.extended.communicator
    rank, ranks = (0, 1) if comm is None else (comm.rank, comm.size)
    readers = _readers(agreement, path, rank, spread(ranks, sum(sizes.values()) // SMALLEST_READ_BYTES))
    try:
        return _read_by(readers, agreement, path, manifest, sizes)
    except DamagedCheckpointError:
        # The others may see an older state of a file: what the first rank sees counts.
        if readers == [0]:
            raise
        return _read_by([0], agreement, path, manifest, sizes)


def _read_by(
    readers: list[int], agreement: Agreement, path: Path, manifest: Manifest, sizes: Mapping[str, int]
) -> Values:
    """Read a checkpoint on some ranks (collective); see ``read_together``."""
    comm = agreement.extended.communicator
    rank = 0 if comm is None else comm.rank
    with agreement.extended.shared_errors("restoring"):
        files = _Files(path, manifest, sizes)
        shares = plan_segments(files.sizes, files.heads(), readers) if sizes else []
    mine: dict[Segment, Array] = {}

    def read() -> list[list[Any]] | str:
        answers = []
        try:
            for reader, segment in shares:
                if reader == rank:
                    mine[segment], answer = files.read(segment)
                    answers.append(answer)
        except DamagedCheckpointError as error:
            return str(error)
        return answers

    told = agreement.every_rank_does(read)
    for answer in told:
        if isinstance(answer, str):
            raise DamagedCheckpointError(answer)
    answers = [iter(answer) for answer in told]
    return files.values(comm, [_Read(reader, segment, *next(answers[reader])) for reader, segment in shares], mine)


def _readers(agreement: Agreement, path: Path, rank: int, candidates: list[int]) -> list[int]:
    """Return the candidates that see the first rank's checkpoint (collective for several)."""
    if len(candidates) == 1:
        return candidates
    marks = agreement.every_rank_does(lambda: storage.mark_of(path) if rank in candidates else None)
    return [candidate for candidate in candidates if marks[candidate] == marks[0]]
