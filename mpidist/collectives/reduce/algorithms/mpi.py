"""All-reduce by the MPI library's own call (MPI_Iallreduce)."""

from __future__ import annotations

from mpidist.arrays.dtypes import Array
from mpidist.collectives.mpi.mpi_types import chunks, mpi_datatype, mpi_op
from mpidist.collectives.mpi.waiting import Steps, until_done
from mpidist.collectives.node.packing import PackedReduction
from mpidist.collectives.reduce.registry import HOST_PLACES, Algorithm, AlgorithmEntry, Site, at_once, host_algorithms


class Mpi(Algorithm):
    """An all-reduce by one non-blocking call per piece that fits into an MPI count.

    Args:
        site: Where it works; its communicator is not freed.
    """

    def __init__(self, site: Site) -> None:
        self._comm = site.comm

    def all_reduce(self, job: PackedReduction) -> Steps[list[Array]]:
        """See ``Algorithm``."""
        send, result = job.flat_input(), job.flat_result()
        datatype, operation = mpi_datatype(send.dtype), mpi_op(job.op, send.dtype)
        for a, b in chunks(job.count):
            request = self._comm.Iallreduce([send[a:b], b - a, datatype], [result[a:b], b - a, datatype], operation)
            yield from until_done(request)
        return job.finish(result)


host_algorithms.register(AlgorithmEntry("mpi", at_once(Mpi), HOST_PLACES, HOST_PLACES))
