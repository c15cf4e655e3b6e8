"""Move data between a GPU and the network: page-locked memory, and the ring of nodes.

MPI libraries with GPU support receive device pointers. Otherwise chunks pass through page-locked memory. NCCL and MPI
never use the same memory at once: each starts after the other has finished. While one is waited for, the other is
polled.
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
from mpidist.collectives.gpu.probes import rdma_fabric
from mpidist.collectives.mpi.exchange import agreed_minimum
from mpidist.collectives.mpi.mpi_types import NUMPY_OPS
from mpidist.collectives.mpi.waiting import Comm, Steps, until_event
from mpidist.collectives.node.memory import slices
from mpidist.collectives.reduce.cost_model import Rail
from mpidist.core import settings
from mpidist.core.options import ReduceOp
from mpidist.topology import import_mpi

# Page-locked memory ---------------------------------------------------------------------------------------------------


_SLOTS = 4
# Sending a chunk must take much longer than starting to send it.
_BYTES_BY_GIGABITS = ((200, 16 << 20), (100, 8 << 20), (0, 4 << 20))


def staging_bytes() -> int:
    """Return the maximum number of bytes of a chunk on this rank."""
    nbytes: int | None = settings.STAGING_BYTES.read()
    if nbytes is not None:
        return nbytes
    fabric = rdma_fabric()
    gigabits = 0.0 if fabric is None else fabric.gigabits
    return next(nbytes for least, nbytes in _BYTES_BY_GIGABITS if gigabits >= least)


def agreed_staging_bytes(comm: Comm) -> Steps[int]:
    """Return the smallest ``staging_bytes`` of all ranks (collective)."""
    return (yield from agreed_minimum(comm, staging_bytes()))


class PinnedBuffer:
    """Hold one chunk.

    Args:
        memory: Bytes on the host.
        received: Bytes on the device, for a part of the chunk.
    """

    def __init__(self, memory: Array, received: Array) -> None:
        self._memory = memory
        self._received = received
        self.free_after: Event | None = None  # after its last content was copied

    def array(self, count: int, dtype: DType) -> Array:
        """View the host memory as ``count`` elements."""
        return self._memory[: count * dtype.itemsize].view(dtype)

    def received(self, count: int, dtype: DType) -> Array:
        """View the device memory as ``count`` elements."""
        return self._received[: count * dtype.itemsize].view(dtype)


class StagingRing:
    """Keep a few slots, each reused after its last content was copied.

    Args:
        streams: Streams of the device.
        nbytes: Bytes of a slot, a power of two.
        received_bytes: Bytes of a slot on the device. Use them on ``streams.to_device`` after ``is_made``.
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
        """Return a free slot, or None."""
        for index, slot in enumerate(self._idle):
            if slot.free_after is None or slot.free_after.is_done:
                return self._idle.pop(index)
        return None

    def give_back(self, slot: PinnedBuffer, free_after: Event) -> None:
        """Return a slot that is in use until an event."""
        slot.free_after = free_after
        self._idle.append(slot)


# The ring between nodes -----------------------------------------------------------------------------------------------


class DeviceRing(Rail):
    """All-reduce arrays on GPUs over a ring of ranks.

    Args:
        comm, ranks, position: See ``Rail``.
        streams: Streams of the device.
        takes_device_memory: True if MPI accepts device pointers.
    """

    def __init__(
        self, comm: Comm, ranks: list[int], position: int, streams: DeviceStreams, takes_device_memory: bool
    ) -> None:
        super().__init__(comm, ranks, position)
        self._streams = streams
        self.takes_device_memory = takes_device_memory

    def all_reduce(self, flat: Array, op: ReduceOp, chunk: int, slot: PinnedBuffer, filled: Event) -> Steps[Event]:
        """Reduce ``flat`` in place over all ranks, and return its event on ``streams.to_device``.

        Args:
            flat: Contiguous array on the device.
            op: Operation.
            chunk: Number that distinguishes chunks in flight.
            slot: Slot that is in use until the event.
            filled: Event after which ``flat`` is filled. Must be done if MPI accepts device memory.
        """
        n, me, streams = len(self._ranks), self._position, self._streams
        before, after = (me - 1) % n, (me + 1) % n
        borders = slices(flat.size, n)
        memory = flat if self.takes_device_memory else slot.array(flat.size, flat.dtype)
        segments, staged = [flat[a:b] for a, b in borders], [memory[a:b] for a, b in borders]
        yield from self._stage_first(segments[me], staged[me], filled)
        for step in range(n - 1):
            mine, theirs = (me - step) % n, (me - step - 1) % n
            received = slot.received(segments[theirs].size, flat.dtype)
            target = received if self.takes_device_memory else staged[theirs]
            yield from self._exchange({before: target}, {after: staged[mine]}, chunk)
            yield from self._add(op, segments[theirs], received, staged[theirs])
        for step in range(n - 1):
            mine, theirs = (me + 1 - step) % n, (me - step) % n
            yield from self._exchange({before: staged[theirs]}, {after: staged[mine]}, chunk)
            if not self.takes_device_memory:
                streams.ops.copy_to_device(segments[theirs], staged[theirs], streams.to_device)
        with streams.on():
            return streams.to_device.record()

    def _stage_first(self, segment: Array, staged: Array, filled: Event) -> Steps[None]:
        """Copy the first segment for MPI, and order the sums after ``filled``."""
        streams = self._streams
        with streams.on():
            streams.to_device.wait(filled)
            if self.takes_device_memory:
                return
            streams.to_host.wait(filled)
            streams.ops.copy_to_host(staged, segment, streams.to_host)
            is_staged = streams.to_host.record()
        yield from until_event(is_staged, relaxes=False)

    def _add(self, op: ReduceOp, segment: Array, received: Array, staged: Array) -> Steps[None]:
        """Add the received elements on the device, and copy the sum for MPI."""
        streams = self._streams
        with streams.on():
            if not self.takes_device_memory:
                streams.ops.copy_to_device(received, staged, streams.to_device)
            with streams.to_device:
                NUMPY_OPS[op](segment, received, out=segment)
            is_staged = streams.to_device.record()
            if not self.takes_device_memory:
                streams.to_host.wait(is_staged)
                streams.ops.copy_to_host(staged, segment, streams.to_host)
                is_staged = streams.to_host.record()
        yield from until_event(is_staged, relaxes=False)

    def _message(self, array: Array) -> Any:
        if not self.takes_device_memory:
            return super()._message(array)
        mpi = import_mpi()
        memory = mpi.buffer.fromaddress(self._streams.ops.pointer(array), array.nbytes)
        return memory, array.nbytes, mpi.BYTE


# Copies for collectives in host memory --------------------------------------------------------------------------------


BringBack = Callable[[list[Array]], list[Array]]


def on_host(arrays: Sequence[Array]) -> tuple[Sequence[Array], BringBack]:
    """Return copies in host memory, and a function that copies results back to the GPU.

    Blocks until the copies are complete.

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
