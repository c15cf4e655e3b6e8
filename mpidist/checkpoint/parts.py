"""The parts of tensors that ranks write, where all of them do."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from mpidist.arrays.dtypes import Array
from mpidist.values.placement import on_host

if TYPE_CHECKING:
    from mpidist.collectives import Communicator

# Tensors of less than twice this are not cut: small parts cost more than they bring.
SMALLEST_PART_BYTES = 1 << 16
# With less than this for each rank only some of them write: many small files cost more than they bring.
SMALLEST_FILE_BYTES = 1 << 20
# Who writes which elements of each tensor: (rank, start, stop).
Plan = dict[str, list[tuple[int, int, int]]]
# So much travels at a time of an array of which only the first rank's value counts.
_WINDOW_BYTES = 2 << 20


@dataclass(frozen=True)
class Extent:
    """The size of a tensor.

    Attributes:
        size: Number of elements.
        itemsize: Bytes of one.
    """

    size: int
    itemsize: int

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.itemsize


def plan_parts(extents: Mapping[str, Extent], ranks: int) -> Plan:
    """Return the part of each tensor that each rank writes, about equally many bytes.

    Of little only some ranks write, evenly spaced, so that no file is small.

    >>> plan_parts({"w": Extent(300000, 8), "b": Extent(10, 8)}, 2)
    {'w': [(0, 0, 150005), (1, 150005, 300000)], 'b': [(1, 0, 10)]}
    """
    total = sum([extent.nbytes for extent in extents.values()])
    writers = spread(ranks, total // SMALLEST_FILE_BYTES)
    cuts = [total * i // len(writers) for i in range(len(writers) + 1)]
    plan: Plan = {key: [(0, 0, extent.size)] for key, extent in extents.items()}
    begin = 0
    for key, extent in extents.items():
        # Those of two neighbours are the borders of what a rank writes; few of them lie in one tensor.
        first, last = bisect_right(cuts, begin) - 1, bisect_left(cuts, begin + extent.nbytes)
        local = [_cut_of(extent, cut - begin) for cut in cuts[first : last + 1]]
        shares = zip(writers[first:last], pairwise(local), strict=True)
        parts = [(rank, start, stop) for rank, (start, stop) in shares if stop > start]
        plan[key] = parts or plan[key]
        begin += extent.nbytes
    return plan


def spread(ranks: int, count: int) -> list[int]:
    """Return so many of the ranks, at least one and evenly spaced over the nodes.

    >>> spread(8, 4), spread(8, 0), spread(2, 5)
    ([0, 2, 4, 6], [0], [0, 1])
    """
    count = min(max(count, 1), ranks)
    return [ranks * i // count for i in range(count)]


def _cut_of(extent: Extent, offset: int) -> int:
    """Return the element at which to cut a tensor, ``offset`` bytes after its begin."""
    if offset <= 0 or extent.nbytes == 0:
        return 0
    if offset >= extent.nbytes:
        return extent.size
    if extent.nbytes < 2 * SMALLEST_PART_BYTES:
        return extent.size if 2 * offset >= extent.nbytes else 0
    return offset // extent.itemsize


def elements_of(array: Array, start: int, stop: int) -> Array:
    """Return elements of an array as a vector; a view where they lie in order."""
    is_in_order = not isinstance(array, np.ndarray) or array.flags.c_contiguous
    return (array.reshape(-1) if is_in_order else array.flat)[start:stop]


def deal(comm: Communicator, array: Array, parts: Sequence[tuple[int, int, int]]) -> Array:
    """Return this rank's part of the first rank's array (collective).

    It travels in pieces, so that no rank needs memory for more than its part.

    Args:
        comm: Of the ranks.
        array: That of the first rank counts; the others' tell its size and dtype.
        parts: Who writes which elements.
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
