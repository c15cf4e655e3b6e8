"""MirroredStrategy, MultiWorkerMirroredStrategy and OneDeviceStrategy: a copy of each variable on every replica."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from mpidist.arrays.dtypes import Array
from mpidist.cluster_resolver import ClusterResolver, MPIClusterResolver
from mpidist.cluster_resolver.cluster_resolver import task_text
from mpidist.cluster_resolver.mpi_cluster_resolver import TRAINING_JOBS, checked_resolver
from mpidist.collectives import Advice, Communicator, FinishedWork, Work
from mpidist.collectives.reduce.registry import check_options
from mpidist.core.context import Args, Kwargs, may_cross_replicas
from mpidist.core.options import CallOptions, CommunicationImplementation, CommunicationOptions, ReduceOp
from mpidist.core.text import parse_device
from mpidist.cross_device_ops import CrossDeviceOps, Pairs, select_cross_device_ops
from mpidist.input import InputWorkers
from mpidist.strategies.base import ReplicaContext, Strategy, Value
from mpidist.strategies.replica_devices import agreed_devices, check_device, check_devices
from mpidist.strategies.replica_threads import ReplicaThreads
from mpidist.strategies.strategy_extended import Result, StrategyExtended
from mpidist.topology import import_mpi, world_topology
from mpidist.values import Variable, select_replica
from mpidist.values.placement import place_at
from mpidist.values.synchronization import make_variable

if TYPE_CHECKING:
    from mpi4py import MPI

FOR_STRATEGIES = Advice(
    "Make this call (reduce, result(), save(), reading a variable, ...) on every rank, even if only one rank needs the "
    "result. Put only the printing under `if strategy.extended.should_checkpoint:`."
)
# Values that the fast path may reduce, whose results are arrays or NumPy numbers.
_FAST_KINDS = (np.ndarray, float, int, np.float32, np.float64, np.int64)


class ReplicatedExtended(StrategyExtended):
    """Replicas in sync with a copy of each variable, on one rank or several.

    ``devices`` None stands for this rank's share of the GPUs, or the CPU. ``comm`` is closed with the strategy.
    """

    # The all-reduce of the fast path, if each rank has one replica and nothing else forms the sums.
    _fast: Callable[..., Array | None] | None = None

    def __init__(
        self,
        strategy: Strategy,
        devices: tuple[str, ...] | None,
        comm: Communicator | None,
        cross_device_ops: CrossDeviceOps | None = None,
        cluster_resolver: ClusterResolver | None = None,
        allows_per_replica_input: bool = False,
    ) -> None:
        super().__init__(strategy, comm)
        try:
            devices, counts, all_have_gpus = agreed_devices(devices, comm)
            ops = cross_device_ops or select_cross_device_ops(devices, sum(counts), comm)
            ops.bind(comm, sum(counts), devices)
        except Exception:  # raised on all ranks together
            if comm is not None:
                comm.close()
            raise
        self.worker_devices, self._ops = devices, ops
        self._workers = InputWorkers(len(counts), comm.rank if comm else 0, counts, comm, sum(counts) > 1, devices)
        self.local_replica_ids = self._workers.local_replica_ids
        places = [place_at(device) for device in devices]
        self.first_gpu = next((place for place in places if not place.is_host), None)
        if self.first_gpu is not None:
            self.first_gpu.settle()
        self.cluster_resolver = cluster_resolver
        self.allows_per_replica_input = allows_per_replica_input
        if comm is not None and all_have_gpus:
            # Before the model takes the memory of the GPUs.
            comm.prepare_device("gpu", places[0].number)
        lone_ops = ops if comm is not None and max(counts) == 1 and ops.leaves_all_to_engine else None
        self._contexts = [
            ReplicaContext(strategy, global_id, i, lone_ops=lone_ops)
            for i, global_id in enumerate(self.local_replica_ids)
        ]
        if comm is not None and lone_ops is not None and ops.with_algorithm(None) is None:
            self._fast = comm.fast.all_reduce
        self._threads = ReplicaThreads([context.frame for context in self._contexts], places)

    def input_workers(self) -> InputWorkers:
        """See ``StrategyExtended``."""
        return self._workers

    def create_variable(self, array: Array, **properties: Any) -> Variable:
        """See ``StrategyExtended``."""
        kind = f"{properties['synchronization'].name}/{properties['aggregation'].name}"
        (array,) = self.broadcast([array], 0, f"variable {properties['name']!r} {kind}")
        return make_variable(self.strategy, self.worker_devices, array, **properties)

    def run_replicas(self, fn: Callable[..., Result], args: Args, kwargs: Kwargs) -> list[Result]:
        """See ``StrategyExtended``."""
        if len(self._contexts) > 1:
            arguments = [(select_replica(i, args), select_replica(i, kwargs)) for i in range(len(self._contexts))]
            return self._threads.run(self, fn, arguments)
        if self.first_gpu is None:
            return [self._contexts[0].call(fn, args, kwargs)]
        with self.first_gpu.current():
            return [self._contexts[0].call(fn, args, kwargs)]

    def reduce(self, op: ReduceOp, pairs: Pairs, divisor: int, options: CallOptions, note: str) -> list[object]:
        """See ``StrategyExtended``."""
        return self._ops.reduce_pairs(op, pairs, divisor, options, note)

    def reduce_fast(self, reduce_op: ReduceOp | str, value: Value) -> Value | None:
        """See ``StrategyExtended``."""
        if self._fast is None or type(value) not in _FAST_KINDS or not may_cross_replicas(self.strategy):
            return None
        result = self._fast(reduce_op, np.asarray(value), None, 0)
        return cast(Value, result[()]) if result is not None and result.ndim == 0 else cast("Value | None", result)

    def reduce_async(
        self, op: ReduceOp, pairs: Pairs, divisor: int, options: CallOptions, note: str
    ) -> Work | FinishedWork:
        """See ``StrategyExtended``."""
        return self._ops.reduce_pairs_async(op, pairs, divisor, options, note)

    def copy_to(self, value: object, destinations: object) -> Any:
        """See ``StrategyExtended``."""
        return self._ops.broadcast(value, destinations)

    def copy_for(self, strategy: Strategy) -> StrategyExtended:
        """See ``StrategyExtended``."""
        if self.communicator is not None or self.cluster_resolver is not None:
            raise ValueError(
                f"{type(self.strategy).__name__} cannot be copied, since it owns a communicator; build a new one on "
                "every rank"
            )
        allows = self.allows_per_replica_input
        return type(self)(strategy, self.worker_devices, None, self._ops, allows_per_replica_input=allows)

    def close(self) -> None:
        """See ``StrategyExtended``."""
        self._threads.close()
        self._ops.close()
        self._fast = None
        super().close()


class OneDeviceExtended(ReplicatedExtended):
    """One replica on one device of this process."""

    def distribute_values(self, value_fn: Callable[..., object]) -> Any:
        """Return the bare value, as in TensorFlow."""
        return select_replica(0, super().distribute_values(value_fn))


class OneDeviceStrategy(Strategy):
    """One replica on one device (tf.distribute.OneDeviceStrategy), to test code before you distribute it.

    Args:
        device: The device string, such as ``"cpu:0"`` or ``"gpu:1"``.

    Raises:
        ValueError: Not a device of this process.
        DeviceError: A GPU, and CuPy is missing or unusable.

    >>> OneDeviceStrategy("cpu:0").run(lambda x: 2 * x, args=(21,))
    42
    """

    def __init__(self, device: str) -> None:
        super().__init__(OneDeviceExtended(self, (check_device(device),), None))


class MirroredStrategy(Strategy):
    """Synchronous training on one node: every replica holds a copy of each variable (tf.distribute.MirroredStrategy).

    It has two uses. Several devices in one process, as in TensorFlow: ``MirroredStrategy(["gpu:0", "gpu:1"])`` under
    a single rank. CPU devices are virtual replicas. Or the ranks of one node: start with ``mpirun``, and all ranks of
    the node take part, each with its own devices. Collective over those ranks.

    Args:
        devices: Device strings of this rank's replicas. By default its share of the node's GPUs, which is all of them
            in a job of one process, or the CPU if there are none.
        cross_device_ops: Reduction of values, such as ``HierarchicalCopyAllReduce()``.
        communicator: An mpi4py communicator of the ranks that take part. By default all ranks of the node. Pass
            ``MPI.COMM_SELF`` for this process alone.

    Raises:
        ValueError: Wrong devices, or a job of several nodes. Use MultiWorkerMirroredStrategy for that.
        DeviceError: A GPU, and CuPy is missing or unusable.
        TypeError: ``cross_device_ops`` is no CrossDeviceOps.
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
        comm = open_ranks(self, communicator or ranks_of_node(self, "mpidist.MultiWorkerMirroredStrategy()"))
        super().__init__(
            ReplicatedExtended(self, local_devices, comm, cross_device_ops, allows_per_replica_input=comm is None)
        )


