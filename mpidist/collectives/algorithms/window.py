"""All-reduce inside a node on private arrays through a shared window, where ranks may not read one another's memory.

Chunk by chunk, so that it stays in cache: every rank copies its chunk into the window, reduces its slice of the chunk
there, and copies the whole reduced chunk out. Two buffers take turns, so one barrier before and one after the
reduction are enough.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpidist.arrays.convert import Array
from mpidist.collectives.algorithms.in_node import InNode, pieces, slices
from mpidist.collectives.mpi_types import numpy_op
from mpidist.collectives.node import Node
from mpidist.collectives.waiting import Steps
from mpidist.core.enums import ReduceOp

# Per rank; smaller chunks cost more barriers, larger ones leave the cache (benchmarks on a 2-core x86-64 machine).
SLICE_BYTES = 512 << 10
_BUFFERS = 2


class Window(InNode):
    """Works on any node with room for the window in shared memory (a few MiB).

    Args:
        node: The node.
    """

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        self._chunk_bytes = SLICE_BYTES * node.size
        # Each rank's segment holds the copies of its input and, in the same place again, of the result.
        window = node.shared.make_window([2 * _BUFFERS * self._chunk_bytes] * node.size)
        if window is None:
            raise ValueError(
                "algorithm 'window' found no room in /dev/shm; make it larger (docker run --shm-size=1g) or leave "
                "algorithm out"
            )
        self._segments = [node.shared.segment(window, rank) for rank in range(node.size)]

    def _on_private(
        self,
        parts: Sequence[Array],
        result: Array,
        op: ReduceOp,
        divisor: int | None,
        places: list[list[int]],
        results: list[int],
    ) -> Steps[None]:
        del places, results
        counts = tuple([part.size for part in parts])
        per_chunk = self._chunk_bytes // result.itemsize
        for turn, start in enumerate(range(0, result.size, per_chunk)):
            stop = min(start + per_chunk, result.size)
            yield from self._reduce_chunk(parts, counts, result, op, divisor, start, stop, turn % _BUFFERS)

    def _reduce_chunk(
        self,
        parts: Sequence[Array],
        counts: tuple[int, ...],
        result: Array,
        op: ReduceOp,
        divisor: int | None,
        start: int,
        stop: int,
        buffer: int,
    ) -> Steps[None]:
        node, combine = self.node, numpy_op(op)
        first = 2 * buffer * self._chunk_bytes
        nbytes = (stop - start) * result.itemsize
        inputs = [segment[first : first + nbytes].view(result.dtype) for segment in self._segments]
        second = first + self._chunk_bytes
        reduced = self._segments[0][second : second + nbytes].view(result.dtype)
        for part, begin, count, offset in pieces(counts, start, stop, stop - start):
            inputs[node.rank][offset - start : offset - start + count] = parts[part][begin : begin + count]
        yield from node.barrier()
        a, b = slices(stop - start, node.size)[node.rank]
        target, total = reduced[a:b], inputs[0][a:b]
        for other in inputs[1:]:
            total = combine(total, other[a:b], out=target)
        if total is not target:
            np.copyto(target, total)
        if divisor is not None:
            np.true_divide(target, divisor, out=target)
        yield from node.barrier()
        result[start:stop] = reduced

    def close(self) -> None:
        """Let go of the segments; the windows belong to the node."""
        self._segments = []
