"""ParameterServerStrategy and ClusterCoordinator: one program on the chief, whose functions workers carry out."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NoReturn, TypeVar

from mpidist.arrays.dtypes import Array
from mpidist.cluster_resolver import ClusterResolver
from mpidist.cluster_resolver.cluster_resolver import task_text
from mpidist.core.context import StrategyLike
from mpidist.core.options import ReduceOp, RunOptions
from mpidist.core.text import tell_user
from mpidist.input import Dataset, InputOptions
from mpidist.parameter_server.dispatcher import Closure, Dispatcher, with_all_used, workers_of
from mpidist.parameter_server.link import COORDINATED, Link, check_not_served, link_of, resolver_of
from mpidist.parameter_server.names import Names
from mpidist.parameter_server.parameter_server_extended import ParameterServerExtended
from mpidist.parameter_server.partitioners import Partitioner
from mpidist.parameter_server.pickling import CannotTravelError
from mpidist.parameter_server.remote_value import PerWorkerDataset, PerWorkerValues, Recipe, RemoteValue, fetch
from mpidist.strategies.base import Strategy

_Values = TypeVar("_Values", bound=PerWorkerValues)
Result = TypeVar("Result")
Value = TypeVar("Value")


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


class CoordinatorExtended(ParameterServerExtended):
    """The chief's part: it creates variables and schedules functions on the workers.

    ``run`` and ``reduce`` outside of scheduled functions work on the chief, which has as many replicas as a worker.
    """

    def __init__(
        self, strategy: Strategy, link: Link, resolver: ClusterResolver, partitioner: Partitioner | None
    ) -> None:
        devices = tuple(f"cpu:{i}" for i in range(link.replicas))
        super().__init__(strategy, link, devices, resolver, True, partitioner=partitioner)
        # The ClusterCoordinator, of which there is one.
        self.coordinator: Any = None
        self._dispatcher: Dispatcher | None = None
        self.workers = workers_of(link)
        self.names = self.workers.names[self.number] = Names(link, self, self.workers.names.__getitem__)
        self._has_warned = False

    @property
    def link(self) -> Link:
        """Connects with workers and servers."""
        return self._link

    def dispatch(self) -> Dispatcher:
        """Start and return the dispatcher of this strategy."""
        self._dispatcher = Dispatcher(self._link, self.workers, self.number, self.names.find)
        return self._dispatcher

    def close(self) -> None:
        """See ``StrategyExtended``; finishes running functions and cancels queued ones."""
        if self._dispatcher is not None:
            self._dispatcher.stop()
        if not self.is_closed:
            self.workers.closed.append(self.number)
        super().close()

    def warn_once(self, method: str) -> None:
        """Warn that a method runs on the chief, as TensorFlow does."""
        if not self._has_warned:
            self._has_warned = True
            tell_user(
                f"ParameterServerStrategy.{method}() was called outside of a scheduled function, so it runs on the "
                f"chief. To run it on a worker, use coordinator.schedule(lambda: strategy.{method}(...))"
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

    The chief constructs it, creates variables in its scope, which go to the parameter servers in turn, and schedules
    functions by a ``mpidist.coordinator.ClusterCoordinator``. ``ps`` and ``worker`` ranks call
    ``mpidist.Server(resolver).join()``. Collective over all ranks of the cluster the first time. The chief may make
    more strategies for the same cluster, one after the other or at the same time.

    ``run`` and ``reduce`` cover the replicas of one worker: call them in scheduled functions. Outside, they work on the
    chief, with a warning. Closing a strategy keeps its variables readable.

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
        resolver = resolver_of(cluster_resolver)
        if variable_partitioner is not None and not callable(variable_partitioner):
            raise ValueError(f"variable_partitioner is {variable_partitioner!r}; expected a function, or None")
        check_not_served(resolver, COORDINATED)
        if resolver.task_type != "chief":
            raise ValueError(
                f"{task_text(resolver)}; ParameterServerStrategy is for the chief. Call mpidist.Server(resolver).join()"
                " on the other ranks, and set the roles: MPIDIST_JOBS=chief:1,ps:1,worker:2 mpirun -n 4 python ..., or "
                "task_type and task_id of the resolver. For a program on every worker use "
                "mpidist.v1.experimental.ParameterServerStrategy"
            )
        link = link_of(resolver, COORDINATED)
        super().__init__(CoordinatorExtended(self, link, resolver, variable_partitioner))

    def run(
        self,
        fn: Callable[..., Result],
        args: Sequence[object] = (),
        kwargs: dict[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Result:
        """Call ``fn`` on the chief, with a warning; in a scheduled function this is ``Strategy.run``."""
        self._require_open()
        _extended_of(self).warn_once("run")
        return super().run(fn, args, kwargs, options)

    def reduce(self, reduce_op: ReduceOp | str, value: Value, axis: int | tuple[int, ...] | None) -> Value:
        """Reduce on the chief, with a warning; in a scheduled function this is ``Strategy.reduce``."""
        self._require_open()
        _extended_of(self).warn_once("reduce")
        return super().reduce(reduce_op, value, axis)


class WorkerTwin(Strategy):
    """The copy of a coordinator's strategy on a worker, with the same number."""

    def __init__(self, link: Link, resolver: ClusterResolver, number: int) -> None:
        super().__init__(WorkerTwinExtended(self, link, None, resolver, gives_initial_values=False, number=number))


