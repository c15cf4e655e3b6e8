"""Strategy and ReplicaContext: the methods that users call, the same for every kind of strategy."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from math import prod
from typing import Any, NoReturn, TypeVar

import numpy as np

from mpidist.arrays.convert import to_array
from mpidist.arrays.dtypes import Array
from mpidist.cluster_resolver import ClusterResolver
from mpidist.collectives import FinishedWork, PartOfWork, Work
from mpidist.core import context, nest
from mpidist.core.context import Args, Frame, Kwargs, get_replica_context, pop, push, require_replica
from mpidist.core.options import CallOptions, CommunicationOptions, ReduceOp, RunOptions, check_communication_options
from mpidist.cross_device_ops.local_values import destination_devices
from mpidist.cross_device_ops.local_values import place as place_values
from mpidist.input import Dataset, InputContext, InputOptions, ValueContext, whole_elements
from mpidist.input.elements import owned
from mpidist.strategies import value_checks
from mpidist.strategies.axis_reduction import reduce_over_axis
from mpidist.strategies.replica_threads import finished_work, replica_works, run_of_this_thread
from mpidist.strategies.strategy_extended import StrategyExtended
from mpidist.values import PerReplica, Variable, regroup, select_replica
from mpidist.values.component import Assignable
from mpidist.values.distributed import here
from mpidist.values.placement import Place, place_at

# What a replica function returns, and what goes into a combination of replicas and comes out of it.
Result = TypeVar("Result")
Value = TypeVar("Value")
Self = TypeVar("Self")

# Types of the strategies of several ranks that are not closed. Not the strategies: garbage is collected at another time
# on each rank, and all ranks must find the same here.
_open_on_ranks: list[str] = []


def check_adopts_in_scope(method: str) -> None:
    """Raise RuntimeError if a model is adopted outside of the scope of several ranks."""
    if _open_on_ranks and not context.has_strategy():
        raise RuntimeError(
            f"{method} was called outside of the scope of {_open_on_ranks[-1]}. Each rank would train alone. Call it "
            "inside `with strategy.scope():`. For a model of this rank alone, call it inside `with "
            'mpidist.OneDeviceStrategy("cpu:0").scope():`.'
        )


class Strategy:
    """How computation is spread over replicas (tf.distribute.Strategy).

    Args:
        extended: The object that does it; users build a subclass such as ``MultiWorkerMirroredStrategy``.
    """

    def __init__(self, extended: StrategyExtended) -> None:
        self._extended = extended
        self._counts_as_open = extended.communicator is not None
        if self._counts_as_open:
            _open_on_ranks.append(type(self).__name__)

    @property
    def extended(self) -> StrategyExtended:
        """The interface for library writers."""
        return self._extended

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas, over all ranks, whose values are combined in a step."""
        return self._extended.num_replicas_in_sync

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """The cluster resolver in use, None where there is none."""
        return self._extended.cluster_resolver

    def scope(self) -> AbstractContextManager[Strategy]:
        """Make the strategy current and enter cross-replica context; variables created inside are distributed.

        Entering it again inside is allowed; it communicates nothing. The first of this rank's GPUs is current inside,
        so the thread that entered the scope has to leave it.

        Raises:
            RuntimeError: Inside another strategy's scope, or inside ``run``; the strategy is closed.

        >>> import mpidist
        >>> strategy = mpidist.OneDeviceStrategy("cpu:0")
        >>> with strategy.scope():
        ...     mpidist.get_strategy() is strategy
        True
        """
        self._require_open()
        gpu = self._extended.first_gpu
        return context.scope(self) if gpu is None else _scope_on(gpu, self)

    def run(
        self,
        fn: Callable[..., Result],
        args: Sequence[object] = (),
        kwargs: dict[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Result:
        """Call ``fn`` once for each replica of this rank, in replica context.

        The replica's device is current.

        Args:
            fn: The function. All replicas must communicate in the same way.
            args: Its arguments, a list or tuple; distributed values in them, at any depth, become this replica's
                component, everything else is passed as it is.
            kwargs: Its keyword arguments, likewise.
            options: Accepted and ignored, as in TensorFlow outside TPUs.

        With several local replicas each runs in a thread of its own, the same in every run: settings that belong to a
        thread, such as ``torch.no_grad()``, are entered inside ``fn``.

        Returns:
            The results: bare with one local replica, otherwise grouped into PerReplica values. Their type is that of
                the bare value, which they have again once ``reduce`` or ``experimental_local_results`` took it.

        Raises:
            RuntimeError: Called inside ``run``, or inside another strategy's scope.
            TypeError: ``fn`` cannot be called.
            ValueError: ``args`` is neither list nor tuple.

        >>> import mpidist
        >>> with mpidist.MirroredStrategy(["cpu:0", "cpu:1"], communicator=None) as strategy:
        ...     strategy.run(lambda: mpidist.get_replica_context().replica_id_in_sync_group)
        PerReplica:{0: 0, 1: 1}
        """
        try:
            if not callable(fn):
                raise TypeError(f"fn is {fn!r}; expected a function, as in strategy.run(step, args=(x,))")
            if not isinstance(args, (list, tuple)):
                raise ValueError(
                    f"args has type {type(args).__name__}. Pass a tuple. A single argument needs a comma: args=(x,)."
                )
            if options is not None and not isinstance(options, RunOptions):
                raise TypeError(f"options is {options!r}; expected None or mpidist.RunOptions()")
            self._require_cross_replica("run()", "one replica cannot start replicas: call the function itself")
        except Exception as error:
            self._extended.announce(error, "run()")
            raise
        if whole_elements.watch.pending and self._extended.communicator is not None:
            whole_elements.watch.look_at((args, kwargs), self._extended.input_workers())
        context.steps_made += 1
        return self._extended.run(fn, tuple(args), kwargs or {})

    def reduce(self, reduce_op: ReduceOp | str, value: Value, axis: int | tuple[int, ...] | None) -> Value:
        """Combine the values of all replicas into one array, the same on every rank.

        Collective: call it on every rank, in the same order.

        Args:
            reduce_op: SUM, MEAN, MIN, MAX or PROD, as a ReduceOp or its name.
            value: A result of ``run``: a PerReplica, or a nest of them. A plain value belongs to its rank: with
                several ranks each rank's value counts once; in one process with several replicas SUM of anything
                but zeros is refused, since nobody could say how often it should count.
            axis: None combines element by element. An axis, or a tuple of axes, is reduced in each replica first, a
                plain value in each of the rank's replicas; sizes along it may differ between replicas, and MEAN divides
                by the number of all elements.

        Returns:
            A NumPy array, a NumPy number for values without axes (the kind of the input where that is another
            library's);
            for arrays on devices one
            on the device of the first replica, which ``float()`` waits for. It shares no memory with ``value``, and is
            the caller's to change, or read-only where ranks of a node share it; tensors of PyTorch have no gradients.

        Raises:
            RuntimeError: Called in replica context.
            ValueError: Unknown operation, axis out of range, or replicas that differ in shape.
            TypeError: An axis that is no int, tuple or None; None or a string among the values.

        >>> import mpidist
        >>> mpidist.get_strategy().reduce("MEAN", [1, 2, 3, 6], axis=None)
        [np.int64(1), np.int64(2), np.int64(3), np.int64(6)]
        """
        if axis is None:
            reduced = self._extended.reduce_fast(reduce_op, value)
            if reduced is not None:
                return reduced
        with self._extended.shared_errors("reduce()"):
            self._require_cross_replica("reduce()", "use get_replica_context().all_reduce(op, value)")
            op = ReduceOp.of(reduce_op)
            value_checks.check_given(axis, "reduce()", "axis=None to combine replicas element by element, or axis=0")
            value_checks.check_axis(axis)
            leaves, structure = nest.flatten(value), nest.describe(value)
            value_checks.check_returned(leaves)
        if axis is None:
            results = self._extended.reduce_leaves(op, leaves, structure)
        else:
            results = reduce_over_axis(self._extended, op, leaves, axis, structure)
        combined = [
            value_checks.as_result(value_checks.apart_from(*pair)) for pair in zip(results, leaves, strict=True)
        ]
        return nest.pack_like(value, combined)

    def gather(self, value: Value, axis: int) -> Value:
        """Concatenate the values of all replicas along ``axis``, in replica order.

        Every rank gets the result.

        Collective: call it on every rank, in the same order.

        Args:
            value: A PerReplica of arrays of at least one dimension, or a nest of them.
            axis: Where to concatenate; sizes along it may differ, also be 0.

        Raises:
            RuntimeError: Called in replica context.
            ValueError: A scalar, an axis out of range, or replicas that differ in another dimension.
            NotImplementedError: IndexedSlices.
        """
        with self._extended.shared_errors("gather()"):
            self._require_cross_replica("gather()", "use get_replica_context().all_gather(value, axis)")
            value_checks.check_given(axis, "gather()", "axis=0 to concatenate along the first axis")
        leaves = nest.flatten(value)
        results = self._extended.gather_leaves(leaves, axis, nest.describe(value))
        return nest.pack_like(value, map(value_checks.apart_from, results, leaves))

    def experimental_local_results(self, value: Value) -> tuple[Value, ...]:
        """Return the components of this rank, one per local replica.

        A plain value gives a tuple of itself.

        A nest gives a nest for each local replica, also where all in it are plain values.

        >>> import mpidist
        >>> mpidist.get_strategy().experimental_local_results(5)
        (5,)
        """
        return self._extended.local_results(value)

    def unwrap(self, value: Value) -> tuple[Value, ...]:
        """Return the same as :meth:`experimental_local_results` (deprecated name)."""
        return self.experimental_local_results(value)

    def experimental_distribute_dataset(self, dataset: object, options: InputOptions | None = None) -> Any:
        """Deal the batches of ``dataset``, which hold a global batch each, to the replicas.

        Collective: call it on every rank, with the same dataset. How it is divided is told by
        ``dataset.with_options(auto_shard_policy=...)``, see ``AutoShardPolicy``.

        Args:
            dataset: A batched ``mpidist.Dataset``; or a DataLoader of PyTorch, whose ``batch_size`` is that of a global
                batch, and whose tensors stay tensors (docs/input.md).
            options: See ``InputOptions``.
        """
        self._require_cross_replica("experimental_distribute_dataset()", "call it before run()")
        return self._extended.distribute_dataset(dataset, options)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], object], options: InputOptions | None = None
    ) -> Any:
        """Distribute the datasets of ``dataset_fn(InputContext)`` on each rank, batched per replica already.

        Collective: call it on every rank.
        """
        self._require_cross_replica("distribute_datasets_from_function()", "call it before run()")
        return self._extended.distribute_from_function(dataset_fn, options)

    experimental_distribute_datasets_from_function = distribute_datasets_from_function

    def experimental_distribute_values_from_function(self, value_fn: Callable[[ValueContext], object]) -> Any:
        """Return a PerReplica of ``value_fn(ValueContext)`` for each replica of this rank.

        The replica's device is current in ``value_fn``. The default strategy and OneDeviceStrategy return the bare
        value. Nothing is communicated.
        """
        self._require_cross_replica("experimental_distribute_values_from_function()", "call it before run()")
        return self._extended.distribute_values(value_fn)

    def experimental_make_numpy_dataset(self, numpy_input: object, session: object = None) -> Dataset:
        """Return a dataset of the slices of ``numpy_input`` along axis 0 (deprecated).

        It keeps a copy of the arrays.

        Every rank builds it from its own arrays; nothing is communicated. ``Dataset.from_tensor_slices`` does not copy.

        Args:
            numpy_input: Nest of arrays of equal first dimension; a list of arrays is stacked into one.
            session: Ignored.

        >>> import mpidist
        >>> len(mpidist.get_strategy().experimental_make_numpy_dataset([[1, 2], [3, 4], [5, 6]]))
        3
        """
        return Dataset.from_tensor_slices(owned(numpy_input))

    def experimental_assign_to_logical_device(self, tensor: Value, logical_device_id: int) -> Value:
        """Return ``tensor``, after checking the id: a replica has one logical device here."""
        if logical_device_id != 0:
            raise ValueError(f"logical_device_id is {logical_device_id}; expected 0: a replica has 1 logical device")
        return tensor

    def experimental_split_to_logical_devices(self, tensor: Value, partition_dimensions: Sequence[int]) -> Value:
        """Return ``tensor``, after checking the partition: a replica has one logical device here."""
        shape, parts = to_array(tensor).shape, list(partition_dimensions)
        if len(parts) != len(shape):
            raise ValueError(
                f"partition_dimensions {parts} for a tensor of shape {shape}; expected {len(shape)} numbers, one per "
                "axis"
            )
        for axis, (size, count) in enumerate(zip(shape, parts, strict=True)):
            if count < 1 or size % count:
                raise ValueError(f"axis {axis} of size {size} cannot be cut into {count} equal parts")
        if prod(parts) != 1:
            raise ValueError(
                f"partition_dimensions {parts} make {prod(parts)} parts; expected 1, the number of logical devices of "
                "a replica"
            )
        return tensor

    def experimental_replicate_to_logical_devices(self, tensor: Value) -> Value:
        """Return ``tensor``: a replica has one logical device here."""
        return tensor

    def update_config_proto(self, config_proto: Value) -> Value:
        """Return a copy of ``config_proto``: there are no sessions to configure.

        >>> import mpidist
        >>> mpidist.get_strategy().update_config_proto({"a": 1})
        {'a': 1}
        """
        return copy.deepcopy(config_proto)

    def _require_open(self) -> None:
        if self._extended.is_closed:
            raise RuntimeError(f"this {type(self).__name__} can no longer be used: it has been closed")

    def _require_cross_replica(self, method: str, instead: str) -> None:
        self._require_open()
        # Not of ``self``: the default strategy has a second face, that of v1.
        context.require_cross_replica(self._extended.strategy, method, instead)

    def close(self) -> None:
        """Free the resources of the strategy (collective). Closing again does nothing.

        Later calls of ``run``, ``reduce``, ``gather``, ``scope`` and the distribute methods raise RuntimeError, on one
        rank too. Its variables can still be read.
        """
        self._extended.close()
        if self._counts_as_open:
            self._counts_as_open = False
            _open_on_ranks.remove(type(self).__name__)

    def __enter__(self: Self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        elif isinstance(error, Exception):
            # Closing takes all ranks, and this one is on its way out alone.
            self._extended.announce(error, f"the block of {type(self).__name__}")

    def __copy__(self) -> Strategy:
        raise RuntimeError(
            f"{type(self).__name__} cannot be copied with copy.copy(): two strategies would share one state; "
            "use the same object, or build a new one"
        )

    def __deepcopy__(self, memo: dict[int, object]) -> Strategy:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update({k: v for k, v in self.__dict__.items() if k != "_extended"})
        twin._extended = self._extended.copy_for(twin)
        return twin

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"{type(self).__name__} cannot be pickled; build it on each rank")

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.num_replicas_in_sync} replicas in sync>"


