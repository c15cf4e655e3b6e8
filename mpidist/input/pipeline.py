"""The nodes of a dataset's graph.

``Rows``: elements are rows of a table, known by number until they are read.
``Items``: elements are batches of rows of a table, known by their numbers until they are read, or come one
after the other from a stream. Transforms keep the numbers as long as they can, so that a rank which needs a
part of a batch reads that part only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from mpidist.input import row_indices
from mpidist.input.element_spec import flatten_spec
from mpidist.input.reordering import UNKNOWN, Pass, Shuffle
from mpidist.input.row_indices import RowIndex
from mpidist.input.tables import Table


class Node(ABC):
    """One step of a pipeline.

    Attributes:
        inputs: The steps before it.
        cardinality: Number of elements in a pass, -1 without end, -2 unknown.
        text: The call that made it, for messages and for comparing pipelines of several ranks.
        identity: The same for comparing those of several jobs, which may find their files in other folders.
        batched: Whether its elements went through ``batch``.
        dynamic: Whether the first axis of its elements may differ from element to element.
        read_ahead: How many elements are read ahead when ``elements`` reads rows by number.
    """

    batched: bool
    dynamic: bool

    def __init__(self, inputs: Sequence[Node], cardinality: int, text: str) -> None:
        self.inputs = tuple(inputs)
        self.cardinality = cardinality
        self.text = self.identity = text
        self.batched = bool(inputs) and all(node.batched for node in inputs)
        self.dynamic = any(node.dynamic for node in inputs)
        self.read_ahead = 0

    @abstractmethod
    def elements(self, run: Pass) -> Iterator[Any]:
        """Yield the elements of a pass."""

    @abstractmethod
    def spec(self) -> Any:
        """Return the nest of ArraySpec of an element, None if there is none to tell from; may read one."""

    def with_inputs(self, inputs: Sequence[Node]) -> Node:
        """Return the same step after other inputs, as many as it has."""
        if inputs:
            raise NotImplementedError(f"{type(self).__name__} does not say how to go on after other inputs")
        return self

    def batch_size(self) -> int | None:
        """Return how many rows an element has that is not the last of its batches, None where nothing says so.

        As TensorFlow finds it: in the shapes, if no element may be smaller, and else in ``batch``, through steps that
        leave elements as they are.
        """
        if self.dynamic:
            return self._size_of_batches()
        sizes = {leaf.shape[:1] for leaf in flatten_spec(self.spec() or ())}
        return next(iter(sizes.pop()), None) if len(sizes) == 1 else None

    def _size_of_batches(self) -> int | None:
        """Return the size that ``batch`` was given, if its batches are the elements here."""
        return None

    def row_count(self) -> int:
        """Return the number of rows of all batches of a pass together: -1 without end, -2 unknown."""
        return UNKNOWN if self.cardinality else 0

    def graph(self) -> Iterator[Node]:
        """Yield all steps of the graph, those of the inputs first."""
        for node in self.inputs:
            yield from node.graph()
        yield self

    def shuffles(self) -> Iterator[Shuffle]:
        """Yield the shuffles of the whole graph, in the order of the inputs."""
        for node in self.inputs:
            yield from node.shuffles()

    def files(self) -> Iterator[str]:
        """Yield the paths of the files that the whole graph reads, in the order of the inputs."""
        for node in self.inputs:
            yield from node.files()

    def __str__(self) -> str:
        before = ", ".join(str(node) for node in self.inputs)
        if len(self.inputs) == 1:
            return f"{before}.{self.text}"
        return f"{self.text}({before})" if before else self.text


class Rows(Node):
    """Rows of a table, in an order that is known without reading them."""

    def __init__(self, inputs: Sequence[Node], cardinality: int, text: str, table: Table) -> None:
        super().__init__(inputs, cardinality, text)
        self.table = table

    @abstractmethod
    def blocks(self, run: Pass) -> Iterator[RowIndex]:
        """Yield the row numbers of a pass."""

    def elements(self, run: Pass) -> Iterator[Any]:
        """Yield the rows of a pass."""
        each = self.table.opened(run.readers).each
        return run.read_ahead(lambda: each(row_indices.rows(self.blocks(run))), self.read_ahead)

    def spec(self) -> Any:
        """Return that of the table."""
        return self.table.spec()


def require_rows(node: Node) -> Rows:
    """Return ``node``, which must be rows."""
    if not isinstance(node, Rows):
        raise TypeError(f"{node} is of type {type(node).__name__}; expected Rows here")
    return node


class Items(Node):
    """Elements that come one after the other; with a ``table``, an item is the row numbers of a batch."""

    table: Table | None = None

    @abstractmethod
    def items(self, run: Pass) -> Iterator[Any]:
        """Yield the items of a pass: row numbers where there is a table, and else the elements."""

    def elements(self, run: Pass) -> Iterator[Any]:
        """Yield the elements of a pass."""
        if self.table is None:
            return self.items(run)
        read = self.table.opened(run.readers).read
        return run.read_ahead(lambda: map(read, self.items(run)), self.read_ahead)


def require_items(node: Node) -> Items:
    """Return ``node``, which must be items."""
    if not isinstance(node, Items):
        raise TypeError(f"{node} is of type {type(node).__name__}; expected Items here")
    return node
