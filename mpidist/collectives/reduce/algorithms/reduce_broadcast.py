"""All-reduce by reducing to one rank and broadcasting from it (MPI_Ireduce, MPI_Ibcast)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpidist.arrays.dtypes import Array
from mpidist.collectives.mpi.mpi_types import chunks, mpi_datatype, mpi_op
from mpidist.collectives.mpi.waiting import Steps, until_done
from mpidist.collectives.node.packing import PackedReduction
from mpidist.collectives.reduce.registry import HOST_PLACES, AlgorithmEntry, Site, at_once, host_algorithms
from mpidist.core.enums import ReduceOp

if TYPE_CHECKING:
    from mpi4py import MPI


class ReduceBroadcast:
    """An all-reduce that sums on rank 0, in one place, and copies to the others.

    Args:
        site: Where it works; its communicator is not freed.
    """

    takes_replicas = False

    def __init__(self, site: Site) -> None:
        self._comm = site.comm

    def start(self, job: PackedReduction) -> None:
        """See ``Algorithm``: MPI begins when all have met."""

    def all_reduce(self, job: PackedReduction) -> Steps[list[Array]]:
        """See ``Algorithm``."""
        result = job.flat_result()
        yield from reduce_to(self._comm, job.flat_input(), result, job.op, root=0)
        datatype = mpi_datatype(job.dtype)
        for a, b in chunks(result.size):
            yield from until_done(self._comm.Ibcast([result[a:b], b - a, datatype], 0))
        return job.finish(result)

    def close(self) -> None:
        """Free nothing: the communicator is the caller's."""


host_algorithms.register(AlgorithmEntry("reduce_broadcast", at_once(ReduceBroadcast), HOST_PLACES))


def reduce_to(comm: MPI.Intracomm, send: Array, receive: Array | None, op: ReduceOp, root: int) -> Steps[None]:
    """Reduce flat ``send`` of all ranks into flat ``receive`` of ``root``; others may pass None."""
    datatype = mpi_datatype(send.dtype)
    for a, b in chunks(send.size):
        target = None if receive is None else [receive[a:b], b - a, datatype]
        yield from until_done(comm.Ireduce([send[a:b], b - a, datatype], target, mpi_op(op, send.dtype), root))
