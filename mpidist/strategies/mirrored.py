"""MirroredStrategy, MultiWorkerMirroredStrategy and OneDeviceStrategy: a copy of each variable on every replica."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mpidist.cluster_resolver import ClusterResolver, MPIClusterResolver
from mpidist.cluster_resolver.cluster_resolver import task_text
from mpidist.cluster_resolver.mpi_cluster_resolver import TRAINING_JOBS, checked_resolver
from mpidist.collectives import Advice, Communicator
from mpidist.collectives.reduce.registry import check_options
from mpidist.core.options import CommunicationImplementation, CommunicationOptions
from mpidist.core.text import parse_device
from mpidist.cross_device_ops import CrossDeviceOps
from mpidist.strategies.base import Strategy
from mpidist.strategies.replica_devices import check_device, check_devices
from mpidist.strategies.replicated import ReplicatedExtended
from mpidist.topology import import_mpi, world_topology
from mpidist.values import select_replica

if TYPE_CHECKING:
    from mpi4py import MPI

FOR_STRATEGIES = Advice(
    "Make this call (reduce, result(), save(), reading a variable, ...) on every rank, even if only one rank needs the "
    "result. Put only the printing under `if strategy.extended.should_checkpoint:`."
)


class MirroredStrategy(Strategy):
    """Synchronous training on one node: every replica holds a copy of each variable (tf.distribute.MirroredStrategy).

    Two ways to use it. Several devices in one process, as in TensorFlow: ``MirroredStrategy(["gpu:0", "gpu:1"])``
    under a single rank; CPU devices are virtual replicas. Or the ranks of one node: start with ``mpirun``, and all
    ranks of the node take part, each with its own devices. Collective over those ranks.

    Args:
        devices: Device strings of this rank's replicas; by default its share of the node's GPUs, which is all of them
            in a job of one process, or the CPU where there are none.
        cross_device_ops: How values are reduced, such as ``HierarchicalCopyAllReduce()``.
        communicator: An mpi4py communicator of the ranks that take part. By default all ranks of the node;
            ``MPI.COMM_SELF`` for this process alone.

    Raises:
        ValueError: Wrong devices, or a job of several nodes, which MultiWorkerMirroredStrategy is for.
        DeviceError: A GPU, and there is no usable CuPy.
        TypeError: A ``cross_device_ops`` that is none.
        LaunchError: MPI cannot be started.

    >>> strategy = MirroredStrategy(["cpu:0", "cpu:1"])
    >>> strategy.num_replicas_in_sync
    2
    >>> strategy.close()
    """

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        communicator: MPI.Intracomm | None = None,
    ) -> None:
        local_devices = check_devices(devices)
        if cross_device_ops is not None and not isinstance(cross_device_ops, CrossDeviceOps):
            raise TypeError(
                f"cross_device_ops is {cross_device_ops!r}; expected an object such as "
                "mpidist.HierarchicalCopyAllReduce() or mpidist.ReductionToOneDevice()"
            )
        ranks = communicator
        if ranks is None:
            ranks = ranks_of_node("MirroredStrategy", "mpidist.MultiWorkerMirroredStrategy()")
        comm = Communicator(ranks, owner=type(self).__name__, advice=FOR_STRATEGIES) if ranks.Get_size() > 1 else None
        super().__init__(
            ReplicatedExtended(self, local_devices, comm, cross_device_ops, allows_per_replica_input=comm is None)
        )


def ranks_of_node(strategy: str, instead: str) -> MPI.Intracomm:
    """Return the ranks of the node, which are all of the job.

    Args:
        strategy: Name of the strategy, for the message.
        instead: The strategy for several nodes.

    Raises:
        ValueError: The job has several nodes.
    """
    topology = world_topology()
    if topology.num_nodes > 1:
        raise ValueError(
            f"{strategy} is for one node, and this job has {topology.size} ranks on {topology.num_nodes} nodes; "
            f"use {instead}"
        )
    return topology.node


class OneDeviceExtended(ReplicatedExtended):
    """One replica on one device of this process."""

    def distribute_values(self, value_fn: Callable[..., object]) -> Any:
        """See ``StrategyExtended``: the bare value, as in TensorFlow."""
        return select_replica(0, super().distribute_values(value_fn))


class OneDeviceStrategy(Strategy):
    """Runs on one device (tf.distribute.OneDeviceStrategy); for testing code that is to be distributed later.

    Args:
        device: The device string, such as ``"cpu:0"`` or ``"gpu:1"``.

    Raises:
        ValueError: Not a device of this process.
        DeviceError: A GPU, and there is no usable CuPy.

    >>> OneDeviceStrategy("cpu:0").run(lambda x: 2 * x, args=(21,))
    42
    """

    def __init__(self, device: str) -> None:
        super().__init__(OneDeviceExtended(self, (check_device(device),), None))


class MultiWorkerMirroredStrategy(Strategy):
    """Synchronous training over all ranks (tf.distribute.MultiWorkerMirroredStrategy).

    Every rank is a worker with one or more local replicas; every replica holds a copy of each variable. Start the
    program with ``mpirun`` or ``srun``. Collective: construct it on every rank that trains.

    Args:
        cluster_resolver: Who is who; by default every rank is a worker, and rank 0 the chief.
        communication_options: Defaults of the communication.
        communicator: An mpi4py communicator of the ranks that take part; by default those that the resolver
            calls chief or worker.
        devices: Device strings of this rank's replicas; by default its share of the node's GPUs, or the CPU where there
            are none. Ranks may have different numbers.

    Raises:
        ValueError: A wrong argument, or a rank whose task does not train.
        DeviceError: A GPU, and there is no usable CuPy.
        LaunchError: MPI cannot be started, the ranks do not form one world, or no resolver is given and TF_CONFIG
            tells of another cluster.

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
        local_devices = check_devices(devices)
        options = communication_options or CommunicationOptions()
        check_options(options)
        example = "an object such as mpidist.cluster_resolver.MPIClusterResolver()"
        resolver = checked_resolver(cluster_resolver, example, communicator=communicator)
        with _training_ranks(resolver, communicator) as ranks:
            if isinstance(resolver, MPIClusterResolver) and resolver.is_of(ranks):
                # Collective the first time; a program asks it where one task alone comes.
                resolver.cluster_spec()
            several, owner = ranks.Get_size() > 1, type(self).__name__
            comm = Communicator(ranks, options=options, owner=owner, advice=FOR_STRATEGIES) if several else None
        if comm is not None:
            _check_tasks(resolver, comm)
        extended = ReplicatedExtended(self, local_devices, comm, cluster_resolver=resolver)
        super().__init__(extended)
        cpus = [device for device in extended.worker_devices if parse_device(device).kind == "cpu"]
        if options.implementation is CommunicationImplementation.NCCL and cpus:
            warnings.warn(
                f"implementation NCCL was asked for and the devices are {list(extended.worker_devices)}: arrays in "
                "host memory go by MPI; leave implementation at AUTO",
                stacklevel=2,
            )