@contextmanager
def _scope_on(gpu: Place, strategy: Strategy) -> Iterator[Strategy]:
    with context.scope(strategy) as entered, gpu.current():
        yield entered


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

    def call(self, fn: Callable[..., Result], args: Args, kwargs: Kwargs) -> Result:
        """Call ``fn`` in this context, with this replica's part of distributed arguments. Extension.

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
        """Whether this is replica 0: for work of one replica alone, such as printing. Extension."""
        return self._id == 0

    def merge_call(
        self, merge_fn: Callable[..., Result], args: Sequence[object] = (), kwargs: dict[str, Any] | None = None
    ) -> Result:
        """Wait for the other local replicas, then run ``merge_fn`` once for all of them.

        Collective over the replicas of a rank: each must make the same calls. ``merge_fn`` runs once per rank in
        cross-replica context, as ``merge_fn(strategy, *args, **kwargs)`` with the arguments of the replicas
        grouped into PerReplica values; all ranks must communicate in the same way in it.

        Args:
            merge_fn: The function; that of the first replica is called.
            args: Its arguments, from this replica.
            kwargs: Its keyword arguments, from this replica.

        Returns:
            This replica's part of the result of ``merge_fn``.

        Raises:
            RuntimeError: Called elsewhere than in this replica, or another replica returned without calling.
        """
        require_replica(self, "merge_call()")
        # Replicas that meet in functions with other code have lost one another.
        call = ("merge_call", getattr(merge_fn, "__code__", merge_fn))
        return self.meet(call, merge_fn, tuple(args), kwargs or {})

    def meet(self, call: tuple[object, ...], merge_fn: Callable[..., Result], args: Args, kwargs: Kwargs) -> Result:
        """Run a merge function as ``merge_call`` does; ``call`` must be equal on all local replicas. Extension."""
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
        out: object = None,
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
            The structure and kinds of ``value``. Integer sums and products that are too large for their dtype wrap
            around as in NumPy.

        Raises:
            RuntimeError: Called elsewhere than in this replica.
            ValueError: Unknown operation, or replicas that differ in shape, dtype or structure.
            TypeError: Something that cannot be reduced.
            MismatchError: Ranks that differ.
        """
        require_replica(self, "all_reduce()")
        op = reduce_op if type(reduce_op) is ReduceOp else ReduceOp.of(reduce_op)
        if options is not None:
            check_communication_options(options)
        reduced: Value = self._all_reduce(op, *_read_here(value), options, out)
        return reduced

    def sums_of(self, like: dict[str, object]) -> Callable[[list[Array]], list[Array]] | None:
        """Return a function that sums the NumPy arrays of dicts like this one (collective). Extension.

        It checks nothing, and may return its arguments. None if replicas need more than a collective of the ranks.
        """
        return list if self.num_replicas_in_sync == 1 else None

    def _all_reduce(
        self, op: ReduceOp, value: object, leaves: Sequence[object], options: CallOptions, out: object
    ) -> Any:
        """Reduce a value of these leaves, after the checks of context and options."""
        targets = self._check_values(value, leaves, op, out)
        if self.num_replicas_in_sync == 1:
            if targets is None:
                return self.own_sum(value)
            value_checks.copy_leaves(targets, leaves)
            return out

        def merged(strategy: Strategy, values: object, outs: object) -> object:
            pairs, note = self._contributions(op, values, outs)
            results = strategy.extended.reduce(op, pairs, strategy.num_replicas_in_sync, options, note)
            return nest.pack_like(values, results)

        reduced = self.meet(("all_reduce", op, options), merged, (value, out), {})
        return reduced if out is None else value_checks.copy_into(out, reduced)

    def own_sum(self, value: object) -> object:
        """Return the sum over one replica, a copy of ``value``. Extension."""
        return nest.map_structure(value_checks.copied, value)

    def _check_values(self, value: object, leaves: Sequence[object], op: ReduceOp, out: object) -> list[Array] | None:
        """Return the arrays of ``out``, if any."""
        with self._strategy.extended.shared_errors(f"{op.name} of its values"):
            value_checks.check_can_reduce(leaves, op)
            if out is None:
                return None
            return value_checks.checked_out(value, leaves, out, op, self.num_replicas_in_sync)

    def _contributions(self, op: ReduceOp, values: object, outs: object) -> tuple[list[tuple[PerReplica, object]], str]:
        """Return the values of all local replicas with their destinations, and their description."""
        extended = self._strategy.extended
        leaves = [
            leaf if isinstance(leaf, PerReplica) else PerReplica((leaf,), extended.local_replica_ids)
            for leaf in nest.flatten(values)
        ]
        with extended.shared_errors(f"{op.name} of its values"):
            value_checks.check_results_apart(outs)
            value_checks.check_gradients_apart(leaves)
        # Results go where the values are: an array of the host stays there, also under a strategy of devices.
        return [(leaf, leaf) for leaf in leaves], "" if isinstance(values, PerReplica) else nest.describe(values)

    def all_reduce_async(
        self,
        reduce_op: ReduceOp | str,
        value: object,
        options: CommunicationOptions | None = None,
        *,
        out: object = None,
    ) -> Work | PartOfWork | FinishedWork:
        """Start an :meth:`all_reduce` and return a handle whose ``wait()`` gives the result. Extension.

        Collective as ``all_reduce``; ``value`` must not be changed before ``wait()`` has returned, and ``out`` is
        written then.
        """
        require_replica(self, "all_reduce_async()")
        op = ReduceOp.of(reduce_op)
        check_communication_options(options)
        given, leaves = _read_here(value)
        self._check_values(given, leaves, op, out)
        extended = self._strategy.extended

        def merged(strategy: Strategy, values: object, outs: object) -> Any:
            pairs, note = self._contributions(op, values, outs)
            work = strategy.extended.reduce_async(op, pairs, strategy.num_replicas_in_sync, options, note)
            nested = PartOfWork(work, lambda results: nest.pack_like(values, results))
            places = [place_at(device) for device in extended.worker_devices]
            return PerReplica(replica_works(nested, places), extended.local_replica_ids)

        work: FinishedWork | PartOfWork
        if self.num_replicas_in_sync == 1:
            work = finished_work(self.own_sum(given), extended.first_gpu)
        else:
            work = self.meet(("all_reduce_async", op, options), merged, (given, out), {})
        return work if out is None else PartOfWork(work, lambda results: value_checks.copy_into(out, results))

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
            value_checks.check_given(axis, "all_gather()", "axis=0 to concatenate along the first axis")
            for leaf in leaves:
                value_checks.check_can_gather(leaf, axis, "all_gather()")

        def merged(strategy: Strategy, values: Value) -> Value:
            leaves = nest.flatten(values)
            gathered = strategy.extended.gather_leaves(leaves, axis, nest.describe(values), options)
            return nest.pack_like(values, map(place_values, gathered, map(destination_devices, leaves)))

        return self.meet(("all_gather along axis", axis, options), merged, (given,), {})

    def _update(
        self,
        var: Variable,
        fn: Callable[..., object],
        args: Sequence[object] = (),
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


# A missing axis is an error of type checkers, and at run time an error that says which axis to pass.
Strategy.reduce.__defaults__ = Strategy.gather.__defaults__ = (value_checks.NO_AXIS,)
ReplicaContext.all_gather.__defaults__ = (value_checks.NO_AXIS, None)


def _read_here(value: Value) -> tuple[Value, list[object]]:
    """Return ``value`` with variables and PerReplica values read in this replica, and its leaves."""
    if type(value) is np.ndarray:
        return value, [value]
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