def ranks_of_node(strategy: Strategy, instead: str) -> MPI.Intracomm:
    """Return the ranks of the node. Raise ValueError, with the strategy ``instead``, if the job has several nodes."""
    topology = world_topology()
    if topology.num_nodes > 1:
        raise ValueError(
            f"{type(strategy).__name__} is for one node, and this job has {topology.size} ranks on "
            f"{topology.num_nodes} nodes; use {instead}"
        )
    return topology.node


def open_ranks(
    strategy: Strategy, ranks: MPI.Intracomm, options: CommunicationOptions | None = None
) -> Communicator | None:
    """Return the communicator of a strategy, or None for one rank (collective)."""
    if ranks.Get_size() == 1:
        return None
    return Communicator(ranks, options=options, owner=type(strategy).__name__, advice=FOR_STRATEGIES)


class MultiWorkerMirroredStrategy(Strategy):
    """Synchronous training over all ranks (tf.distribute.MultiWorkerMirroredStrategy).

    Every rank is a worker with one or more local replicas. Every replica holds a copy of each variable. Start the
    program with ``mpirun`` or ``srun``. Collective: construct it on every rank that trains.

    Args:
        cluster_resolver: The tasks of the ranks. By default every rank is a worker, and rank 0 the chief.
        communication_options: Defaults of the communication.
        communicator: An mpi4py communicator of the ranks that take part. By default the ranks that the resolver calls
            chief or worker.
        devices: Device strings of this rank's replicas. By default its share of the node's GPUs, or the CPU if there
            are none. Ranks may have different numbers.

    Raises:
        ValueError: A wrong argument, or a rank whose task does not train.
        DeviceError: A GPU, and CuPy is missing or unusable.
        LaunchError: MPI cannot be started, the ranks do not form one world, or TF_CONFIG describes another cluster
            and no resolver is given.

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
                # Collective the first time, and a program may query it on one task alone.
                resolver.cluster_spec()
            comm = open_ranks(self, ranks, options)
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
    """Provide the communicator of the ranks that train. Raise ValueError if this rank does not."""
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
    elif not isinstance(resolver, MPIClusterResolver):
        world = world_topology().world
        _check_size(resolver, world.Get_size())
        yield world
    elif resolver.is_made_of(TRAINING_JOBS):
        yield resolver.comm
    else:
        trainers = resolver.comm_of(TRAINING_JOBS)
        try:
            yield trainers
        finally:
            trainers.Free()


def _check_size(resolver: ClusterResolver, size: int) -> None:
    """Raise ValueError unless the cluster has a training task for each rank."""
    counts = {job: len(addresses) for job, addresses in resolver.cluster_spec().as_dict().items()}
    total = sum(counts.values())
    jobs = ", ".join(f"{job}:{count}" for job, count in counts.items())
    if not counts.keys() <= set(TRAINING_JOBS):
        raise ValueError(
            f"the {type(resolver).__name__} has jobs that do not train ({jobs}), and does not tell which ranks those "
            "are; give the ranks that train as communicator=, or the roles by MPIClusterResolver(jobs={...})"
        )
    if total not in (0, size):
        raise ValueError(
            f"the {type(resolver).__name__} has {total} tasks ({jobs}), and the MPI world has {size} ranks. Start one "
            f"rank for each task: mpirun -n {total} python ... Or pass communicator= with the ranks that train"
        )


def _check_tasks(resolver: ClusterResolver, comm: Communicator) -> None:
    """Close ``comm`` and raise ValueError if two ranks have one task (collective)."""
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
