"""Steps that make one dataset of several: zip, concatenate, sample_from_datasets and interleave."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np

from mpidist.arrays.dtypes import Array
from mpidist.core import nest
from mpidist.input import row_indices
from mpidist.input.elements import call, common_spec, join, spec_of
from mpidist.input.nodes import INFINITE, UNKNOWN, Form, GraphNode, Pass, Seed, T, combined
from mpidist.input.row_indices import RowIndex
from mpidist.input.steps import DRAWN_AHEAD, Cached
from mpidist.input.threads import ending, taken_ahead

_END: Any = object()


def _caching_inputs(node: GraphNode) -> GraphNode:
    # Arrays in memory are not kept a second time.
    return node.with_inputs([table.caching() or Cached((table,)) for table in node.inputs])


@dataclass(eq=False, repr=False)
class Zipped(GraphNode):
    """Elements of several inputs side by side, until the first input ends. ``build`` makes an element of theirs."""

    keeps_batches = True

    build: Callable[[list[object]], object]

    def _set_up(self) -> None:
        self.text = "zip"
        finite = [node.cardinality for node in self.inputs if node.cardinality != INFINITE]
        self.cardinality = min(finite, default=INFINITE)
        self.is_source = all(node.is_source for node in self.inputs)
        if self.is_source:
            self.form, self.is_table = Form.ROWS, True

    def items(self, run: Pass) -> Iterator[object]:
        """Yield all row numbers, or the elements of all inputs together."""
        if self.is_source:
            return iter((range(self.cardinality),))
        return self._together([node.elements(run) for node in self.inputs])

    def _together(self, streams: Iterable[Iterable[object]]) -> Iterator[object]:
        return (self.build(list(parts)) for parts in zip(*streams, strict=False))

    def each(self, numbers: Iterable[int], run: Pass) -> Iterator[object]:
        """Yield the rows of all inputs together."""
        copies = itertools.tee(numbers, len(self.inputs))
        return self._together([table.each(own, run) for table, own in zip(self.inputs, copies, strict=True)])

    def read_rows(self, index: RowIndex, run: Pass) -> list[object]:
        """Return the rows of all inputs together."""
        return list(self._together([table.read_rows(index, run) for table in self.inputs]))

    def read(self, index: RowIndex, run: Pass) -> object:
        """Return the rows of each input as a batch."""
        return self.build([table.read(index, run) for table in self.inputs])

    def caching(self) -> GraphNode:
        """Return the same zip with inputs that keep their rows."""
        return _caching_inputs(self)

    def spec(self) -> object:
        """Return the specs of the inputs."""
        specs = [node.spec() for node in self.inputs]
        return None if any(spec is None for spec in specs) else self.build(specs)


@dataclass(eq=False, repr=False)
class Concatenated(GraphNode):
    """The elements of one input after the other. It is also the table of other combinations."""

    keeps_batches: ClassVar[bool] = True

    step: str = field(default="concatenate", kw_only=True)  # the method of the dataset, for errors

    def _set_up(self) -> None:
        self.text = self.step
        self.cardinality = combined(sum, [node.cardinality for node in self.inputs])
        self._combine()

    def _combine(self) -> None:
        # Rows of different tables may have different sizes. The last batch of an input may be smaller, and is not last.
        self.dynamic = True
        form, *others = {node.form for node in self.inputs}
        if not others and form is not Form.ELEMENTS:
            self.form = form
            self.read_ahead = max(node.read_ahead for node in self.inputs)
            self.is_table = type(self) is Concatenated and all(node.is_table for node in self.inputs)
            if not self.is_table:
                self.chosen_from = Concatenated(tuple(node.table for node in self.inputs), step=self.step)
        if self.is_table:
            self.starts = [0, *itertools.accumulate(node.cardinality for node in self.inputs)][:-1]

    def used(self) -> Sequence[GraphNode]:
        """Return the inputs that elements come from."""
        return self.inputs

    def items(self, run: Pass) -> Iterator[object]:
        """Yield the items of each input in turn."""
        return itertools.chain.from_iterable(self.streams(run))

    def streams(self, run: Pass) -> Sequence[Iterator[Any]]:
        """Return the items of each input, with the row numbers of the table."""
        runs = [run.repetition(number) for number in range(len(self.inputs))]
        if self.form is not Form.ELEMENTS:
            table = self.table
            assert isinstance(table, Concatenated)
            return [
                row_indices.shifted(node.items(own), start)
                for node, own, start in zip(self.inputs, runs, table.starts, strict=True)
            ]
        seen: list[object] = []
        return [self._checked(node, own, seen) for node, own in zip(self.inputs, runs, strict=True)]

    def _checked(self, node: GraphNode, run: Pass, seen: list[object]) -> Iterator[object]:
        """Yield the elements of an input. Check the spec of the first element."""
        elements = node.elements(run)
        for element in elements:
            seen.append(spec_of(element))
            common_spec(seen, self.step)
            yield element
            break
        yield from elements

    def row(self, index: int) -> object:
        """Return row ``index``."""
        owner = bisect_right(self.starts, index) - 1
        return self.inputs[owner].row(index - self.starts[owner])

    def read_rows(self, index: RowIndex, run: Pass) -> list[object]:
        """Return the rows as a list, read together for each input."""
        found: list[object] = [None] * len(index)
        for node, positions, own in self._divided(index):
            for position, row in zip(positions.tolist(), node.read_rows(own, run), strict=True):
                found[position] = row
        return found

    def read(self, index: RowIndex, run: Pass) -> object:
        """Return the rows as one batch, read together for each input."""
        parts = self._divided(index)
        batches = [node.read(own, run) for node, _, own in parts]
        if len(batches) == 1:
            return batches[0]
        common_spec([spec_of(batch) for batch in batches], self.step)
        order = np.argsort(np.concatenate([positions for _, positions, _ in parts]))
        return nest.map_structure(lambda leaf: leaf[order], join(batches))

    def _divided(self, index: RowIndex) -> list[tuple[GraphNode, Array, RowIndex]]:
        """Return inputs with some of the rows, positions in ``index`` and the input's numbers."""
        numbers = row_indices.as_array(index)
        owners = np.searchsorted(self.starts, numbers, "right") - 1
        divided: list[tuple[GraphNode, Array, RowIndex]] = []
        for owner in np.unique(owners).tolist():
            positions = np.flatnonzero(owners == owner)
            own: RowIndex = numbers[positions] - self.starts[owner]
            if isinstance(index, range):  # still evenly spaced, and read as a slice
                own = range(int(own[0]), int(own[-1]) + (1 if index.step > 0 else -1), index.step)
            divided.append((self.inputs[owner], positions, own))
        return divided

    def caching(self) -> GraphNode:
        """Return the same rows of inputs that keep them."""
        return _caching_inputs(self)

    def spec(self) -> object:
        """Return the common spec of the elements of all inputs."""
        if self.form is Form.ROWS and not self.is_table:
            return self.table.spec()
        specs = (node.spec() for node in self.inputs if node.cardinality)
        return common_spec([spec for spec in specs if spec is not None], self.step)

    def row_count(self) -> int:
        """Return the number of rows of all inputs together."""
        return self.cardinality if self.cardinality < 0 else combined(sum, [node.row_count() for node in self.used()])


