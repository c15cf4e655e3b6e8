"""ParameterServerStrategy and ClusterCoordinator: one program on the chief, whose functions workers execute."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NoReturn, TypeVar

from mpidist.cluster_resolver import ClusterResolver
from mpidist.cluster_resolver.cluster_resolver import task_text
from mpidist.core.context import StrategyLike
from mpidist.core.options import ReduceOp, RunOptions
from mpidist.core.text import tell_user
from mpidist.input import Dataset, InputOptions
from mpidist.parameter_server.dispatcher import (
    Closure,
    FunctionQueue,
    PerWorkerDataset,
    PerWorkerValues,
    Recipe,
    RemoteValue,
    dispatcher_of,
    fetch,
    with_all_used,
)
from mpidist.parameter_server.link import COORDINATED, Link, check_not_served, link_of, resolver_of
from mpidist.parameter_server.parameter_server_extended import ParameterServerExtended
from mpidist.parameter_server.partitioners import Partitioner
from mpidist.parameter_server.pickling import CannotTravelError, Name, pack
from mpidist.parameter_server.remote import RemoteComponent, component_of
from mpidist.strategies.base import Strategy
from mpidist.training.optimizer import Optimizer
from mpidist.values import Variable
from mpidist.values.synchronization import variable_of

_Values = TypeVar("_Values", bound=PerWorkerValues)
Result = TypeVar("Result")
Value = TypeVar("Value")


class CoordinatedExtended(ParameterServerExtended):
    """The part of one process in a coordinated strategy, and the names of its objects.

    Variables, optimizers, strategies and per-worker values are not copied to other ranks. Their names are sent. A name
    contains the number of the strategy that owns the object, because functions may use objects of several strategies.

    Attributes:
        variables_by_place: The variables known by server and by number there.
    """

    def __init__(
        self,
        strategy: Strategy,
        link: Link,
        devices: tuple[str, ...] | None,
        resolver: ClusterResolver,
        is_chief: bool,
        extended_of: Callable[[int], CoordinatedExtended],
        **options: Any,
    ) -> None:
        super().__init__(strategy, link, devices, resolver, is_chief, **options)
        self._extended_of = extended_of
        self.variables_by_place: dict[tuple[int, int], Variable] = {}
        self._descriptions: weakref.WeakKeyDictionary[Variable, bytes] = weakref.WeakKeyDictionary()
        self._optimizers_by_number: dict[int, Optimizer] = {}

    def name_of(self, value: object) -> Name | None:
        """Return the name of an object that must not be copied, None for other objects."""
        if not isinstance(value, (Variable, Optimizer, Strategy, PerWorkerValues, RemoteValue)):
            return None
        if isinstance(value, Variable):
            return self._name_of_variable(value)
        if isinstance(value, Optimizer):
            return self._name_of_optimizer(value)
        if isinstance(value, PerWorkerValues):
            return "own", value.number
        if isinstance(value, RemoteValue):
            raise CannotTravelError(
                "a RemoteValue was given to a scheduled function. Pass its value: coordinator.fetch(value). Or keep "
                "the results that other functions need in variables"
            )
        extended = value.extended
        return ("strategy", extended.number) if isinstance(extended, ParameterServerExtended) else None

    def find(self, name: Name) -> object:
        """Return this process's object of a name."""
        kind, number, *rest = name
        assert isinstance(number, int)
        if kind == "own":
            return self.own_value(number)
        owner = self._owner(number)
        finders: dict[object, Callable[..., object]] = {
            "strategy": lambda: owner.strategy,
            "optimizer": owner.find_optimizer,
            "variable": owner.find_variable,
        }
        return finders[kind](*rest)

    def own_value(self, number: int) -> object:
        """Return this worker's value of a PerWorkerValues."""
        raise ValueError("a PerWorkerValues came back to the coordinator, where it has no value")

    def _owner(self, number: int) -> CoordinatedExtended:
        return self if number == self.number else self._extended_of(number)

    def _name_of_variable(self, variable: Variable) -> Name | None:
        component = variable.values[0]
        if not isinstance(component, RemoteComponent):
            return None
        place = self.link.connections.index(component.connection), component.number
        strategy = _number_of(variable)
        self._owner(strategy).variables_by_place.setdefault(place, variable)
        description = self._descriptions.get(variable)
        if description is None:
            # Pickled once, because the receiver most often knows the variable, and does not need it.
            properties = {
                "trainable": variable.trainable,
                "constraint": None,
                "synchronization": variable.synchronization,
                "aggregation": variable.aggregation,
            }
            description = pickle.dumps((component.shape, component.dtype, component.name, properties))
            self._descriptions[variable] = description
        return "variable", strategy, *place, description

    def find_variable(self, server: int, number: int, description: bytes) -> Variable:
        """Return a variable of this strategy, created at its first use."""
        variable = self.variables_by_place.get((server, number))
        if variable is None:
            shape, dtype, name, properties = pickle.loads(description)
            connection, device = self.link.connections[server], self.parameter_devices[server]
            component = RemoteComponent(connection, number, shape, dtype, name, device)
            variable = variable_of(self.strategy, [component], initial_value=None, name=name, **properties)
            self.variables_by_place[server, number] = variable
        return variable

    def _name_of_optimizer(self, optimizer: Optimizer) -> Name:
        counter = _counter_of(optimizer)
        owner = self if counter is None else self._owner(_number_of(optimizer.iterations))
        writes = 0 if counter is None else counter.writes
        return "optimizer", owner.number, owner.number_of(optimizer), type(optimizer), vars(optimizer), writes

    def find_optimizer(self, number: int, kind: type[Optimizer], state: dict[str, object], writes: int) -> Optimizer:
        """Return an optimizer of this strategy with a new state, created at its first use."""
        optimizer = self._optimizers_by_number.get(number)
        if optimizer is None:
            optimizer = self._optimizers_by_number[number] = kind.__new__(kind)
            self.number_of(optimizer, number)
        vars(optimizer).update(state)
        counter = _counter_of(optimizer)
        if counter is not None:
            # If the sender has set the number of updates, this process must read it again.
            counter.writes = writes
        return optimizer


