"""The strategies as ``tf.compat.v1`` has them: ``reduce`` without an axis, iterators, datasets of NumPy arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpidist.core import context
from mpidist.core.enums import ReduceOp
from mpidist.input import Dataset, InputContext, InputIterator, InputReplicationMode
from mpidist.input.input_iterator import check_divisible, dataset_fn_of
from mpidist.strategies.central_storage import CentralStorageStrategy
from mpidist.strategies.mirrored import MirroredStrategy
from mpidist.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy
from mpidist.strategies.one_device import OneDeviceStrategy
from mpidist.strategies.strategy import Strategy


class StrategyV1(Strategy):
    """What the v1 forms add to a strategy."""

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: int | tuple[int, ...] | None = None) -> Any:
        """Do what ``Strategy.reduce`` does; ``axis`` may be left out (collective)."""
        return super().reduce(reduce_op, value, axis)

    def experimental_make_numpy_dataset(self, numpy_input: Any, session: Any = None) -> Dataset:
        """Return a dataset of the slices of ``numpy_input`` along axis 0.

        Every rank builds it from its own arrays; nothing is communicated.

        Args:
            numpy_input: Nest of arrays of equal first dimension; a list of arrays is stacked into one.
            session: Ignored.

        >>> strategy = OneDeviceStrategyV1("cpu:0")
        >>> len(strategy.experimental_make_numpy_dataset([[1, 2], [3, 4], [5, 6]]))
        3
        """
        del session
        return Dataset.from_tensor_slices(numpy_input)

    def make_dataset_iterator(self, dataset: Dataset) -> InputIterator:
        """Return an iterator over ``dataset``, divided as ``experimental_distribute_dataset`` does (collective).

        Args:
            dataset: Batched with the global batch size, which all replicas must be able to share equally.

        Raises:
            ValueError: The batch size is no multiple of the number of replicas.

        >>> strategy = OneDeviceStrategyV1("cpu:0")
        >>> iterator = strategy.make_dataset_iterator(Dataset.range(4).batch(2))
        >>> iterator.initialize(), iterator.get_next(), iterator.get_next()
        ([], array([0, 1]), array([2, 3]))
        """
        context.require_cross_replica(self, "make_dataset_iterator()", "call it before run()")
        check_divisible(dataset, self.num_replicas_in_sync)
        return InputIterator(self._extended._experimental_distribute_dataset(dataset, None))

    def make_input_fn_iterator(
        self,
        input_fn: Callable[[InputContext], Any],
        replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER,
    ) -> InputIterator:
        """Return an iterator over what ``input_fn`` makes on each rank (collective).

        Args:
            input_fn: Called once on each rank with an InputContext. Returns a Dataset, batched per replica, of which
                the local replicas take the next batches in turn; or a function without arguments, which is called for
                each local replica in each step, without end.
            replication_mode: PER_WORKER; nothing else is taken.

        Raises:
            ValueError: Another replication mode, or ``input_fn`` returned something else.
        """
        context.require_cross_replica(self, "make_input_fn_iterator()", "call it before run()")
        dataset_fn = dataset_fn_of(input_fn, replication_mode)
        return InputIterator(self._extended._distribute_datasets_from_function(dataset_fn, None))

    def experimental_run(self, fn: Callable[..., Any], input_iterator: InputIterator | None = None) -> Any:
        """Do what ``run`` does, with the next element of an iterator as the argument of ``fn``.

        Collective where the iterator's ``get_next`` is: call it on every rank.

        Args:
            fn: The function; without arguments where there is no iterator.
            input_iterator: What :meth:`make_dataset_iterator` or :meth:`make_input_fn_iterator` returned.

        Raises:
            OutOfRangeError: The iterator has no element left.

        >>> strategy = OneDeviceStrategyV1("cpu:0")
        >>> iterator = strategy.make_dataset_iterator(Dataset.range(4).batch(2))
        >>> strategy.experimental_run(lambda batch: batch * 10, iterator)
        array([ 0, 10])
        """
        with self.scope():
            return self.run(fn, args=() if input_iterator is None else (input_iterator.get_next(),))


class OneDeviceStrategyV1(StrategyV1, OneDeviceStrategy):
    """OneDeviceStrategy in its v1 form."""


class MirroredStrategyV1(StrategyV1, MirroredStrategy):
    """MirroredStrategy in its v1 form."""


class CentralStorageStrategyV1(StrategyV1, CentralStorageStrategy):
    """CentralStorageStrategy in its v1 form."""


class MultiWorkerMirroredStrategyV1(StrategyV1, MultiWorkerMirroredStrategy):
    """MultiWorkerMirroredStrategy in its v1 form."""
