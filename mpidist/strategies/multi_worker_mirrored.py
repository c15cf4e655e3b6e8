"""MultiWorkerMirroredStrategy: all ranks of the job, on any number of nodes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mpidist.cluster_resolver import ClusterResolver, MPIClusterResolver
from mpidist.collectives import Communicator
from mpidist.collectives.choice import check_options
from mpidist.core.enums import CommunicationImplementation
from mpidist.core.options import CommunicationOptions
from mpidist.strategies.devices import check_devices
from mpidist.strategies.replicated import ReplicatedExtended
from mpidist.strategies.strategy import Strategy
from mpidist.topology import import_mpi, world_topology

if TYPE_CHECKING:
    from mpi4py import MPI

_TRAINING_JOBS = ("chief", "worker")


class MultiWorkerMirroredStrategy(Strategy):
    """Synchronous training over all ranks (tf.distribute.MultiWorkerMirroredStrategy).

    Every rank is a worker with one or more local replicas; every replica holds a copy of each variable. Start the
    program with ``mpirun`` or ``srun``. Collective: construct it on every rank that trains.

    Args:
        cluster_resolver: Who is who; by default every rank is a worker, and rank 0 the chief.
        communication_options: Defaults of the communication.
        communicator: An mpi4py communicator of the ranks that take part; by default those that the resolver
            calls chief or worker.
        devices: Device strings of this rank's replicas; the CPU by default. Ranks may have different numbers.

    Raises:
        ValueError: A wrong argument, or a rank whose task does not train.
        LaunchError: MPI cannot be started, or the ranks do not form one world.

    >>> strategy = MultiWorkerMirroredStrategy()
    >>> strategy.cluster_resolver.task_type
    'worker'
    >>> strategy.close()
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None = None,
        communication_options: CommunicationOptions | None = None,
        communicator: MPI.Intracomm | None = None,
        devices: Sequence[str] | None = None,
    ) -> None:
        if communication_options is not None and not isinstance(communication_options, CommunicationOptions):
            raise ValueError(
                f"communication_options is {communication_options!r}; expected None or "
                "mpidist.experimental.CommunicationOptions(...)"
            )
        if cluster_resolver is not None and not isinstance(cluster_resolver, ClusterResolver):
            raise ValueError(
                f"cluster_resolver is {cluster_resolver!r}; expected None or an object such as "
                "mpidist.cluster_resolver.MPIClusterResolver()"
            )
        local_devices = check_devices(devices)
        options = communication_options or CommunicationOptions()
        check_options(options)
        if options.implementation is CommunicationImplementation.NCCL:
            warnings.warn(
                f"implementation NCCL was asked for and the devices are {list(local_devices)}: arrays in host memory "
                "go by MPI; leave implementation at AUTO",
                stacklevel=2,
            )
        resolver = cluster_resolver or MPIClusterResolver(communicator)
        with _training_ranks(resolver, communicator) as ranks:
            comm = Communicator(ranks, options=options) if ranks.Get_size() > 1 else None
        super().__init__(ReplicatedExtended(self, local_devices, comm, options=options, cluster_resolver=resolver))


@contextmanager
def _training_ranks(resolver: ClusterResolver, communicator: MPI.Intracomm | None) -> Iterator[MPI.Intracomm]:
    """Provide the communicator of the ranks that train, of which this rank must be one."""
    task_type = resolver.task_type
    if (task_type is None or resolver.task_id is None) and resolver.cluster_spec():
        raise ValueError(
            f"the cluster resolver has a cluster and no task for this rank (task_type={task_type!r}, "
            f"task_id={resolver.task_id!r}); expected both: resolver.task_type = 'worker', resolver.task_id = 0"
        )
    if task_type not in (None, "evaluator", *_TRAINING_JOBS):
        raise ValueError(
            f"this rank is {task_type}:{resolver.task_id}; MultiWorkerMirroredStrategy is for the jobs "
            f"{' and '.join(_TRAINING_JOBS)}; build it on their ranks only"
        )
    if task_type == "evaluator":
        yield import_mpi().COMM_SELF
    elif communicator is not None:
        yield communicator
    elif isinstance(resolver, MPIClusterResolver) and not resolver.is_made_of(_TRAINING_JOBS):
        trainers = resolver.comm_of(_TRAINING_JOBS)
        try:
            yield trainers
        finally:
            trainers.Free()
    else:
        yield world_topology().world
