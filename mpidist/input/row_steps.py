"""The steps of a pipeline whose elements are rows of a table, known by number until they are read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mpidist.input.pipeline import Node, Rows, require_rows
from mpidist.input.reordering import Pass, Reordering, Shuffle, Source
from mpidist.input.row_indices import RowIndex
from mpidist.input.tables import ArrayTable, MappedTable, Table


class TableRows(Rows):
    """All rows of a table in their own order."""

    def __init__(self, table: Table) -> None:
        super().__init__((), table.length, table.text, table)

    def blocks(self, run: Pass) -> Iterator[RowIndex]:
        """Yield all row numbers."""
        return iter((range(self.table.length),))


class MappedRows(Rows):
    """Rows that go through a function when they are read, ``calls`` of them at once."""

    def __init__(self, rows: Rows, fn: Callable[..., Any], calls: int = 1) -> None:
        super().__init__((rows,), rows.cardinality, "map", MappedTable(rows.table, fn, calls))
        self.calls = calls
        self.blocks_of = rows.blocks
        self.fn = fn
        self.read_ahead = rows.read_ahead

    def blocks(self, run: Pass) -> Iterator[RowIndex]:
        """Yield the row numbers of the input."""
        return self.blocks_of(run)

    def with_inputs(self, inputs: Sequence[Node]) -> Node:
        """Return the same function of other rows."""
        return MappedRows(require_rows(inputs[0]), self.fn, self.calls)


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

    def with_inputs(self, inputs: Sequence[Node]) -> Node:
        """Return the same choice of other rows."""
        return ReorderedRows(require_rows(inputs[0]), self.reordering)

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
        self.size = size
        self.read_ahead = rows.read_ahead + size

    def blocks(self, run: Pass) -> Iterator[RowIndex]:
        """Yield the row numbers of the input."""
        return self.blocks_of(run)

    def with_inputs(self, inputs: Sequence[Node]) -> Node:
        """Return the same prefetch of other rows."""
        return PrefetchedRows(require_rows(inputs[0]), self.size)


def array_samples(node: Node) -> Iterator[int]:
    """Yield a checksum of some rows of each nest of arrays that a pipeline reads."""
    for step in node.graph():
        if isinstance(step, TableRows) and isinstance(step.table, ArrayTable):
            yield step.table.sample()
