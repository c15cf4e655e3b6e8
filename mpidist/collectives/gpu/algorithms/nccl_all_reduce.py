"""All-reduce of arrays on GPUs by NCCL over all ranks, or by one rank alone."""

from __future__ import annotations

from mpidist.arrays.dtypes import Array
from mpidist.collectives.gpu.device_call import DeviceAlgorithm, DeviceReduction, DeviceSite
from mpidist.collectives.gpu.device_streams import DeviceStreams
from mpidist.collectives.gpu.nccl_comm import NcclComm
from mpidist.collectives.mpi.waiting import Steps
from mpidist.collectives.reduce.registry import GPU_PLACES, AlgorithmEntry, at_once, gpu_algorithms
from mpidist.core.errors import AlgorithmError


class Nccl:
    """One NCCL call per pack (ncclAllReduce).

    Args:
        comm: The NCCL communicator of all ranks; closed with this object.
        streams: Where it works.

    Attributes:
        comm: See above.
    """

    def __init__(self, comm: NcclComm, streams: DeviceStreams) -> None:
        self.comm = comm
        self._streams = streams

    @classmethod
    def made(cls, site: DeviceSite) -> Steps[Nccl]:
        """Return a new one (collective).

        Raises:
            AlgorithmError: NCCL does not work on some rank; on all ranks.
        """
        streams = site.streams
        made = yield from NcclComm.made(site.comm, streams.device, has_given_up=streams.has_given_up)
        if isinstance(made, str):
            raise AlgorithmError(f"algorithm 'nccl' does not work here: {made}")
        streams.watch(made)
        return cls(made, streams)

    def all_reduce(self, job: DeviceReduction) -> Steps[list[Array]]:
        """See ``DeviceAlgorithm``."""
        yield from ()
        with self._streams.on():
            self.comm.all_reduce(job.source, job.target, job.op, self._streams.stream)
            return job.store()

    def close(self) -> None:
        """Destroy the NCCL communicator (collective)."""
        self.comm.close()


gpu_algorithms.register(
    AlgorithmEntry("nccl", Nccl.made, GPU_PLACES, GPU_PLACES, is_general=False, instead=("hierarchical", "staged"))
)


class Alone(DeviceAlgorithm):
    """An all-reduce of one rank alone, which casts, divides and copies.

    Args:
        site: Where it works.
    """

    def __init__(self, site: DeviceSite) -> None:
        self._streams = site.streams

    def all_reduce(self, job: DeviceReduction) -> Steps[list[Array]]:
        """See ``DeviceAlgorithm``."""
        yield from ()
        with self._streams.on():
            job.copy()
            return job.store()


gpu_algorithms.register(AlgorithmEntry("alone", at_once(Alone), ()))
