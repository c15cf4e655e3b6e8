"""Between nodes on device memory: a ring as ``ring``, for MPI libraries that take pointers to it.

NCCL and MPI are never at work on the same memory at once: the device is done with what MPI is given, and MPI with what
the device is given, before either begins. Waiting for the device keeps MPI going and the other way round.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mpidist.arrays.convert import Array
from mpidist.collectives.chunks import slices
from mpidist.collectives.lane import Lane
from mpidist.collectives.mpi_types import numpy_op, tag_of
from mpidist.collectives.waiting import Steps, until_all_done, until_event
from mpidist.core.enums import ReduceOp
from mpidist.topology import import_mpi

if TYPE_CHECKING:
    from mpi4py import MPI


class DeviceRing:
    """An all-reduce over a ring of ranks, of arrays on their devices.

    Args:
        comm: The communicator, of an MPI library that takes device memory.
        ranks: The ranks of the ring, in it.
        position: Of this rank among them.
        lane: Whose device it is.
    """

    def __init__(self, comm: MPI.Intracomm, ranks: list[int], position: int, lane: Lane) -> None:
        self._comm = comm
        self._size, self._position = len(ranks), position
        self._next = ranks[(position + 1) % len(ranks)]
        self._previous = ranks[position - 1]
        self._lane = lane

    def all_reduce(self, flat: Array, op: ReduceOp, chunk: int) -> Steps[None]:
        """Reduce ``flat`` in place over all ranks; the device must be done with it, and is done with it afterwards.

        Args:
            flat: Contiguous, on the device.
            op: The operation.
            chunk: Tells several apart that are on their way.
        """
        n, combine, lane = self._size, numpy_op(op), self._lane
        segments = [flat[a:b] for a, b in slices(flat.size, n)]
        with lane.on(), lane.to_device:
            received = lane.ops.empty((segments[0].size,), flat.dtype, lane.device)
            # MPI does not wait for what the stream has still to do with memory that it gave out before.
            is_given = lane.to_device.record()
        yield from until_event(is_given, relaxes=False)
        for step in range(n - 1):
            mine, theirs = (self._position - step) % n, (self._position - step - 1) % n
            part = received[: segments[theirs].size]
            yield from self._exchange(segments[mine], part, chunk)
            with lane.on(), lane.to_device:
                combine(segments[theirs], part, out=segments[theirs])
                combined = lane.to_device.record()
            yield from until_event(combined, relaxes=False)
        for step in range(n - 1):
            mine, theirs = (self._position + 1 - step) % n, (self._position - step) % n
            yield from self._exchange(segments[mine], segments[theirs], chunk)

    def _exchange(self, send: Array, receive: Array, chunk: int) -> Steps[None]:
        tag = tag_of(chunk)
        yield from until_all_done(
            [
                self._comm.Irecv(self._message(receive), self._previous, tag),
                self._comm.Isend(self._message(send), self._next, tag),
            ]
        )

    def _message(self, array: Array) -> list[Any]:
        mpi = import_mpi()
        memory = mpi.buffer.fromaddress(self._lane.ops.pointer(array), array.nbytes)
        return [memory, array.nbytes, mpi.BYTE]
