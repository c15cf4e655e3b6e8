"""What the all-reduces inside one node have in common, and the one on arrays that lie in shared memory already.

Every rank tells the others where its input lies. Where all of it lies in shared memory, each rank reduces its slice
straight out of its neighbours' segments into a result that all ranks share: nothing is copied. Otherwise a subclass
says how private arrays are reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np

from mpidist.arrays.convert import Array
from mpidist.collectives.mpi_types import numpy_op
from mpidist.collectives.neighbours_memory import address_of
from mpidist.collectives.node import CONTROL_SLOTS, Node
from mpidist.collectives.shared_results import MAX_SLOTS
from mpidist.collectives.waiting import Steps
from mpidist.core.enums import ReduceOp

# Best between 256 KiB and 1 MiB on the machines measured: large enough for the call, small enough for the cache.
CHUNK_BYTES = 512 << 10
# A rank's row of the control window: whether it takes a shared result, which shared results it holds, where its own
# result lies, then where each part of its input lies (addresses, or shared locations counted down from -1).
_TAKES_SHARED = 0
_HELD = 1
_RESULT = _HELD + MAX_SLOTS
_PARTS = _RESULT + 1
# Where a rank's own result lies, if that came out only after the others had read its row.
LATE_RESULT = CONTROL_SLOTS - 1
Piece = tuple[int, int, int, int]


class InNode:
    """An all-reduce of the ranks of one node.

    Args:
        node: The node, which has to hold all ranks.
    """

    most_parts = LATE_RESULT - _PARTS

    def __init__(self, node: Node) -> None:
        if node.topology.num_nodes > 1:
            raise ValueError(
                f"algorithm {type(self).__name__.lower()!r} needs all ranks on one node, and there are "
                f"{node.topology.num_nodes}; leave algorithm out"
            )
        self.node = node

    def all_reduce(
        self, parts: Sequence[Array], receive: Callable[[], Array], op: ReduceOp, divisor: int | None, may_share: bool
    ) -> Steps[Array]:
        """See ``Algorithm``."""
        node = self.node
        row = node.control[node.rank]
        locations = [node.shared.locate(part) for part in parts]
        takes_shared = may_share and None not in locations
        result = None if takes_shared else receive()
        row[_TAKES_SHARED] = takes_shared
        row[_HELD:_RESULT] = node.results.held()
        row[_RESULT] = 0 if result is None else address_of(result)
        row[_PARTS : _PARTS + len(parts)] = [
            address_of(part) if location is None else -1 - location
            for part, location in zip(parts, locations, strict=True)
        ]
        yield from node.barrier()
        rows: list[list[int]] = node.control[:, : _PARTS + len(parts)].tolist()
        places = [row[_PARTS:] for row in rows]
        if all(row[_TAKES_SHARED] for row in rows):
            nbytes = sum(part.nbytes for part in parts)
            shared = node.results.take(nbytes, [row[_HELD:_RESULT] for row in rows])
            if shared is not None:
                return (yield from self._on_shared(parts, shared.view(parts[0].dtype), op, divisor, places))
        if result is None:
            result = receive()
        yield from self._on_private(parts, result, op, divisor, places, [row[_RESULT] for row in rows])
        return result

    def _on_private(
        self,
        parts: Sequence[Array],
        result: Array,
        op: ReduceOp,
        divisor: int | None,
        places: list[list[int]],
        results: list[int],
    ) -> Steps[None]:
        """Reduce into this rank's own ``result``.

        Args:
            parts: The input of this rank.
            result: Where its result goes.
            op: The operation.
            divisor: See ``Algorithm``.
            places: Of every rank, where each part lies.
            results: Of every rank, the address of its result; 0 where that was not told.
        """
        raise NotImplementedError

    def _on_shared(
        self, parts: Sequence[Array], result: Array, op: ReduceOp, divisor: int | None, places: list[list[int]]
    ) -> Steps[Array]:
        node, combine, itemsize = self.node, numpy_op(op), result.itemsize
        counts = tuple([part.size for part in parts])
        start, stop = slices(result.size, node.size)[node.rank]
        inputs = [
            [
                node.shared.at(-1 - places[rank][part], rank, count * itemsize).view(result.dtype)
                for rank in range(node.size)
            ]
            for part, count in enumerate(counts)
        ]
        for part, begin, count, offset in pieces(counts, start, stop, CHUNK_BYTES // itemsize):
            target = result[offset : offset + count]
            total = inputs[part][0][begin : begin + count]
            for other in inputs[part][1:]:
                total = combine(total, other[begin : begin + count], out=target)
            if total is not target:
                np.copyto(target, total)
            if divisor is not None:
                np.true_divide(target, divisor, out=target)
        yield from node.barrier()
        result.flags.writeable = False
        return result

    def close(self) -> None:
        """Nothing to free: windows belong to the node."""


@lru_cache(maxsize=64)
def slices(count: int, ranks: int) -> tuple[tuple[int, int], ...]:
    """Return the range of elements that each rank reduces: equal lengths, the first ones one longer.

    >>> slices(5, 2)
    ((0, 3), (3, 5))
    """
    length, more = divmod(count, ranks)
    borders = [rank * length + min(rank, more) for rank in range(ranks + 1)]
    return tuple(pairwise(borders))


@lru_cache(maxsize=64)
def pieces(counts: tuple[int, ...], start: int, stop: int, limit: int) -> tuple[Piece, ...]:
    """Cut elements ``start`` to ``stop`` of concatenated parts into pieces of one part, at most ``limit`` long.

    Returns:
        For each piece: the part, the first element in it, the number of elements, the offset in the whole.

    >>> pieces((3, 4), 1, 6, 2)
    ((0, 1, 2, 1), (1, 0, 2, 3), (1, 2, 1, 5))
    """
    found = []
    first = 0
    for part, count in enumerate(counts):
        position, end = max(start, first), min(stop, first + count)
        while position < end:
            length = min(limit, end - position)
            found.append((part, position - first, length, position))
            position += length
        first += count
    return tuple(found)
