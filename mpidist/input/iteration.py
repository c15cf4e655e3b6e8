"""Iterators over a pass of a dataset, and Optional."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any, Generic

from mpidist.core.errors import OutOfRangeError
from mpidist.input import whole_elements
from mpidist.input.distribution import Distribution, Position, Remainder
from mpidist.input.elements import spec_of
from mpidist.input.nodes import INFINITE, GraphNode
from mpidist.input.threads import Readers

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    # The type of an element, Any by default.
    E_co = TypeVar("E_co", covariant=True, default=Any)
else:
    from typing import TypeVar

    E_co = TypeVar("E_co", covariant=True)

S = TypeVar("S")


class Optional(Generic[E_co]):
    """A value that may be missing (tf.experimental.Optional).

    ``get_next_as_optional`` returns it.
    """

    def __init__(self, *value: E_co) -> None:
        self._value = value
        # The iterator that returned it.
        self.iterator: PassIterator[E_co] | None = None

    @property
    def element_spec(self) -> object:
        """The nest of ``ArraySpec`` of the value.

        Without a value it is known if an iterator returned this Optional.

        Raises:
            ValueError: It is unknown.

        >>> Optional(3).element_spec
        ArraySpec(shape=(), dtype=dtype('int64'))
        """
        return spec_of(self.get_value()) if self.iterator is None else self.iterator.element_spec

    def has_value(self) -> bool:
        """Return whether there is a value.

        >>> Optional().has_value(), Optional(3).get_value()
        (False, 3)
        """
        return bool(self._value)

    def get_value(self) -> E_co:
        """Return the value.

        Raises:
            ValueError: It is missing.
        """
        if not self._value:
            raise ValueError("this Optional has no value. Call has_value() first")
        return self._value[0]


class PassIterator(ABC, Generic[E_co]):
    """One pass: the base of the iterators of a dataset and of a distributed dataset.

    For a distributed dataset every method that moves on is collective: call it on every rank, in the same order.
    """

    def __init__(self, distribution: Distribution, remainder: Remainder) -> None:
        self._distribution = distribution
        self._begin(remainder)

    def _begin(self, remainder: Remainder) -> None:
        self._remainder = remainder
        self._readers = Readers()
        self._taken = 0
        self._failure: str | None = None

    @abstractmethod
    def _read(self) -> E_co:
        """Return the next element, or raise StopIteration at the end of the pass."""

    def _resume(self, remainder: Remainder) -> None:
        self.close()
        self._distribution.resume(remainder)
        self._begin(remainder)

    def _stop_reading(self, wait: bool = True) -> None:
        self._readers.close(wait)

    def _advance(self, method: str) -> E_co:
        if self._failure is not None:
            # Its next element is lost.
            raise RuntimeError(
                f"{method} of an iterator that has failed before, with {self._failure}. Begin another pass with "
                "iter(dataset), or restore() a state of this iterator"
            )
        try:
            element = self._read()
        except BaseException as error:  # the end, or an error: nothing more is read ahead
            if not isinstance(error, StopIteration):
                self._failure = f"{type(error).__name__}: {error}"
            self._stop_reading(wait=isinstance(error, Exception))
            raise
        self._taken += 1
        return element

    def __iter__(self) -> Iterator[E_co]:
        return self

    def __next__(self) -> E_co:
        return self._advance("next()")

    def get_next(self) -> E_co:
        """Return the next element.

        Collective for a distributed dataset: call it on every rank, in the same order.

        Raises:
            OutOfRangeError: The pass has no more elements; on all ranks at the same step.
            ValueError: Called inside a replica function, for a distributed dataset.
        """
        try:
            return self._advance("get_next()")
        except StopIteration:
            raise OutOfRangeError(
                f"there are no more elements in this pass over {self._distribution}. Begin another pass with "
                "iter(dataset), or use get_next_as_optional()"
            ) from None

    def get_next_as_optional(self) -> Optional[E_co]:
        """Return the next element, or an Optional without value; collective as :meth:`get_next`.

        Raises:
            ValueError: Called inside a replica function, for a distributed dataset.
        """
        try:
            found = Optional(self._advance("get_next_as_optional()"))
        except StopIteration:
            found = Optional()
        found.iterator = self
        return found

    @property
    @abstractmethod
    def element_spec(self) -> object:
        """The spec of the elements."""

    @abstractmethod
    def close(self) -> None:
        """End the pass."""

    def state(self) -> dict[str, Any]:
        """Return the position of this iterator for ``restore``, in JSON types.

        Equal on all ranks for a distributed dataset; not collective. Batches that have been read ahead do not count as
        taken.

        >>> from mpidist.input import Dataset
        >>> iterator = iter(Dataset.range(3))
        >>> _ = next(iterator)
        >>> iterator.state()["steps"]
        1
        """
        return self._remainder.after(self._taken).to_json()

    def _checkpoint_check(self, state: object) -> None:
        """Raise TypeError or ValueError unless ``state`` has the format of a state."""
        Position.from_json(state)

    def __repr__(self) -> str:
        progress = self._remainder.after(self._taken).progress()
        return f"<{type(self).__name__} of {self._distribution}, {progress}>"


class DatasetIterator(PassIterator[E_co]):
    """One pass over a dataset of this process alone, with DistributedIterator's methods.

    >>> from mpidist.input import Dataset
    >>> iterator = iter(Dataset.range(2))
    >>> int(iterator.get_next()), int(iterator.get_next()), iterator.get_next_as_optional().has_value()
    (0, 1, False)
    """

    def _begin(self, remainder: Remainder) -> None:
        super()._begin(remainder)
        elements = remainder.batches.open_alone(remainder.run(self._readers), remainder.start)
        self._elements: Iterator[Any] = whole_elements.watch.over(self._distribution.batches.nodes[0], elements)

    def _read(self) -> E_co:
        element: E_co = next(self._elements)
        return element

    @property
    def element_spec(self) -> Any:
        """The element spec of the dataset."""
        return spec_of_elements(self._distribution.batches.nodes[0])

    def restore(self, state: dict[str, object]) -> None:
        """Continue from a ``state()``, as ``restore`` of a distributed iterator does.

        Args:
            state: From ``state()`` of an iterator over the same steps and data, maybe a distributed one.

        Raises:
            TypeError: ``state`` is no dict.
            ValueError: It is damaged, or of another dataset, or of another batch size that must not change.

        >>> from mpidist.input import Dataset
        >>> iterator, other = iter(Dataset.range(3)), iter(Dataset.range(3))
        >>> _ = next(iterator)
        >>> other.restore(iterator.state())
        >>> [int(x) for x in other]
        [1, 2]
        """
        self._resume(self._distribution.remainder(state))

    def close(self) -> None:
        """End the pass and the threads of ``prefetch``. Waits for the elements that they are reading."""
        self._readers.close()
        self._elements = iter(())


def spec_of_elements(node: GraphNode) -> object:
    """Return the nest of ArraySpec of an element of a dataset. Raises ValueError without an element."""
    spec = node.spec()
    if spec is None:
        raise ValueError(
            f"{node} has no elements, so its element_spec is unknown. Pass from_generator() an output_signature"
        )
    return spec


def reduce_elements(dataset: Any, state: S, reduce_func: Callable[..., S]) -> S:
    """Return the last ``state = reduce_func(state, element)`` of a pass over ``dataset``."""
    if not callable(reduce_func):
        raise TypeError(
            f"reduce_func is {reduce_func!r} of type {type(reduce_func).__name__}; expected a function of a state and "
            "an element that returns the next state"
        )
    if dataset.cardinality() == INFINITE:
        raise ValueError("reduce() of an endless dataset would never return. Limit it: dataset.take(count)")
    with closing(iter(dataset)) as elements:
        for element in elements:
            state = reduce_func(state, element)
    return state