# Error messages name the class that the program knows.
WorkerTwin.__name__ = ParameterServerStrategy.__name__


class ClusterCoordinator:
    """A scheduler of functions on the workers of a ParameterServerStrategy.

    It is tf.distribute.coordinator.ClusterCoordinator, for the chief alone; workers and parameter servers call
    ``mpidist.Server(resolver).join()``. Constructing it again for the same strategy returns the same object. Functions
    are pickled. Functions of the program's own file need cloudpickle (``pip install cloudpickle``). Scheduling a
    function copies the objects that it refers to. Variables, optimizers, the strategy, and the results of
    ``create_per_worker_dataset`` and ``create_per_worker_resource`` are not copied: they mean the same on every worker.
    So keep state in variables. Workers import a function of another file. Pass the program's objects to it as
    arguments.

    A function is carried out at least once: where MPI survives a lost worker (``mpirun --with-ft ulfm``), another one
    carries out its function.

    Args:
        strategy: A ``mpidist.ParameterServerStrategy``.

    Raises:
        ValueError: Another strategy.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/coordinator/ClusterCoordinator
    """

    def __new__(cls, strategy: ParameterServerStrategy) -> ClusterCoordinator:
        """Return the coordinator of the strategy, made the first time."""
        if not isinstance(strategy, ParameterServerStrategy):
            raise ValueError(
                f"ClusterCoordinator was given {strategy!r}; expected a mpidist.ParameterServerStrategy(resolver)"
            )
        existing = _extended_of(strategy).coordinator
        assert existing is None or isinstance(existing, cls)
        return existing or super().__new__(cls)

    def __init__(self, strategy: ParameterServerStrategy) -> None:
        extended = _extended_of(strategy)
        if extended.coordinator is self:
            return
        if extended.is_closed or not extended.link.is_open:
            raise RuntimeError(
                "a ClusterCoordinator was made of a ParameterServerStrategy that has been closed; build a new strategy"
            )
        self._strategy = strategy
        self._names = extended.names
        self._dispatcher = extended.dispatch()
        self._workers = extended.workers
        extended.coordinator = self

    def __repr__(self) -> str:
        return f"<ClusterCoordinator of {self._strategy!r}>"

    def __reduce__(self) -> NoReturn:
        raise CannotTravelError(
            "a ClusterCoordinator cannot be used in a scheduled function: only the program on the chief schedules; "
            "expected: return from fn what is to be done next, and schedule that on the chief"
        )

    @property
    def strategy(self) -> ParameterServerStrategy:
        """The strategy."""
        return self._strategy

    def schedule(
        self, fn: Callable[..., Result], args: Sequence[object] = (), kwargs: dict[str, Any] | None = None
    ) -> RemoteValue[Result]:
        """Have a worker call ``fn(*args, **kwargs)`` in the strategy's scope, and return at once.

        Functions start in the order in which they were scheduled; which worker takes one, and in which order they end,
        is not said. Waits only while 262,144 functions are queued.

        Args:
            fn: The function. PerWorkerValues among the arguments mean those of the worker that calls it.
            args: Its arguments.
            kwargs: Its keyword arguments.

        Returns:
            The future result of ``fn``, as one RemoteValue, whatever its structure.

        Raises:
            TypeError: ``fn`` is no function, or something cannot be pickled.
            ValueError: A RemoteValue, or the coordinator, among the arguments or the objects that ``fn`` refers to.
            RuntimeError: The strategy has been closed.
            Exception: That of a function that was scheduled before; queued functions have been cancelled.
        """
        if not callable(fn):
            raise TypeError(f"schedule() was given {fn!r}; expected a function")
        if isinstance(args, (str, bytes)) or not isinstance(args, (tuple, list)):
            raise TypeError(f"args is {args!r}; expected a tuple or list of arguments, such as args=(x,)")
        if kwargs is not None and not isinstance(kwargs, dict):
            raise TypeError(f"kwargs is {kwargs!r}; expected a dict of arguments by name, such as kwargs={{'x': 1}}")
        name = getattr(fn, "__qualname__", repr(fn))
        payload, uses = self._names.pack((fn, tuple(args), kwargs or {}), f"function {name} with its arguments")
        future: Future[Result] = Future()
        self._dispatcher.put(Closure(name, payload, with_all_used(uses), future))
        return RemoteValue(future, self._dispatcher.wait_for)

    def join(self) -> None:
        """Wait until all scheduled functions have ended.

        After ``MPIDIST_WARN_AFTER`` seconds it reports the state of every worker.

        Raises:
            Exception: The first error of a function; raised once, after which scheduling can go on. Functions that were
                queued when it failed have been cancelled.
        """
        self._dispatcher.join()

    def done(self) -> bool:
        """Return whether all scheduled functions have ended; raises as :meth:`join`, and does not wait."""
        return self._dispatcher.is_done()

    def fetch(self, val: object) -> Any:
        """Return a nest with the results in the place of its RemoteValues; waits for them.

        Raises:
            CancelledError: A function was cancelled.
            Exception: That of a function that failed.
        """
        return fetch(val)

    def create_per_worker_dataset(self, dataset_fn: object) -> PerWorkerDataset:
        """Return a dataset that each worker has for itself.

        It is built there when it is first used. Every worker sees all of the data; shard it by
        ``experimental_get_current_worker_index()`` if each is to see a part. On a worker that takes the place of a lost
        one it begins anew.

        Args:
            dataset_fn: A function without arguments that is called on each worker, and returns a Dataset or the result
                of a ``distribute_`` method of the strategy; or one of these itself.

        Returns:
            A PerWorkerDataset; ``iter()`` of it gives iterators to pass to ``schedule``.
        """
        if not callable(dataset_fn) and not isinstance(dataset_fn, Dataset):
            raise TypeError(
                f"create_per_worker_dataset() was given {dataset_fn!r}; expected a Dataset, or a function "
                "without arguments that returns one"
            )

        def iterators(dataset: PerWorkerDataset) -> PerWorkerValues:
            return self._kept_while_used(PerWorkerValues(*self._to_build("iterator", dataset)))

        return self._kept_while_used(PerWorkerDataset(*self._to_build("dataset", dataset_fn), iterators))

    def create_per_worker_resource(self, fn: Callable[[], object]) -> PerWorkerValues:
        """Return the value of ``fn()`` on each worker, such as a lookup table.

        It is called there when the value is first used.
        """
        if not callable(fn):
            raise TypeError(f"create_per_worker_resource() was given {fn!r}; expected a function without arguments")
        return self._kept_while_used(PerWorkerValues(*self._to_build("resource", fn)))

    def _to_build(self, kind: str, given: object) -> tuple[int, Recipe, frozenset[PerWorkerValues]]:
        """Return number, recipe and used values of a new per-worker value."""
        recipe, uses = self._names.pack((kind, given), f"the function of a per-worker {kind}")
        return next(self._workers.numbers), (_extended_of(self._strategy).number, recipe), uses

    def _kept_while_used(self, values: _Values) -> _Values:
        """Have the workers drop their values once the program has dropped ``values``."""
        weakref.finalize(values, self._workers.dropped.append, values.number).atexit = False
        return values


def _extended_of(strategy: ParameterServerStrategy) -> CoordinatorExtended:
    assert isinstance(strategy.extended, CoordinatorExtended)
    return strategy.extended
