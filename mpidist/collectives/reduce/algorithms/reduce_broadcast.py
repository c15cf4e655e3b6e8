"""All-reduce by reducing to one rank and broadcasting from it (MPI_Ireduce, MPI_Ibcast)."""

from __future__ import annotations

from mpidist.arrays.dtypes import Array
from mpidist.collectives.mpi.exchange import broadcast_flat, reduce_to
from mpidist.collectives.mpi.waiting import Steps
from mpidist.collectives.node.packing import PackedReduction
from mpidist.collectives.reduce.registry import HOST_PLACES, Algorithm, AlgorithmEntry, Site, at_once, host_algorithms


class ReduceBroadcast(Algorithm):
    """An all-reduce that sums on rank 0, in one place, and copies to the others.

    Args:
        site: Where it works; its communicator is not freed.
    """

    def __init__(self, site: Site) -> None:
        self._comm = site.comm

    def all_reduce(self, job: PackedReduction) -> Steps[list[Array]]:
        """See ``Algorithm``."""
        result = job.flat_result()
        yield from reduce_to(self._comm, job.flat_input(), result, job.op, root=0)
        yield from broadcast_flat(self._comm, result, 0)
        return job.finish(result)


host_algorithms.register(AlgorithmEntry("reduce_broadcast", at_once(ReduceBroadcast), HOST_PLACES))
