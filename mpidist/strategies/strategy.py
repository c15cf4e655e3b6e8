"""Strategy: the methods that users call, the same for every kind of strategy."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from mpidist.cluster_resolver import ClusterResolver
from mpidist.core import context, nest
from mpidist.core.enums import ReduceOp
from mpidist.core.options import RunOptions
from mpidist.input import Dataset, InputContext, InputOptions, ValueContext, whole_elements
from mpidist.input.elements import owned
from mpidist.strategies import logical_devices
from mpidist.strategies.leaves import apart_from, as_result, check_axis, check_returned, reduce_over_axis
from mpidist.values.placement import Place

if TYPE_CHECKING:
    from mpidist.strategies.extended import StrategyExtended

# What a replica function returns, and what goes into a combination of replicas and comes out of it.
Result = TypeVar("Result")
Value = TypeVar("Value")


class Strategy:
    """How computation is spread over replicas (tf.distribute.Strategy).

    Args:
        extended: The object that does it; users build a subclass such as ``MultiWorkerMirroredStrategy``.
    """

    def __init__(self, extended: StrategyExtended) -> None:
        self._extended = extended

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

    def scope(self) -> AbstractContextManager[Any]:
        """Make the strategy current and enter cross-replica context; variables created inside are distributed.

        Entering it again inside is allowed; it communicates nothing. The first of this rank's GPUs is current inside,
        so the thread that entered the scope has to leave it.

        Raises:
            RuntimeError: Inside another strategy's scope, or inside ``run``.

        >>> import mpidist
        >>> strategy = mpidist.OneDeviceStrategy("cpu:0")
        >>> with strategy.scope():
        ...     mpidist.get_strategy() is strategy
        True
        """
        gpu = self._extended.first_gpu
        return context.scope(self) if gpu is None else _scope_on(gpu, self)

    def run(
        self,
        fn: Callable[..., Result],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Result:
        """Call ``fn`` once for each replica of this rank, in replica context, with the replica's device current.

        Args:
            fn: The function. What it does across replicas must be the same on all of them.
            args: Its arguments, a list or tuple; distributed values in them, at any depth, become this replica's
                component, everything else is passed as it is.
            kwargs: Its keyword arguments, likewise.
            options: Accepted and ignored, as in TensorFlow outside TPUs.

        With several local replicas each runs in a thread of its own, the same in every run: settings that belong to a
        thread, such as ``torch.no_grad()``, are entered inside ``fn``.

        Returns:
            What ``fn`` returned: bare with one local replica, otherwise grouped into PerReplica values. Its type is
            that of the bare value, which it has again once ``reduce`` or ``experimental_local_results`` took it.

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
                raise ValueError(f"args is {args!r} of type {type(args).__name__}; expected a tuple, such as args=(x,)")
            if options is not None and not isinstance(options, RunOptions):
                raise TypeError(f"options is {options!r}; expected None or mpidist.RunOptions()")
            self._require_cross_replica("run()", "one replica cannot start replicas: call the function itself")
        except Exception as error:
            self._extended.announce(error, "run()")
            raise
        if whole_elements.watch.pending and self._extended.communicator is not None:
            whole_elements.watch.look_at((args, kwargs), self._extended.input_workers())
        return self._extended.run(fn, tuple(args), kwargs or {})

    def reduce(self, reduce_op: ReduceOp | str, value: Value, axis: int | tuple[int, ...] | None) -> Value:
        """Combine the values of all replicas into one array, the same on every rank.

        Collective: call it on every rank, in the same order.

        Args:
            reduce_op: SUM, MEAN, MIN, MAX or PROD, as a ReduceOp or its name.
            value: What ``run`` returned: a PerReplica, or a nest of them. A plain value belongs to its rank: with
                several ranks each rank's value counts once; in one process with several replicas SUM of anything
                but zeros is refused, since nobody could say how often it should count.
            axis: None combines element by element. An axis, or a tuple of axes, is reduced in each replica first, a
                plain value in each of the rank's replicas; sizes along it may differ between replicas, and MEAN divides
                by the number of all elements.

        Returns:
            A NumPy array, a NumPy number for what has no axes (the kind of the input where that is another library's);
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
        with self._extended.shared_errors("reduce()"):
            self._require_cross_replica("reduce()", "use get_replica_context().all_reduce(op, value)")
            op = ReduceOp.of(reduce_op)
            check_axis(axis)
            leaves, structure = nest.flatten(value), nest.describe(value)
            check_returned(leaves)
        if axis is None:
            results = self._extended.reduce_leaves(op, leaves, structure)
        else:
            results = reduce_over_axis(self._extended, op, leaves, axis, structure)
        combined = [as_result(apart_from(*pair)) for pair in zip(results, leaves, strict=True)]
        reduced: Value = nest.pack_like(value, combined)
        return reduced

    def gather(self, value: Value, axis: int) -> Value:
        """Concatenate the values of all replicas along ``axis``, in replica order; the same on every rank.

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
        leaves = nest.flatten(value)
        results = self._extended.gather_leaves(leaves, axis, nest.describe(value))
        gathered: Value = nest.pack_like(value, map(apart_from, results, leaves))
        return gathered

    def experimental_local_results(self, value: Value) -> tuple[Value, ...]:
        """Return the components of this rank, one per local replica; a plain value gives a tuple of itself.

        A nest gives a nest for each local replica, also where all in it are plain values.

        >>> import mpidist
        >>> mpidist.get_strategy().experimental_local_results(5)
        (5,)
        """
        return self._extended.local_results(value)

    def unwrap(self, value: Value) -> tuple[Value, ...]:
        """Return the same as :meth:`experimental_local_results` (deprecated name)."""
        return self.experimental_local_results(value)

    def experimental_distribute_dataset(self, dataset: Any, options: InputOptions | None = None) -> Any:
        """Deal the batches of ``dataset``, which hold a global batch each, to the replicas.

        Collective: call it on every rank, with the same dataset. How it is divided is told by
        ``dataset.with_options(auto_shard_policy=...)``, see ``AutoShardPolicy``.

        Args:
            dataset: A batched ``mpidist.Dataset``.
            options: See ``InputOptions``.
        """
        self._require_cross_replica("experimental_distribute_dataset()", "call it before run()")
        return self._extended.distribute_dataset(dataset, options)

    def distribute_datasets_from_function(
        self, dataset_fn: Callable[[InputContext], Any], options: InputOptions | None = None
    ) -> Any:
        """Distribute what ``dataset_fn(InputContext)`` returns on each rank, batched per replica already.

        Collective: call it on every rank.
        """
        self._require_cross_replica("distribute_datasets_from_function()", "call it before run()")
        return self._extended.distribute_from_function(dataset_fn, options)

    experimental_distribute_datasets_from_function = distribute_datasets_from_function

    def experimental_distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Return a PerReplica of what ``value_fn(ValueContext)`` gives for each replica of this rank.

        The replica's device is current in ``value_fn``. The default strategy and OneDeviceStrategy return the bare
        value. Nothing is communicated.
        """
        self._require_cross_replica("experimental_distribute_values_from_function()", "call it before run()")
        return self._extended.distribute_values(value_fn)

    def experimental_make_numpy_dataset(self, numpy_input: Any, session: Any = None) -> Dataset:
        """Return a dataset of the slices of ``numpy_input`` along axis 0, of which it keeps a copy (deprecated).

        Every rank builds it from its own arrays; nothing is communicated. ``Dataset.from_tensor_slices`` does not copy.

        Args:
            numpy_input: Nest of arrays of equal first dimension; a list of arrays is stacked into one.
            session: Ignored.

        >>> import mpidist
        >>> len(mpidist.get_strategy().experimental_make_numpy_dataset([[1, 2], [3, 4], [5, 6]]))
        3
        """
        del session
        return Dataset.from_tensor_slices(owned(numpy_input))

    def experimental_assign_to_logical_device(self, tensor: Any, logical_device_id: int) -> Any:
        """Return ``tensor``, after checking the id: a replica has one logical device here."""
        return logical_devices.assign(tensor, logical_device_id)

    def experimental_split_to_logical_devices(self, tensor: Any, partition_dimensions: Sequence[int]) -> Any:
        """Return ``tensor``, after checking the partition: a replica has one logical device here."""
        return logical_devices.split(tensor, partition_dimensions)

    def experimental_replicate_to_logical_devices(self, tensor: Any) -> Any:
        """Return ``tensor``: a replica has one logical device here."""
        return tensor

    def update_config_proto(self, config_proto: Any) -> Any:
        """Return a copy of ``config_proto``: there are no sessions to configure.

        >>> import mpidist
        >>> mpidist.get_strategy().update_config_proto({"a": 1})
        {'a': 1}
        """
        return copy.deepcopy(config_proto)

    def _require_cross_replica(self, method: str, instead: str) -> None:
        # Not of ``self``: the default strategy has a second face, that of v1.
        context.require_cross_replica(self._extended.strategy, method, instead)

    def close(self) -> None:
        """Free what the strategy holds (collective). Closing again does nothing."""
        self._extended.close()

    def __enter__(self) -> Any:
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

    def __deepcopy__(self, memo: dict[int, Any]) -> Strategy:
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update({k: v for k, v in self.__dict__.items() if k != "_extended"})
        twin._extended = self._extended.copy_for(twin)
        return twin

    def __reduce__(self) -> Any:
        raise TypeError(f"{type(self).__name__} cannot be pickled; build it on each rank")

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.num_replicas_in_sync} replicas in sync>"


@contextmanager
def _scope_on(gpu: Place, strategy: Strategy) -> Iterator[Any]:
    with context.scope(strategy) as entered, gpu.current():
        yield entered
