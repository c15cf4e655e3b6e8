"""ParameterServerStrategy: one program on the chief, whose functions workers carry out (tf.distribute, version 2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from mpidist.arrays.dtypes import Array
from mpidist.cluster_resolver import ClusterResolver
from mpidist.core.protocols import StrategyLike
from mpidist.input import InputOptions
from mpidist.parameter_server.dispatcher import Dispatcher
from mpidist.parameter_server.link import COORDINATED, Link, check_not_served, checked_resolver, link_of
from mpidist.parameter_server.parameter_server_extended import ParameterServerExtended
from mpidist.parameter_server.partitioners import Partitioner
from mpidist.parameter_server.pickling import Find
from mpidist.strategies.base import Strategy
from mpidist.strategies.replica_devices import check_devices


class DatasetForWorkers:
    """A dataset that each worker makes for itself. A ``distribute_`` method returns it on the coordinator.

    Args:
        strategy: Whose method it was.
        method: Its name.
        args: Its arguments.
    """

    def __init__(self, strategy: StrategyLike, method: str, args: tuple[object, ...]) -> None:
        self._strategy, self._method, self._args = strategy, method, args

    def __call__(self) -> object:
        """Make the dataset, on a worker."""
        return getattr(self._strategy, self._method)(*self._args)

    def __iter__(self) -> NoReturn:
        raise ValueError(
            "a dataset of ParameterServerStrategy was iterated over on the coordinator; expected: "
            "coordinator.create_per_worker_dataset(dataset), iter() of that, and next() in a scheduled function"
        )


def _finds_nothing(name: object) -> NoReturn:
    raise LookupError(f"nothing was scheduled, so no result can name {name!r}")


class CoordinatorExtended(ParameterServerExtended):
    """The chief's part: it makes variables and gives functions to workers."""

    def __init__(
        self, strategy: Strategy, link: Link, resolver: ClusterResolver, partitioner: Partitioner | None
    ) -> None:
        devices = tuple(f"cpu:{i}" for i in range(link.replicas))
        super().__init__(strategy, link, devices, resolver, True, partitioner=partitioner)
        # The ClusterCoordinator, of which there is one.
        self.coordinator: Any = None
        self._dispatcher: Dispatcher | None = None
        link.before_leaving(self._stop)

    @property
    def link(self) -> Link:
        """Connects with workers and servers."""
        return self._link

    def dispatch(self, find: Find) -> Dispatcher:
        """Start handing functions out.

        Raises:
            RuntimeError: The strategy has been closed.
        """
        if not self._link.is_open:
            raise RuntimeError(
                "a ClusterCoordinator was made of a ParameterServerStrategy that has been closed; build a new strategy"
            )
        self._dispatcher = Dispatcher(self._link, find)
        return self._dispatcher

    def _stop(self) -> None:
        """Tell the workers that the job is over."""
        (self._dispatcher or Dispatcher(self._link, _finds_nothing)).stop()

    def run_replicas(self, fn: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, Any]) -> NoReturn:
        """Raise NotImplementedError: replicas are on the workers."""
        raise NotImplementedError(
            "ParameterServerStrategy.run() was called on the coordinator; expected: inside a scheduled function, "
            "coordinator.schedule(lambda: strategy.run(fn, args))"
        )

    def distribute_dataset(self, dataset: object, options: InputOptions | None) -> DatasetForWorkers:
        """See ``StrategyExtended``: each worker does it."""
        return DatasetForWorkers(self.strategy, "experimental_distribute_dataset", (dataset, options))

    def distribute_from_function(
        self, dataset_fn: Callable[..., object], options: InputOptions | None
    ) -> DatasetForWorkers:
        """See ``StrategyExtended``: each worker does it."""
        return DatasetForWorkers(self.strategy, "distribute_datasets_from_function", (dataset_fn, options))


class WorkerTwinExtended(ParameterServerExtended):
    """The worker's part: the coordinator's strategy as scheduled functions see it."""

    def __init__(self, strategy: Strategy, link: Link, devices: tuple[str, ...] | None, resolver: ClusterResolver):
        super().__init__(strategy, link, devices, resolver, False)

    @property
    def should_checkpoint(self) -> bool:
        """False: the coordinator writes checkpoints."""
        return False

    def create_variable(self, array: Array, **properties: object) -> NoReturn:
        """Raise ValueError: the coordinator creates variables."""
        raise ValueError(
            f"variable {properties['name']!r} was created in a scheduled function; create it on the coordinator, "
            "inside `with strategy.scope():`, and let the function use it; for those of an optimizer call "
            "optimizer.build(variables) there"
        )


class ParameterServerStrategy(Strategy):
    """Asynchronous training that one program coordinates (tf.distribute.ParameterServerStrategy).

    The chief constructs it, creates variables in its scope, which are dealt to the parameter servers in turn, and
    schedules functions by a ``mpidist.coordinator.ClusterCoordinator``. Ranks that are ``ps`` or ``worker`` call
    ``mpidist.Server(resolver).join()``. Collective over all ranks of the cluster.

    ``run``, ``reduce`` and the like work in scheduled functions, over the replicas of one worker.

    Args:
        cluster_resolver: Who is who; the roles of the MPI job by default
            (``MPIDIST_JOBS="chief:1,ps:2,worker:5"``).
        variable_partitioner: Called with shape and dtype of each new variable, such as
            ``mpidist.experimental.partitioners.MinSizePartitioner()``; a variable of several shards is a
            ShardedVariable. Scalars, and variables that are colocated with others, are not cut.

    Raises:
        ValueError: A cluster without chief, server or worker; workers with different numbers of devices; a rank that
            is not the chief; a partitioner that cuts another axis than the first.
        RuntimeError: This rank has served as a task of the cluster, and its job is over.
        CollectiveTimeoutError: Not all ranks of the cluster came.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/ParameterServerStrategy
    """

    def __init__(
        self, cluster_resolver: ClusterResolver | None = None, variable_partitioner: Partitioner | None = None
    ) -> None:
        resolver = checked_resolver(cluster_resolver)
        if variable_partitioner is not None and not callable(variable_partitioner):
            raise ValueError(f"variable_partitioner is {variable_partitioner!r}; expected a function, or None")
        check_not_served(resolver, COORDINATED)
        if resolver.task_type != "chief":
            raise ValueError(
                f"this rank is {resolver.task_type}:{resolver.task_id}; ParameterServerStrategy is for the chief, "
                "which coordinates: the others call mpidist.Server(resolver).join(). Roles are dealt out by "
                "MPIDIST_JOBS=chief:1,ps:1,worker:2 mpirun -n 4 python ... For a program on every worker use "
                "mpidist.v1.experimental.ParameterServerStrategy"
            )
        link = link_of(resolver, COORDINATED)
        super().__init__(CoordinatorExtended(self, link, resolver, variable_partitioner))


class WorkerTwin(Strategy):
    """The coordinator's strategy on a worker; made by ``Server.join``."""

    def __init__(self, link: Link, resolver: ClusterResolver) -> None:
        super().__init__(WorkerTwinExtended(self, link, check_devices(None), resolver))
