"""The nodes of a dataset's graph.

``Rows``: elements are rows of a table, known by number until they are read.
``Items``: elements are batches of rows of a table, known by their numbers until they are read, or come one
after the other from a stream. Transforms keep the numbers as long as they can, so that a rank which needs a
part of a batch reads that part only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from mpidist.input import row_indices
from mpidist.input.element_spec import ArraySpec, batched, flatten_spec, map_spec, spec_of
from mpidist.input.elements import call, owned, stack
from mpidist.input.reordering import INFINITE, UNKNOWN, Pass, Reordering, Shuffle, Source
from mpidist.input.row_indices import RowIndex
from mpidist.input.tables import MappedTable, Table


class Node(ABC):
    """One step of a pipeline.

    Attributes:
        inputs: The steps before it.
        cardinality: Number of elements in a pass, -1 without end, -2 unknown.
        text: The call that made it, for messages and for comparing pipelines of several ranks.
        batched: Whether its elements went through ``batch``.
        dynamic: Whether the first axis of its elements may differ from element to element.
        read_ahead: How many elements are read ahead when ``elements`` reads rows by number.
    """

    batched: bool
    dynamic: bool

    def __init__(self, inputs: Sequence[Node], cardinality: int, text: str) -> None:
        self.inputs = tuple(inputs)
        self.cardinality = cardinality
        self.text = text
        self.batched = bool(inputs) and all(node.batched for node in inputs)
        self.dynamic = any(node.dynamic for node in inputs)
        self.read_ahead = 0

    @abstractmethod
    def elements(self, run: Pass) -> Iterator[Any]:
        """Yield the elements of a pass."""

    @abstractmethod
    def spec(self) -> Any:
        """Return the nest of ArraySpec of an element, None if there is none to tell from; may read one."""

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
        return run.read_ahead(lambda: map(self.table.row, row_indices.rows(self.blocks(run))), self.read_ahead)

    def spec(self) -> Any:
        """Return that of the table."""
        return self.table.spec()


class TableRows(Rows):
    """All rows of a table in their own order."""

    def __init__(self, table: Table) -> None:
        super().__init__((), table.length, table.text, table)

    def blocks(self, run: Pass) -> Iterator[RowIndex]:
        """Yield all row numbers."""
        return iter((range(self.table.length),))


class MappedRows(Rows):
    """Rows that go through a function when they are read."""

    def __init__(self, rows: Rows, fn: Callable[..., Any]) -> None:
        super().__init__((rows,), rows.cardinality, "map", MappedTable(rows.table, fn))
        self.blocks_of = rows.blocks
        self.read_ahead = rows.read_ahead

    def blocks(self, run: Pass) -> Iterator[RowIndex]:
        """Yield the row numbers of the input."""
        return self.blocks_of(run)


class ReorderedRows(Rows):
    """Rows chosen and ordered by number."""

    def __init__(self, rows: Rows, reordering: Reordering) -> None:
        super().__init__((rows,), reordering.cardinality(rows.cardinality), str(reordering), rows.table)
        self.rows = rows
        self.read_ahead = rows.read_ahead
        self.reordering = reordering

    def blocks(self, run: Pass) -> Iterator[RowIndex]:
        """Yield the row numbers that the reordering chooses."""
        return self.reordering.blocks(Source(self.rows.blocks, self.rows.cardinality), run)

    def shuffles(self) -> Iterator[Shuffle]:
        """Yield those of the input, and this one if it is a shuffle."""
        yield from super().shuffles()
        if isinstance(self.reordering, Shuffle):
            yield self.reordering


class PrefetchedRows(Rows):
    """The same rows, to be read ahead by whatever reads them."""

    def __init__(self, rows: Rows, size: int) -> None:
        super().__init__((rows,), rows.cardinality, f"prefetch({size})", rows.table)
        self.blocks_of = rows.blocks
        self.read_ahead = rows.read_ahead + size

    def blocks(self, run: Pass) -> Iterator[RowIndex]:
        """Yield the row numbers of the input."""
        return self.blocks_of(run)


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
        read = self.table.read
        return run.read_ahead(lambda: map(read, self.items(run)), self.read_ahead)


class ReorderedItems(Items):
    """Items chosen and ordered as wholes."""

    def __init__(self, source: Items, reordering: Reordering) -> None:
        super().__init__((source,), reordering.cardinality(source.cardinality), str(reordering))
        self.table = source.table
        self.source = source
        self.reordering = reordering
        self.read_ahead = source.read_ahead

    def items(self, run: Pass) -> Iterator[Any]:
        """Yield the items that the reordering chooses."""
        return self.reordering.items(Source(self.source.items, self.source.cardinality), run)

    def spec(self) -> Any:
        """Return that of the input."""
        return self.source.spec()

    def shuffles(self) -> Iterator[Shuffle]:
        """Yield those of the input, and this one if it is a shuffle."""
        yield from super().shuffles()
        if isinstance(self.reordering, Shuffle):
            yield self.reordering


class PrefetchedItems(Items):
    """The same items: batches of rows are read ahead by whatever reads them, and other elements here."""

    def __init__(self, source: Items, size: int) -> None:
        super().__init__((source,), source.cardinality, f"prefetch({size})")
        self.table = source.table
        self.source = source
        self.size = size
        self.read_ahead = source.read_ahead + size

    def items(self, run: Pass) -> Iterator[Any]:
        """Yield the items of the input."""
        if self.table is not None:
            return self.source.items(run)
        return run.read_ahead(lambda: self.source.items(run), self.size)

    def spec(self) -> Any:
        """Return that of the input."""
        return self.source.spec()


class Batches(Items):
    """Groups of consecutive elements, stacked; of rows only the numbers are grouped."""

    def __init__(self, source: Node, size: int, drop_remainder: bool) -> None:
        count = source.cardinality
        if count >= 0:
            count = count // size if drop_remainder else -(-count // size)
        text = f"batch({size}{', drop_remainder=True' if drop_remainder else ''})"
        super().__init__((source,), count, text)
        self.source = source
        self.size = size
        self.drop_remainder = drop_remainder
        self.table = source.table if isinstance(source, Rows) else None
        self.read_ahead = -(-source.read_ahead // size) if isinstance(source, Rows) else 0
        self.batched = True
        self.dynamic = not drop_remainder

    def items(self, run: Pass) -> Iterator[Any]:
        """Yield the row numbers of each batch, or the batches."""
        if isinstance(self.source, Rows):
            yield from row_indices.batch(self.source.blocks(run), self.size, self.drop_remainder)
            return
        elements = self.source.elements(run)
        while group := list(islice(elements, self.size)):
            if len(group) == self.size or not self.drop_remainder:
                yield stack(group)

    def spec(self) -> Any:
        """Return that of the input with the batch in front."""
        spec = self.source.spec()
        return None if spec is None else batched(spec, self.size if self.drop_remainder else None)


class Mapped(Items):
    """A function of each element."""

    def __init__(self, source: Node, fn: Callable[..., Any]) -> None:
        super().__init__((source,), source.cardinality, "map")
        self.source = source
        self.fn = fn

    def items(self, run: Pass) -> Iterator[Any]:
        """Yield the function of each element."""
        return (owned(call(self.fn, element)) for element in self.source.elements(run))

    def spec(self) -> Any:
        """Return that of the function of the first element.

        The first axis is unknown where it has the size of the first batch and batches may differ in size.
        """
        for element in self.source.elements(Pass()):
            spec = spec_of(call(self.fn, element))
            if not self.source.batched or not self.dynamic:
                return spec
            sizes = {leaf.shape[0] for leaf in flatten_spec(spec_of(element)) if leaf.shape}
            return map_spec(lambda leaf, sizes=sizes: _forget(leaf, sizes), spec)
        return None


def _forget(leaf: ArraySpec, sizes: set[int | None]) -> ArraySpec:
    if leaf.shape and leaf.shape[0] in sizes:
        return ArraySpec((None, *leaf.shape[1:]), leaf.dtype)
    return leaf


class Filtered(Items):
    """The elements for which a function is true."""

    def __init__(self, source: Node, predicate: Callable[..., Any]) -> None:
        super().__init__((source,), UNKNOWN if source.cardinality else 0, "filter")
        self.source = source
        self.predicate = predicate

    def items(self, run: Pass) -> Iterator[Any]:
        """Yield the elements for which it is true."""
        return (element for element in self.source.elements(run) if bool(call(self.predicate, element)))

    def spec(self) -> Any:
        """Return that of the input."""
        return self.source.spec()


class Zipped(Items):
    """Elements of several inputs side by side, until the first of them ends.

    Args:
        sources: The inputs.
        build: Makes an element of theirs.
    """

    def __init__(self, sources: Sequence[Node], build: Callable[[list[Any]], Any]) -> None:
        counts = [node.cardinality for node in sources]
        finite = [count for count in counts if count != INFINITE]
        super().__init__(sources, min(finite, default=INFINITE), "zip")
        self.build = build

    def items(self, run: Pass) -> Iterator[Any]:
        """Yield the elements of all inputs together."""
        streams = (node.elements(run) for node in self.inputs)
        return (self.build(list(parts)) for parts in zip(*streams, strict=False))

    def spec(self) -> Any:
        """Return those of the inputs."""
        specs = [node.spec() for node in self.inputs]
        return None if any(spec is None for spec in specs) else self.build(specs)
