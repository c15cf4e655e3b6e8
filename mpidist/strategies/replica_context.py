"""ReplicaContext: what code inside ``strategy.run`` can ask and do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from mpidist.collectives import FinishedWork, PartOfWork, Work
from mpidist.core import context, nest
from mpidist.core.context import Frame, get_replica_context, pop, push, require_replica
from mpidist.core.enums import ReduceOp
from mpidist.core.options import CommunicationOptions, check_communication_options
from mpidist.cross_device_ops.local_values import destination_devices
from mpidist.cross_device_ops.local_values import place as place_values
from mpidist.strategies.leaves import (
    check_can_gather,
    check_can_reduce,
    check_gradients_apart,
    check_out,
    check_results_apart,
    copied,
    copy_into,
)
from mpidist.strategies.replica_threads import run_of_this_thread
from mpidist.strategies.replica_work import finished_work, replica_works
from mpidist.values import PerReplica, regroup, select_replica
from mpidist.values.component import Assignable
from mpidist.values.distributed import here
from mpidist.values.placement import place_at

if TYPE_CHECKING:
    from mpidist.strategies.strategy import Strategy
    from mpidist.values import Variable

Value = TypeVar("Value")


class ReplicaContext:
    """The view of one replica (tf.distribute.ReplicaContext); get it with ``mpidist.get_replica_context()``.

    Args:
        strategy: The strategy that runs the replica.
        replica_id_in_sync_group: Its global id, from 0 to n - 1.
        local_replica_id: Its index among the replicas of its rank.
    """

    def __init__(self, strategy: Strategy, replica_id_in_sync_group: int, local_replica_id: int = 0) -> None:
        self._strategy = strategy
        self._id = replica_id_in_sync_group
        self._local_id = local_replica_id
        self.frame = Frame(strategy, self)

    def call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``fn`` in this context, with this replica's part of the distributed values in its arguments. Extension.

        For strategies that run replicas one after the other in the calling thread.
        """
        push(self.frame)
        try:
            if not args and not kwargs:
                return fn()
            return fn(*select_replica(self._local_id, args), **select_replica(self._local_id, kwargs))
        finally:
            pop(self.frame)

    @property
    def replica_id_in_sync_group(self) -> int:
        """Global id of this replica, from 0 to n - 1.

        A generator of random numbers that differs between replicas:
        ``numpy.random.default_rng([seed, ctx.replica_id_in_sync_group])``.
        """
        return self._id

    @property
    def local_replica_id(self) -> int:
        """Index of this replica among those of its rank. Extension."""
        return self._local_id

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas whose values are combined."""
        return self._strategy.num_replicas_in_sync

    @property
    def strategy(self) -> Strategy:
        """The strategy that runs this replica."""
        return self._strategy

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of this replica, in a tuple (deprecated in TensorFlow)."""
        return (self._strategy.extended.worker_devices_by_replica[self._local_id][0],)

    @property
    def is_first_replica(self) -> bool:
        """Whether this is replica 0: for what one replica should do alone, such as printing. Extension."""
        return self._id == 0

    def merge_call(
        self, merge_fn: Callable[..., Any], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Wait for the other local replicas, then run ``merge_fn`` once for all of them.

        Collective over the replicas of a rank: each must make the same calls. ``merge_fn`` runs once per rank in
        cross-replica context, as ``merge_fn(strategy, *args, **kwargs)`` with the arguments of the replicas
        grouped into PerReplica values; what it does across ranks must be the same on every rank.

        Args:
            merge_fn: The function; that of the first replica is called.
            args: Its arguments, from this replica.
            kwargs: Its keyword arguments, from this replica.

        Returns:
            This replica's part of what ``merge_fn`` returned.

        Raises:
            RuntimeError: Called elsewhere than in this replica, or another replica returned without calling.
        """
        require_replica(self, "merge_call()")
        # Replicas that meet in functions with other code have lost one another.
        call = ("merge_call", getattr(merge_fn, "__code__", merge_fn))
        return self.meet(call, merge_fn, tuple(args), kwargs or {})

    def meet(
        self, call: tuple[Any, ...], merge_fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Do what ``merge_call`` does; ``call`` must be equal on all local replicas. Extension."""
        run = run_of_this_thread()
        if run is not None:
            return run.merge(call, merge_fn, args, kwargs)
        extended = self._strategy.extended
        if extended.wraps_lone_replica:
            args, kwargs = regroup([(args, kwargs)], (self._id,), wrap_lone=True, unwrap_objects=True)
        with context.entered(extended.frame):
            result = merge_fn(self._strategy, *args, **kwargs)
        return select_replica(0, result)

    def all_reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Value,
        options: CommunicationOptions | None = None,
        *,
        out: Any = None,
    ) -> Value:
        """Reduce over all replicas and give every replica the result.

        Collective: call it on every replica, in the same order, with the same structure, shapes and dtypes. A
        nest is reduced in one go, packed into few messages. The gradient of a SUM is the all-reduced SUM of the
        upstream gradients, that of a MEAN the same divided by n.

        Args:
            reduce_op: SUM, MEAN, MIN, MAX or PROD, as a ReduceOp or its name.
            value: Array, number, IndexedSlices, or a nest of them.
            options: Packing, deadline and algorithm of this call.
            out: Arrays to write the result to, of the same structure. Extension.

        Returns:
            The structure and kinds of ``value``.

        Raises:
            RuntimeError: Called elsewhere than in this replica.
            ValueError: Unknown operation, or replicas that differ in shape, dtype or structure.
            TypeError: Something that cannot be reduced.
            MismatchError: Ranks that differ.
        """
        require_replica(self, "all_reduce()")
        op = ReduceOp.of(reduce_op)
        check_communication_options(options)
        reduced: Value = self._all_reduce(op, *_read_here(value), options, out)
        return reduced

    def _all_reduce(
        self, op: ReduceOp, value: Any, leaves: list[Any], options: CommunicationOptions | None, out: Any
    ) -> Any:
        """Do what ``all_reduce`` does, with a value of these leaves, after the checks of context and options."""
        self._check_values(value, leaves, op, out)
        if self.num_replicas_in_sync == 1:
            return nest.map_structure(copied, value) if out is None else copy_into(out, value)

        def merged(strategy: Strategy, values: Any, outs: Any) -> Any:
            pairs, note = self._contributions(op, values, outs)
            results = strategy.extended.reduce(op, pairs, strategy.num_replicas_in_sync, options, note)
            return nest.pack_like(values, results)

        reduced = self.meet(("all_reduce", op, options), merged, (value, out), {})
        return reduced if out is None else copy_into(out, reduced)

    def _check_values(self, value: Any, leaves: list[Any], op: ReduceOp, out: Any) -> None:
        with self._strategy.extended.shared_errors(f"{op.name} of its values"):
            check_can_reduce(leaves, op)
            if out is not None:
                check_out(value, out, op, self.num_replicas_in_sync)

    def _contributions(self, op: ReduceOp, values: Any, outs: Any) -> tuple[list[tuple[PerReplica, Any]], str]:
        """Return the values of all local replicas and where their sums are to be, and what describes them."""
        extended = self._strategy.extended
        leaves = [
            leaf if isinstance(leaf, PerReplica) else PerReplica((leaf,), extended.local_replica_ids)
            for leaf in nest.flatten(values)
        ]
        with extended.shared_errors(f"{op.name} of its values"):
            check_results_apart(outs)
            check_gradients_apart(leaves)
        # Results go where the values are: an array of the host stays there, also under a strategy of devices.
        return [(leaf, leaf) for leaf in leaves], "" if isinstance(values, PerReplica) else nest.describe(values)

    def all_reduce_async(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        options: CommunicationOptions | None = None,
        *,
        out: Any = None,
    ) -> Work | PartOfWork | FinishedWork:
        """Start an :meth:`all_reduce` and return a handle whose ``wait()`` gives the result. Extension.

        Collective as ``all_reduce``; ``value`` must not be changed before ``wait()`` has returned, and ``out`` is
        written then.
        """
        require_replica(self, "all_reduce_async()")
        op = ReduceOp.of(reduce_op)
        check_communication_options(options)
        work = self._start_all_reduce(op, *_read_here(value), options, out)
        return work if out is None else PartOfWork(work, lambda results: copy_into(out, results))

    def _start_all_reduce(
        self, op: ReduceOp, value: Any, leaves: list[Any], options: CommunicationOptions | None, out: Any
    ) -> Work | PartOfWork | FinishedWork:
        self._check_values(value, leaves, op, out)
        extended = self._strategy.extended
        if self.num_replicas_in_sync == 1:
            return finished_work(nest.map_structure(copied, value), extended.first_gpu)

        def merged(strategy: Strategy, values: Any, outs: Any) -> PerReplica:
            pairs, note = self._contributions(op, values, outs)
            work = strategy.extended.reduce_async(op, pairs, strategy.num_replicas_in_sync, options, note)
            nested = PartOfWork(work, lambda results: nest.pack_like(values, results))
            places = [place_at(device) for device in extended.worker_devices]
            return PerReplica(replica_works(nested, places), extended.local_replica_ids)

        work: PartOfWork = self.meet(("all_reduce_async", op, options), merged, (value, out), {})
        return work

    def all_gather(self, value: Value, axis: int, options: CommunicationOptions | None = None) -> Value:
        """Concatenate over all replicas along ``axis``, in replica order; every replica gets the result.

        Collective as ``all_reduce``. Sizes along ``axis`` may differ between replicas, and may be 0.

        Args:
            value: Array of at least one dimension, or a nest of them.
            axis: Where to concatenate; may be negative.
            options: Deadline of this call.

        Raises:
            RuntimeError: Called elsewhere than in this replica.
            ValueError: A scalar, an axis out of range, or replicas that differ in dtype or other dimensions.
            NotImplementedError: IndexedSlices.
        """
        require_replica(self, "all_gather()")
        check_communication_options(options)
        given, leaves = _read_here(value)
        with self._strategy.extended.shared_errors("gathering its values"):
            for leaf in leaves:
                check_can_gather(leaf, axis, "all_gather()")

        def merged(strategy: Strategy, values: Any) -> Any:
            leaves = nest.flatten(values)
            gathered = strategy.extended.gather_leaves(leaves, axis, nest.describe(values), options)
            return nest.pack_like(values, map(place_values, gathered, map(destination_devices, leaves)))

        gathered: Value = self.meet(("all_gather along axis", axis, options), merged, (given,), {})
        return gathered

    def _update(
        self,
        var: Variable,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Apply ``fn`` to this replica's component of ``var``; copies diverge if the arguments differ."""
        require_replica(self, "_update()")
        return self._strategy.extended.update_in_replica(self, var, fn, tuple(args), kwargs or {}, group)

    def __enter__(self) -> ReplicaContext:
        push(self.frame)
        return self

    def __exit__(self, *_: object) -> None:
        pop(self.frame)

    def __repr__(self) -> str:
        return f"<ReplicaContext {self._id} of {self.num_replicas_in_sync} of {type(self._strategy).__name__}>"


def _read_here(value: Any) -> tuple[Any, list[Any]]:
    """Return ``value`` with variables and PerReplica values as they are in this replica; and its leaves."""
    leaves = nest.flatten(value)
    if any([isinstance(leaf, (Assignable, PerReplica)) for leaf in leaves]):
        leaves = [leaf.value() if isinstance(leaf, Assignable) else here(leaf) for leaf in leaves]
        value = nest.pack_like(value, leaves)
        leaves = nest.flatten(value)
    return value, leaves


def all_reduce_grad(reduce_op: ReduceOp | str, upstream: Value) -> Value:
    """Return the gradient of ``ctx.all_reduce(reduce_op, x)`` with respect to this replica's ``x``. Extension.

    For autodiff libraries; collective as ``all_reduce``.

    Args:
        reduce_op: SUM or MEAN, as in the forward call.
        upstream: Gradient of the loss with respect to the result, on this replica.

    Raises:
        ValueError: An operation that has no such rule.
    """
    op = ReduceOp.of(reduce_op)
    if op not in (ReduceOp.SUM, ReduceOp.MEAN):
        raise ValueError(f"reduce_op is {op.name}; only SUM and MEAN have a linear gradient")
    context = get_replica_context()
    if context is None:
        raise RuntimeError("all_reduce_grad() requires replica context; call it inside strategy.run()")
    gradient: Value = context.all_reduce(op, upstream)
    return gradient
