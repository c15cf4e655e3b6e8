"""Iteration over a dataset in this process alone: a pass, and the order of passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Generic

from mpidist.core.errors import OutOfRangeError
from mpidist.input import whole_elements
from mpidist.input.elements import as_element
from mpidist.input.graph import INFINITE, GraphNode, Pass, Seed
from mpidist.input.input_options import DatasetOptions
from mpidist.input.input_workers import WorkerLayout
from mpidist.input.local_batches import DealtBatches
from mpidist.input.policies import dealt_batches
from mpidist.input.position import Position, first_position, next_beginning, pipelines_of, seeds_for
from mpidist.input.resuming import Dealing, Remainder
from mpidist.input.threads import Readers

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    # The type of an element; Any where none is written.
    E_co = TypeVar("E_co", covariant=True, default=Any)
else:
    from typing import TypeVar

    E_co = TypeVar("E_co", covariant=True)

S = TypeVar("S")
_ALONE = WorkerLayout(1, 0, (1,))


class Optional(Generic[E_co]):
    """A value that may be missing (tf.experimental.Optional).

    ``get_next_as_optional`` returns it.
    """

    def __init__(self, *value: E_co) -> None:
        self._value = value

    def has_value(self) -> bool:
        """Return whether there is a value.

        >>> Optional().has_value(), Optional(3).get_value()
        (False, 3)
        """
        return bool(self._value)

    def get_value(self) -> E_co:
        """Return the value.

        Raises:
            ValueError: There is none.
        """
        if not self._value:
            raise ValueError("this Optional has no value; ask has_value() first")
        return self._value[0]


class Passes:
    """The passes over a dataset: the number begun, and the beginning of the next.

    Args:
        node: The graph of the dataset.
        options: Those of the dataset.

    Attributes:
        batches: The elements, as a lone worker reads them.
        begun: The number of passes begun.
        seeds: The entropy of seeds that were not given; empty until a state has been restored.
        beginning: The beginning that states name; None until then.
    """

    def __init__(self, node: GraphNode, options: DatasetOptions) -> None:
        self.node = node
        self.options = options
        self.batches = DealtBatches(_ALONE, node, "block")
        self.begun = 0
        self.seeds: dict[Seed, tuple[int, ...]] = {}
        self.beginning: Position | None = None

    def whole_pass(self, number: int, beginning: Position | None) -> Remainder:
        """Return pass ``number`` for a lone worker.

        It begins at ``beginning``, or at the first beginning of all for None.
        """
        beginning = beginning or first_position(self.batches, pipelines_of(self.batches))
        return Remainder(self.batches, 0, replace(beginning, pass_number=number))

    def remainder(self, position: Position) -> Remainder:
        """Return the rest of the pass of ``position``; see ``Dealing.remainder``."""
        node, options = self.node, self.options
        dealing = Dealing(lambda layout: dealt_batches(node, options, layout)[0], options.assignment)
        return dealing.remainder(position, self.batches, self.batches.steps)

    def continue_from(self, position: Position) -> None:
        """Make ``position``'s pass the one that the next passes follow."""
        self.begun = position.pass_number + 1
        self.beginning = next_beginning(first_position(self.batches, pipelines_of(self.batches)), position)
        self.seeds = seeds_for(self.batches, self.beginning)


class DatasetIterator(Generic[E_co]):
    """One pass over a dataset of this process alone, with DistributedIterator's methods.

    >>> from mpidist.input import Dataset
    >>> iterator = iter(Dataset.range(2))
    >>> int(iterator.get_next()), int(iterator.get_next()), iterator.get_next_as_optional().has_value()
    (0, 1, False)
    """

    def __init__(self, passes: Passes) -> None:
        self._passes = passes
        self._number = passes.begun
        passes.begun += 1
        self._taken = 0
        self._failure: str | None = None
        # Made by state() alone, or restored: most iterators need none.
        self._remainder: Remainder | None = None
        self._beginning = passes.beginning
        self._readers = Readers()
        run = Pass((self._number,), passes.seeds, self._readers)
        self._elements: Iterator[Any] = whole_elements.watch.over(
            passes.node, map(as_element, passes.node.elements(run))
        )

    def __iter__(self) -> Iterator[E_co]:
        return self

    def __next__(self) -> E_co:
        if self._failure is not None:
            raise pass_failed("next()", self._failure)
        try:
            element: E_co = next(self._elements)
        except BaseException as error:  # the end, or an error: nothing is read ahead any more
            if not isinstance(error, StopIteration):
                self._failure = f"{type(error).__name__}: {error}"
            self._readers.close(wait=isinstance(error, Exception))
            raise
        self._taken += 1
        return element

    def get_next(self) -> E_co:
        """Return the next element.

        Raises:
            OutOfRangeError: There is none.
        """
        found = self.get_next_as_optional()
        if not found.has_value():
            raise OutOfRangeError(
                f"there are no more elements in this pass over {self._passes.node}; begin another one with "
                "iter(dataset), or ask get_next_as_optional()"
            )
        return found.get_value()

    def get_next_as_optional(self) -> Optional[E_co]:
        """Return the next element, or an Optional without value."""
        try:
            return Optional(next(self))
        except StopIteration:
            return Optional()

    @property
    def element_spec(self) -> Any:
        """The element spec of the dataset."""
        return spec_of_elements(self._passes.node)

    def state(self) -> dict[str, Any]:
        """Return the position of this iterator for :meth:`restore`, in types that JSON has.

        >>> from mpidist.input import Dataset
        >>> iterator = iter(Dataset.range(3))
        >>> _ = next(iterator)
        >>> iterator.state()["steps"]
        1
        """
        return self._position().to_json()

    def restore(self, state: dict[str, object]) -> None:
        """Continue from a ``state()``, as ``restore`` of a distributed iterator does.

        Args:
            state: From ``state()`` of an iterator over the same steps and data, be it a distributed one.

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
        position = Position.from_json(state)
        passes, remainder = self._passes, self._passes.remainder(position)
        self.close()
        passes.continue_from(remainder.position)
        self._taken, self._remainder, self._readers, self._failure = 0, remainder, Readers(), None
        elements = (element for (element,) in remainder.batches.open(remainder.run(self._readers), remainder.start))
        self._elements = whole_elements.watch.over(passes.node, elements)

    def close(self) -> None:
        """End the pass and the threads of ``prefetch``. Waits for the elements that they are reading."""
        self._readers.close()
        self._elements = iter(())

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._passes.node}, {self._position().progress()}>"

    def _position(self) -> Position:
        if self._remainder is None:
            self._remainder = self._passes.whole_pass(self._number, self._beginning)
        return self._remainder.after(self._taken)


def spec_of_elements(node: GraphNode) -> object:
    """Return the nest of ArraySpec of an element of a dataset.

    Raises:
        ValueError: There is no element to tell from.
    """
    spec = node.spec()
    if spec is None:
        raise ValueError(
            f"{node} gives no element, so nothing tells what its elements look like; give "
            "from_generator() an output_signature"
        )
    return spec


def pass_failed(method: str, failure: str) -> RuntimeError:
    """Return the error of an iterator that has raised ``failure`` before.

    Its next element is lost.
    """
    return RuntimeError(
        f"{method} of an iterator that has failed before, with {failure}; begin another pass with iter(dataset), or "
        "restore() a state of this one"
    )


def reduce_elements(dataset: Any, state: S, reduce_func: Callable[..., S]) -> S:
    """Return the final ``state = reduce_func(state, element)`` over a pass of ``dataset``.

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
