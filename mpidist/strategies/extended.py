"""StrategyExtended: the interface of a strategy for library writers.

Its public methods check context and arguments; the hooks do the work. A new strategy is a subclass that fills in the
hooks that ``StrategyHooks`` leaves open.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mpidist.arrays.convert import Array
from mpidist.core import context, nest
from mpidist.core.context import Frame
from mpidist.core.enums import ReduceOp, VariableSynchronization
from mpidist.core.options import CommunicationOptions, check_communication_options
from mpidist.cross_device_ops.destinations import destination_devices, device_of
from mpidist.strategies.hooks import StrategyHooks
from mpidist.strategies.leaves import apart_from
from mpidist.values import ReplicaValues, Variable, regroup, select_replica
from mpidist.values.component import Component
from mpidist.values.placement import place_at, place_of
from mpidist.values.synchronization import changing
from mpidist.values.variable import update_components

if TYPE_CHECKING:
    from mpidist.strategies.replica_context import ReplicaContext


class StrategyExtended(StrategyHooks):
    """What a strategy does (tf.distribute.StrategyExtended).

    Args:
        strategy: The strategy it belongs to.
    """

    # Reductions -----------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._strategy!r}>"

    def reduce_to(
        self, reduce_op: ReduceOp | str, value: Any, destinations: Any, options: CommunicationOptions | None = None
    ) -> Any:
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
        instead = "use get_replica_context().all_reduce(op, value)"
        with self._shared_errors("reduce_to()"):
            context.require_cross_replica(self._strategy, "reduce_to()", instead)
            op = ReduceOp.of(reduce_op)
            check_communication_options(options)
            destination_devices(destinations)
        leaves = nest.flatten(value)
        pairs = [(leaf, destinations) for leaf in leaves]
        results = self._batch_reduce_to(op, pairs, options, _told(value, destinations))
        return nest.pack_like(value, list(map(apart_from, results, leaves)))

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Do :meth:`reduce_to` for many pairs in few messages (collective); results in the order of the pairs.

        Raises:
            ValueError: Something else than (value, destinations) tuples.
        """
        instead = "use get_replica_context().all_reduce(op, values)"
        with self._shared_errors("batch_reduce_to()"):
            context.require_cross_replica(self._strategy, "batch_reduce_to()", instead)
            op = ReduceOp.of(reduce_op)
            check_communication_options(options)
            pairs = list(value_destination_pairs)
            if any(not isinstance(pair, (tuple, list)) or len(pair) != 2 for pair in pairs):
                raise ValueError(f"value_destination_pairs is {pairs!r}; expected (value, destinations) tuples")
            flat = [(leaf, d) for value, d in pairs for leaf in nest.flatten(value)]
            for _, destinations in flat:
                destination_devices(destinations)
        structure = "; ".join(_told(value, destinations) for value, destinations in pairs)
        reduced = self._batch_reduce_to(op, flat, options, structure) if flat else []
        results = iter([apart_from(result, leaf) for result, (leaf, _) in zip(reduced, flat, strict=True)])
        return [nest.pack_like(value, [next(results) for _ in nest.flatten(value)]) for value, _ in pairs]

    def broadcast_to(self, tensor: Any, destinations: Any, root: int = 0) -> Any:
        """Give every rank the ``tensor`` of rank ``root``, with a copy on each of ``destinations`` (collective).

        Python ints and floats are returned as they are, without communication, as in TensorFlow.

        Args:
            tensor: Array, or a nest of arrays, of equal shapes and dtypes on all ranks.
            destinations: Variable, distributed value, array, ``"host"`` or a device string.
            root: Rank among those of the strategy; the first by default. Extension.

        Returns:
            Mirrored where the destinations are several local devices, otherwise the bare value.
        """
        with self._shared_errors("broadcast_to()"):
            context.require_cross_replica(self._strategy, "broadcast_to()", "a replica holds its value already")
            if type(tensor) in (int, float):
                return tensor
            destination_devices(destinations)
        return self._broadcast_to(tensor, destinations, root)

    # Variables ------------------------------------------------------------------------------------------------

    def update(
        self,
        var: Variable,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Call ``fn(component, *args, **kwargs)`` for each local component of ``var``, in its update context.

        Distributed values in the arguments become the part of the component's replica. No communication: the
        copies stay equal because the arguments are; the ranks compare checksums of theirs at their next collective. In
        replica context it goes through ``merge_call``.

        Args:
            var: A variable of this strategy.
            fn: What to do with each component.
            args, kwargs: Further arguments.
            group: Whether to group the results; otherwise a tuple of them is returned.

        Raises:
            ValueError: ``var`` is no variable of this strategy.

        >>> import mpidist
        >>> strategy = mpidist.OneDeviceStrategy("cpu:0")
        >>> with strategy.scope():
        ...     v = mpidist.Variable(1.0)
        ...     strategy.extended.update(v, lambda v, x: v.assign_add(x), args=(2.0,)).numpy()
        array(3.)
        """
        var = self._own_variable(var, "update()")
        replica = context.get_replica_context()
        if replica is not None and context.has_strategy():
            return replica.merge_call(
                lambda strategy, *a, **k: strategy.extended.update(var, fn, a, k, group), args, kwargs
            )
        with context.scope(self._strategy), changing(var, "extended.update()"):
            return self._update(var, fn, tuple(args), kwargs or {}, group)

    def update_non_slot(
        self,
        colocate_with: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Call ``fn(*args, **kwargs)`` once per local device, for state that belongs to no variable."""
        context.require_cross_replica(self._strategy, "update_non_slot()", "use merge_call")
        del colocate_with
        return self._update_non_slot(fn, tuple(args), kwargs or {}, group)

    def non_slot_devices(self, var_list: Sequence[Variable]) -> tuple[str, ...]:
        """Return the devices of state that belongs to no variable."""
        del var_list
        return self.parameter_devices

    def variable_created_in_scope(self, v: Variable) -> bool:
        """Whether ``v`` was created while this strategy was in scope."""
        return isinstance(v, Variable) and v.distribute_strategy is self._strategy

    @contextmanager
    def colocate_vars_with(self, colocate_with_variable: Variable) -> Iterator[None]:
        """Create the variables of the block where ``colocate_with_variable`` is; for optimizer slots.

        Raises:
            RuntimeError: Outside the strategy's scope.
            ValueError: The variable belongs to another strategy.
        """
        context.require_scope(self._strategy, "variables that are colocated")
        self._own_variable(colocate_with_variable, "colocate_vars_with()")
        yield

    def read_var(self, v: Any) -> Any:
        """Return the value of ``v`` in the current context; ON_READ variables are aggregated (collective)."""
        return v.value() if isinstance(v, (Variable, Component)) else v

    def read_all(self, variables: Sequence[Variable]) -> list[Array]:
        """Return the values of several variables, as ``value()`` of each; from parameter servers in few messages.

        In the current context; ON_READ variables are aggregated outside of ``run`` (collective). Extension.

        >>> import mpidist
        >>> v, w = mpidist.Variable(1.0), mpidist.Variable([2.0])
        >>> mpidist.get_strategy().extended.read_all([v, w])
        [array(1.), array([2.])]
        """
        return [variable.value() for variable in variables]

    def value_container(self, value: Any) -> Any:
        """Return the variable that a component belongs to; other values unchanged."""
        return value.container if isinstance(value, Component) else value

    # Calls ----------------------------------------------------------------------------------------------------

    def call_for_each_replica(
        self, fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Do what ``Strategy.run`` does."""
        context.require_cross_replica(self._strategy, "call_for_each_replica()", "call the function itself")
        return self._call_for_each_replica(fn, args, kwargs)

    def empty(self, shape: int | Sequence[int], dtype: Any = "float32") -> Any:
        """Return an uninitialized array of a replica's device, in memory that collectives handle best (collective).

        Extension.

        Returns:
            An array with one local replica, a PerReplica of arrays with several.
        """
        context.require_cross_replica(self._strategy, "empty()", "call it before run()")
        return self._per_replica([self._empty(shape, dtype, device) for (device,) in self.worker_devices_by_replica])

    def zeros(self, shape: int | Sequence[int], dtype: Any = "float32") -> Any:
        """Return an :meth:`empty` filled with zeros (collective). Extension."""
        arrays = self.empty(shape, dtype)
        for array in arrays.values if isinstance(arrays, ReplicaValues) else (arrays,):
            with place_of(array).current():
                array.fill(0)
        return arrays

    # Shared by strategies -------------------------------------------------------------------------------------

    def _reduce_to(self, op: ReduceOp, value: Any, destinations: Any, options: CommunicationOptions | None) -> Any:
        return self._batch_reduce_to(op, [(value, destinations)], options)[0]

    def _reduce(self, op: ReduceOp, leaves: Sequence[Any], structure: str = "") -> list[Any]:
        """Reduce values to plain ones, which stay on the device of the first replica's."""
        return self._batch_reduce_to(op, [(leaf, _first_device(leaf)) for leaf in leaves], None, structure)

    def _replica_ctx_update(
        self, ctx: ReplicaContext, var: Variable, fn: Callable[..., Any], args: Any, kwargs: Any, group: bool
    ) -> Any:
        var = self._own_variable(var, "update")
        local_id = ctx.local_replica_id
        component = var.values[local_id]
        with context.entered(Frame(self._strategy, None, local_id)):
            result = fn(component, *select_replica(local_id, tuple(args)), **select_replica(local_id, kwargs or {}))
        return result if group else (result,)

    def _update(
        self, var: Variable, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], group: bool
    ) -> Any:
        results = update_components(var, fn, lambda i: (select_replica(i, args), select_replica(i, kwargs)))
        if not group:
            return tuple(results)
        if len(results) == 1:
            return nest.map_structure(self.value_container, results[0])
        return regroup(results, self.local_replica_ids)

    def _update_non_slot(
        self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], group: bool
    ) -> Any:
        results = []
        for i, (device,) in enumerate(self.worker_devices_by_replica):
            with place_at(device).current(), context.entered(Frame(self._strategy, None, i)):
                results.append(fn(*select_replica(i, args), **select_replica(i, kwargs)))
        return regroup(results, self.local_replica_ids) if group else tuple(results)

    def _local_results(self, value: Any) -> tuple[Any, ...]:
        from mpidist.strategies.strategy import local_results

        return value.values if isinstance(value, Variable) else local_results(value, len(self.local_replica_ids))

    def _per_replica(self, values: Sequence[Any]) -> Any:
        return regroup(values, self.local_replica_ids, wrap_lone=self._wraps_lone_replica)

    def _own_variable(self, var: Any, method: str) -> Variable:
        var = self.value_container(var)
        if not isinstance(var, Variable) or not self.variable_created_in_scope(var):
            of_whom = f" of {type(var.distribute_strategy).__name__}" if isinstance(var, Variable) else ""
            raise ValueError(
                f"{method} was given {var!r}{of_whom}; expected a variable created in "
                f"`with strategy.scope():` of this {type(self._strategy).__name__}"
            )
        return var


def _first_device(value: Any) -> str:
    first = value.values[0] if isinstance(value, ReplicaValues) else value
    return destination_devices(first)[0] if isinstance(first, (Variable, Component)) else device_of(first)


def is_on_read(value: Any) -> bool:
    """Whether ``value`` is a variable whose copies differ between replicas."""
    return isinstance(value, Variable) and value.synchronization == VariableSynchronization.ON_READ


def _told(value: Any, destinations: Any) -> str:
    """Return what ranks compare of a value that is reduced: its structure, and which variable it is for."""
    structure = nest.describe(value)
    return f"{structure} for variable {destinations._label!r}" if isinstance(destinations, Variable) else structure
