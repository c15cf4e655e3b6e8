"""Going through a dataset: its iterator, and the base class that iterates, reduces, counts and describes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import count
from typing import Any

from mpidist.core.errors import OutOfRangeError
from mpidist.input.elements import as_element
from mpidist.input.input_options import DatasetOptions
from mpidist.input.optional import Optional
from mpidist.input.pipeline import Node
from mpidist.input.read_ahead import Readers
from mpidist.input.reordering import INFINITE, Pass


class DatasetIterator:
    """One pass over a dataset of this process alone, with the methods of DistributedIterator.

    >>> from mpidist.input import Dataset
    >>> iterator = iter(Dataset.range(2))
    >>> int(iterator.get_next()), int(iterator.get_next()), iterator.get_next_as_optional().has_value()
    (0, 1, False)
    """

    def __init__(self, dataset: Elements, number: int) -> None:
        self._dataset = dataset
        self._readers = Readers()
        self._elements = map(as_element, dataset._node.elements(Pass((number,), readers=self._readers)))

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._elements)
        except BaseException:  # the end, or an error: nothing is read ahead any more
            self._readers.close()
            raise

    def get_next(self) -> Any:
        """Return the next element.

        Raises:
            OutOfRangeError: There is none.
        """
        found = self.get_next_as_optional()
        if not found.has_value():
            raise OutOfRangeError(
                f"there are no more elements in this pass over {self._dataset._node}; begin another one with "
                "iter(dataset), or ask get_next_as_optional()"
            )
        return found.get_value()

    def get_next_as_optional(self) -> Optional:
        """Return the next element, or an Optional without value."""
        try:
            return Optional(next(self))
        except StopIteration:
            return Optional()

    @property
    def element_spec(self) -> Any:
        """As that of the dataset."""
        return self._dataset.element_spec

    def close(self) -> None:
        """End the pass, and the threads of ``prefetch`` with it; waits for the elements that they are reading."""
        self._readers.close()
        self._elements = map(as_element, ())


class Elements:
    """The elements of a pipeline, gone through anew with each ``iter``."""

    def __init__(self, node: Node, options: DatasetOptions = DatasetOptions()) -> None:  # noqa: B008 - frozen
        self._node = node
        self._options = options
        self._passes = count()

    def __iter__(self) -> DatasetIterator:
        return DatasetIterator(self, next(self._passes))

    def reduce(self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
        """Return what ``reduce_func`` makes of all elements of one pass.

        Args:
            initial_state: The first state, of any kind; returned where there is no element.
            reduce_func: Gets the state and an element, a tuple too as one argument; returns the next state.

        Raises:
            TypeError: ``reduce_func`` is not callable.
            ValueError: The dataset is endless.

        >>> from mpidist.input import Dataset
        >>> int(Dataset.range(5).reduce(0, lambda total, x: total + x))
        10
        """
        return reduce_elements(self, initial_state, reduce_func)

    @property
    def element_spec(self) -> Any:
        """The nest of ``ArraySpec`` of an element; where only an element can tell, one is read.

        Raises:
            ValueError: There is no element to tell from.

        >>> from mpidist.input import Dataset
        >>> Dataset.range(5).batch(2).element_spec
        ArraySpec(shape=(None,), dtype=dtype('int64'))
        """
        spec = self._node.spec()
        if spec is None:
            raise ValueError(
                f"{self._node} gives no element, so nothing tells what its elements look like; give "
                "from_generator() an output_signature"
            )
        return spec

    def cardinality(self) -> int:
        """Return the number of elements in a pass: -1 without end, -2 unknown.

        >>> from mpidist.input import Dataset
        >>> Dataset.range(5).batch(2).cardinality(), Dataset.range(5).repeat().cardinality()
        (3, -1)
        """
        return self._node.cardinality

    def __len__(self) -> int:
        length = self.cardinality()
        if length < 0:
            kind = "endless" if length == INFINITE else "not known beforehand"
            raise TypeError(f"the number of elements of {self._node} is {kind}; ask cardinality()")
        return length

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._node}>"


def reduce_elements(dataset: Any, state: Any, reduce_func: Callable[[Any, Any], Any]) -> Any:
    """Return the last of the states ``state = reduce_func(state, element)`` over a pass of ``dataset``.

    Args:
        dataset: Has ``cardinality`` and an iterator with ``close``.
        state: The first state.
        reduce_func: The function.
    """
    if not callable(reduce_func):
        raise TypeError(
            f"reduce_func is {reduce_func!r} of type {type(reduce_func).__name__}; expected a function of a state and "
            "an element that returns the next state"
        )
    if dataset.cardinality() == INFINITE:
        raise ValueError("reduce() of an endless dataset would never return; say how much of it: dataset.take(count)")
    with closing(iter(dataset)) as elements:
        for element in elements:
            state = reduce_func(state, element)
    return state
