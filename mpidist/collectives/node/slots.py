"""Slots in which a rank shows small arrays to the others of its node.

All ranks map them. Every rank has two, which alternate: data shown before the ranks meet lie in the next slot, and are
read after the meeting; the slot is written again only before a later meeting, to which nobody comes before having read
it. So one meeting is all that a collective of small arrays needs.
"""

from __future__ import annotations

from mpidist.arrays.dtypes import Array, DType
from mpidist.collectives.mpi.waiting import Steps
from mpidist.collectives.node.shared_memory import SharedMemory

SLOT_BYTES = 512 << 10
_MOST_VIEWS = 256


class InlineSlots:
    """The slots of one node.

    Args:
        shared: Shared memory of the node.
        rank: In the node.
        segments: Of every rank, room for two slots.

    Attributes:
        nbytes: Of one slot.
    """

    def __init__(self, shared: SharedMemory, rank: int, segments: list[Array]) -> None:
        self._rank = rank
        self._segments = segments
        self.nbytes = segments[0].size // 2
        self._first_location = shared.register(segments)
        self._next = 0
        # Making a view costs as much as summing a small array.
        self._views: dict[tuple[int, int, DType], list[Array]] = {}

    @classmethod
    def made(cls, shared: SharedMemory, rank: int) -> Steps[InlineSlots | None]:
        """Return new ones, or None on every rank where there is no room (collective)."""
        segments = yield from shared.segments(2 * SLOT_BYTES)
        return None if segments is None else cls(shared, rank, segments)

    def mine(self, count: int, dtype: DType) -> Array:
        """Return ``count`` elements of this rank's next slot, to be written before the ranks meet."""
        return self._of_all(self._next, count, dtype)[self._rank]

    def flip(self) -> None:
        """Flip the slots after a meeting, on every rank of the node."""
        self._next = 1 - self._next

    def shown(self, count: int, dtype: DType) -> list[Array]:
        """Return ``count`` elements of the slot of every rank."""
        return self._of_all(1 - self._next, count, dtype)

    def location(self, start: int) -> int:
        """Return the location in shared memory of byte ``start`` of this rank's next slot."""
        return self._first_location + self._next * self.nbytes + start

    def hold(self, location: int) -> bool:
        """Return whether a slot lies at a location."""
        return 0 <= location - self._first_location < 2 * self.nbytes

    def _of_all(self, slot: int, count: int, dtype: DType) -> list[Array]:
        key = (slot, count, dtype)
        views = self._views.get(key)
        if views is None:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            first = slot * self.nbytes
            stop = first + count * dtype.itemsize
            views = self._views[key] = [segment[first:stop].view(dtype) for segment in self._segments]
        return views
