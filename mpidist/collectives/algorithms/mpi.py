"""All-reduce by the MPI library's own call (MPI_Iallreduce)."""

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


class Mpi:
    """One non-blocking call per piece that fits into an MPI count."""

    most_parts = 1

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm

    def all_reduce(
        self, parts: Sequence[Array], receive: Callable[[], Array], op: ReduceOp, divisor: int | None, may_share: bool
    ) -> Steps[Array]:
        """See ``Algorithm``."""
        (send,) = parts
        result = receive()
        datatype, operation = mpi_datatype(send.dtype), mpi_op(op, send.dtype)
        for a, b in chunks(send.size):
            request = self._comm.Iallreduce([send[a:b], b - a, datatype], [result[a:b], b - a, datatype], operation)
            yield from until_done(request)
        return divided(result, divisor)

    def close(self) -> None:
        """Nothing to free: the communicator is the caller's."""