def _number_of(variable: Variable) -> int:
    """Return the number of a variable's strategy."""
    extended = variable.distribute_strategy.extended
    assert isinstance(extended, ParameterServerExtended)
    return extended.number


def _counter_of(optimizer: Optimizer) -> RemoteComponent | None:
    """Return the counter of an optimizer's updates, or None before it is built."""
    return component_of(optimizer.iterations) if optimizer.variables else None


class DatasetForWorkers:
    """Result of a ``distribute_`` method on the coordinator. Each worker calls the method for itself."""

    def __init__(self, strategy: StrategyLike, method: str, args: tuple[object, ...]) -> None:
        self._strategy, self._method, self._args = strategy, method, args

    def __call__(self) -> object:
        """Create the dataset, on a worker."""
        return getattr(self._strategy, self._method)(*self._args)

    def __iter__(self) -> NoReturn:
        raise ValueError(
            "a dataset of ParameterServerStrategy was iterated over on the coordinator; expected: "
            "coordinator.create_per_worker_dataset(dataset), iter() of that, and next() in a scheduled function"
        )


class ChiefExtended(CoordinatedExtended):
    """The chief's part: it creates variables and schedules functions on the workers.

    ``run`` and ``reduce`` outside of scheduled functions use the chief, which has as many replicas as a worker.
    """

    def __init__(
        self, strategy: Strategy, link: Link, resolver: ClusterResolver, partitioner: Partitioner | None
    ) -> None:
        self.dispatcher = dispatcher_of(link)
        devices = tuple(f"cpu:{i}" for i in range(link.replicas))
        extended_of = self.dispatcher.strategies.__getitem__
        super().__init__(strategy, link, devices, resolver, True, extended_of, partitioner=partitioner)
        self.dispatcher.strategies[self.number] = self
        # The only ClusterCoordinator of the strategy.
        self.coordinator: Any = None
        self._queue: FunctionQueue | None = None
        self._has_warned = False

    def open_queue(self) -> FunctionQueue:
        """Return the queue of the coordinator."""
        self._queue = self.dispatcher.open(self.number, self.find)
        return self._queue

    def close(self) -> None:
        """See ``StrategyExtended``. Finishes running functions and cancels waiting ones."""
        if self._queue is not None:
            self._queue.stop()
        if not self.is_closed:
            self.dispatcher.gone.append(("strategy", self.number))
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


