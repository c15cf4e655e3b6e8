"""Tables made of others: mapped, side by side, or one after the other."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from copy import copy
from itertools import accumulate, tee

import numpy as np

from mpidist.arrays.dtypes import Array
from mpidist.core import nest
from mpidist.input import row_indices
from mpidist.input.element_spec import common_spec, spec_of
from mpidist.input.elements import call, join, owned
from mpidist.input.row_indices import RowIndex
from mpidist.input.tables import RowTable
from mpidist.input.threads import Readers, map_batch, map_stream


class MappedTable(RowTable):
    """A table whose rows go through a function when they are read.

    Args:
        table: The table.
        fn: The function.
        calls: The number of calls at once, in threads of the pass; 1: they run in the thread that reads.
        threads: Those of the pass; rows are read by the thread that asks, and only the function runs in others.
    """

    def __init__(
        self, table: RowTable, fn: Callable[..., object], calls: int = 1, threads: ThreadPoolExecutor | None = None
    ) -> None:
        super().__init__(table.length, f"{table.text}.map")
        self.table = table
        self.fn = fn
        self.calls = calls
        self.threads = threads

    def _call(self, row: object) -> object:
        return owned(call(self.fn, row))

    def row(self, index: int) -> object:
        """Return the function's result for row ``index``."""
        return self._call(self.table.row(index))

    def each(self, numbers: Iterable[int]) -> Iterator[object]:
        """Yield the function's result for each row, in threads a few calls ahead."""
        rows = self.table.each(numbers)
        return map(self._call, rows) if self.threads is None else map_stream(self._call, rows, self.threads, self.calls)

    def rows(self, index: RowIndex) -> list[object]:
        """Return the function's result for each row."""
        rows = self.table.rows(index)
        if self.threads is None:
            return list(map(self._call, rows))
        return map_batch(self._call, rows, self.threads, self.calls)

    def opened(self, readers: Readers | None) -> RowTable:
        """Return the table with the threads of the pass."""
        threads = readers.workers(self.calls) if self.calls > 1 and readers is not None else None
        return MappedTable(self.table.opened(readers), self.fn, self.calls, threads)


class TableGroup(RowTable):
    """Several tables as one.

    Attributes:
        tables: The tables.
    """

    tables: Sequence[RowTable]

    def _of(self, tables: Sequence[RowTable]) -> RowTable:
        group = copy(self)
        group.tables = tables
        return group

    def opened(self, readers: Readers | None) -> RowTable:
        """Return the tables with the threads of the pass."""
        return self._of([table.opened(readers) for table in self.tables])

    def cached(self) -> RowTable:
        """Return the tables, of which each row is read once."""
        return self._of([table.cached() for table in self.tables])

    def is_cut_from_arrays(self) -> bool:
        """Return whether the rows of all tables are cut from arrays."""
        return all(table.is_cut_from_arrays() for table in self.tables)


class ZippedTable(TableGroup):
    """Several tables side by side, as long as the shortest.

    Args:
        tables: The tables.
        build: Makes an element of theirs.
    """

    def __init__(self, tables: Sequence[RowTable], build: Callable[[list[object]], object]) -> None:
        text = ", ".join(table.text for table in tables)
        super().__init__(min(table.length for table in tables), f"zip({text})")
        self.tables = tables
        self.build = build

    def row(self, index: int) -> object:
        """Return row ``index`` of each table."""
        return self.build([table.row(index) for table in self.tables])

    def each(self, numbers: Iterable[int]) -> Iterator[object]:
        """Yield the rows of all tables together."""
        copies = tee(numbers, len(self.tables))
        parts = zip(*(table.each(own) for table, own in zip(self.tables, copies, strict=True)), strict=True)
        return (self.build(list(row)) for row in parts)

    def rows(self, index: RowIndex) -> list[object]:
        """Return the rows of all tables together."""
        return [self.build(list(row)) for row in zip(*(table.rows(index) for table in self.tables), strict=True)]

    def read(self, index: RowIndex) -> object:
        """Return the rows of ``index`` of each table."""
        return self.build([table.read(index) for table in self.tables])

    def spec(self) -> object:
        """Return the specs of the tables."""
        specs = [table.spec() for table in self.tables]
        return None if any(spec is None for spec in specs) else self.build(specs)


class JoinedTable(TableGroup):
    """The rows of several tables, one table after the other."""

    def __init__(self, tables: Sequence[RowTable], step: str) -> None:
        super().__init__(sum(table.length for table in tables), ", ".join(table.text for table in tables))
        self.tables = tables
        self.step = step
        self.starts = [0, *accumulate(table.length for table in tables)][:-1]

    def row(self, index: int) -> object:
        """Return row ``index``."""
        owner = bisect_right(self.starts, index) - 1
        return self.tables[owner].row(index - self.starts[owner])

    def rows(self, index: RowIndex) -> list[object]:
        """Return the rows, those of each table asked for together."""
        found: list[object] = [None] * len(index)
        for table, places, own in self._divided(index):
            for place, row in zip(places.tolist(), table.rows(own), strict=True):
                found[place] = row
        return found

    def read(self, index: RowIndex) -> object:
        """Return the rows as one batch, those of each table read together."""
        parts = self._divided(index)
        if len(parts) == 1:
            table, _, own = parts[0]
            return table.read(own)
        batches = [table.read(own) for table, _, own in parts]
        common_spec([spec_of(batch) for batch in batches], self.step)
        order = np.argsort(np.concatenate([places for _, places, _ in parts]))
        return nest.map_structure(lambda leaf: leaf[order], join(batches))

    def _divided(self, index: RowIndex) -> list[tuple[RowTable, Array, RowIndex]]:
        """Return the tables that have some of the rows, each with places and row numbers.

        The places are those in ``index``, the row numbers those of the table.
        """
        numbers = row_indices.as_array(index)
        owners = np.searchsorted(self.starts, numbers, "right") - 1
        divided: list[tuple[RowTable, Array, RowIndex]] = []
        for owner in np.unique(owners).tolist():
            places, start = np.flatnonzero(owners == owner), self.starts[owner]
            own = numbers[places] - start
            # Evenly spaced rows stay so, and are read as a slice.
            if isinstance(index, range):
                own = range(int(own[0]), int(own[-1]) + (1 if index.step > 0 else -1), index.step)
            divided.append((self.tables[owner], places, own))
        return divided

    def spec(self) -> object:
        """Return the common spec of the rows of all tables."""
        return common_spec([table.spec() for table in self.tables if table.length], self.step)
