"""Copies between the arrays of the ranks of one node, for all-gather, broadcast and reduce-scatter.

Small arrays are shown in the slots of the node. Elements of larger ones are read out of shared memory, or out of the
other rank's own memory where the kernel allows that; otherwise the array passes through the slots, chunk by chunk.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from mpidist.arrays.dtypes import Array
from mpidist.collectives.mpi.mpi_types import NUMPY_OPS, as_bytes
from mpidist.collectives.mpi.waiting import Steps
from mpidist.collectives.node.board import WORDS
from mpidist.collectives.node.chunks import pieces
from mpidist.collectives.node.neighbours_memory import address_of
from mpidist.collectives.node.node import Node
from mpidist.core.enums import ReduceOp

# What stays in cache while it is summed.
_CHUNK_BYTES = 512 << 10
_BYTE = np.dtype(np.uint8)


class Movement:
    """The copies inside one node, which has to hold all ranks.

    Args:
        node: The node.
    """

    def __init__(self, node: Node) -> None:
        self._node = node

    def can_tell(self, numbers: int) -> bool:
        """Return whether the board has room for so many numbers of each rank."""
        return self._node.is_alone and numbers <= WORDS

    def show(self, arrays: Sequence[Array]) -> list[int]:
        """Show contiguous arrays of this rank to the others, and return their places.

        The others read there after the ranks have met. A place is an address in this rank's memory, or a shared
        location down from -1. All arrays of a rank are in its slot or none: those that pass through it later would
        overwrite the slot.
        """
        slots = self._node.slots
        if slots is None or sum([array.nbytes for array in arrays]) > slots.nbytes:
            return [self._place_of(array) for array in arrays]
        places, start = [], 0
        for array in arrays:
            slots.mine(slots.nbytes, _BYTE)[start : start + array.nbytes] = as_bytes(array)
            places.append(-1 - slots.location(start))
            start += array.nbytes
        return places

    def _place_of(self, array: Array) -> int:
        location = self._node.shared.locate(array) if self._node.shared.has_arrays else None
        return address_of(array) if location is None else -1 - location

    def met(self) -> Steps[bool]:
        """Flip the slots after a meeting; return whether larger arrays can be copied."""
        node = self._node
        if node.slots is not None:
            node.slots.flip()
        yield from node.make_slots()
        return node.reads_neighbours or node.slots is not None

    def finish(self, places: Iterable[int]) -> Steps[None]:
        """Wait until arrays at these places, told by any rank, may be written again."""
        slots = self._node.slots
        for place in places:
            if place >= 0 or slots is None or not slots.hold(-1 - place):
                # The others may still be reading.
                yield from self._node.board.meet()
                return

    def copy(
        self, mine: Array | None, places: Sequence[int], wanted: Sequence[tuple[int, Array]], longest: int
    ) -> Steps[None]:
        """Copy arrays of other ranks (collective over the node).

        Args:
            mine: This rank's array, contiguous; None if nobody wants it.
            places: Of every rank, where its array lies.
            wanted: Ranks, and contiguous arrays that receive theirs.
            longest: Bytes of the longest array, the same on every rank.
        """
        reads = self._node.reads_neighbours
        through_slots = []
        for rank, target in wanted:
            if not target.nbytes:
                continue
            if rank == self._node.rank:
                assert mine is not None
                np.copyto(target, mine.reshape(target.shape))
            elif places[rank] < 0 or reads:
                self._read(rank, places[rank], as_bytes(target))
            else:
                through_slots.append((rank, as_bytes(target)))
        if not reads and any(place >= 0 for place in places):
            source = None if mine is None or places[self._node.rank] < 0 else as_bytes(mine)
            yield from self._through_slots(source, through_slots, longest)

    def _read(self, rank: int, place: int, target: Array) -> None:
        node = self._node
        if place < 0:
            np.copyto(target, node.shared.at(-1 - place, rank, target.nbytes))
        else:
            node.memory.read(node.pids[rank], place, address_of(target), target.nbytes)

    def _through_slots(self, source: Array | None, wanted: list[tuple[int, Array]], longest: int) -> Steps[None]:
        slots = self._node.slots
        assert slots is not None
        for start in range(0, longest, slots.nbytes):
            stop = start + slots.nbytes
            if source is not None:
                part = source[start:stop]
                slots.mine(part.size, _BYTE)[:] = part
            yield from self._node.board.meet()
            slots.flip()
            for rank, target in wanted:
                part = target[start:stop]
                part[:] = slots.shown(part.size, _BYTE)[rank]

    def reduce_rows(self, mine: Array, places: Sequence[int], start: int, result: Array, op: ReduceOp) -> None:
        """Reduce elements ``start`` onwards of all ranks' flat arrays into ``result``, in rank order.

        Needs neighbours whose memory can be read, or arrays in shared memory.
        """
        node, itemsize, combine = self._node, mine.itemsize, NUMPY_OPS[op]
        limit = _CHUNK_BYTES // itemsize
        scratch = np.empty(min(limit, result.size), mine.dtype)
        for _, begin, count, _ in pieces((result.size,), 0, result.size, limit):
            target = result[begin : begin + count]
            total: Array | None = None
            for rank in range(node.size):
                first = start + begin
                if rank == node.rank:
                    value = mine[first : first + count]
                elif places[rank] < 0:
                    at = -1 - places[rank] + first * itemsize
                    value = node.shared.at(at, rank, count * itemsize).view(mine.dtype)
                else:
                    value = scratch[:count] if total is not None else target
                    self._read(rank, places[rank] + first * itemsize, as_bytes(value))
                total = value if total is None else combine(total, value, out=target)
            if total is not None and total is not target:
                np.copyto(target, total)

    def reduce_rows_through_slots(
        self, mine: Array, borders: Sequence[tuple[int, int]], result: Array, op: ReduceOp
    ) -> Steps[None]:
        """Reduce to every rank its elements of all ranks' flat arrays, in rank order.

        Collective over the node.

        Args:
            mine: This rank's array.
            borders: Of every rank, where its elements begin and end.
            result: This rank's elements of the reduction.
            op: The operation.
        """
        slots, rank, combine = self._node.slots, self._node.rank, NUMPY_OPS[op]
        assert slots is not None
        per_round = slots.nbytes // mine.itemsize // self._node.size
        longest = max(stop - start for start, stop in borders)
        for offset in range(0, longest, per_round):
            room = slots.mine(per_round * self._node.size, mine.dtype)
            for other, (start, stop) in enumerate(borders):
                part = mine[start + offset : min(start + offset + per_round, stop)]
                room[other * per_round : other * per_round + part.size] = part
            yield from self._node.board.meet()
            slots.flip()
            rooms = slots.shown(room.size, mine.dtype)
            target = result[offset : offset + per_round]
            total, *others = [room[rank * per_round : rank * per_round + target.size] for room in rooms]
            for value in others:
                total = combine(total, value, out=target)
            if total is not target:
                np.copyto(target, total)