class ParameterServerStrategy(Strategy):
    """Asynchronous training that one program coordinates (tf.distribute.ParameterServerStrategy).

    The chief constructs it, creates variables in its scope, which go to the parameter servers in turn, and schedules
    functions by a ``mpidist.coordinator.ClusterCoordinator``. ``ps`` and ``worker`` ranks call
    ``mpidist.Server(resolver).join()``. The first strategy is collective over all ranks of the cluster. The chief may
    create more strategies for the same cluster, one after the other or at the same time.

    ``run`` and ``reduce`` cover the replicas of one worker: call them in scheduled functions. Outside, they use the
    chief, with a warning. Closing a strategy keeps its variables readable.

    Args:
        cluster_resolver: Resolver of the cluster. By default the roles of the MPI job
            (``MPIDIST_JOBS="chief:1,ps:2,worker:5"``).
        variable_partitioner: Function of shape and dtype that returns the shards of each new variable, such as
            ``mpidist.experimental.partitioners.MinSizePartitioner()``. A variable of several shards is a
            ShardedVariable. Scalars and colocated variables have one shard.

    Raises:
        ValueError: The cluster has no chief, server or worker, workers differ in their number of devices, this rank is
            not the chief, or the partitioner cuts another axis than the first.
        RuntimeError: This rank has served as a task of the cluster, and its job is over.
        CollectiveTimeoutError: Some ranks of the cluster did not arrive.

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
        super().__init__(ChiefExtended(self, link, resolver, variable_partitioner))

    def run(
        self,
        fn: Callable[..., Result],
        args: Sequence[object] = (),
        kwargs: dict[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Result:
        """Call ``fn`` on the chief, with a warning. In a scheduled function this is ``Strategy.run``."""
        self._require_open()
        _extended_of(self).warn_once("run")
        return super().run(fn, args, kwargs, options)

    def reduce(self, reduce_op: ReduceOp | str, value: Value, axis: int | tuple[int, ...] | None) -> Value:
        """Reduce on the chief, with a warning. In a scheduled function this is ``Strategy.reduce``."""
        self._require_open()
        _extended_of(self).warn_once("reduce")
        return super().reduce(reduce_op, value, axis)


class ClusterCoordinator:
    """A scheduler of functions on the workers of a ParameterServerStrategy.

    This is tf.distribute.coordinator.ClusterCoordinator, for the chief alone. Workers and parameter servers call
    ``mpidist.Server(resolver).join()``. A second call for the same strategy returns the same object. Functions are
    pickled. Functions of the program's own file need cloudpickle (``pip install cloudpickle``). Scheduling a function
    copies the objects that it refers to. Variables, optimizers, the strategy, and the results of
    ``create_per_worker_dataset`` and ``create_per_worker_resource`` are not copied. They mean the same on every worker.
    So keep state in variables. Workers import a function of another file. Pass the program's objects to it as
    arguments.

    A function is executed at least once. If MPI survives a lost worker (``mpirun --with-ft ulfm``), another worker
    executes its function.

    Args:
        strategy: A ``mpidist.ParameterServerStrategy``.

    Raises:
        ValueError: The argument is another strategy.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/coordinator/ClusterCoordinator
    """

    def __new__(cls, strategy: ParameterServerStrategy) -> ClusterCoordinator:
        """Return the only coordinator of the strategy."""
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
        self._extended = extended
        self._queue = extended.open_queue()
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
        """Schedule ``fn(*args, **kwargs)`` on a worker, in the strategy's scope, and return at once.

        Functions start in the order in which they were scheduled, on any worker, and end in any order. The call waits
        only if 262,144 functions are queued.

        Args:
            fn: The function. PerWorkerValues in the arguments mean the values of the worker that calls it.
            args: Its arguments.
            kwargs: Its keyword arguments.

        Returns:
            One RemoteValue for the result of ``fn``, whatever its structure.

        Raises:
            TypeError: ``fn`` is no function, or something cannot be pickled.
            ValueError: The arguments, or objects that ``fn`` refers to, contain a RemoteValue or the coordinator.
            RuntimeError: The strategy has been closed.
            Exception: The error of an earlier function. Queued functions have been cancelled.
        """
        if not callable(fn):
            raise TypeError(f"schedule() was given {fn!r}; expected a function")
        if isinstance(args, (str, bytes)) or not isinstance(args, (tuple, list)):
            raise TypeError(f"args is {args!r}; expected a tuple or list of arguments, such as args=(x,)")
        if kwargs is not None and not isinstance(kwargs, dict):
            raise TypeError(f"kwargs is {kwargs!r}; expected a dict of arguments by name, such as kwargs={{'x': 1}}")
        name = getattr(fn, "__qualname__", repr(fn))
        payload, uses = self._pack((fn, tuple(args), kwargs or {}), f"function {name} with its arguments")
        future: Future[Result] = Future()
        self._queue.put(Closure(name, payload, with_all_used(uses), future))
        return RemoteValue(future, self._queue.wait_for)

    def join(self) -> None:
        """Wait until all scheduled functions have ended.

        After ``MPIDIST_WARN_AFTER`` seconds it reports the state of every worker.

        Raises:
            Exception: The first error of a function. It is raised once, and you may schedule more functions after it.
                Functions that were queued when it failed have been cancelled.
        """
        self._queue.join()

    def done(self) -> bool:
        """Return whether all scheduled functions have ended, or raise the error that :meth:`join` would raise."""
        return self._queue.check_done()

    def fetch(self, val: object) -> Any:
        """Wait for the RemoteValues of a nest, and replace them by their results.

        Raises:
            CancelledError: A function was cancelled.
            Exception: The error of a function that failed.
        """
        return fetch(val)

    def create_per_worker_dataset(self, dataset_fn: object) -> PerWorkerDataset:
        """Return a dataset of each worker, which the worker builds at the first use.

        Every worker sees all of the data. To give each worker a part, shard by
        ``experimental_get_current_worker_index()``. A worker that replaces a lost one starts from the beginning.

        Args:
            dataset_fn: A function without arguments that is called on each worker. It returns a Dataset or the result
                of a ``distribute_`` method of the strategy. You may also pass one of these.

        Returns:
            A PerWorkerDataset; ``iter()`` of it gives iterators to pass to ``schedule``.
        """
        if not callable(dataset_fn) and not isinstance(dataset_fn, Dataset):
            raise TypeError(
                f"create_per_worker_dataset() was given {dataset_fn!r}; expected a Dataset, or a function "
                "without arguments that returns one"
            )

        def iterate(dataset: PerWorkerValues) -> PerWorkerValues:
            return self._kept_while_used(PerWorkerValues(*self._to_build("iterator", dataset)))

        return self._kept_while_used(PerWorkerDataset(*self._to_build("dataset", dataset_fn), iterate))

    def create_per_worker_resource(self, fn: Callable[[], object]) -> PerWorkerValues:
        """Return the value of ``fn()`` on each worker, such as a lookup table. Each calls it at the first use."""
        if not callable(fn):
            raise TypeError(f"create_per_worker_resource() was given {fn!r}; expected a function without arguments")
        return self._kept_while_used(PerWorkerValues(*self._to_build("resource", fn)))

    def _pack(self, value: object, label: str) -> tuple[bytes, frozenset[PerWorkerValues]]:
        """Return ``value`` as bytes, and the per-worker values in it."""
        used: set[PerWorkerValues] = set()

        def name_of(value: object) -> Name | None:
            if isinstance(value, PerWorkerValues):
                used.add(value)
            return self._extended.name_of(value)

        return pack(value, name_of, label), frozenset(used)

    def _to_build(self, kind: str, given: object) -> tuple[int, Recipe, frozenset[PerWorkerValues]]:
        """Return number, recipe and used values of a new per-worker value."""
        recipe, uses = self._pack((kind, given), f"the function of a per-worker {kind}")
        return next(self._extended.dispatcher.numbers), (self._extended.number, recipe), uses

    def _kept_while_used(self, values: _Values) -> _Values:
        """Let the workers drop their values when the program has dropped ``values``."""
        weakref.finalize(values, self._extended.dispatcher.gone.append, ("value", values.number)).atexit = False
        return values


def _extended_of(strategy: ParameterServerStrategy) -> ChiefExtended:
    assert isinstance(strategy.extended, ChiefExtended)
    return strategy.extended
