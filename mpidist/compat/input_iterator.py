"""InputIterator: the restartable iterators of ``tf.compat.v1``, and their datasets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from mpidist.input.dataset import Dataset
from mpidist.input.distributed_dataset import DistributedDataset, DistributedIterator
from mpidist.input.graph import INFINITE
from mpidist.input.input_options import InputReplicationMode
from mpidist.input.input_workers import InputContext
from mpidist.input.iteration import Optional
from mpidist.input.sources import Stream


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
        self.close()
        self._iterator = iter(self._dataset)
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

    def _begun(self) -> DistributedIterator:
        if self._iterator is None:
            self._iterator = iter(self._dataset)
        return self._iterator


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
        return Dataset(Stream(lambda: (made() for _ in count()), f"input_fn({name})", None, INFINITE))

    return dataset_fn
