"""StrategyExtended: the interface of a strategy for library writers.

Each strategy is a subclass that sets ``local_replica_ids`` and ``worker_devices``, and implements the four
abstract methods. The members of tf.distribute and mpidist's own
are built on them.
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
from mpidist.collectives.observe.lateness import LateRanks, SlowLink
from mpidist.collectives.observe.stragglers import straggler_watch
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
from mpidist.values.placement import Place, copy_of, place_at, place_of
from mpidist.values.variable import VariableNames, changing

Result = TypeVar("Result")
Value = TypeVar("Value")
# The results of these for equal values depend on the number of replicas.
_COUNTING = (ReduceOp.SUM, ReduceOp.PROD, ReduceOp.BXOR)


class StrategyExtended(ABC):
    """Implementation of a strategy (tf.distribute.StrategyExtended).

    ``dir()`` lists the members of tf.distribute, and these extensions for programs: ``empty``, ``zeros``,
    ``read_all``, ``stragglers``, ``local_replica_ids``, ``num_replicas_in_sync`` and ``spans_ranks``. Other members
    are for strategies and for other modules of mpidist.

    Args:
        strategy: The strategy it belongs to.
        communicator: The ranks that take part, or None for this process alone. Closed with the strategy.

    Attributes:
        allows_per_replica_input: Whether input may be made per replica.
        cluster_resolver: The value of ``strategy.cluster_resolver``.
        first_gpu: The GPU that is current in scopes and merge functions; None for the host alone.
        frame: The entry in the stack of contexts for the strategy's cross-replica context.
        local_replica_ids: Global ids of the replicas of this rank. Extension.
        worker_devices: Devices of the replicas of this rank.
        is_central: Whether each variable has one copy, which all replicas share.
        variable_names: The names of its variables.
    """

    allows_per_replica_input = False
    is_central = False
    # Shapes may change from step to step.
    experimental_require_static_shapes = False
    local_replica_ids: tuple[int, ...] = ()
    worker_devices: tuple[str, ...] = ()
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

    def __dir__(self) -> list[str]:
        """Return the names for programs."""
        return sorted(_OF_TENSORFLOW | _EXTENSIONS)

    # Implemented by each strategy -----------------------------------------------------------------------------

    @abstractmethod
    def input_workers(self) -> InputWorkers:
        """Return the ranks that share the input, with their numbers of replicas. Extension."""

    @abstractmethod
    def create_variable(self, array: Array, **properties: Any) -> Variable:
        """Create a variable with this rank's initial value (collective). Extension.

        ``properties`` are the other arguments of ``make_variable``.
        """

    @abstractmethod
    def run_replicas(self, fn: Callable[..., Result], args: Args, kwargs: Kwargs) -> list[Result]:
        """Call ``fn`` in the context of each replica of this rank; return the results. Extension.

        Each replica gets its part of the distributed values in ``args`` and ``kwargs``.
        """

    @abstractmethod
    def reduce(self, op: ReduceOp, pairs: Pairs, divisor: int, options: CallOptions, note: str) -> list[object]:
        """Reduce values over all replicas (collective). Extension.

        Args:
            op: The operation.
            pairs: Values, of arrays, numbers or IndexedSlices, and the destination of each result.
            divisor: Divisor of the sum for a mean.
            options: Packing, deadline and algorithm.
            note: Text that the ranks compare. Pass it to the communicator.

        Returns:
            The results, a Mirrored if the destinations are several local devices.
        """

    def reduce_async(
        self, op: ReduceOp, pairs: Pairs, divisor: int, options: CallOptions, note: str
    ) -> Work | FinishedWork:
        """Start :meth:`reduce` and return its handle (collective). By default it finishes at once. Extension."""
        return FinishedWork(self.reduce(op, pairs, divisor, options, note))

    def reduce_fast(self, reduce_op: ReduceOp | str, value: Value) -> Value | None:
        """Return the reduction of a number or array by the fast path, or None. Extension."""
        return None

    def gather(self, arrays: list[Array], axis: int, options: CallOptions, note: str) -> list[Array]:
        """Concatenate each array with those of the other ranks, in rank order (collective). Extension."""
        comm = self.communicator
        return arrays if comm is None else comm.gather_arrays(arrays, axis, options=options, note=note)

    def broadcast(self, arrays: list[Array], root: int, note: str) -> list[Array]:
        """Return the arrays of rank ``root`` on every rank (collective). Extension."""
        return arrays if self.communicator is None else self.communicator.broadcast_arrays(arrays, root, note=note)

    # Members of tf.distribute ---------------------------------------------------------------------------------

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """Devices of variables."""
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
        """Whether this rank writes checkpoints. Reading ON_READ variables is collective all the same."""
        return self.communicator is None or self.communicator.rank == 0

    @property
    def should_save_summary(self) -> bool:
        """Whether this rank writes summaries."""
        return self.should_checkpoint

    def reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value: Value,
        destinations: object,
        options: CommunicationOptions | None = None,
    ) -> Value:
        """Combine the values of all replicas and copy the result to ``destinations`` (collective).

        Args:
            reduce_op: The operation, or its name.
            value: PerReplica, or a nest of them; plain values as in ``Strategy.reduce``.
            destinations: Variable, distributed value, array, ``"host"`` or a device string.
            options: Packing, deadline and algorithm.

        Returns:
            A Mirrored if the destinations are several local devices, otherwise the bare value. Every rank gets it.

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

        Returns the results in the order of the pairs.

        Raises:
            ValueError: The pairs are no (value, destinations) tuples.
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
        note = "; ".join(_structure_text(value, destinations) for value, destinations in nests)
        results = iter(self.reduce_pairs(op, flat, options, note, copies=True) if flat else [])
        return [nest.map_structure(lambda _: next(results), value) for value, _ in nests]

    def broadcast_to(self, tensor: Value, destinations: object, root: int = 0) -> Value:
        """Copy the ``tensor`` of rank ``root`` to the ``destinations`` on every rank (collective).

        Python ints and floats are returned without communication, as in TensorFlow.

        Args:
            tensor: Array, or a nest of arrays, of equal shapes and dtypes on all ranks.
            destinations: Variable, distributed value, array, ``"host"`` or a device string.
            root: Rank among those of the strategy; the first by default. Extension.

        Returns:
            A Mirrored if the destinations are several local devices, otherwise the bare value.
        """
        with self.shared_errors("broadcast_to()"):
            context.require_cross_replica(self.strategy, "broadcast_to()", "a replica holds its value already")
            if type(tensor) in (int, float):
                return tensor
            destination_devices(destinations)
        sent = self.broadcast_nest(tensor, root)
        copies: Value = nest.map_structure(lambda leaf: self.copy_to(leaf, destinations), sent)
        return copies

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
        ranks: the ranks compare checksums of their copies at the next collective. In replica context the call uses
        ``merge_call``.

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

        def in_scope(_: object, *args: object, **kwargs: object) -> object:
            with context.scope(self.strategy), changing(var, "extended.update()"):
                return self._update(var, fn, args, kwargs, group)

        replica = context.get_replica_context()
        if replica is not None and context.has_strategy():
            # merge_call wraps the arguments of several replicas in PerReplica even if they are equal.
            return replica.merge_call(in_scope, args, kwargs)
        if var.synchronization != VariableSynchronization.ON_READ:
            value_checks.check_equal_on_replicas(f"update() of variable {var.name!r}", args, kwargs)
        return in_scope(None, *args, **(kwargs or {}))

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
        return self._update(None, fn, tuple(args), kwargs or {}, group)

    def non_slot_devices(self, var_list: Sequence[Variable]) -> tuple[str, ...]:
        """Return the devices of state that belongs to no variable."""
        return self.parameter_devices

    def variable_created_in_scope(self, v: Variable) -> bool:
        """Return whether ``v`` was created while this strategy was in scope."""
        return isinstance(v, Variable) and v.distribute_strategy is self.strategy

    @contextmanager
    def colocate_vars_with(self, colocate_with_variable: Variable) -> Iterator[None]:
        """Create the variables of the block next to ``colocate_with_variable``, such as optimizer slots.

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

    def value_container(self, value: object) -> Any:
        """Return the variable that a component belongs to; other values unchanged."""
        return value.container if isinstance(value, Component) else value

    def call_for_each_replica(
        self, fn: Callable[..., Result], args: Sequence[object] = (), kwargs: dict[str, Any] | None = None
    ) -> Result:
        """Run a function as ``Strategy.run`` does."""
        context.require_cross_replica(self.strategy, "call_for_each_replica()", "call the function itself")
        return self.run(fn, tuple(args), kwargs or {})

    # Extensions for programs ----------------------------------------------------------------------------------

    @cached_property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas, over all ranks. Extension."""
        return sum(self.replica_counts)

    @property
    def spans_ranks(self) -> bool:
        """Whether several ranks run the program. Extension."""
        return self.communicator is not None

    def read_all(self, variables: Sequence[Variable]) -> list[Array]:
        """Return the values of several variables, from parameter servers in few messages. Extension.

        The same as ``value()`` of each in the current context; ON_READ variables are aggregated outside of ``run``
        (collective).

        >>> import mpidist
        >>> v, w = mpidist.Variable(1.0), mpidist.Variable([2.0])
        >>> mpidist.get_strategy().extended.read_all([v, w])
        [array(1.), array([2.])]
        """
        return [variable.value() for variable in variables]

    def stragglers(self) -> LateRanks | SlowLink | None:
        """Return which ranks the others keep waiting for, or which link is slow. Extension.

        Not collective: any rank may call it, and the others go on. It returns within milliseconds, and after at most
        four seconds if ranks do not answer. Links are compared on rank 0 only. See docs/stragglers.md.

        Returns:
            The verdict, or None. ``str()`` of the verdict is its text. Its attributes are the ranks, the hosts, the
            phase and the share of the job's time. The result is None if nobody is late, in the first ten seconds, in
            a job of one rank, or if MPI does not allow threads.

        >>> import mpidist
        >>> print(mpidist.get_strategy().extended.stragglers())
        None
        """
        return straggler_watch().ask() if self.spans_ranks else None

    def empty(self, shape: int | Sequence[int], dtype: DTypeLike = "float32") -> Any:
        """Return an uninitialized array of a replica's device, in the fastest memory for collectives (collective).

        Extension.

        Returns:
            An array with one local replica, a PerReplica of arrays with several.
        """
        context.require_cross_replica(self.strategy, "empty()", "call it before run()")
        arrays = []
        for (device,) in self.worker_devices_by_replica:
            where = place_at(device)
            if self.communicator is not None and where.is_host:
                arrays.append(self.communicator.empty(shape, dtype))
            else:
                sizes = (shape,) if isinstance(shape, int) else tuple(shape)
                arrays.append(where.ops.empty(sizes, as_dtype(dtype), where.number))
        return self._per_replica(arrays)

    def zeros(self, shape: int | Sequence[int], dtype: DTypeLike = "float32") -> Any:
        """Return an :meth:`empty` filled with zeros (collective). Extension."""
        arrays = self.empty(shape, dtype)
        for array in arrays.values if isinstance(arrays, ReplicaValues) else (arrays,):
            with place_of(array).current():
                array.fill(0)
        return arrays

    # For Strategy and other modules: replicas and input -------------------------------------------------------

    @cached_property
    def replica_counts(self) -> tuple[int, ...]:
        """Number of replicas on each rank."""
        return self.input_workers().replica_counts

    @cached_property
    def wraps_lone_replica(self) -> bool:
        """Whether values are PerReplica even with one local replica, because ranks differ in their numbers."""
        return len(set(self.replica_counts)) > 1

    @property
    def worker_devices_by_replica(self) -> tuple[tuple[str, ...], ...]:
        """Devices of each replica of this rank."""
        return tuple((device,) for device in self.worker_devices)

    def run(self, fn: Callable[..., Result], args: Args, kwargs: Kwargs) -> Result:
        """Call ``fn`` for each replica and group the results; announce errors to other ranks."""
        try:
            results = self.run_replicas(fn, args, kwargs)
        except Exception as error:
            # If the caller continues, the other ranks must not pair this rank's next step with their current one.
            self.announce(error, "the function given to run()")
            raise
        # Saves a call for one replica: the shortest run takes less than a microsecond.
        return results[0] if len(results) == 1 and not self.wraps_lone_replica else self._per_replica(results)

    def _per_replica(self, values: Sequence[Value]) -> Value:
        return regroup(values, self.local_replica_ids, wrap_lone=self.wraps_lone_replica)

    def distribute_dataset(self, dataset: Any, options: InputOptions | None) -> Any:
        """Distribute a dataset (collective)."""
        return distribute_dataset(dataset, self.input_workers(), self.strategy, options)

    def distribute_from_function(self, dataset_fn: Callable[..., Any], options: InputOptions | None) -> Any:
        """Distribute the datasets of a function (collective)."""
        workers, allowed = self.input_workers(), self.allows_per_replica_input
        return distribute_from_function(dataset_fn, workers, self.strategy, options, per_replica_allowed=allowed)

    def distribute_values(self, value_fn: Callable[..., object]) -> Any:
        """Return the values of a function for each replica."""
        return distribute_values(value_fn, self.input_workers())

    # Reductions -----------------------------------------------------------------------------------------------

    def reduce_pairs(
        self,
        op: ReduceOp,
        pairs: Sequence[tuple[object, object]],
        options: CallOptions = None,
        note: str = "",
        copies: bool = False,
    ) -> list[object]:
        """Reduce leaves of any kind to their destinations (collective).

        All ranks must agree on ``note``, their structure or variable. With ``copies``, results share no memory with
        the leaves.
        """
        results: list[object] = [None] * len(pairs)
        by_divisor: dict[int, list[int]] = {}
        with self.shared_errors(f"{op.name} of its values"):
            values: list[Any] = [self._as_contribution(op, value) for value, _ in pairs]
            for i, (value, (given, destinations)) in enumerate(zip(values, pairs, strict=True)):
                if isinstance(value, PerReplica) and self.num_replicas_in_sync > 1:
                    # A plain value counts once per rank, a PerReplica once per replica.
                    is_plain = not isinstance(given, (ReplicaValues, Variable))
                    divisor = len(self.replica_counts) if is_plain else self.num_replicas_in_sync
                    by_divisor.setdefault(divisor, []).append(i)
                    continue
                own = value.values[0] if isinstance(value, ReplicaValues) else value
                value_checks.check_can_reduce([own], op)
                results[i] = self.copy_to(value_checks.copied(own) if copies else own, destinations)
        for divisor, indices in by_divisor.items():
            batch = [(values[i], pairs[i][1]) for i in indices]
            for i, result in zip(indices, self.reduce(op, batch, divisor, options, note), strict=True):
                results[i] = result
        return results

    def reduce_leaves(self, op: ReduceOp, leaves: Sequence[object], note: str) -> list[object]:
        """Reduce values to new plain ones, on the device of the first replica's value (collective)."""
        return self.reduce_pairs(op, [(leaf, _first_device(leaf)) for leaf in leaves], None, note, copies=True)

    def _as_contribution(self, op: ReduceOp, value: object) -> Any:
        """Return a PerReplica to reduce, or a value that is its own result."""
        value, count = self.distributed(value), self.num_replicas_in_sync
        is_plain = not isinstance(value, ReplicaValues)
        if is_plain and self.communicator is not None:
            return PerReplica((value,), self.local_replica_ids[:1])
        if isinstance(value, Mirrored) or is_plain:
            if op in _COUNTING and count > 1 and not (is_plain and op is not ReduceOp.PROD and _is_zero(value)):
                raise ValueError(
                    f"{op.name} of {value!r}, which is equal on all {count} replicas, is ambiguous. Pass the result of "
                    "strategy.run(), use MEAN for the value itself, or multiply it by strategy.num_replicas_in_sync."
                )
        elif isinstance(value, ReplicaValues) and len(value.values) != len(self.local_replica_ids):
            raise ValueError(
                f"a value of {len(value.values)} replicas was given to {type(self.strategy).__name__}, which has "
                f"{len(self.local_replica_ids)} on this rank. Pass the result of strategy.run() of this strategy."
            )
        return value

    def distributed(self, value: object) -> object:
        """Return the components of a variable as a distributed value; other values unchanged."""
        if not isinstance(value, Variable):
            return value
        copies = [component.value() for component in value.values]
        if value.synchronization == VariableSynchronization.ON_READ:
            return PerReplica(copies, self.local_replica_ids)
        # One copy that all replicas share represents each of them.
        return Mirrored(copies * (len(self.local_replica_ids) // len(copies)), self.local_replica_ids)

    def gather_leaves(self, leaves: Sequence[object], axis: int, note: str, options: CallOptions = None) -> list[Any]:
        """Concatenate the values of all replicas along ``axis``, as new arrays in replica order (collective)."""
        local, firsts, samples = [], [], []
        with self.shared_errors("gathering the values of its replicas"):
            for leaf in map(self.distributed, leaves):
                parts = leaf.values if isinstance(leaf, ReplicaValues) else (leaf,)
                value_checks.check_can_gather(parts[0], axis, "gather()")
                first = to_array(parts[0])
                with place_of(first).current():
                    arrays = [first, *(place_of(first).brings(to_array(part)) for part in parts[1:])]
                    local.append(value_checks.concatenated(arrays, axis))
                firsts.append(first)
                samples.append(parts[0])
        gathered = self.gather(local, axis, options, note)
        results = [copy_of(array) if array is first else array for array, first in zip(gathered, firsts, strict=True)]
        return list(map(restore, samples, results))

    def broadcast_nest(self, value: Value, root: int = 0, note: str = "") -> Value:
        """Return, on every rank, the nest of arrays that rank ``root`` passed (collective)."""
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
        """Return ``value`` on the destinations on this rank, a Mirrored if they are several."""
        return place(value, destination_devices(destinations))

    # Updates --------------------------------------------------------------------------------------------------

    def update_in_replica(self, replica: ReplicaContextLike, var: Variable, fn: Callable[[Any], object]) -> None:
        """Call ``fn`` with the replica's component of ``var``, in its update context."""
        local_id = replica.local_replica_id
        component = self.own_variable(var, "update").values[local_id]
        with context.entered(Frame(self.strategy, None, local_id)):
            fn(component)

    def _update(
        self, var: Variable | None, fn: Callable[..., object], args: Args, kwargs: Kwargs, group: bool
    ) -> object:
        """Call an update function for each component of ``var``, or each local device."""
        results = self._call_updates(var, fn, args, kwargs)
        if not group:
            return tuple(results)
        if len(results) == 1:
            return nest.map_structure(self.value_container, results[0])
        return regroup(results, self.local_replica_ids)

    def _call_updates(
        self, var: Variable | None, fn: Callable[..., object], args: Args, kwargs: Kwargs
    ) -> list[object]:
        results = []
        for i, (device,) in enumerate(self.worker_devices_by_replica):
            component = () if var is None else (var.values[i],)
            with place_at(device).current(), context.entered(Frame(self.strategy, None, i)):
                results.append(fn(*component, *select_replica(i, args), **select_replica(i, kwargs)))
        return results

    def apply_gradients(self, optimizer: Any, summed: Iterable[tuple[list[object], list[Variable]]]) -> None:
        """Update variables in update context by summed gradients, which come with their variables.

        ``optimizer`` is a ``mpidist.optimizers.Optimizer`` whose slots exist.
        """
        optimizer.update_copies(summed)

    def own_variable(self, var: object, method: str) -> Variable:
        """Return the variable that ``var`` is, or is a component of. Raise ValueError if it is of another strategy."""
        var = var.container if isinstance(var, Component) else var
        if isinstance(var, Variable) and var.distribute_strategy is self.strategy:
            return var
        of_whom = f" of {type(var.distribute_strategy).__name__}" if isinstance(var, Variable) else ""
        raise ValueError(
            f"{method} was given {var!r}{of_whom}; expected a variable created in "
            f"`with strategy.scope():` of this {type(self.strategy).__name__}"
        )

    # Agreement of the ranks -----------------------------------------------------------------------------------

    def shared_errors(self, doing: str) -> AbstractContextManager[None]:
        """Return a block around rank-local work. Its errors reach every rank."""
        return nullcontext() if self.communicator is None else self.communicator.shared_errors(doing)

    def announce(self, error: Exception, doing: str) -> None:
        """Send an error to the other ranks instead of calling the next collective."""
        if self.communicator is not None:
            self.communicator.announce(error, doing)

    def agree_on(self, text: Callable[[], str]) -> None:
        """Raise MismatchError unless all ranks return the same text, which describes a call (collective)."""
        if self.communicator is not None:
            self.communicator.meet(text())

    def step_agreement(self) -> StepAgreement:
        """Return the object by which the ranks agree on a step (collective)."""
        return StepAgreement(None) if self.communicator is None else self.communicator.step_agreement()

    def changing(self, label: str, what: str, content: Callable[[], bytes]) -> AbstractContextManager[None]:
        """Return a block in which each rank changes its own copy of ``label``. The ranks compare the copies later."""
        if self.communicator is None or self.is_central:
            return nullcontext()
        return self.communicator.changing(label, what, content)

    def settle(self, label: str) -> None:
        """Compare earlier changes of a variable by its present content, see ``Communicator.settle``."""
        if self.communicator is not None and not self.is_central:
            self.communicator.settle(label)

    def done(self, label: str, what: str, checksum: Callable[[], int]) -> None:
        """Compare the results of rank-local work without state at the next collective."""
        if self.communicator is not None and not self.is_central:
            self.communicator.done(label, what, checksum())

    def require_checkpoints(self, method: str) -> None:  # noqa: B027 - a subclass may refuse
        """Raise RuntimeError if this rank takes no part in checkpoints. By default every rank does."""

    def copy_for(self, strategy: Any) -> StrategyExtended:
        """Return a copy for ``strategy``, a copy of the strategy. Raise ValueError if that is impossible."""
        raise ValueError(f"{type(self.strategy).__name__} cannot be copied; build a new one on every rank")

    def close(self) -> None:
        """Free all resources (collective)."""
        if self.communicator is not None:
            self.communicator.close()
        self.is_closed = True


_OF_TENSORFLOW = {
    *("batch_reduce_to", "broadcast_to", "call_for_each_replica", "colocate_vars_with", "experimental_between_graph"),
    *("experimental_require_static_shapes", "experimental_should_init", "non_slot_devices", "parameter_devices"),
    *("read_var", "reduce_to", "should_checkpoint", "should_save_summary", "update", "update_non_slot"),
    *("value_container", "variable_created_in_scope", "worker_devices"),
}
_EXTENSIONS = {"empty", "local_replica_ids", "num_replicas_in_sync", "read_all", "spans_ranks", "stragglers", "zeros"}


def _first_device(value: object) -> str:
    first = value.values[0] if isinstance(value, ReplicaValues) else value
    return destination_devices(first)[0] if isinstance(first, (Variable, Component)) else device_of(first)


def _is_zero(value: object) -> bool:
    return not isinstance(value, IndexedSlices) and not to_array(value).any()


def _structure_text(value: object, destinations: object) -> str:
    """Return the text that ranks compare: the structure of a value, and its variable."""
    structure = nest.describe(value)
    return f"{structure} for variable {destinations.label!r}" if isinstance(destinations, Variable) else structure