@dataclass(eq=False, repr=False)
class Sampled(Concatenated):
    """A random choice among inputs for each element. If ``stop``, it ends when an empty input is drawn."""

    step: str = field(default="sample_from_datasets", kw_only=True)
    weights: Sequence[float]
    seed: Seed
    stop: bool

    def _set_up(self) -> None:
        self._combine()
        self.own_seed = self.seed
        drawn = [node.cardinality for node in self.used()]
        endless = all(count == INFINITE for count in drawn)
        self.cardinality = UNKNOWN if self.stop and not endless else combined(sum, drawn)
        again = f", rerandomize_each_iteration={self.seed.is_renewed}" if self.seed.given else ""
        stop = ", stop_on_empty_dataset=True" if self.stop else ""
        seed = self.seed.number if self.seed.given else None
        self.text = f"{self.step}[weights={list(self.weights)}, seed={seed}{stop}{again}]"

    def used(self) -> Sequence[GraphNode]:
        """Return the inputs that may be drawn."""
        return [node for node, weight in zip(self.inputs, self.weights, strict=True) if weight > 0]

    def items(self, run: Pass) -> Iterator[object]:
        """Yield the items of all inputs in random order."""
        streams = self.streams(run)
        if self.form is not Form.ROWS:
            yield from self._drawn(streams, run)
            return
        drawn = self._drawn([row_indices.rows(blocks) for blocks in streams], run)
        while block := list(itertools.islice(drawn, DRAWN_AHEAD)):
            yield np.array(block, np.int64)

    def _drawn(self, streams: Sequence[Iterator[T]], run: Pass) -> Iterator[T]:
        generator = self.seed.generator(run)
        active = [number for number, weight in enumerate(self.weights) if weight > 0]
        while active:
            bounds = list(itertools.accumulate(self.weights[number] for number in active))
            while True:
                chosen = min(bisect_right(bounds, generator.random() * bounds[-1]), len(active) - 1)
                item = next(streams[active[chosen]], _END)
                if item is _END:
                    break
                yield item
            if self.stop:
                return
            del active[chosen]


