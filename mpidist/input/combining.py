"""Several datasets made one: one after the other, or each element from one of them that is drawn.

Where all of them are rows of tables, or all batches of such rows, so is what comes out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, chain, islice, repeat
from typing import Any

import numpy as np

from mpidist.core import nest
from mpidist.input import row_indices
from mpidist.input.element_spec import ArraySpec, flatten_spec, map_spec, spec_of
from mpidist.input.elements import join
from mpidist.input.pipeline import Items, Node, Rows, require_items, require_rows
from mpidist.input.read_ahead import Readers
from mpidist.input.reordering import INFINITE, UNKNOWN, Pass, Shuffle
from mpidist.input.row_indices import RowIndex
from mpidist.input.tables import Table

_DRAWN_AHEAD = 1024
_END = object()


def _common_spec(specs: Sequence[Any], step: str) -> Any:
    """Return the spec that all elements have, sizes that differ unknown; None where there are no specs.

    Raises:
        TypeError: Structures, dtypes or numbers of axes differ.
    """
    if not specs:
        return None
    kinds = [map_spec(lambda leaf: f"{len(leaf.shape)}-d {_kind(leaf.dtype)}", spec) for spec in specs]
    if any(kind != kinds[0] for kind in kinds):
        raise TypeError(
            f"{step}() got datasets of unlike elements: {'; '.join(dict.fromkeys(map(str, specs)))}; expected "
            "the same structure, dtypes and numbers of axes: bring them together by map(...) before"
        )
    columns = zip(*map(flatten_spec, specs), strict=True)

    def merge(leaf: ArraySpec) -> ArraySpec:
        sizes = zip(*(other.shape for other in next(columns)), strict=True)
        return ArraySpec(tuple(size[0] if len(set(size)) == 1 else None for size in sizes), leaf.dtype)

    return map_spec(merge, specs[0])


def _kind(dtype: np.dtype[Any]) -> str:
    return "text" if dtype.kind in "SU" else str(dtype)  # of any length


class JoinedTable(Table):
    """The rows of several tables, one table after the other."""

    def __init__(self, tables: Sequence[Table], step: str) -> None:
        super().__init__(sum(table.length for table in tables), ", ".join(table.text for table in tables))
        self.tables = tables
        self.step = step
        self.starts = [0, *accumulate(table.length for table in tables)][:-1]

    def row(self, index: int) -> Any:
        """Return row ``index``."""
        owner = bisect_right(self.starts, index) - 1
        return self.tables[owner].row(index - self.starts[owner])

    def some(self, index: RowIndex) -> list[Any]:
        """Return the rows, those of each table asked for together."""
        found: list[Any] = [None] * len(index)
        for table, places, own in self._divided(index):
            for place, row in zip(places.tolist(), table.some(own), strict=True):
                found[place] = row
        return found

    def read(self, index: RowIndex) -> Any:
        """Return the rows as one batch, those of each table read together."""
        parts = self._divided(index)
        if len(parts) == 1:
            table, _, own = parts[0]
            return table.read(own)
        batches = [table.read(own) for table, _, own in parts]
        _common_spec([spec_of(batch) for batch in batches], self.step)
        order = np.argsort(np.concatenate([places for _, places, _ in parts]))
        return nest.map_structure(lambda leaf: leaf[order], join(batches))

    def _divided(self, index: RowIndex) -> list[tuple[Table, np.ndarray[Any, Any], RowIndex]]:
        """Return for each table that has some of the rows their places in ``index``, and their numbers in the table."""
        numbers = row_indices.as_array(index)
        owners = np.searchsorted(self.starts, numbers, "right") - 1
        divided: list[tuple[Table, np.ndarray[Any, Any], RowIndex]] = []
        for owner in np.unique(owners).tolist():
            places, start = np.flatnonzero(owners == owner), self.starts[owner]
            own = numbers[places] - start
            # Evenly spaced rows stay so, and are read as a slice.
            if isinstance(index, range):
                own = range(int(own[0]), int(own[-1]) + (1 if index.step > 0 else -1), index.step)
            divided.append((self.tables[owner], places, own))
        return divided

    def opened(self, readers: Readers | None) -> Table:
        """Return the tables with the threads of the pass."""
        return JoinedTable([table.opened(readers) for table in self.tables], self.step)

    def cached(self) -> Table:
        """Return the tables, of which each row is read once."""
        return JoinedTable([table.cached() for table in self.tables], self.step)

    def spec(self) -> Any:
        """Return what the rows of all tables look like."""
        return _common_spec([table.spec() for table in self.tables if table.length], self.step)

    def is_cut_from_arrays(self) -> bool:
        """Whether the rows of all tables are."""
        return all(table.is_cut_from_arrays() for table in self.tables)


class Combination(ABC):
    """A way to make one dataset of several; one class for rows by number, for batches of such rows, and for elements.

    Attributes:
        step: The method that makes it.
        draws: What the order is drawn by, None where nothing is drawn.
    """

    step: str
    draws: Shuffle | None = None

    @abstractmethod
    def text(self) -> str:
        """Return the step as a text."""

    @abstractmethod
    def count(self, counts: Sequence[int]) -> int:
        """Return how many elements come of inputs with so many."""

    def used(self, inputs: Sequence[Node]) -> Sequence[Node]:
        """Return the inputs of which elements come."""
        return inputs

    @abstractmethod
    def order(self, streams: Sequence[Iterator[Any]], run: Pass) -> Iterator[Any]:
        """Yield the elements of all streams."""


class Concatenation(Combination):
    """One input after the other."""

    step = "concatenate"

    def text(self) -> str:
        """Return the step as a text."""
        return self.step

    def count(self, counts: Sequence[int]) -> int:
        """Return the sum."""
        return _sum(counts)

    def order(self, streams: Sequence[Iterator[Any]], run: Pass) -> Iterator[Any]:
        """Yield the elements of each stream in turn."""
        return chain.from_iterable(streams)


class Sampling(Combination):
    """Each element is the next one of an input that is drawn.

    Args:
        weights: How likely each input is drawn; 0 for never.
        draws: By which it is drawn.
        stop: End with the first input that is drawn and has nothing left; else go on with the others.
    """

    step = "sample_from_datasets"
    draws: Shuffle

    def __init__(self, weights: Sequence[float], draws: Shuffle, stop: bool) -> None:
        self.weights = weights
        self.draws = draws
        self.stop = stop

    def text(self) -> str:
        """Return the step as a text."""
        seed = self.draws.seed if self.draws.given else None
        again = f", rerandomize_each_iteration={self.draws.reshuffle}" if self.draws.given else ""
        stop = ", stop_on_empty_dataset=True" if self.stop else ""
        return f"{self.step}[weights={list(self.weights)}, seed={seed}{stop}{again}]"

    def count(self, counts: Sequence[int]) -> int:
        """Return the sum of those that are drawn; unknown if the first that ends ends all."""
        drawn = [count for count, weight in zip(counts, self.weights, strict=True) if weight > 0]
        if not self.stop or all(count == INFINITE for count in drawn):
            return _sum(drawn)
        return UNKNOWN

    def used(self, inputs: Sequence[Node]) -> Sequence[Node]:
        """Return those that may be drawn."""
        return [node for node, weight in zip(inputs, self.weights, strict=True) if weight > 0]

    def order(self, streams: Sequence[Iterator[Any]], run: Pass) -> Iterator[Any]:
        """Yield an element of a stream that is drawn, until all have ended, or one has."""
        generator = self.draws.generator(run)
        going = [number for number, weight in enumerate(self.weights) if weight > 0]
        while going:
            bounds = list(accumulate(self.weights[number] for number in going))
            while True:
                place = min(bisect_right(bounds, generator.random() * bounds[-1]), len(going) - 1)
                element = next(streams[going[place]], _END)
                if element is _END:
                    break
                yield element
            if self.stop:
                return
            del going[place]


def _sum(counts: Sequence[int]) -> int:
    for special in (INFINITE, UNKNOWN):
        if special in counts:
            return special
    return sum(counts)


def combined(nodes: Sequence[Node], combination: Combination) -> Node:
    """Return the node of several inputs together."""
    return (CombinedRows if all(isinstance(node, Rows) for node in nodes) else CombinedItems)(nodes, combination)


def _shifted(table: JoinedTable, streams: Iterable[Iterator[Any]], shift: Callable[[Any, int], Any]) -> Iterator[Any]:
    for stream, start in zip(streams, table.starts, strict=True):
        yield map(shift, stream, repeat(start))


class CombinedRows(Rows):
    """Rows of several tables together."""

    def __init__(self, inputs: Sequence[Node], combination: Combination) -> None:
        table = JoinedTable([require_rows(node).table for node in inputs], combination.step)
        super().__init__(inputs, combination.count([node.cardinality for node in inputs]), combination.text(), table)
        self.joined = table
        self.combination = combination
        # Rows of different tables may have different sizes.
        self.dynamic = True
        self.read_ahead = max(node.read_ahead for node in inputs)

    def blocks(self, run: Pass) -> Iterator[RowIndex]:
        """Yield the row numbers of all inputs in the order of the combination."""
        runs = [run.repetition(number) for number in range(len(self.inputs))]
        blocks = [require_rows(node).blocks(own) for node, own in zip(self.inputs, runs, strict=True)]
        if self.combination.draws is None:
            yield from self.combination.order(list(_shifted(self.joined, blocks, _shift_block)), run)
            return
        numbers = _shifted(self.joined, map(row_indices.rows, blocks), int.__add__)
        drawn = self.combination.order(list(numbers), run)
        while block := list(islice(drawn, _DRAWN_AHEAD)):
            yield np.array(block, np.int64)

    def with_inputs(self, inputs: Sequence[Node]) -> Node:
        """Return other inputs together."""
        return combined(inputs, self.combination)

    def shuffles(self) -> Iterator[Shuffle]:
        """Yield those of the inputs, and what the order is drawn by."""
        yield from super().shuffles()
        if self.combination.draws is not None:
            yield self.combination.draws


def _shift_block(block: RowIndex, start: int) -> RowIndex:
    return range(block.start + start, block.stop + start, block.step) if isinstance(block, range) else block + start


class CombinedItems(Items):
    """Batches or elements of several inputs together."""

    def __init__(self, inputs: Sequence[Node], combination: Combination) -> None:
        super().__init__(inputs, combination.count([node.cardinality for node in inputs]), combination.text())
        self.combination = combination
        # The last batch of an input may be smaller and is not the last here.
        self.dynamic = True
        tables = [node.table for node in inputs if isinstance(node, Items) and node.table is not None]
        self.joined = JoinedTable(tables, combination.step) if len(tables) == len(inputs) else None
        self.table = self.joined
        self.read_ahead = max(node.read_ahead for node in inputs) if self.joined else 0

    def items(self, run: Pass) -> Iterator[Any]:
        """Yield the items of all inputs in the order of the combination."""
        runs = [run.repetition(number) for number in range(len(self.inputs))]
        if self.joined is not None:
            items = [require_items(node).items(own) for node, own in zip(self.inputs, runs, strict=True)]
            return self.combination.order(list(_shifted(self.joined, items, _shift_block)), run)
        seen: list[Any] = []
        elements = [self._checked(node, own, seen) for node, own in zip(self.inputs, runs, strict=True)]
        return self.combination.order(elements, run)

    def _checked(self, node: Node, run: Pass, seen: list[Any]) -> Iterator[Any]:
        """Yield the elements of an input, which is opened with the first; that is compared with those of others."""
        elements = node.elements(run)
        for element in elements:
            seen.append(spec_of(element))
            _common_spec(seen, self.combination.step)
            yield element
            break
        yield from elements

    def spec(self) -> Any:
        """Return what the elements of all inputs look like."""
        specs = (node.spec() for node in self.inputs if node.cardinality)
        return _common_spec([spec for spec in specs if spec is not None], self.combination.step)

    def with_inputs(self, inputs: Sequence[Node]) -> Node:
        """Return other inputs together."""
        return combined(inputs, self.combination)

    def _size_of_batches(self) -> int | None:
        sizes = {node.batch_size() for node in self.inputs}
        return sizes.pop() if len(sizes) == 1 else None

    def row_count(self) -> int:
        """Return that of all inputs together, where all their elements come."""
        if self.cardinality < 0:
            return self.cardinality
        return _sum([node.row_count() for node in self.combination.used(self.inputs)])

    def shuffles(self) -> Iterator[Shuffle]:
        """Yield those of the inputs, and what the order is drawn by."""
        yield from super().shuffles()
        if self.combination.draws is not None:
            yield self.combination.draws
