"""StrategyExtended: the interface of a strategy for library writers.

Each strategy is a subclass, which writes the eight abstract members at the top; the others check context and arguments
and are built on them. It is one class, without an object behind it that would do the work: here TensorFlow's
names are looked for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any, TypeVar

from numpy.typing import DTypeLike

from mpidist.arrays.convert import to_array
from mpidist.arrays.dtypes import Array, as_dtype
from mpidist.cluster_resolver import ClusterResolver
from mpidist.collectives import Communicator, FinishedWork, Work
from mpidist.collectives.reading import restore
from mpidist.collectives.step_agreement import StepAgreement
from mpidist.core import context, nest
from mpidist.core.context import Args, Frame, Kwargs, ReplicaContextLike, StrategyLike
from mpidist.core.options import (
    CallOptions,
    CommunicationOptions,
    ReduceOp,
    VariableSynchronization,
    check_communication_options,
)
from mpidist.cross_device_ops import Pairs
from mpidist.cross_device_ops.local_values import destination_devices, device_of, place
from mpidist.input import InputOptions, InputWorkers, distribute_dataset, distribute_from_function, distribute_values
from mpidist.strategies import value_checks
from mpidist.values import IndexedSlices, Mirrored, PerReplica, ReplicaValues, Variable, regroup, select_replica
from mpidist.values.component import Component
from mpidist.values.placement import Place, place_at, place_of
from mpidist.values.variable import VariableNames, changing, update_components

Result = TypeVar("Result")
Value = TypeVar("Value")
# Of values that are equal on all replicas, what these give depends on how many there are.
_COUNTING = (ReduceOp.SUM, ReduceOp.PROD, ReduceOp.BXOR)


class StrategyExtended(ABC):
    """The work of a strategy (tf.distribute.StrategyExtended).

    Args:
        strategy: The strategy it belongs to.
        communicator: Joins the ranks that take part; None for this process alone. Closed with the strategy.

    Attributes:
        allows_per_replica_input: Whether input may be made per replica.
        cluster_resolver: The value of ``strategy.cluster_resolver``.
        first_gpu: The GPU that is current in scopes and merge functions; None for the host alone.
        frame: The entry in the stack of contexts for the strategy's cross-replica context.
        is_central: Whether each variable has one copy, which all replicas share.
        variable_names: The names of its variables.
    """

    allows_per_replica_input = False
    is_central = False
    # Shapes may change from step to step.
    experimental_require_static_shapes = False
    first_gpu: Place | None = None
    cluster_resolver: ClusterResolver | None = None

    def __init__(self, strategy: StrategyLike, communicator: Communicator | None = None) -> None:
        self.strategy = strategy
        self.communicator = communicator
        self.frame = Frame(strategy)
        self.variable_names = VariableNames()
        self.is_closed = False

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self.strategy!r}>"

    # What a strategy writes -----------------------------------------------------------------------------------

    @property
    @abstractmethod
    def local_replica_ids(self) -> tuple[int, ...]:
        """Global ids of the replicas of this rank. Extension."""

    @property
    @abstractmethod
    def worker_devices(self) -> tuple[str, ...]:
        """Devices of the replicas of this rank."""

    @abstractmethod
    def input_workers(self) -> InputWorkers:
        """Return the ranks, with their numbers of replicas, as those who share input. Extension."""

    @abstractmethod
    def create_variable(self, array: Array, **properties: Any) -> Variable:
        """Create a variable as the strategy keeps it (collective). Extension.

        Args:
            array: The initial value, as this rank has it.
            properties: The other arguments of the variable, for ``make_variable``.
        """

    @abstractmethod
    def run_replicas(self, fn: Callable[..., Result], args: Args, kwargs: Kwargs) -> list[Result]:
        """Call ``fn`` for each replica of this rank, and return the results in order. Extension.

        Args:
            fn: The function, called in the replica's context. args, kwargs: Its arguments; each replica gets its part
                of the distributed values in them.
        """

    @abstractmethod
    def reduce(self, op: ReduceOp, pairs: Pairs, divisor: int, options: CallOptions, note: str) -> list[object]:
        """Reduce values over all replicas (collective). Extension.

        Args:
            op: The operation.
            pairs: Values, of arrays, numbers or IndexedSlices, and where each result is to be.
            divisor: Divides the sum where the mean is asked for.
            options: Packing, deadline and algorithm.
            note: All ranks have to agree on it; hand it on to the communicator.

        Returns:
            The results, a Mirrored where the destinations are several local devices.
        """

    def reduce_async(
        self, op: ReduceOp, pairs: Pairs, divisor: int, options: CallOptions, note: str
    ) -> Work | FinishedWork:
        """Start :meth:`reduce` and return its handle (collective); by default it is done at once. Extension."""
        return FinishedWork(self.reduce(op, pairs, divisor, options, note))

    def reduce_fast(self, reduce_op: ReduceOp | str, value: Value) -> Value | None:
        """Return the reduction of a number or array by the fast path, or None. Extension."""
        return None

    @abstractmethod
    def gather(self, arrays: list[Array], axis: int, options: CallOptions, note: str) -> list[Array]:
        """Concatenate each array with those of the other ranks, in rank order (collective). Extension."""

    @abstractmethod
    def broadcast(self, arrays: list[Array], root: int, note: str) -> list[Array]:
        """Return the arrays of rank ``root`` on every rank (collective). Extension."""

    # Facts ----------------------------------------------------------------------------------------------------

    @cached_property
    def replica_counts(self) -> tuple[int, ...]:
        """Number of replicas on each rank. Extension."""
        return self.input_workers().replica_counts

    @cached_property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas, over all ranks. Extension."""
        return sum(self.replica_counts)

    @cached_property
    def wraps_lone_replica(self) -> bool:
        """Whether values are PerReplica even with one replica, as ranks differ in their numbers."""
        return len(set(self.replica_counts)) > 1

    @property
    def worker_devices_by_replica(self) -> tuple[tuple[str, ...], ...]:
        """Devices of each replica of this rank."""
        return tuple((device,) for device in self.worker_devices)

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """Devices that variables are put on."""
        return self.worker_devices

    @property
    def experimental_between_graph(self) -> bool:
        """Whether several ranks run the program; always true of a CentralStorageStrategy, as in TensorFlow."""
        return self.spans_ranks

    @property
    def experimental_should_init(self) -> bool:
        """True: every rank initializes its variables."""
        return True

    @property
    def should_checkpoint(self) -> bool:
        """Whether this rank writes checkpoints. Reading ON_READ variables still takes all ranks."""
        return self.communicator is None or self.communicator.rank == 0

    @property
    def should_save_summary(self) -> bool:
        """Whether this rank writes summaries."""
        return self.should_checkpoint

    @property
    def spans_ranks(self) -> bool:
        """Whether several ranks run the program. Extension."""
        return self._in_multi_worker_mode()

    def _in_multi_worker_mode(self) -> bool:
        return self.communicator is not None

    def _use_merge_call(self) -> bool:
        """Return whether reductions in replica context wait for the other local replicas."""
        return len(self.local_replica_ids) > 1

    def _get_replica_id_in_sync_group(self, local_replica_id: int) -> int:
        return self.local_replica_ids[local_replica_id]

    def _get_local_replica_id(self, replica_id_in_sync_group: int) -> int:
        return self.local_replica_ids.index(replica_id_in_sync_group)

    # Reductions -----------------------------------------------------------------------------------------------

    def reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value: Value,
        destinations: object,
        options: CommunicationOptions | None = None,
    ) -> Value:
        """Combine the values of all replicas and put the result where ``destinations`` is (collective).

        Args:
            reduce_op: The operation, or its name.
            value: PerReplica, or a nest of them; plain values as in ``Strategy.reduce``.
            destinations: Variable, distributed value, array, ``"host"`` or a device string.
            options: Packing, deadline and algorithm.

        Returns:
            Mirrored where the destinations are several local devices, otherwise the bare value. Every rank gets it.

        Raises:
            RuntimeError: Called in replica context.
            ValueError: ``destinations`` is a list or tuple, or unknown.
        """
        return self._reduce_nests("reduce_to()", reduce_op, [(value, destinations)], options)[0]

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Value, object]],
        options: CommunicationOptions | None = None,
    ) -> list[Value]:
        """Reduce many pairs as :meth:`reduce_to` does, in few messages (collective).

        Results come in the order of the pairs.

        Raises:
            ValueError: Something else than (value, destinations) tuples.
        """
        return self._reduce_nests("batch_reduce_to()", reduce_op, value_destination_pairs, options)

    def _reduce_nests(
        self, method: str, reduce_op: ReduceOp | str, nests: Sequence[tuple[Value, object]], options: CallOptions
    ) -> list[Value]:
        with self.shared_errors(method):
            context.require_cross_replica(self.strategy, method, "use get_replica_context().all_reduce(op, value)")
            op = ReduceOp.of(reduce_op)
            check_communication_options(options)
            nests = list(nests)
            if any(not isinstance(pair, (tuple, list)) or len(pair) != 2 for pair in nests):
                raise ValueError(f"value_destination_pairs is {nests!r}; expected (value, destinations) tuples")
            flat = [(leaf, destinations) for value, destinations in nests for leaf in nest.flatten(value)]
            for _, destinations in nests:
                destination_devices(destinations)
        note = "; ".join(_told(value, destinations) for value, destinations in nests)
        reduced = self.reduce_pairs(op, flat, options, note) if flat else []
        results = iter([value_checks.apart_from(result, leaf) for result, (leaf, _) in zip(reduced, flat, strict=True)])
        return [nest.pack_like(value, [next(results) for _ in nest.flatten(value)]) for value, _ in nests]

    def broadcast_to(self, tensor: Value, destinations: object, root: int = 0) -> Value:
        """Copy the ``tensor`` of rank ``root`` to the ``destinations`` on every rank (collective).

        Python ints and floats are returned as they are, without communication, as in TensorFlow.

        Args:
            tensor: Array, or a nest of arrays, of equal shapes and dtypes on all ranks.
            destinations: Variable, distributed value, array, ``"host"`` or a device string.
            root: Rank among those of the strategy; the first by default. Extension.

        Returns:
            Mirrored where the destinations are several local devices, otherwise the bare value.
        """
        with self.shared_errors("broadcast_to()"):
            context.require_cross_replica(self.strategy, "broadcast_to()", "a replica holds its value already")
            if type(tensor) in (int, float):
                return tensor
            destination_devices(destinations)
        sent = self.broadcast_nest(tensor, root)
        copies: Value = nest.map_structure(lambda leaf: self.copy_to(leaf, destinations), sent)
        return copies

    def reduce_pairs(
        self, op: ReduceOp, pairs: Sequence[tuple[object, object]], options: CallOptions = None, note: str = ""
    ) -> list[object]:
        """Reduce many values of any kind to their destinations (collective). Extension.

        Args:
            op: The operation.
            pairs: Leaves, and where each result is to be.
            options: Packing, deadline and algorithm.
            note: Their structure or variable, on which all ranks must agree.
        """
        results: list[object] = [None] * len(pairs)
        by_divisor: dict[int, list[int]] = {}
        values: list[Any] = []
        for i, (value, destinations) in enumerate(pairs):
            with self.shared_errors(f"{op.name} of its values"):
                value = self._as_contribution(op, value)
            values.append(value)
            if isinstance(value, PerReplica) and self.num_replicas_in_sync > 1:
                # A plain value counts once per rank, a PerReplica once per replica.
                is_plain = not isinstance(pairs[i][0], (ReplicaValues, Variable))
                divisor = len(self.replica_counts) if is_plain else self.num_replicas_in_sync
                by_divisor.setdefault(divisor, []).append(i)
            else:
                own = value.values[0] if isinstance(value, ReplicaValues) else value
                with self.shared_errors(f"{op.name} of its values"):
                    value_checks.check_can_reduce([own], op)
                results[i] = self.copy_to(own, destinations)
        with self.shared_errors(f"{op.name} of its values"):
            value_checks.check_gradients_apart([value for value in values if isinstance(value, PerReplica)])
        for divisor, indices in by_divisor.items():
            batch = [(values[i], pairs[i][1]) for i in indices]
            for i, result in zip(indices, self.reduce(op, batch, divisor, options, note), strict=True):
                results[i] = result
        return results

    def reduce_leaves(self, op: ReduceOp, leaves: Sequence[object], note: str = "") -> list[object]:
        """Reduce values to plain ones, which stay on the device of the first replica's (collective). Extension."""
        return self.reduce_pairs(op, [(leaf, _first_device(leaf)) for leaf in leaves], None, note)

    def _as_contribution(self, op: ReduceOp, value: object) -> Any:
        """Return the PerReplica to be reduced, or a value that is its own result."""
        value = self.distributed(value)
        if isinstance(value, Mirrored):
            if op in _COUNTING and self.num_replicas_in_sync > 1:
                raise ValueError(
                    f"{op.name} of a Mirrored value, which is equal on all {self.num_replicas_in_sync} replicas, is "
                    "ambiguous; use MEAN for the value itself, or multiply it by strategy.num_replicas_in_sync"
                )
            return value
        if isinstance(value, ReplicaValues):
            if len(value.values) != len(self.local_replica_ids):
                raise ValueError(
                    f"a value of {len(value.values)} replicas was given to {type(self.strategy).__name__}, which has "
                    f"{len(self.local_replica_ids)} on this rank; expected what strategy.run() of this strategy "
                    "returned"
                )
            return value if isinstance(value, PerReplica) else PerReplica(value.values, value.replica_ids)
        if self.communicator is not None:
            return PerReplica((value,), self.local_replica_ids[:1])
        if op in _COUNTING and self.num_replicas_in_sync > 1:
            array = None if isinstance(value, IndexedSlices) else to_array(value)
            if array is None or op is ReduceOp.PROD or array.any():
                raise ValueError(
                    f"{op.name} of a value that is not distributed, {value!r}, over {self.num_replicas_in_sync} "
                    "replicas is ambiguous; pass what strategy.run() returned, use MEAN for the value itself, or "
                    "multiply it"
                )
        return value

    def distributed(self, value: object) -> object:
        """Return the components of a variable as a distributed value; other values unchanged. Extension."""
        if not isinstance(value, Variable):
            return value
        copies = [component.value() for component in value.values]
        if value.synchronization == VariableSynchronization.ON_READ:
            return PerReplica(copies, self.local_replica_ids)
        # One copy that all replicas share stands for each of them.
        return Mirrored(copies * (len(self.local_replica_ids) // len(copies)), self.local_replica_ids)

    def gather_leaves(self, leaves: Sequence[object], axis: int, note: str, options: CallOptions = None) -> list[Any]:
        """Concatenate the values of all replicas along ``axis``, in replica order (collective). Extension."""
        local: list[Array] = []
        samples = []
        with self.shared_errors("gathering the values of its replicas"):
            for leaf in map(self.distributed, leaves):
                parts = leaf.values if isinstance(leaf, ReplicaValues) else (leaf,)
                value_checks.check_can_gather(parts[0], axis, "gather()")
                first = place_of(to_array(parts[0]))
                with first.current():
                    local.append(value_checks.concatenated([first.brings(to_array(part)) for part in parts], axis))
                samples.append(parts[0])
        return list(map(restore, samples, self.gather(local, axis, options, note)))

    def broadcast_nest(self, value: Value, root: int = 0, note: str = "") -> Value:
        """Return, on every rank, the nest of arrays that rank ``root`` passed (collective). Extension."""
        if not 0 <= root < len(self.replica_counts):
            with self.shared_errors("broadcast_to()"):
                raise ValueError(f"root is {root}; expected a rank from 0 to {len(self.replica_counts) - 1}")
        if self.communicator is None:
            return value
        leaves = nest.flatten(value)
        with self.shared_errors("broadcasting its values"):
            arrays = [to_array(leaf) for leaf in leaves]
        sent = self.broadcast(arrays, root, note or nest.describe(value))
        return nest.pack_like(value, map(restore, leaves, sent))

    def copy_to(self, value: object, destinations: object) -> Any:
        """Return ``value`` on the destinations on this rank, a Mirrored where they are several. Extension."""
        return place(value, destination_devices(destinations))

    # Variables ------------------------------------------------------------------------------------------------

    def update(
        self,
        var: Variable,
        fn: Callable[..., object],
        args: Sequence[object] = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Call ``fn(component, *args, **kwargs)`` for each local component of ``var``, in its update context.

        Not collective. Each component receives its own copy of a Mirrored argument. The arguments must be equal on all
        ranks: the ranks compare checksums of their copies at the next collective. In replica context the call goes
        through ``merge_call``.

        Args:
            var: A variable of this strategy.
            fn: The update of a component.
            args, kwargs: Further arguments. They may hold a PerReplica only if ``var`` is ON_READ, because the copies
                of other variables must stay equal.
            group: Whether to group the results; otherwise a tuple of them is returned.

        Raises:
            ValueError: ``var`` is no variable of this strategy, or an argument holds a PerReplica.

        >>> import mpidist
        >>> strategy = mpidist.OneDeviceStrategy("cpu:0")
        >>> with strategy.scope():
        ...     v = mpidist.Variable(1.0)
        ...     strategy.extended.update(v, lambda v, x: v.assign_add(x), args=(2.0,)).numpy()
        array(3.)
        """
        var = self.own_variable(var, "update()")
        replica = context.get_replica_context()
        if replica is not None and context.has_strategy():
            # merge_call wraps the arguments of several replicas in PerReplica even if they are equal.
            return replica.merge_call(lambda _, *a, **k: self._update_in_scope(var, fn, a, k, group), args, kwargs)
        if var.synchronization != VariableSynchronization.ON_READ:
            value_checks.check_equal_on_replicas(f"update() of variable {var.name!r}", args, kwargs)
        return self._update_in_scope(var, fn, tuple(args), kwargs or {}, group)

    def _update_in_scope(
        self, var: Variable, fn: Callable[..., object], args: Args, kwargs: Kwargs, group: bool
    ) -> object:
        with context.scope(self.strategy), changing(var, "extended.update()"):
            return self._update(var, fn, args, kwargs, group)

    def update_non_slot(
        self,
        colocate_with: object,
        fn: Callable[..., object],
        args: Sequence[object] = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Call ``fn(*args, **kwargs)`` once per local device, for state that belongs to no variable.

        Raises:
            RuntimeError: Called in replica context.
            ValueError: An argument holds a PerReplica.
        """
        context.require_cross_replica(self.strategy, "update_non_slot()", "use merge_call")
        value_checks.check_equal_on_replicas("update_non_slot()", args, kwargs)
        return self._update_non_slot(fn, tuple(args), kwargs or {}, group)

    def non_slot_devices(self, var_list: Sequence[Variable]) -> tuple[str, ...]:
        """Return the devices of state that belongs to no variable."""
        return self.parameter_devices

    def variable_created_in_scope(self, v: Variable) -> bool:
        """Return whether ``v`` was created while this strategy was in scope."""
        return isinstance(v, Variable) and v.distribute_strategy is self.strategy

    @contextmanager
    def colocate_vars_with(self, colocate_with_variable: Variable) -> Iterator[None]:
        """Create the variables of the block where ``colocate_with_variable`` is; for optimizer slots.

        Raises:
            RuntimeError: Outside the strategy's scope.
            ValueError: The variable belongs to another strategy.
        """
        context.require_scope(self.strategy, "variables that are colocated")
        self.own_variable(colocate_with_variable, "colocate_vars_with()")
        yield

    def read_var(self, v: object) -> Any:
        """Return the value of ``v`` in the current context; ON_READ variables are aggregated (collective)."""
        return v.value() if isinstance(v, (Variable, Component)) else v

    def read_all(self, variables: Sequence[Variable]) -> list[Array]:
        """Return the values of several variables, from parameter servers in few messages.

        As ``value()`` of each in the current context; ON_READ variables are aggregated outside of ``run`` (collective).
        Extension.

        >>> import mpidist
        >>> v, w = mpidist.Variable(1.0), mpidist.Variable([2.0])
        >>> mpidist.get_strategy().extended.read_all([v, w])
        [array(1.), array([2.])]
        """
        return [variable.value() for variable in variables]

    def value_container(self, value: object) -> Any:
        """Return the variable that a component belongs to; other values unchanged."""
        return value.container if isinstance(value, Component) else value

    def update_in_replica(
        self,
        replica: ReplicaContextLike,
        var: Variable,
        fn: Callable[..., object],
        args: Args,
        kwargs: Kwargs,
        group: bool,
    ) -> object:
        """Call ``fn`` with the component of ``var`` that is the replica's, in its update context. Extension."""
        local_id = replica.local_replica_id
        component = self.own_variable(var, "update").values[local_id]
        if args or kwargs:
            args, kwargs = select_replica(local_id, args), select_replica(local_id, kwargs)
        with context.entered(Frame(self.strategy, None, local_id)):
            result = fn(component, *args, **kwargs)
        return result if group else (result,)

    def _update(self, var: Variable, fn: Callable[..., object], args: Args, kwargs: Kwargs, group: bool) -> object:
        results = update_components(var, fn, lambda i: (select_replica(i, args), select_replica(i, kwargs)))
        if not group:
            return tuple(results)
        if len(results) == 1:
            return nest.map_structure(self.value_container, results[0])
        return regroup(results, self.local_replica_ids)

    def _update_non_slot(self, fn: Callable[..., object], args: Args, kwargs: Kwargs, group: bool) -> object:
        results = []
        for i, (device,) in enumerate(self.worker_devices_by_replica):
            with place_at(device).current(), context.entered(Frame(self.strategy, None, i)):
                results.append(fn(*select_replica(i, args), **select_replica(i, kwargs)))
        return regroup(results, self.local_replica_ids) if group else tuple(results)

    def apply_gradients(self, optimizer: Any, summed: Iterable[tuple[list[object], list[Variable]]]) -> None:
        """Update variables by summed gradients, in update context. Extension.

        Args:
            optimizer: A ``mpidist.optimizers.Optimizer`` whose slots exist.
            summed: Gradients and their variables, as they come in.
        """
        optimizer.update_copies(summed)

    def own_variable(self, var: object, method: str) -> Variable:
        """Return the variable that ``var`` is, or is a component of; check its strategy."""
        var = var.container if isinstance(var, Component) else var
        if isinstance(var, Variable) and var.distribute_strategy is self.strategy:
            return var
        of_whom = f" of {type(var.distribute_strategy).__name__}" if isinstance(var, Variable) else ""
        raise ValueError(
            f"{method} was given {var!r}{of_whom}; expected a variable created in "
            f"`with strategy.scope():` of this {type(self.strategy).__name__}"
        )

    # Calls ----------------------------------------------------------------------------------------------------

    def call_for_each_replica(
        self, fn: Callable[..., Result], args: Sequence[object] = (), kwargs: dict[str, Any] | None = None
    ) -> Result:
        """Run a function as ``Strategy.run`` does."""
        context.require_cross_replica(self.strategy, "call_for_each_replica()", "call the function itself")
        return self.run(fn, tuple(args), kwargs or {})

    def run(self, fn: Callable[..., Result], args: Args, kwargs: Kwargs) -> Result:
        """Call ``fn`` for each replica and group the results; announce errors to other ranks. Extension."""
        try:
            results = self.run_replicas(fn, args, kwargs)
        except Exception as error:
            # If the caller goes on, the other ranks must not pair this rank's next step with their present one.
            self.announce(error, "the function given to run()")
            raise
        # Without a call where there is one replica: the shortest run takes less than a microsecond.
        return results[0] if len(results) == 1 and not self.wraps_lone_replica else self.per_replica(results)

    def per_replica(self, values: Sequence[Value]) -> Value:
        """Return a structure per local replica as one structure of distributed values. Extension."""
        return regroup(values, self.local_replica_ids, wrap_lone=self.wraps_lone_replica)

    def local_results(self, value: Value) -> tuple[Value, ...]:
        """Return the components of this rank; see ``Strategy.experimental_local_results``. Extension."""
        if isinstance(value, (ReplicaValues, Variable)):
            return tuple(value.values)
        if not nest.is_nest(value):
            return (value,)
        return tuple(select_replica(i, value) for i in range(len(self.local_replica_ids)))

    # Input ----------------------------------------------------------------------------------------------------

    def distribute_dataset(self, dataset: Any, options: InputOptions | None) -> Any:
        """Distribute a dataset (collective); see ``Strategy.experimental_distribute_dataset``. Extension."""
        return distribute_dataset(dataset, self.input_workers(), self.strategy, options)

    def distribute_from_function(self, dataset_fn: Callable[..., Any], options: InputOptions | None) -> Any:
        """Distribute datasets (collective); see ``Strategy.distribute_datasets_from_function``. Extension."""
        workers, allowed = self.input_workers(), self.allows_per_replica_input
        return distribute_from_function(dataset_fn, workers, self.strategy, options, per_replica_allowed=allowed)

    def distribute_values(self, value_fn: Callable[..., object]) -> Any:
        """Make values; see ``Strategy.experimental_distribute_values_from_function``. Extension."""
        return distribute_values(value_fn, self.input_workers())

    def empty(self, shape: int | Sequence[int], dtype: DTypeLike = "float32") -> Any:
        """Return an uninitialized array of a replica's device, in memory that collectives handle best (collective).

        Extension.

        Returns:
            An array with one local replica, a PerReplica of arrays with several.
        """
        context.require_cross_replica(self.strategy, "empty()", "call it before run()")
        return self.per_replica([self._empty(shape, dtype, device) for (device,) in self.worker_devices_by_replica])

    def _empty(self, shape: int | Sequence[int], dtype: DTypeLike, device: str) -> Array:
        where = place_at(device)
        if self.communicator is not None and where.is_host:
            return self.communicator.empty(shape, dtype)
        return where.ops.empty((shape,) if isinstance(shape, int) else tuple(shape), as_dtype(dtype), where.number)

    def zeros(self, shape: int | Sequence[int], dtype: DTypeLike = "float32") -> Any:
        """Return an :meth:`empty` filled with zeros (collective). Extension."""
        arrays = self.empty(shape, dtype)
        for array in arrays.values if isinstance(arrays, ReplicaValues) else (arrays,):
            with place_of(array).current():
                array.fill(0)
        return arrays

    # What the ranks have in common ----------------------------------------------------------------------------

    def shared_errors(self, doing: str) -> AbstractContextManager[None]:
        """Return a block around rank-local work whose errors every rank learns of. Extension."""
        return nullcontext() if self.communicator is None else self.communicator.shared_errors(doing)

    def announce(self, error: Exception, doing: str) -> None:
        """Tell the other ranks of an error to be raised in place of a collective. Extension."""
        if self.communicator is not None:
            self.communicator.announce(error, doing)

    def agree_on(self, text: Callable[[], str]) -> None:
        """Return once all ranks have said the same (collective); else raise MismatchError. Extension.

        Args:
            text: Called where there are other ranks; describes the call and its arguments.
        """
        if self.communicator is not None:
            self.communicator.meet(text())

    def step_agreement(self) -> StepAgreement:
        """Return the means by which the ranks agree on a step (collective). Extension."""
        return StepAgreement(None) if self.communicator is None else self.communicator.step_agreement()

    def changing(self, label: str, what: str, content: Callable[[], bytes]) -> AbstractContextManager[None]:
        """Return a block in which each rank changes a copy of its own. Extension.

        The ranks compare the copies afterwards.

        Args:
            label: Name of the changed thing, the same on all ranks.
            what: The change, as in "assign of variable 'w'".
            content: Returns the bytes to compare, called if other ranks have copies of their own.
        """
        if self.communicator is None or self.is_central:
            return nullcontext()
        return self.communicator.changing(label, what, content)

    def done(self, label: str, what: str, checksum: Callable[[], int]) -> None:
        """Have the ranks compare changes that each made by itself, without their state. Extension."""
        if self.communicator is not None and not self.is_central:
            self.communicator.done(label, what, checksum())

    def require_checkpoints(self, method: str) -> None:
        """Raise RuntimeError where this rank takes no part in checkpoints; by default every rank does. Extension."""
        del method

    def copy_for(self, strategy: Any) -> StrategyExtended:
        """Return a copy for ``strategy``, a copy of the strategy. Extension.

        Raises:
            ValueError: It cannot be copied.
        """
        raise ValueError(f"{type(self.strategy).__name__} cannot be copied; build a new one on every rank")

    def close(self) -> None:
        """Free all resources (collective). Extension."""
        if self.communicator is not None:
            self.communicator.close()
        self.is_closed = True


def _first_device(value: object) -> str:
    first = value.values[0] if isinstance(value, ReplicaValues) else value
    return destination_devices(first)[0] if isinstance(first, (Variable, Component)) else device_of(first)


def _told(value: object, destinations: object) -> str:
    """Return the text that ranks compare: the structure of a value, and its variable."""
    structure = nest.describe(value)
    return f"{structure} for variable {destinations.label!r}" if isinstance(destinations, Variable) else structure
