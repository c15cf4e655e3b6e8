"""All-reduce inside a node on private arrays: each rank reads what it needs out of its neighbours' memory.

The elements are dealt to the ranks in slices. Every rank reduces its slice, chunk by chunk so that a chunk stays in
cache, in rank order; then every rank copies the slices of the others out of their results. Nothing is copied into a
shared buffer first. (The reduce-scatter and all-gather of Rabenseifner's algorithm, with process_vm_readv as the
network.)
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise

import numpy as np

from mpidist.arrays.convert import Array
from mpidist.collectives.mpi_types import numpy_op
from mpidist.collectives.neighbours_memory import address_of
from mpidist.collectives.node import CONTROL_SLOTS, Node
from mpidist.collectives.waiting import Steps
from mpidist.core.enums import ReduceOp

# Best between 256 KiB and 1 MiB on the machines measured: large enough for the call, small enough for the cache.
CHUNK_BYTES = 512 << 10
Piece = tuple[int, int, int, int]


class Neighbours:
    """Works where all ranks of the communicator are on one node and may read one another's memory.

    Args:
        node: The node.
    """

    most_parts = CONTROL_SLOTS - 1

    def __init__(self, node: Node) -> None:
        if node.topology.num_nodes > 1 or not node.reads_neighbours:
            raise ValueError(
                "algorithm 'neighbours' needs all ranks on one node, and a kernel that lets them read one another's "
                f"memory; here are {node.topology.num_nodes} node(s), and reading is "
                f"{'allowed' if node.reads_neighbours else 'forbidden'}: leave algorithm out"
            )
        self._node = node
        self._scratch = np.empty(CHUNK_BYTES, np.uint8)

    def all_reduce(self, parts: Sequence[Array], receive: Array, op: ReduceOp) -> Steps[None]:
        """Reduce the concatenation of flat ``parts`` of all ranks into flat ``receive``."""
        node = self._node
        row = node.control[node.rank]
        row[: len(parts)] = [address_of(part) for part in parts]
        row[len(parts)] = own_result = address_of(receive)
        yield from node.barrier()
        addresses: list[list[int]] = node.control[:, : len(parts) + 1].tolist()
        counts = tuple([part.size for part in parts])
        self._reduce_slice(parts, receive, op, counts, addresses)
        yield from node.barrier()
        for rank, (start, stop) in enumerate(slices(receive.size, node.size)):
            if rank != node.rank and stop > start:
                offset, nbytes = start * receive.itemsize, (stop - start) * receive.itemsize
                node.memory.read(node.pids[rank], addresses[rank][-1] + offset, own_result + offset, nbytes)
        yield from node.barrier()

    def _reduce_slice(
        self,
        parts: Sequence[Array],
        receive: Array,
        op: ReduceOp,
        counts: tuple[int, ...],
        addresses: list[list[int]],
    ) -> None:
        node, itemsize = self._node, receive.itemsize
        combine = numpy_op(op)
        scratch = self._scratch.view(receive.dtype)
        scratch_address = address_of(scratch)
        result_address = addresses[node.rank][-1]
        start, stop = slices(receive.size, node.size)[node.rank]
        for part, begin, count, offset in pieces(counts, start, stop, CHUNK_BYTES // itemsize):
            target = receive[offset : offset + count]
            own = parts[part][begin : begin + count]
            nbytes = count * itemsize
            total = None
            for rank, pid in enumerate(node.pids):
                if rank == node.rank:
                    total = own if total is None else combine(total, own, out=target)
                    continue
                where = addresses[rank][part] + begin * itemsize
                if total is None:
                    node.memory.read(pid, where, result_address + offset * itemsize, nbytes)
                    total = target
                else:
                    node.memory.read(pid, where, scratch_address, nbytes)
                    total = combine(total, scratch[:count], out=target)

    def close(self) -> None:
        """Nothing to free: the node is the caller's."""


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
