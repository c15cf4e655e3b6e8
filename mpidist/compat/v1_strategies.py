"""The strategies of ``tf.compat.v1``: ``reduce`` without an axis, iterators, ``experimental_run``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mpidist.compat.input_iterator import InputIterator, dataset_fn_of, with_even_batches
from mpidist.core import context
from mpidist.core.enums import ReduceOp
from mpidist.input import Dataset, InputContext, InputReplicationMode
from mpidist.strategies.base import Strategy, Value
from mpidist.strategies.central_storage import CentralStorageStrategy
from mpidist.strategies.default import default_strategy
from mpidist.strategies.mirrored import MirroredStrategy, OneDeviceStrategy
from mpidist.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy


class StrategyV1(Strategy):
    """The additions of the v1 forms to a strategy."""

    def reduce(self, reduce_op: ReduceOp | str, value: Value, axis: int | tuple[int, ...] | None = None) -> Value:
        """Combine a value, as ``Strategy.reduce`` does; ``axis`` may be left out (collective)."""
        return super().reduce(reduce_op, value, axis)

    def make_dataset_iterator(self, dataset: Dataset) -> InputIterator:
        """Return an iterator over ``dataset``, divided as ``experimental_distribute_dataset`` does (collective).

        Args:
            dataset: Batched with the global batch size, which all replicas must be able to share equally, but for a
                last batch that is smaller.

        Raises:
            ValueError: The batch size is no multiple of the number of replicas. Where it is not known beforehand, as
                after ``map`` or of a generator, the iterator raises it at the first batch that is none.

        >>> strategy = OneDeviceStrategyV1("cpu:0")
        >>> iterator = strategy.make_dataset_iterator(Dataset.range(4).batch(2))
        >>> iterator.initialize(), iterator.get_next(), iterator.get_next()
        ([], array([0, 1]), array([2, 3]))
        """
        self._require_cross_replica("make_dataset_iterator()", "call it before run()")
        replicas = self.num_replicas_in_sync
        if isinstance(dataset, Dataset) and replicas > 1:
            dataset = with_even_batches(dataset, replicas)
        return InputIterator(self._extended.distribute_dataset(dataset, None))

    def make_input_fn_iterator(
        self,
        input_fn: Callable[[InputContext], object],
        replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER,
    ) -> InputIterator:
        """Return an iterator over the results of ``input_fn`` on each rank (collective).

        Args:
            input_fn: Called once on each rank with an InputContext. Returns a Dataset, batched per replica, of which
                the local replicas take the next batches in turn; or a function without arguments, which is called for
                each local replica in each step, without end.
            replication_mode: PER_WORKER; nothing else is taken.

        Raises:
            ValueError: Another replication mode, or ``input_fn`` returned something else.
        """
        self._require_cross_replica("make_input_fn_iterator()", "call it before run()")
        dataset_fn = dataset_fn_of(input_fn, replication_mode)
        return InputIterator(self._extended.distribute_from_function(dataset_fn, None))

    def experimental_run(self, fn: Callable[..., object], input_iterator: InputIterator | None = None) -> Any:
        """Run ``fn``, as ``run`` does, with the next element of an iterator.

        Collective where the iterator's ``get_next`` is: call it on every rank.

        Args:
            fn: The function; without arguments where there is no iterator.
            input_iterator: From :meth:`make_dataset_iterator` or :meth:`make_input_fn_iterator`.

        Raises:
            OutOfRangeError: The iterator has no element left.

        >>> strategy = OneDeviceStrategyV1("cpu:0")
        >>> iterator = strategy.make_dataset_iterator(Dataset.range(4).batch(2))
        >>> strategy.experimental_run(lambda batch: batch * 10, iterator)
        array([ 0, 10])
        """
        with self.scope():
            return self.run(fn, args=() if input_iterator is None else (input_iterator.get_next(),))


class DefaultStrategyV1(StrategyV1):
    """The default strategy in its v1 form: another face of the same object."""

    @contextmanager
    def scope(self) -> Iterator[Any]:
        """Enter the scope, as ``Strategy.scope`` does."""
        with context.scope(self._extended.strategy):
            yield self


_default_strategy = DefaultStrategyV1(default_strategy.extended)


def get_strategy() -> Any:
    """Return the current strategy of this thread.

    Where none is active that is the default strategy in its v1 form.

    >>> get_strategy().reduce("SUM", 2.0)
    np.float64(2.0)
    """
    current = context.get_strategy()
    return _default_strategy if context.is_default(current) else current


class OneDeviceStrategyV1(StrategyV1, OneDeviceStrategy):
    """OneDeviceStrategy in its v1 form."""


class MirroredStrategyV1(StrategyV1, MirroredStrategy):
    """MirroredStrategy in its v1 form."""


class CentralStorageStrategyV1(StrategyV1, CentralStorageStrategy):
    """CentralStorageStrategy in its v1 form."""


class MultiWorkerMirroredStrategyV1(StrategyV1, MultiWorkerMirroredStrategy):
    """MultiWorkerMirroredStrategy in its v1 form."""
