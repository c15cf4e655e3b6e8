"""The strategies of ``tf.compat.v1``: ``reduce`` without an axis, restartable iterators, ``experimental_run``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any

from mpidist.core import context
from mpidist.core.options import ReduceOp
from mpidist.input import Dataset, InputContext, InputReplicationMode
from mpidist.input.batching import last_batching
from mpidist.input.dataset import graph_and_options
from mpidist.input.distributed_dataset import DistributedDataset, DistributedIterator
from mpidist.input.elements import as_element, row_count
from mpidist.input.iteration import Optional
from mpidist.input.nodes import INFINITE, Form, Pass, PassThrough
from mpidist.input.sources import StreamSource
from mpidist.strategies.base import Strategy, Value
from mpidist.strategies.central_storage import CentralStorageStrategy
from mpidist.strategies.default import default_strategy
from mpidist.strategies.mirrored import MirroredStrategy, MultiWorkerMirroredStrategy, OneDeviceStrategy

_END = object()


class InputIterator:
    """Restartable iterator over a distributed dataset (tf.distribute.InputIterator).

    ``initialize`` begins anew. Strategies of ``mpidist.v1`` make it. Its methods are collective: call them on every
    rank, in the same order.

    Args:
        dataset: A dataset as strategies distribute it.
    """

    def __init__(self, dataset: DistributedDataset) -> None:
        self._dataset = dataset
        self._iterator: DistributedIterator | None = None

    def initialize(self) -> list[object]:
        """Begin a new pass, and return an empty list: there are no operations to run.

        The first pass begins by itself if this is not called before the first element is taken.
        """
        self._begin()
        return []

    @property
    def initializer(self) -> list[object]:
        """The result of :meth:`initialize`; asking for it begins a new pass."""
        return self.initialize()

    def get_next(self) -> Any:
        """Return the next element.

        Raises:
            OutOfRangeError: There is none; ``initialize`` begins another pass.
        """
        return self._begun().get_next()

    def next(self) -> Any:
        """Return the next element; another name of :meth:`get_next`."""
        return self.get_next()

    def get_next_as_optional(self) -> Optional:
        """Return the next element, or an Optional without value."""
        return self._begun().get_next_as_optional()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._begun())

    @property
    def element_spec(self) -> Any:
        """The element spec of the distributed dataset."""
        return self._dataset.element_spec

    def close(self) -> None:
        """End the pass, as ``close`` of a distributed iterator does."""
        if self._iterator is not None:
            self._iterator.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._dataset if self._iterator is None else self._iterator}>"

    def _begin(self) -> DistributedIterator:
        self.close()
        self._iterator = iter(self._dataset)
        return self._iterator

    def _begun(self) -> DistributedIterator:
        return self._begin() if self._iterator is None else self._iterator


def dataset_fn_of(
    input_fn: Callable[[InputContext], object], replication_mode: InputReplicationMode
) -> Callable[[InputContext], Dataset]:
    """Return a function that makes a Dataset of the result of ``input_fn``.

    That result is a Dataset, or a function of values.

    Raises:
        TypeError: ``input_fn`` is no function.
        ValueError: ``replication_mode`` is not PER_WORKER. The function that is returned: ``input_fn`` returned
            something else.
    """
    if not callable(input_fn):
        raise TypeError(f"input_fn is {input_fn!r}; expected a function that takes an InputContext")
    if replication_mode is not InputReplicationMode.PER_WORKER:
        raise ValueError(
            f"replication_mode is {replication_mode!r}; make_input_fn_iterator() takes InputReplicationMode.PER_WORKER "
            "only, and distribute_datasets_from_function() of a MirroredStrategy PER_REPLICA"
        )

    def dataset_fn(context: InputContext) -> Dataset:
        made = input_fn(context)
        if isinstance(made, Dataset):
            return made
        if not callable(made):
            raise ValueError(
                f"input_fn returned {made!r} of type {type(made).__name__} for {context}; expected a Dataset, or a "
                "function without arguments that returns the value of a replica in a step"
            )
        name = getattr(made, "__name__", type(made).__name__)
        return Dataset(StreamSource(lambda: (made() for _ in count()), f"input_fn({name})", None, INFINITE))

    return dataset_fn


@dataclass(eq=False, repr=False)
class EvenBatches(PassThrough):
    """The same batches, with their rows counted.

    Only the last one may be no multiple of the number of replicas.

    Args:
        replicas: Number of replicas.
    """

    replicas: int

    def __post_init__(self) -> None:
        super().__post_init__()
        self.text = f"shared_by({self.replicas})"
        if self.form is Form.ROWS:  # an element is a batch: its rows are counted once it is read
            self.form, self.chosen_from, self.read_ahead = Form.ELEMENTS, None, 0

    def items(self, run: Pass) -> Iterator[object]:
        """Yield the batches.

        Raises:
            ValueError: One that is not the last cannot be shared equally, or one that is no smaller than a whole batch.
        """
        by_number = self.form is Form.BATCHES
        batches: Iterator[Any] = self.source.items(run) if by_number else self.source.elements(run)
        made = last_batching(self.source)
        whole = 0 if made is None or made.size % self.replicas else made.size
        for batch in batches:
            rows = len(batch) if by_number else row_count(as_element(batch))
            if rows % self.replicas and (rows >= whole or next(batches, _END) is not _END):
                raise uneven(rows, self.replicas)
            whole = max(whole, rows)
            yield batch


def with_even_batches(dataset: Dataset, replicas: int) -> Dataset:
    """Return ``dataset`` with batches that replicas can share equally.

    Batches whose size is not known beforehand are checked as they come.

    Raises:
        ValueError: The size is known, and no multiple of the number of replicas.
    """
    node, options = graph_and_options(dataset)
    size = node.batch_size() if node.batched else None
    if size is None:
        return Dataset(EvenBatches((node,), replicas), options)
    if size % replicas:
        raise uneven(size, replicas)
    return dataset


def uneven(rows: int, replicas: int) -> ValueError:
    """Return the error for a batch that replicas cannot share equally."""
    return ValueError(
        f"the dataset has batches of {rows} rows, which {replicas} replicas in sync cannot share equally; expected a "
        f"multiple of {replicas}, or use make_input_fn_iterator(input_fn) or experimental_distribute_dataset(dataset), "
        "which takes any size"
    )


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
