"""All-reduce inside a node on private arrays: each rank reads what it needs out of its neighbours' memory.

The elements are dealt to the ranks in slices. Every rank reduces its slice, chunk by chunk so that a chunk stays in
cache, in rank order; then every rank copies the slices of the others out of their results. Nothing is copied into a
shared buffer first. (The reduce-scatter and all-gather of Rabenseifner's algorithm, with process_vm_readv as the
network.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpidist.arrays.convert import Array
from mpidist.collectives.algorithms.in_node import CHUNK_BYTES, LATE_RESULT, InNode, pieces, slices
from mpidist.collectives.mpi_types import numpy_op
from mpidist.collectives.neighbours_memory import address_of
from mpidist.collectives.node import Node
from mpidist.collectives.waiting import Steps
from mpidist.core.enums import ReduceOp


class Neighbours(InNode):
    """Works where all ranks are on one node and the kernel lets them read one another's memory.

    Args:
        node: The node.
    """

    def __init__(self, node: Node) -> None:
        super().__init__(node)
        if not node.reads_neighbours:
            raise ValueError(
                "algorithm 'neighbours' reads the memory of other ranks, which the kernel forbids here (ptrace scope, "
                "or containers of their own); leave algorithm out"
            )
        self._scratch = np.empty(CHUNK_BYTES, np.uint8)

    def _on_private(
        self,
        parts: Sequence[Array],
        result: Array,
        op: ReduceOp,
        divisor: int | None,
        places: list[list[int]],
        results: list[int],
    ) -> Steps[None]:
        node, itemsize = self.node, result.itemsize
        self._reduce_slice(parts, result, op, divisor, places)
        node.control[node.rank, LATE_RESULT] = address_of(result)
        yield from node.barrier()
        if not all(results):
            results = node.control[:, LATE_RESULT].tolist()
        own = address_of(result)
        for rank, (start, stop) in enumerate(slices(result.size, node.size)):
            if rank != node.rank and stop > start:
                offset, nbytes = start * itemsize, (stop - start) * itemsize
                node.memory.read(node.pids[rank], results[rank] + offset, own + offset, nbytes)
        yield from node.barrier()

    def _reduce_slice(
        self, parts: Sequence[Array], result: Array, op: ReduceOp, divisor: int | None, places: list[list[int]]
    ) -> None:
        node, itemsize, combine = self.node, result.itemsize, numpy_op(op)
        counts = tuple([part.size for part in parts])
        start, stop = slices(result.size, node.size)[node.rank]
        for part, begin, count, offset in pieces(counts, start, stop, CHUNK_BYTES // itemsize):
            target = result[offset : offset + count]
            total: Any = None
            for rank in range(node.size):
                if rank == node.rank:
                    value = parts[part][begin : begin + count]
                else:
                    # The first value may lie where the total will.
                    room = target if total is None else self._scratch.view(result.dtype)[:count]
                    value = self._value_of(rank, places[rank][part], begin * itemsize, room)
                total = value if total is None else combine(total, value, out=target)
            if total is not target:
                np.copyto(target, total)
            if divisor is not None:
                np.true_divide(target, divisor, out=target)

    def _value_of(self, rank: int, place: int, offset: int, room: Array) -> Array:
        """Return elements of a rank: where they lie in shared memory, or a copy of them in ``room``."""
        node = self.node
        if place < 0:
            return node.shared.at(-1 - place + offset, rank, room.nbytes).view(room.dtype)
        node.memory.read(node.pids[rank], place + offset, address_of(room), room.nbytes)
        return room