Opener = Callable[[], Iterator[object]]


@dataclass(eq=False, repr=False)
class Interleaved(GraphNode):
    """The elements of datasets that a function makes, in the order of tf.data's deterministic interleave.

    ``cycle_length`` datasets are open at a time. Each in turn yields ``block_length`` elements. The next dataset takes
    the position of one that ends, and starts when its turn comes again.
    """

    node_fn: Callable[..., GraphNode]  # makes a dataset from an element of the input
    cycle_length: int
    block_length: int
    seed: Seed  # replaces seeds in the datasets that the user did not choose, so that ranks agree
    calls: int = 1  # threads that read the datasets. 1: no threads.
    _first: GraphNode | None = field(init=False, default=None)

    def _set_up(self) -> None:
        self.own_seed = self.seed
        self.text = f"interleave(cycle_length={self.cycle_length}, block_length={self.block_length})"
        self.cardinality = UNKNOWN if self.cardinality else 0
        self.batched = False
        self.dynamic = True

    def items(self, run: Pass) -> Iterator[object]:
        """Yield the elements of the datasets in turn."""
        openers = (
            partial(self._open, element, run.repetition(number))
            for number, element in enumerate(self.source.elements(run))
        )
        if self.calls == 1 or run.readers is None:
            return self._in_turn(partial(itertools.islice, opener(), self.block_length) for opener in openers)
        return self._in_threads(openers, run.readers.workers(self.calls))

    def _in_threads(self, openers: Iterator[Opener], threads: ThreadPoolExecutor) -> Iterator[object]:
        """Read ahead one block of each open dataset, and of one more for each thread."""
        readings = (_Reading(opener, self.block_length, threads).block for opener in openers)
        with ending(threads):
            yield from self._in_turn(taken_ahead(readings, self.calls))

    def _in_turn(self, readings: Iterator[Opener]) -> Iterator[object]:
        """Yield the elements of datasets, each a function that returns its next block."""
        cycle: list[Opener | None] = [None] * self.cycle_length
        position = empty = 0
        while empty < self.cycle_length:
            reading = cycle[position] or next(readings, None)
            cycle[position], count = None, 0
            for value in reading() if reading is not None else ():
                count += 1
                yield value
            empty = empty + 1 if reading is None else 0
            if count == self.block_length:
                cycle[position] = reading
            position = (position + 1) % self.cycle_length

    def _open(self, element: object, run: Pass) -> Iterator[object]:
        node: GraphNode = call(self.node_fn, element)
        own = (*self.seed.entropy(run), *run.key[-1:])
        seeds = {seed: (*own, number) for number, seed in enumerate(node.seeds()) if not seed.given}
        return node.elements(replace(run, seeds=seeds) if seeds else run)

    def first(self) -> GraphNode | None:
        """Return the dataset of the first element of the input, or None."""
        if self._first is None:
            self._first = next((call(self.node_fn, element) for element in self.source.elements(Pass())), None)
        return self._first

    def spec(self) -> object:
        """Return the spec of the first dataset that has an element."""
        specs = (call(self.node_fn, element).spec() for element in self.source.elements(Pass()))
        return next((spec for spec in specs if spec is not None), None)


class _Reading:
    """An open dataset. A thread reads one block ahead."""

    def __init__(self, opener: Opener, size: int, threads: ThreadPoolExecutor) -> None:
        # Opened by the thread that reads the first block.
        self._elements = itertools.chain.from_iterable(open_source() for open_source in [opener])
        self._size = size
        self._threads = threads
        self._read_next()

    def _read_next(self) -> None:
        self._values: list[object] = []
        self._block = self._threads.submit(self._values.extend, itertools.islice(self._elements, self._size))

    def block(self) -> Iterator[object]:
        """Yield the block while the next one is read, then raise its error."""
        error, values = self._block.exception(), self._values
        # Do not hold the error here, because its traceback holds this object.
        del self._block
        if error is not None and not isinstance(error, Exception):
            raise error
        if error is None and len(values) == self._size:
            self._read_next()
        yield from values
        try:
            if error is not None:
                raise error
        finally:
            del error  # the traceback holds this frame
