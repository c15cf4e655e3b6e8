"""Strategy and ReplicaContext: the methods that programs call, the same for every kind of strategy."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NoReturn, TypeVar, cast

import numpy as np

from mpidist.arrays.convert import to_array
from mpidist.arrays.dtypes import Array
from mpidist.cluster_resolver import ClusterResolver
from mpidist.collectives import FinishedWork, PartOfWork, Work
from mpidist.collectives.reading import restore
from mpidist.core import context, nest
from mpidist.core.context import Args, Frame, Kwargs, current_frame, pop, push, require_replica
from mpidist.core.options import CallOptions, CommunicationOptions, ReduceOp, RunOptions, check_communication_options
from mpidist.core.phases import counts
from mpidist.cross_device_ops import CrossDeviceOps
from mpidist.cross_device_ops.local_values import destination_devices, place
from mpidist.input import Dataset, InputContext, InputOptions, ValueContext, whole_elements
from mpidist.input.elements import owned
from mpidist.strategies import value_checks
from mpidist.strategies.axis_reduction import reduce_over_axis
from mpidist.strategies.replica_threads import ReplicaWork, run_of_this_thread
from mpidist.strategies.strategy_extended import StrategyExtended
from mpidist.values import IndexedSlices, PerReplica, ReplicaValues, Variable, regroup, select_replica
from mpidist.values.component import Assignable
from mpidist.values.distributed import here
from mpidist.values.placement import HOST, Place, place_at

Result = TypeVar("Result")
Value = TypeVar("Value")
Self = TypeVar("Self")

# Types of the open strategies of several ranks. Not the strategies themselves: garbage is collected at another time on
# each rank, and all ranks must find the same here.
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
    """Distribution of a computation over replicas (tf.distribute.Strategy).

    Args:
        extended: Implementation of the strategy. Programs create a subclass such as ``MultiWorkerMirroredStrategy``.
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
        """The cluster resolver, or None."""
        return self._extended.cluster_resolver

    def scope(self) -> AbstractContextManager[Strategy]:
        """Enter cross-replica context with this strategy as the current one. Variables created inside are distributed.

        You may nest scopes of one strategy. Entering a scope communicates nothing. The first of this rank's GPUs is
        current inside, so leave the scope in the thread that entered it.

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

        Several local replicas run in threads of their own, the same threads in every run. Enter settings of a thread,
        such as ``torch.no_grad()``, inside ``fn``.

        Args:
            fn: Function to call. All replicas must communicate in the same way.
            args: Arguments, a list or tuple. Distributed values in them, at any depth, become this replica's component.
            kwargs: Keyword arguments, likewise.
            options: Accepted and ignored, as in TensorFlow outside TPUs.

        Returns:
            The result of a single local replica, or the results grouped into PerReplica values. They are annotated with
                the type of a single result, which ``reduce`` and ``experimental_local_results`` restore.

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
        counts.add_run()
        return self._extended.run(fn, tuple(args), kwargs or {})

    def reduce(self, reduce_op: ReduceOp | str, value: Value, axis: int | tuple[int, ...] | None) -> Value:
        """Combine the values of all replicas into one array, the same on every rank.

        Collective: call it on every rank, in the same order.

        Args:
            reduce_op: SUM, MEAN, MIN, MAX or PROD, as a ReduceOp or its name.
            value: Result of ``run``: a PerReplica, or a nest of them. A plain value of several ranks counts once per
                rank. SUM of a plain value, other than zeros, over several replicas of one process raises ValueError.
            axis: None combines element by element. An axis, or a tuple of axes, is reduced in each replica first. Sizes
                along it may differ between replicas, and MEAN divides by the number of all elements.

        Returns:
            A NumPy array, a NumPy number for values without axes, or an array of the input's library. Results of
            arrays on devices are on the device of the first replica, and ``float()`` waits for them. The result shares
            no memory with ``value``. You may modify it, unless the ranks of a node share it, which makes it read-only.
            Tensors of PyTorch have no gradients.

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
            leaves, structure = nest.flatten(value), nest.describe(value)
            value_checks.check_returned(leaves, axis)
        if axis is None:
            results = self._extended.reduce_leaves(op, leaves, structure)
        else:
            results = reduce_over_axis(self._extended, op, leaves, axis, structure)
        return nest.pack_like(value, map(value_checks.as_result, results))

    def gather(self, value: Value, axis: int) -> Value:
        """Concatenate the values of all replicas along ``axis``, in replica order. Every rank gets the result.

        Collective: call it on every rank, in the same order.

        Args:
            value: A PerReplica of arrays of at least one dimension, or a nest of them.
            axis: Axis to concatenate along. Sizes along it may differ, and may be 0.

        Raises:
            RuntimeError: Called in replica context.
            ValueError: A scalar, an axis out of range, or replicas that differ in another dimension.
            NotImplementedError: IndexedSlices.
        """
        with self._extended.shared_errors("gather()"):
            self._require_cross_replica("gather()", "use get_replica_context().all_gather(value, axis)")
            value_checks.check_axis_given(axis, "gather()", "axis=0 to concatenate along the first axis")
        return nest.pack_like(value, self._extended.gather_leaves(nest.flatten(value), axis, nest.describe(value)))

    def experimental_local_results(self, value: Value) -> tuple[Value, ...]:
        """Return the components of this rank, one per local replica.

        A nest becomes a nest for each local replica. Other plain values become a tuple of one.

        >>> import mpidist
        >>> mpidist.get_strategy().experimental_local_results(5)
        (5,)
        """
        if isinstance(value, (ReplicaValues, Variable)):
            return tuple(value.values)
        if not nest.is_nest(value):
            return (value,)
        return tuple(select_replica(i, value) for i in range(len(self._extended.local_replica_ids)))

    def unwrap(self, value: Value) -> tuple[Value, ...]:
        """Return the same as :meth:`experimental_local_results` (deprecated name)."""
        return self.experimental_local_results(value)

    def experimental_distribute_dataset(self, dataset: object, options: InputOptions | None = None) -> Any:
        """Distribute the batches of ``dataset``, global batches, over the replicas.

        Collective: call it on every rank, with the same dataset. ``dataset.with_options(auto_shard_policy=...)``
        selects how it is divided, see ``AutoShardPolicy``.

        Args:
            dataset: A batched ``mpidist.Dataset``, or a DataLoader of PyTorch. Its ``batch_size`` is that of a global
                batch, and its tensors stay tensors (docs/input.md).
            options: See ``InputOptions``.
        """
        self._require_cross_replica("experimental_distribute_dataset()", "call it before run()")
        return self._extended.distribute_dataset(dataset, options)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], object], options: InputOptions | None = None
    ) -> Any:
        """Distribute the dataset that ``dataset_fn(InputContext)`` returns on each rank, batched per replica.

        Collective: call it on every rank.
        """
        self._require_cross_replica("distribute_datasets_from_function()", "call it before run()")
        return self._extended.distribute_from_function(dataset_fn, options)

    experimental_distribute_datasets_from_function = distribute_datasets_from_function

    def experimental_distribute_values_from_function(self, value_fn: Callable[[ValueContext], object]) -> Any:
        """Return a PerReplica of ``value_fn(ValueContext)`` for each replica of this rank.

        The replica's device is current in ``value_fn``. The default strategy and OneDeviceStrategy return the value
        itself. Nothing is communicated.
        """
        self._require_cross_replica("experimental_distribute_values_from_function()", "call it before run()")
        return self._extended.distribute_values(value_fn)

    def experimental_make_numpy_dataset(self, numpy_input: object, session: object = None) -> Dataset:
        """Return a dataset of the slices of a copy of ``numpy_input`` along axis 0 (deprecated).

        Every rank uses its own arrays. Nothing is communicated. ``Dataset.from_tensor_slices`` does not copy.

        Args:
            numpy_input: Nest of arrays of equal first dimension. A list of arrays is stacked into one.
            session: Ignored.

        >>> import mpidist
        >>> len(mpidist.get_strategy().experimental_make_numpy_dataset([[1, 2], [3, 4], [5, 6]]))
        3
        """
        return Dataset.from_tensor_slices(owned(numpy_input))

    def experimental_assign_to_logical_device(self, tensor: Value, logical_device_id: int) -> Value:
        """Return ``tensor`` after a check of the id: a replica has one logical device."""
        if logical_device_id != 0:
            raise ValueError(f"logical_device_id is {logical_device_id}; expected 0: a replica has 1 logical device")
        return tensor

    def experimental_split_to_logical_devices(self, tensor: Value, partition_dimensions: Sequence[int]) -> Value:
        """Return ``tensor`` after a check of the partition: a replica has one logical device."""
        shape, parts = to_array(tensor).shape, list(partition_dimensions)
        if parts != [1] * len(shape):
            raise ValueError(
                f"partition_dimensions is {parts} for a tensor of shape {shape}. Pass {[1] * len(shape)}, one number "
                "per axis. A replica has one logical device, and the product of the numbers must be 1"
            )
        return tensor

    def experimental_replicate_to_logical_devices(self, tensor: Value) -> Value:
        """Return ``tensor``: a replica has one logical device."""
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
        # Not ``self``: the v1 form of the default strategy is another object.
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
            # Closing is collective, and only this rank has left the block.
            self._extended.announce(error, f"the block of {type(self).__name__}")

    def __copy__(self) -> Strategy:
        raise RuntimeError(
            f"{type(self).__name__} cannot be copied with copy.copy(): two strategies would share one state; "
            "use the same object, or build a new one"
        )

    def __deepcopy__(self, memo: dict[int, object]) -> Strategy:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update({**self.__dict__, "_extended": self._extended.copy_for(twin)})
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
        lone_ops: Reduction class, if every rank has one replica and the communicator alone forms the sums. Extension.
    """

    def __init__(
        self,
        strategy: Strategy,
        replica_id_in_sync_group: int,
        local_replica_id: int = 0,
        *,
        lone_ops: CrossDeviceOps | None = None,
    ) -> None:
        self._strategy = strategy
        self._id = replica_id_in_sync_group
        self._local_id = local_replica_id
        self._lone_ops, self._ranks = lone_ops, None if lone_ops is None else lone_ops.ranks
        self._options = None if lone_ops is None else lone_ops.with_algorithm(None)
        self._fast_all_reduce = None
        if self._ranks is not None and self._options is None:
            self._fast_all_reduce = self._ranks.fast.all_reduce
        self.frame = Frame(strategy, self)

    def call(self, fn: Callable[..., Result], args: Args, kwargs: Kwargs) -> Result:
        """Call ``fn`` in this context and thread, with this replica's part of distributed arguments. Extension."""
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
        grouped into PerReplica values. All ranks must communicate in the same way in it.

        Args:
            merge_fn: Function to call. If replicas pass different functions, the one of the first replica is called.
            args: Its arguments, from this replica.
            kwargs: Its keyword arguments, from this replica.

        Returns:
            This replica's part of the result of ``merge_fn``.

        Raises:
            RuntimeError: Called elsewhere than in this replica, or another replica returned without calling.
        """
        require_replica(self, "merge_call()")
        # Replicas in functions with other code have made different calls.
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
        """Reduce over all replicas. Every replica gets the result.

        Collective: call it on every replica, in the same order, with the same structure, shapes and dtypes. A
        nest is reduced in one call, packed into few messages. The gradient of a SUM is the all-reduced SUM of the
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
        if self._fast_all_reduce is not None and options is None and current_frame() is self.frame:
            result: Value | None = self._fast_all_reduce(reduce_op, value, out, None)
            if result is not None:
                return result if out is None else cast(Value, out)
        reduced: Value = self._reduced("all_reduce", reduce_op, value, options, out)
        return reduced

    def sums_of(self, like: dict[str, object]) -> Callable[[list[Array]], list[Array]] | None:
        """Return a function that sums the NumPy arrays of dicts like this one (collective). Extension.

        It checks nothing, and may return its arguments. None if replicas need more than a collective of the ranks.
        """
        ranks, options, note = self._ranks, self._options, nest.describe(like)
        if ranks is None:
            return list if self.num_replicas_in_sync == 1 else None
        return lambda arrays: ranks.reduce_arrays(ReduceOp.SUM, arrays, ranks.size, options=options, note=note)

    def all_reduce_async(
        self,
        reduce_op: ReduceOp | str,
        value: object,
        options: CommunicationOptions | None = None,
        *,
        out: object = None,
    ) -> Work | PartOfWork | FinishedWork:
        """Start an :meth:`all_reduce` and return a handle whose ``wait()`` returns the result. Extension.

        Collective as ``all_reduce``. Do not change ``value`` before ``wait()`` has returned. ``out`` is written by
        then. If a rank has several GPUs, all of its replicas must call ``wait()``.
        """
        work: Work | PartOfWork | FinishedWork = self._reduced("all_reduce_async", reduce_op, value, options, out)
        return work

    def _reduced(
        self, method: str, reduce_op: ReduceOp | str, value: Any, options: CommunicationOptions | None, out: object
    ) -> Any:
        """Return the result of ``all_reduce``, or the handle of ``all_reduce_async``."""
        require_replica(self, f"{method}()")
        starts, op = method == "all_reduce_async", ReduceOp.of(reduce_op)
        check_communication_options(options)
        value, leaves = _read_here(value)
        extended = self._strategy.extended
        if self._lone_ops is not None and not any([isinstance(leaf, IndexedSlices) for leaf in leaves]):
            return self._reduced_by_ranks(starts, op, value, leaves, options, out)
        with extended.shared_errors(f"{op.name} of its values"):
            value_checks.check_can_reduce(leaves, op)
            if out is not None:
                value_checks.check_out(value, leaves, out, op, self.num_replicas_in_sync)

        def merged(strategy: Strategy, values: object, outs: object) -> object:
            with extended.shared_errors(f"{op.name} of its values"):
                value_checks.check_results_apart(outs)
            ids = extended.local_replica_ids
            parts = [
                leaf if isinstance(leaf, PerReplica) else PerReplica((leaf,), ids) for leaf in nest.flatten(values)
            ]
            # Results are placed like the values: an array of the host stays there, also under a strategy of devices.
            pairs = [(part, part) for part in parts]
            note = "" if isinstance(values, PerReplica) else nest.describe(values)
            if not starts:
                results = extended.reduce(op, pairs, strategy.num_replicas_in_sync, options, note)
                return nest.pack_like(values, results)
            work = extended.reduce_async(op, pairs, strategy.num_replicas_in_sync, options, note)
            nested = PartOfWork(work, lambda results: nest.pack_like(values, results))
            places = map(place_at, extended.worker_devices)
            return PerReplica([ReplicaWork(nested, i, place) for i, place in enumerate(places)], ids)

        reduced: Any
        if self.num_replicas_in_sync > 1:
            reduced = self.meet((method, op, options), merged, (value, out), {})
        else:
            # Library code may differentiate, or trace, values under the default strategy.
            is_kept = out is not None or context.is_default(self._strategy)
            reduced = value if is_kept else nest.map_structure(value_checks.copied, value)
            if starts:
                reduced = ReplicaWork(FinishedWork(reduced), 0, extended.first_gpu or HOST)
        if out is None:
            return reduced
        if starts:
            return PartOfWork(reduced, lambda results: value_checks.copy_into(out, results))
        return value_checks.copy_into(out, reduced)

    def _reduced_by_ranks(
        self, starts: bool, op: ReduceOp, value: object, leaves: Sequence[object], options: CallOptions, out: object
    ) -> Any:
        """Return what :meth:`_reduced` returns, without further steps than the communicator's."""
        ranks, own = self._ranks, self._options
        assert self._lone_ops is not None
        assert ranks is not None
        if options is not None:
            own = self._lone_ops.with_algorithm(options)
        try:
            arrays = [to_array(leaf) for leaf in leaves]
            outs = None if out is None else value_checks.outputs_for(value, out)
        except (TypeError, ValueError) as error:
            ranks.announce(error, f"{op.name} of its values")
            raise
        is_leaf = len(leaves) == 1 and leaves[0] is value
        note = "" if is_leaf else nest.describe(value)

        def finished(results: Sequence[Any]) -> object:
            if out is not None:
                return out
            if any(array is not leaf for array, leaf in zip(arrays, leaves, strict=True)):
                results = list(map(restore, leaves, results))
            return results[0] if is_leaf else nest.pack_like(value, results)

        if starts:
            return ranks.reduce_arrays_async(op, arrays, ranks.size, options=own, out=outs, note=note).then(finished)
        return finished(ranks.reduce_arrays(op, arrays, ranks.size, options=own, out=outs, note=note))

    def all_gather(self, value: Value, axis: int, options: CommunicationOptions | None = None) -> Value:
        """Concatenate over all replicas along ``axis``, in replica order. Every replica gets the result.

        Collective as ``all_reduce``. Sizes along ``axis`` may differ between replicas, and may be 0.

        Args:
            value: Array of at least one dimension, or a nest of them.
            axis: Axis to concatenate along; may be negative.
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
            value_checks.check_axis_given(axis, "all_gather()", "axis=0 to concatenate along the first axis")
            for leaf in leaves:
                value_checks.check_can_gather(leaf, axis, "all_gather()")

        def merged(strategy: Strategy, values: Value) -> Value:
            leaves = nest.flatten(values)
            gathered = strategy.extended.gather_leaves(leaves, axis, nest.describe(values), options)
            return nest.pack_like(values, map(place, gathered, map(destination_devices, leaves)))

        return self.meet(("all_gather along axis", axis, options), merged, (given,), {})

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
