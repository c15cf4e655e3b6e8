"""Staging: page-locked host memory that chunks pass through between a GPU and the network."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpidist.arrays.convert import Array
from mpidist.arrays.device_ops import Event
from mpidist.arrays.dtypes import DType
from mpidist.collectives.gathering import agreed_minimum
from mpidist.collectives.lane import Lane
from mpidist.collectives.waiting import Steps
from mpidist.core import settings

if TYPE_CHECKING:
    from mpi4py import MPI

_SLOTS = 4


def agreed_staging_bytes(comm: MPI.Intracomm) -> Steps[int]:
    """Return the bytes of a chunk, at most: the least that any rank was told (collective)."""
    return (yield from agreed_minimum(comm, settings.STAGING_BYTES.read()))


class Slot:
    """Room for one chunk.

    Args:
        memory: Bytes.
    """

    def __init__(self, memory: Array) -> None:
        self._memory = memory
        self.free_after: Event | None = None
        """When its last content has been copied away."""

    def array(self, count: int, dtype: DType) -> Array:
        """Return ``count`` elements of it."""
        flat: Array = self._memory[: count * dtype.itemsize].view(dtype)
        return flat


class StagingRing:
    """A few slots that take turns.

    Args:
        lane: Between whose device and the host.
        nbytes: Of a slot, a power of two.
    """

    def __init__(self, lane: Lane, nbytes: int) -> None:
        self.nbytes = nbytes
        with lane.on():
            self._idle = [Slot(lane.ops.pinned(self.nbytes)) for _ in range(_SLOTS)]

    def take(self) -> Slot | None:
        """Return a slot that nothing uses any more, None if there is none now."""
        for index, slot in enumerate(self._idle):
            if slot.free_after is None or slot.free_after.is_done:
                return self._idle.pop(index)
        return None

    def give_back(self, slot: Slot, free_after: Event) -> None:
        """Return a slot that is in use until an event."""
        slot.free_after = free_after
        self._idle.append(slot)
