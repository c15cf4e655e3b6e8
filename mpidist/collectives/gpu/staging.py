"""Staging: page-locked host memory that chunks pass through between a GPU and the network."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mpidist.arrays.convert import Array
from mpidist.arrays.device_ops import Event
from mpidist.arrays.dtypes import DType
from mpidist.collectives.gpu.device_streams import DeviceStreams
from mpidist.collectives.gpu.nccl_network import rdma_fabric
from mpidist.collectives.mpi.gathering import agreed_minimum
from mpidist.collectives.mpi.waiting import Steps
from mpidist.core import settings

if TYPE_CHECKING:
    from mpi4py import MPI

_SLOTS = 4
# A chunk has to be on its way for much longer than it takes to start one.
_BYTES_BY_GIGABITS = ((200, 16 << 20), (100, 8 << 20), (0, 4 << 20))


def staging_bytes() -> int:
    """Return the bytes of a chunk, at most, as this rank sees it."""
    given: int | None = settings.STAGING_BYTES.read()
    if given is not None:
        return given
    fabric = rdma_fabric()
    gigabits = 0.0 if fabric is None else fabric.gigabits
    return next(nbytes for least, nbytes in _BYTES_BY_GIGABITS if gigabits >= least)


def agreed_staging_bytes(comm: MPI.Intracomm) -> Steps[int]:
    """Return the bytes of a chunk, at most: the least that any rank sees fit (collective)."""
    return (yield from agreed_minimum(comm, staging_bytes()))


class PinnedBuffer:
    """Room for one chunk.

    Args:
        memory: Bytes on the host.
        received: Bytes on the device, for a part of it.
    """

    def __init__(self, memory: Array, received: Array) -> None:
        self._memory = memory
        self._received = received
        self.free_after: Event | None = None
        """When its last content has been copied away."""

    def array(self, count: int, dtype: DType) -> Array:
        """Return ``count`` elements of it."""
        flat: Array = self._memory[: count * dtype.itemsize].view(dtype)
        return flat

    def received(self, count: int, dtype: DType) -> Array:
        """Return ``count`` elements on the device."""
        flat: Array = self._received[: count * dtype.itemsize].view(dtype)
        return flat


class StagingRing:
    """A few slots that take turns.

    Args:
        streams: Between whose device and the host.
        nbytes: Of a slot, a power of two.
        received_bytes: Of what a slot has on the device, where ``streams.to_device`` has to be past ``is_made``.
    """

    def __init__(self, streams: DeviceStreams, nbytes: int, received_bytes: int = 0) -> None:
        self.nbytes = nbytes
        ops = streams.ops
        with streams.on(), streams.to_device:
            self._idle = [
                PinnedBuffer(ops.pinned(nbytes), ops.empty((received_bytes,), np.dtype(np.uint8), streams.device))
                for _ in range(_SLOTS)
            ]
            self.is_made = streams.to_device.record()

    def take(self) -> PinnedBuffer | None:
        """Return a slot that nothing uses any more, None if there is none now."""
        for index, slot in enumerate(self._idle):
            if slot.free_after is None or slot.free_after.is_done:
                return self._idle.pop(index)
        return None

    def give_back(self, slot: PinnedBuffer, free_after: Event) -> None:
        """Return a slot that is in use until an event."""
        slot.free_after = free_after
        self._idle.append(slot)
