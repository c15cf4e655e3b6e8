"""Going through a dataset: its iterator, and the base class that iterates, reduces, counts and describes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any, NoReturn

from mpidist.core import nest
from mpidist.core.errors import OutOfRangeError
from mpidist.input import whole_elements
from mpidist.input.continued_batches import ContinuedBatches
from mpidist.input.elements import as_element, as_numpy, dataset_as_array
from mpidist.input.input_options import DatasetOptions
from mpidist.input.input_workers import WorkerLayout
from mpidist.input.local_batches import DealtBatches
from mpidist.input.optional import Optional
from mpidist.input.pipeline import Node
from mpidist.input.pipeline_seeds import first_position, pipelines_of, seeds_for
from mpidist.input.policies import dealt_batches
from mpidist.input.position import Position
from mpidist.input.read_ahead import Readers
from mpidist.input.reordering import INFINITE, Pass, Shuffle
from mpidist.input.resuming import Dealing, Remainder, going_on, remainder_from


class DatasetIterator:
    """One pass over a dataset of this process alone, with the methods of DistributedIterator.

    >>> from mpidist.input import Dataset
    >>> iterator = iter(Dataset.range(2))
    >>> int(iterator.get_next()), int(iterator.get_next()), iterator.get_next_as_optional().has_value()
    (0, 1, False)
    """

    def __init__(self, dataset: Elements, number: int) -> None:
        self._dataset = dataset
        self._number = number
        self._taken = 0
        self._failure: str | None = None
        # Made by state() alone, or restored: most iterators need none.
        self._remainder: Remainder | None = None
        self._beginning = dataset._beginning
        self._readers = Readers()
        run = Pass((number,), dataset._seeds, self._readers)
        elements = map(as_element, dataset._node.elements(run))
        self._elements: Iterator[Any] = whole_elements.watch.over(dataset._node, elements)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._failure is not None:
            raise pass_failed("next()", self._failure)
        try:
            element = next(self._elements)
        except BaseException as error:  # the end, or an error: nothing is read ahead any more
            if not isinstance(error, StopIteration):
                self._failure = f"{type(error).__name__}: {error}"
            self._readers.close(wait=isinstance(error, Exception))
            raise
        self._taken += 1
        return element

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

    def state(self) -> dict[str, Any]:
        """Return where this iterator stands, for :meth:`restore`, in types that JSON has.

        >>> from mpidist.input import Dataset
        >>> iterator = iter(Dataset.range(3))
        >>> _ = next(iterator)
        >>> iterator.state()["steps"]
        1
        """
        return self._found_remainder().after(self._taken).to_json()

    def _found_remainder(self) -> Remainder:
        if self._remainder is None:
            batches = self._dataset._alone()
            beginning = self._beginning or first_position(batches, pipelines_of(batches))
            self._remainder = Remainder(batches, 0, replace(beginning, pass_number=self._number))
        return self._remainder

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where the iterator stood whose ``state()`` this is, as ``restore`` of a distributed iterator does.

        Args:
            state: What ``state()`` of an iterator over the same steps and data returned, be it a distributed one.

        Raises:
            TypeError: ``state`` is no dict.
            ValueError: It is damaged, or that of another dataset, or of another batch size where that must not change.

        >>> from mpidist.input import Dataset
        >>> iterator, other = iter(Dataset.range(3)), iter(Dataset.range(3))
        >>> _ = next(iterator)
        >>> other.restore(iterator.state())
        >>> [int(x) for x in other]
        [1, 2]
        """
        dataset = self._dataset
        position = Position.from_json(state)
        batches = dataset._alone()
        remainder = remainder_from(position, dataset._dealing(), batches, batches.steps)
        self.close()
        dataset._go_on_from(remainder.position)
        self._taken, self._remainder, self._readers, self._failure = 0, remainder, Readers(), None
        rest = remainder.batches
        seeds = {} if isinstance(rest, ContinuedBatches) else seeds_for(rest, remainder.position)
        run = Pass((position.pass_number,), seeds, self._readers)
        elements = (element for (element,) in rest.open(run, remainder.start))
        self._elements = whole_elements.watch.over(dataset._node, elements)

    def close(self) -> None:
        """End the pass, and the threads of ``prefetch`` with it; waits for the elements that they are reading."""
        self._readers.close()
        self._elements = iter(())

    def __repr__(self) -> str:
        position = self._found_remainder().after(self._taken)
        return f"<{type(self).__name__} of {self._dataset._node}, {position.progress()}>"


class Elements:
    """The elements of a pipeline, gone through anew with each ``iter``."""

    def __init__(self, node: Node, options: DatasetOptions = DatasetOptions()) -> None:  # noqa: B008 - frozen
        self._node = node
        self._options = options
        self._passes = 0
        # Of the shuffles that were given none, and what says so in states, where they were restored.
        self._seeds: dict[Shuffle, tuple[int, ...]] = {}
        self._beginning: Position | None = None

    def __iter__(self) -> DatasetIterator:
        number = self._passes
        self._passes += 1
        return DatasetIterator(self, number)

    def _alone(self) -> DealtBatches:
        """Return the elements as a lone worker reads them."""
        return DealtBatches(WorkerLayout(1, 0, (1,)), self._node, "block")

    def _dealing(self) -> Dealing:
        return Dealing(lambda layout: dealt_batches(self._node, self._options, layout)[0], self._options.assignment)

    def _go_on_from(self, position: Position) -> None:
        """Let the passes that are begun from here on be those that follow the one of ``position``."""
        self._passes = position.pass_number + 1
        batches = self._alone()
        self._beginning = going_on(first_position(batches, pipelines_of(batches)), position)
        self._seeds = seeds_for(batches, self._beginning)

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

    def as_numpy_iterator(self) -> Iterator[Any]:
        """Return an iterator over a pass whose arrays are NumPy's, in host memory, and numbers NumPy's scalars.

        Raises:
            TypeError: While iterating, an element that holds something else than arrays, numbers, texts and bytes.

        >>> from mpidist.input import Dataset
        >>> list(Dataset.from_source([(1, [2.0, 3.0])]).as_numpy_iterator())
        [(np.int64(1), array([2., 3.]))]
        """
        return (nest.map_structure(as_numpy, element) for element in iter(self))

    def __array__(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise dataset_as_array()

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._node}>"


def pass_failed(method: str, failure: str) -> RuntimeError:
    """Return the error of an iterator that has raised ``failure`` before: what it would give next is lost."""
    return RuntimeError(
        f"{method} of an iterator that has failed before, with {failure}; begin another pass with iter(dataset), or "
        "restore() a state of this one"
    )


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
