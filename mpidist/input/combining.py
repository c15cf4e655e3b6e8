"""Steps that make one dataset of several: side by side, one after the other, or each element from one that is drawn.

Where all of several that are joined are rows of tables, or all batches of such rows, so is the result.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice
from typing import Any, ClassVar

import numpy as np

from mpidist.input import row_indices
from mpidist.input.derived_tables import JoinedTable
from mpidist.input.element_spec import common_spec, spec_of
from mpidist.input.graph import INFINITE, UNKNOWN, Form, GraphNode, Pass, Seed
from mpidist.input.row_indices import RowIndex

_DRAWN_AHEAD = 1024
_END = object()


@dataclass(eq=False, repr=False)
class Zipped(GraphNode):
    """Elements of several inputs side by side, until the first of them ends.

    Args:
        build: Makes an element of theirs.
    """

    keeps_batches = True

    build: Callable[[list[Any]], Any]

    def __post_init__(self) -> None:
        super().__post_init__()
        self.text = "zip"
        finite = [node.cardinality for node in self.inputs if node.cardinality != INFINITE]
        self.cardinality = min(finite, default=INFINITE)

    def items(self, run: Pass) -> Iterator[Any]:
        """Yield the elements of all inputs together."""
        streams = (node.elements(run) for node in self.inputs)
        return (self.build(list(parts)) for parts in zip(*streams, strict=False))

    def spec(self) -> Any:
        """Return those of the inputs."""
        specs = [node.spec() for node in self.inputs]
        return None if any(spec is None for spec in specs) else self.build(specs)


class Joined(GraphNode):
    """The elements of all inputs in some order.

    Attributes:
        step: The method that makes it.
    """

    keeps_batches = True
    step: ClassVar[str]

    def __post_init__(self) -> None:
        super().__post_init__()
        # Rows of different tables may have different sizes; the last batch of an input may be smaller, and is not last.
        self.dynamic = True
        form, *others = {node.form for node in self.inputs}
        if not others and form is not Form.ELEMENTS:
            self.form = form
            self.table = JoinedTable([node.row_table() for node in self.inputs], self.step)
            self.read_ahead = max(node.read_ahead for node in self.inputs)

    @abstractmethod
    def order(self, streams: Sequence[Iterator[Any]], run: Pass) -> Iterator[Any]:
        """Yield the items of all streams."""

    def used(self) -> Sequence[GraphNode]:
        """Return the inputs of which elements come."""
        return self.inputs

    def items(self, run: Pass) -> Iterator[Any]:
        """Yield the items of all inputs in their order."""
        return self.order(self.streams(run), run)

    def streams(self, run: Pass) -> list[Iterator[Any]]:
        """Return the items of each input; row numbers are those of the joined table."""
        runs = [run.repetition(number) for number in range(len(self.inputs))]
        if isinstance(self.table, JoinedTable):
            starts = self.table.starts
            return [_shifted(node.items(own), at) for node, own, at in zip(self.inputs, runs, starts, strict=True)]
        seen: list[Any] = []
        return [self._checked(node, own, seen) for node, own in zip(self.inputs, runs, strict=True)]

    def _checked(self, node: GraphNode, run: Pass, seen: list[Any]) -> Iterator[Any]:
        """Yield the elements of an input, which is opened with the first; that is compared with those of others."""
        elements = node.elements(run)
        for element in elements:
            seen.append(spec_of(element))
            common_spec(seen, self.step)
            yield element
            break
        yield from elements

    def spec(self) -> Any:
        """Return what the elements of all inputs look like."""
        if self.form is Form.ROWS:
            return super().spec()
        specs = (node.spec() for node in self.inputs if node.cardinality)
        return common_spec([spec for spec in specs if spec is not None], self.step)

    def row_count(self) -> int:
        """Return that of all inputs together, where all their elements come."""
        return self.cardinality if self.cardinality < 0 else _sum([node.row_count() for node in self.used()])


def _shifted(blocks: Iterator[RowIndex], by: int) -> Iterator[RowIndex]:
    for block in blocks:
        if isinstance(block, range):
            yield range(block.start + by, block.stop + by, block.step)
        else:
            yield block + by


def _sum(counts: Sequence[int]) -> int:
    for special in (INFINITE, UNKNOWN):
        if special in counts:
            return special
    return sum(counts)


class Concatenated(Joined):
    """One input after the other."""

    step = "concatenate"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.text = self.step
        self.cardinality = _sum([node.cardinality for node in self.inputs])

    def order(self, streams: Sequence[Iterator[Any]], run: Pass) -> Iterator[Any]:
        """Yield the items of each stream in turn."""
        return chain.from_iterable(streams)


@dataclass(eq=False, repr=False)
class Sampled(Joined):
    """Each element is the next one of an input that is drawn.

    Args:
        weights: How likely each input is drawn; 0 for never.
        seed: By which it is drawn.
        stop: End with the first input that is drawn and has nothing left; else go on with the others.
    """

    step = "sample_from_datasets"

    weights: Sequence[float]
    seed: Seed
    stop: bool

    def __post_init__(self) -> None:
        super().__post_init__()
        drawn = [node.cardinality for node in self.used()]
        endless = all(count == INFINITE for count in drawn)
        self.cardinality = UNKNOWN if self.stop and not endless else _sum(drawn)
        again = f", rerandomize_each_iteration={self.seed.is_renewed}" if self.seed.given else ""
        stop = ", stop_on_empty_dataset=True" if self.stop else ""
        seed = self.seed.number if self.seed.given else None
        self.text = f"{self.step}[weights={list(self.weights)}, seed={seed}{stop}{again}]"

    def used(self) -> Sequence[GraphNode]:
        """Return those that may be drawn."""
        return [node for node, weight in zip(self.inputs, self.weights, strict=True) if weight > 0]

    def items(self, run: Pass) -> Iterator[Any]:
        """Yield the items of all inputs in the order in which they are drawn, rows one by one."""
        if self.form is not Form.ROWS:
            yield from super().items(run)
            return
        drawn = self.order([row_indices.rows(blocks) for blocks in self.streams(run)], run)
        while block := list(islice(drawn, _DRAWN_AHEAD)):
            yield np.array(block, np.int64)

    def order(self, streams: Sequence[Iterator[Any]], run: Pass) -> Iterator[Any]:
        """Yield an item of a stream that is drawn, until all have ended, or one has."""
        generator = self.seed.generator(run)
        going = [number for number, weight in enumerate(self.weights) if weight > 0]
        while going:
            bounds = list(accumulate(self.weights[number] for number in going))
            while True:
                place = min(bisect_right(bounds, generator.random() * bounds[-1]), len(going) - 1)
                item = next(streams[going[place]], _END)
                if item is _END:
                    break
                yield item
            if self.stop:
                return
            del going[place]

    def seeds(self) -> Iterator[Seed]:
        """Yield those of the inputs, and its own."""
        yield from super().seeds()
        yield self.seed