@contextmanager
def _training_ranks(resolver: ClusterResolver, communicator: MPI.Intracomm | None) -> Iterator[MPI.Intracomm]:
    """Provide the communicator of the ranks that train, of which this rank must be one."""
    task_type = resolver.task_type
    if (task_type is None or resolver.task_id is None) and resolver.cluster_spec():
        raise ValueError(
            f"the cluster resolver has a cluster and no task for this rank (task_type={task_type!r}, "
            f"task_id={resolver.task_id!r}); expected both: resolver.task_type = 'worker', resolver.task_id = 0"
        )
    if task_type not in (None, "evaluator", *TRAINING_JOBS):
        raise ValueError(
            f"{task_text(resolver)}; MultiWorkerMirroredStrategy is for the jobs {' and '.join(TRAINING_JOBS)}; build "
            "it on their ranks only"
        )
    if task_type == "evaluator":
        yield import_mpi().COMM_SELF
    elif communicator is not None:
        yield communicator
    elif isinstance(resolver, MPIClusterResolver) and not resolver.is_made_of(TRAINING_JOBS):
        trainers = resolver.comm_of(TRAINING_JOBS)
        try:
            yield trainers
        finally:
            trainers.Free()
    elif isinstance(resolver, MPIClusterResolver):
        yield resolver.comm
    else:
        world = world_topology().world
        _check_size(resolver, world.Get_size())
        yield world


def _check_size(resolver: ClusterResolver, size: int) -> None:
    """Raise ValueError unless the cluster has a training task for each rank."""
    tasks = resolver.cluster_spec().as_dict()
    counts = {job: len(addresses) for job, addresses in tasks.items()}
    total = sum(counts.values())
    jobs = ", ".join(f"{job}:{count}" for job, count in counts.items())
    others = [job for job in counts if job not in TRAINING_JOBS]
    if others:
        raise ValueError(
            f"the {type(resolver).__name__} has jobs that do not train ({jobs}), and does not tell which ranks those "
            "are; give the ranks that train as communicator=, or the roles by MPIClusterResolver(jobs={...})"
        )
    if total in (0, size):
        return
    raise ValueError(
        f"the {type(resolver).__name__} has {total} tasks ({jobs}), and the MPI world has {size} ranks; expected one "
        f"rank for each task: mpirun -n {total} python ..., or communicator= with the ranks of those that train"
    )


def _check_tasks(resolver: ClusterResolver, comm: Communicator) -> None:
    """Raise ValueError on all ranks where two have the same task (collective).

    Closes ``comm`` first.
    """
    tasks = comm.all_gather_object((resolver.task_type, resolver.task_id))
    first: dict[tuple[str | None, int | None], int] = {}
    for rank, task in enumerate(tasks):
        other = first.setdefault(task, rank)
        if other != rank and task[0] is not None:
            comm.close()
            raise ValueError(
                f"ranks {other} and {rank} are both {task[0]}:{task[1]} by their {type(resolver).__name__}; expected a "
                "task of its own for each rank: set TF_CONFIG for each rank by itself, not before mpirun"
            )
