"""The way between a GPU and the network: page-locked memory, and the ring of nodes.

MPI is given memory of the device where it takes that; elsewhere chunks pass through page-locked memory of the same
layout. NCCL and MPI are never at work on the same memory at once: the device is done with it before MPI begins, and
MPI before the device begins. Waiting for the device keeps MPI going and the other way round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpidist.arrays.device_ops import ops_of
from mpidist.arrays.dtypes import Array, DType
from mpidist.arrays.streams import Event
from mpidist.collectives.channel.operation import which_on_device
from mpidist.collectives.gpu.device_streams import DeviceStreams
from mpidist.collectives.gpu.network_probes import rdma_fabric
from mpidist.collectives.mpi.exchange import agreed_minimum
from mpidist.collectives.mpi.mpi_types import NUMPY_OPS
from mpidist.collectives.mpi.waiting import Comm, Steps, until_event
from mpidist.collectives.node.memory import slices
from mpidist.collectives.reduce.registry import Rail
from mpidist.core import settings
from mpidist.core.options import ReduceOp
from mpidist.topology import import_mpi

# Page-locked memory ---------------------------------------------------------------------------------------------------


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


def agreed_staging_bytes(comm: Comm) -> Steps[int]:
    """Return the bytes of a chunk, at most, the least of all ranks (collective)."""
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
        return self._memory[: count * dtype.itemsize].view(dtype)

    def received(self, count: int, dtype: DType) -> Array:
        """Return ``count`` elements on the device."""
        return self._received[: count * dtype.itemsize].view(dtype)


class StagingRing:
    """A few slots, each used again once its last content has been copied.

    Args:
        streams: Between whose device and the host.
        nbytes: Of a slot, a power of two.
        received_bytes: Of the part of a slot on the device, where ``streams.to_device`` has to be past ``is_made``.
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
        """Return a slot that nothing uses any more, or None."""
        for index, slot in enumerate(self._idle):
            if slot.free_after is None or slot.free_after.is_done:
                return self._idle.pop(index)
        return None

    def give_back(self, slot: PinnedBuffer, free_after: Event) -> None:
        """Put back a slot that is in use until an event."""
        slot.free_after = free_after
        self._idle.append(slot)


# The ring between nodes -----------------------------------------------------------------------------------------------


def received_bytes(slice_bytes: int, nodes: int) -> int:
    """Return the bytes of a slot on the device: a segment of a slice.

    It may be one element longer than others.
    """
    return slice_bytes // nodes + 16


class DeviceRing(Rail):
    """An all-reduce over a ring of ranks, of arrays on their devices.

    Args:
        comm, ranks, position: See ``Rail``.
        streams: Whose device it is.
        takes_device_memory: Whether MPI takes pointers to it.
    """

    def __init__(
        self, comm: Comm, ranks: list[int], position: int, streams: DeviceStreams, takes_device_memory: bool
    ) -> None:
        super().__init__(comm, ranks, position)
        self._streams = streams
        self.takes_device_memory = takes_device_memory

    def all_reduce(self, flat: Array, op: ReduceOp, chunk: int, slot: PinnedBuffer, filled: Event) -> Steps[Event]:
        """Reduce ``flat`` in place over all ranks; return the event of its arrival.

        The event is one of ``streams.to_device``.

        Args:
            flat: Contiguous, on the device.
            op: The operation.
            chunk: Tells several apart that are on their way.
            slot: In use until then.
            filled: When ``flat`` has its content; where MPI takes device memory, that has to be now.
        """
        n, me, streams = len(self._ranks), self._position, self._streams
        before, after = (me - 1) % n, (me + 1) % n
        borders = slices(flat.size, n)
        memory = flat if self.takes_device_memory else slot.array(flat.size, flat.dtype)
        segments, shown = [flat[a:b] for a, b in borders], [memory[a:b] for a, b in borders]
        yield from self._show_first(segments[me], shown[me], filled)
        for step in range(n - 1):
            mine, theirs = (me - step) % n, (me - step - 1) % n
            received = slot.received(segments[theirs].size, flat.dtype)
            target = received if self.takes_device_memory else shown[theirs]
            yield from self._exchange({before: target}, {after: shown[mine]}, chunk)
            yield from self._add(op, segments[theirs], received, shown[theirs])
        for step in range(n - 1):
            mine, theirs = (me + 1 - step) % n, (me - step) % n
            yield from self._exchange({before: shown[theirs]}, {after: shown[mine]}, chunk)
            if not self.takes_device_memory:
                streams.ops.copy_to_device(segments[theirs], shown[theirs], streams.to_device)
        with streams.on():
            return streams.to_device.record()

    def _show_first(self, segment: Array, shown: Array, filled: Event) -> Steps[None]:
        """Give MPI the first segment, and have the sums wait for the others."""
        streams = self._streams
        with streams.on():
            streams.to_device.wait(filled)
            if self.takes_device_memory:
                return
            streams.to_host.wait(filled)
            streams.ops.copy_to_host(shown, segment, streams.to_host)
            is_shown = streams.to_host.record()
        yield from until_event(is_shown, relaxes=False)

    def _add(self, op: ReduceOp, segment: Array, received: Array, shown: Array) -> Steps[None]:
        """Add the received elements to a segment, on the device, and give MPI the sum."""
        streams = self._streams
        with streams.on():
            if not self.takes_device_memory:
                streams.ops.copy_to_device(received, shown, streams.to_device)
            with streams.to_device:
                NUMPY_OPS[op](segment, received, out=segment)
            is_shown = streams.to_device.record()
            if not self.takes_device_memory:
                streams.to_host.wait(is_shown)
                streams.ops.copy_to_host(shown, segment, streams.to_host)
                is_shown = streams.to_host.record()
        yield from until_event(is_shown, relaxes=False)

    def _message(self, array: Array) -> Any:
        if not self.takes_device_memory:
            return super()._message(array)
        mpi = import_mpi()
        memory = mpi.buffer.fromaddress(self._streams.ops.pointer(array), array.nbytes)
        return memory, array.nbytes, mpi.BYTE


# Copies for collectives in host memory --------------------------------------------------------------------------------


BringBack = Callable[[list[Array]], list[Array]]


def on_host(arrays: Sequence[Array]) -> tuple[Sequence[Array], BringBack]:
    """Return arrays in host memory, and the function that brings results back to the GPU.

    Blocks until the arrays are there.

    >>> import numpy as np
    >>> arrays, bring_back = on_host([np.ones(2)])
    >>> bring_back([2 * arrays[0]])
    [array([2., 2.])]
    """
    if not which_on_device(arrays):
        return arrays, lambda results: results
    homes = [(ops, ops.device_of(array)) for ops, array in ((ops_of(array), array) for array in arrays)]
    copies = list(arrays)
    for ops, device in {home for home in homes if home[0].kind != "cpu"}:
        there = [index for index, home in enumerate(homes) if home == (ops, device)]
        for index, copy in zip(there, ops.all_to_host([arrays[index] for index in there]), strict=True):
            copies[index] = copy

    def bring_back(results: list[Array]) -> list[Array]:
        return [
            ops.from_host(result, device) if ops.kind != "cpu" else result
            for (ops, device), result in zip(homes, results, strict=True)
        ]

    return copies, bring_back
