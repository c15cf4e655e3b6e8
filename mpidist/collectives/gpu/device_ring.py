"""Between nodes: a ring as ``ring``, of arrays on GPUs, which form the sums.

MPI is given memory of the device where it takes that; elsewhere the segments pass through page-locked memory of the
same layout. NCCL and MPI are never at work on the same memory at once: the device is done with what MPI is given, and
MPI with what the device is given, before either begins. Waiting for the device keeps MPI going and the other way round.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpidist.arrays.convert import Array
from mpidist.arrays.device_ops import Event
from mpidist.collectives.gpu.device_streams import DeviceStreams
from mpidist.collectives.gpu.staging import PinnedBuffer
from mpidist.collectives.mpi.mpi_types import message, numpy_op, tag_of
from mpidist.collectives.mpi.waiting import Steps, until_all_done, until_event
from mpidist.collectives.node.chunks import slices
from mpidist.core.enums import ReduceOp
from mpidist.topology import import_mpi

if TYPE_CHECKING:
    from mpi4py import MPI


def received_bytes(slice_bytes: int, nodes: int) -> int:
    """Return what a slot has to hold on the device: a segment of a slice, which may be one element longer."""
    return slice_bytes // nodes + 16


class DeviceRing:
    """An all-reduce over a ring of ranks, of arrays on their devices.

    Args:
        comm: The communicator.
        ranks: The ranks of the ring, in it.
        position: Of this rank among them.
        streams: Whose device it is.
        takes_device_memory: Whether MPI takes pointers to it.
    """

    def __init__(
        self, comm: MPI.Intracomm, ranks: list[int], position: int, streams: DeviceStreams, takes_device_memory: bool
    ) -> None:
        self._comm = comm
        self._size, self._position = len(ranks), position
        self._next = ranks[(position + 1) % len(ranks)]
        self._previous = ranks[position - 1]
        self._streams = streams
        self.takes_device_memory = takes_device_memory

    def all_reduce(self, flat: Array, op: ReduceOp, chunk: int, slot: PinnedBuffer, filled: Event) -> Steps[Event]:
        """Reduce ``flat`` in place over all ranks; returns after what on ``streams.to_device`` it is there.

        Args:
            flat: Contiguous, on the device.
            op: The operation.
            chunk: Tells several apart that are on their way.
            slot: In use until then.
            filled: When ``flat`` has its content; where MPI takes device memory, that has to be now.
        """
        n, streams = self._size, self._streams
        borders = slices(flat.size, n)
        memory = flat if self.takes_device_memory else slot.array(flat.size, flat.dtype)
        segments, shown = [flat[a:b] for a, b in borders], [memory[a:b] for a, b in borders]
        yield from self._show_first(segments[self._position], shown[self._position], filled)
        for step in range(n - 1):
            mine, theirs = (self._position - step) % n, (self._position - step - 1) % n
            received = slot.received(segments[theirs].size, flat.dtype)
            target = received if self.takes_device_memory else shown[theirs]
            yield from self._exchange(shown[mine], target, chunk)
            yield from self._add(op, segments[theirs], received, shown[theirs])
        for step in range(n - 1):
            mine, theirs = (self._position + 1 - step) % n, (self._position - step) % n
            yield from self._exchange(shown[mine], shown[theirs], chunk)
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
        """Add what was received to a segment, on the device, and give MPI the sum."""
        streams = self._streams
        with streams.on():
            if not self.takes_device_memory:
                streams.ops.copy_to_device(received, shown, streams.to_device)
            with streams.to_device:
                numpy_op(op)(segment, received, out=segment)
            is_shown = streams.to_device.record()
            if not self.takes_device_memory:
                streams.to_host.wait(is_shown)
                streams.ops.copy_to_host(shown, segment, streams.to_host)
                is_shown = streams.to_host.record()
        yield from until_event(is_shown, relaxes=False)

    def _exchange(self, send: Array, receive: Array, chunk: int) -> Steps[None]:
        tag = tag_of(chunk)
        yield from until_all_done(
            [
                self._comm.Irecv(self._message(receive), self._previous, tag),
                self._comm.Isend(self._message(send), self._next, tag),
            ]
        )

    def _message(self, array: Array) -> Any:
        if not self.takes_device_memory:
            return message(array)
        mpi = import_mpi()
        memory = mpi.buffer.fromaddress(self._streams.ops.pointer(array), array.nbytes)
        return [memory, array.nbytes, mpi.BYTE]
