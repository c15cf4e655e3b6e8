"""All-reduce by reducing to one rank and broadcasting from there (MPI_Ireduce, MPI_Ibcast)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mpidist.arrays.convert import Array
from mpidist.collectives.mpi_types import chunks, mpi_datatype, mpi_op
from mpidist.collectives.packing import divided
from mpidist.collectives.waiting import Steps, until_done
from mpidist.core.enums import ReduceOp

if TYPE_CHECKING:
    from mpi4py import MPI


class ReduceBroadcast:
    """Every element is summed on rank 0, in one place, and copied to the others.

    Args:
        comm: The communicator; not freed.
    """

    most_parts = 1

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm

    def all_reduce(
        self, parts: Sequence[Array], receive: Callable[[], Array], op: ReduceOp, divisor: int | None, may_share: bool
    ) -> Steps[Array]:
        """See ``Algorithm``."""
        (send,) = parts
        result = receive()
        yield from reduce_to(self._comm, send, result, op, root=0)
        yield from broadcast(self._comm, result, root=0)
        return divided(result, divisor)

    def close(self) -> None:
        """Nothing to free: the communicator is the caller's."""


def reduce_to(comm: MPI.Intracomm, send: Array, receive: Array | None, op: ReduceOp, root: int) -> Steps[None]:
    """Reduce flat ``send`` of all ranks into flat ``receive`` of ``root``; others may pass None."""
    datatype = mpi_datatype(send.dtype)
    for a, b in chunks(send.size):
        target = None if receive is None else [receive[a:b], b - a, datatype]
        yield from until_done(comm.Ireduce([send[a:b], b - a, datatype], target, mpi_op(op, send.dtype), root))


def broadcast(comm: MPI.Intracomm, data: Array, root: int) -> Steps[None]:
    """Copy flat ``data`` of ``root`` into that of all ranks."""
    datatype = mpi_datatype(data.dtype)
    for a, b in chunks(data.size):
        yield from until_done(comm.Ibcast([data[a:b], b - a, datatype], root))
