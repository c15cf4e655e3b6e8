"""Steps that transform, choose, order, combine and keep elements. Of rows they handle only the numbers if they can."""

from __future__ import annotations

import itertools
import operator
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
from mpidist.input.elements import ArraySpec, call, common_spec, flatten_spec, join, map_spec, owned, spec_of, stack
from mpidist.input.nodes import INFINITE, UNKNOWN, Form, GraphNode, Pass, PassThrough, Seed, T, combined
from mpidist.input.row_indices import RowIndex
from mpidist.input.threads import ending, map_batch, map_stream, taken_ahead

# Random row numbers come in blocks of this size.
_DRAWN_AHEAD = 1024
_END: Any = object()


@dataclass(eq=False, repr=False)
class Mapped(GraphNode):
    """A function of each element, with ``calls`` calls at once. Rows are mapped when they are read."""

    fn: Callable[..., object]
    calls: int = 1

    def _set_up(self) -> None:
        self.text = "map"
        if self.source.form is Form.ROWS:
            self.form, self.read_ahead, self.is_table = Form.ROWS, self.source.read_ahead, self.source.is_table
            self.chosen_from = None if self.is_table else self.with_inputs([self.source.table])

    def items(self, run: Pass) -> Iterator[object]:
        """Yield the row numbers of the input, or the result for each element."""
        return self.source.items(run) if self.form is Form.ROWS else self._mapped(self.source.elements(run), run)

    def _mapped(self, elements: Iterator[object], run: Pass) -> Iterator[object]:
        if self.calls == 1 or run.readers is None:
            return map(self._call, elements)
        return map_stream(self._call, elements, run.readers.workers(self.calls), self.calls)

    def _call(self, element: object) -> object:
        return owned(call(self.fn, element))

    def each(self, numbers: Iterable[int], run: Pass) -> Iterator[object]:
        """Yield the result for each row."""
        return self._mapped(self.source.each(numbers, run), run)

    def read_rows(self, index: RowIndex, run: Pass) -> list[object]:
        """Return the result for each row."""
        rows = self.source.read_rows(index, run)
        if self.calls == 1 or run.readers is None:
            return list(map(self._call, rows))
        return map_batch(self._call, rows, run.readers.workers_of(self, self.calls), self.calls)

    def spec(self) -> object:
        """Return the spec of the first result. The first axis is unknown if it is that of batches of any size."""
        if self.form is Form.ROWS:
            return super().spec()
        for element in self.source.elements(Pass()):
            spec = spec_of(call(self.fn, element))
            if not self.source.batched or not self.dynamic:
                return spec
            sizes = {leaf.shape[0] for leaf in flatten_spec(spec_of(element)) if leaf.shape}
            return map_spec(partial(_without_size, sizes), spec)
        return None


def _without_size(sizes: set[int | None], leaf: ArraySpec) -> ArraySpec:
    if leaf.shape and leaf.shape[0] in sizes:
        return leaf._replace(shape=(None, *leaf.shape[1:]))
    return leaf


@dataclass(eq=False, repr=False)
class Filtered(GraphNode):
    """The elements for which a function is true, or those before the first false."""

    keeps_batches = True

    predicate: Callable[..., object]
    step: str = "filter"

    def _set_up(self) -> None:
        self.text = self.step
        self.cardinality = UNKNOWN if self.cardinality else 0

    def items(self, run: Pass) -> Iterator[object]:
        """Yield the elements for which the function is true."""
        keep = itertools.takewhile if self.step == "take_while" else filter
        return keep(lambda element: bool(call(self.predicate, element)), self.source.elements(run))


@dataclass(eq=False, repr=False)
class Enumerated(GraphNode):
    """Elements with int64 numbers from ``start``."""

    start: int

    def _set_up(self) -> None:
        self.text = f"enumerate({self.start})" if self.start else "enumerate()"
        self.batched = False

    def items(self, run: Pass) -> Iterator[object]:
        """Yield numbers and elements."""
        return zip(map(np.int64, itertools.count(self.start)), self.source.elements(run), strict=False)

    def spec(self) -> object:
        """Return the specs of both."""
        spec = self.source.spec()
        return None if spec is None else (ArraySpec((), np.dtype(np.int64)), spec)


@dataclass(eq=False, repr=False)
class Prefetched(PassThrough):
    """The same elements, read ahead. Rows are read ahead by the step that reads them."""

    size: int

    def _set_up(self) -> None:
        self.text = f"prefetch({self.size})"
        self.read_ahead += self.size

    def items(self, run: Pass) -> Iterator[object]:
        """Yield the items of the input."""
        if self.form is not Form.ELEMENTS:
            return self.source.items(run)
        return run.read_ahead(lambda: self.source.items(run), self.size)


# Steps that choose elements


class Chosen(PassThrough):
    """Some of the elements in some order, maybe repeatedly."""

    def row_count(self) -> int:
        """Return the number of rows of the chosen batches. UNKNOWN: it depends on the choice."""
        rows, size, count = self.source.row_count(), self.source.batch_size(), self.source.cardinality
        if self.cardinality < 0 or rows < 0 or not count:
            return self.cardinality if self.cardinality < 0 else UNKNOWN if self.cardinality else 0
        if size is not None and rows == size * count:
            return size * self.cardinality
        return rows * (self.cardinality // count) if isinstance(self, (Repeated, Shuffled)) else UNKNOWN


@dataclass(eq=False, repr=False)
class Sliced(Chosen):
    """The elements of the slice ``start:stop:step``. ``text`` is the call."""

    start: int
    stop: int | None
    step: int
    call: str

    def _set_up(self) -> None:
        self.text = self.call
        if self.cardinality >= 0:
            self.cardinality = len(range(self.cardinality)[self.start : self.stop : self.step])
        elif self.stop is not None and (self.stop == 0 or self.cardinality == INFINITE):
            self.cardinality = self.stop

    def items(self, run: Pass) -> Iterator[object]:
        """Yield the chosen items."""
        if self.stop == 0:
            return iter(())
        cut = row_indices.cut if self.form is Form.ROWS else itertools.islice
        return cut(self.source.items(run), self.start, self.stop, self.step)


def take(node: GraphNode, limit: int) -> GraphNode:
    """Return the first ``limit`` elements, or all for a negative limit."""
    return Sliced((node,), 0, None if limit < 0 else limit, 1, f"take({limit})")


def skip(node: GraphNode, count: int) -> GraphNode:
    """Return all but the first ``count`` elements, or none for a negative count."""
    return Sliced((node,), max(0, count), 0 if count < 0 else None, 1, f"skip({count})")


class Shard(Sliced):
    """Every ``num_shards``-th element, beginning with element ``index``."""

    @staticmethod
    def of(node: GraphNode, num_shards: int, index: int) -> GraphNode:
        """Return the shard of a node."""
        return Shard((node,), index, None, num_shards, f"shard({num_shards}, {index})")


class ShardHint(Chosen):
    """A shard whose numbers are filled in when the dataset is distributed with AutoShardPolicy.HINT."""

    def _set_up(self) -> None:
        self.text = "shard(SHARD_HINT, SHARD_HINT)"
        if self.cardinality > 0:  # it depends on the number of workers
            self.cardinality = UNKNOWN

    def items(self, run: Pass) -> Iterator[object]:
        """Raise ValueError."""
        raise ValueError(
            "shard(SHARD_HINT, SHARD_HINT) waits for the number of ranks, which only experimental_distribute_dataset() "
            "fills in, for dataset.with_options(auto_shard_policy=AutoShardPolicy.HINT). Anywhere else pass numbers: "
            "shard(num_shards, index)"
        )


@dataclass(eq=False, repr=False)
class Repeated(Chosen):
    """The elements repeated ``times`` times. None: without end."""

    times: int | None

    def _set_up(self) -> None:
        self.text = "repeat()" if self.times is None else f"repeat({self.times})"
        if self.times == 0:
            self.cardinality = 0
        elif self.cardinality:
            each = self.cardinality
            self.cardinality = INFINITE if self.times is None else each if each < 0 else each * self.times

    def items(self, run: Pass) -> Iterator[object]:
        """Yield the items of each repetition."""
        if self.source.cardinality == 0:
            return
        for number in itertools.count() if self.times is None else range(self.times):
            is_empty = True
            for item in self.source.items(run.repetition(number)):
                is_empty = False
                yield item
            if is_empty and self.times is None:
                raise ValueError(
                    f"repeat() found no element in pass {number + 1} of its input; expected a source that "
                    "yields its elements again in each pass. Pass from_generator() a function that returns a new "
                    "iterator in every call"
                )


@dataclass(eq=False, repr=False)
class Shuffled(Chosen):
    """The elements in random order, which the seed and the pass determine."""

    buffer_size: int | None  # of a stream. With block_size: the number of rows that are mixed at a time.
    seed: Seed
    block_size: int | None = None  # consecutive rows that stay together until they are mixed

    def _set_up(self) -> None:
        self.own_seed = self.seed
        seed, blocks = self.seed.number if self.seed.given else None, f", block_size={self.block_size}"
        self.text = (
            f"shuffle({self.buffer_size}, seed={seed}, reshuffle_each_iteration={self.seed.is_renewed}"
            f"{'' if self.block_size is None else blocks})"
        )

    def items(self, run: Pass) -> Iterator[object]:
        """Yield permuted row numbers, or items drawn from a buffer."""
        generator, source = self.seed.generator(run), self.source
        if self.form is not Form.ROWS:
            yield from self._drawn(source.items(run), generator)
        elif source.cardinality == INFINITE:
            numbers = self._drawn(row_indices.rows(source.items(run)), generator)
            while True:
                yield np.fromiter(itertools.islice(numbers, _DRAWN_AHEAD), np.int64, _DRAWN_AHEAD)
        else:
            rows = row_indices.Joined(list(source.items(run)))
            if self.block_size is None:
                order = row_indices.random_order(len(rows), generator)
            else:
                window = max(1, (self.buffer_size or 0) // self.block_size)
                order = row_indices.order_in_windows(len(rows), self.block_size, window, generator)
            yield from map(rows.at, order)

    def _drawn(self, items: Iterator[T], generator: np.random.Generator) -> Iterator[T]:
        buffer = list(itertools.islice(items, self.buffer_size))
        for item in items:
            chosen = int(generator.integers(len(buffer)))
            yield buffer[chosen]
            buffer[chosen] = item
        for chosen in generator.permutation(len(buffer)):
            yield buffer[chosen]


def check_shuffle(node: GraphNode, buffer_size: int | None, block_size: int | None) -> None:
    """Raise ValueError unless the elements of ``node`` can be shuffled with these sizes."""
    if buffer_size is not None and operator.index(buffer_size) < 1:
        raise ValueError(f"buffer_size is {buffer_size}; expected 1 or more, or None for all elements")
    if block_size is not None:
        if operator.index(block_size) < 1:
            raise ValueError(f"block_size is {block_size}; expected 1 or more consecutive rows")
        if buffer_size is None:
            raise ValueError(
                f"block_size is {block_size} and buffer_size None; expected the number of rows to mix at a time, "
                f"several blocks: shuffle(buffer_size={64 * block_size}, block_size={block_size})"
            )
        if node.form is not Form.ROWS or node.cardinality == INFINITE:
            raise ValueError(
                f"block_size is {block_size}, and the elements of {node} are no rows of a finite dataset. "
                "Call shuffle(buffer_size, block_size=...) before batch() and repeat(), of a source whose rows are "
                "read by number"
            )
    unknown = node.cardinality == UNKNOWN and node.form is not Form.ROWS
    if buffer_size is None and (node.cardinality == INFINITE or unknown):
        raise ValueError(
            f"shuffle() of {node}, whose number of elements is endless or unknown, got no buffer_size. Pass the "
            "number of elements to draw from, shuffle(buffer_size=1000), or call shuffle() before repeat()"
        )


@dataclass(eq=False, repr=False)
class Cached(PassThrough):
    """The elements of the first pass, in memory. Rows are kept when read, others after a pass.

    The source always yields its first pass. So a resumed pass, or another rank, gets the same elements.
    """

    # The elements of a pass, with the seeds of the steps before it.
    kept: tuple[list[tuple[int, ...]], list[object]] | None = field(init=False, default=None)
    kept_rows: dict[int, object] = field(init=False, default_factory=dict)

    def _set_up(self) -> None:
        self.text = "cache()"
        if self.form is not Form.ELEMENTS:
            self.chosen_from = self.source.table.caching()
            self.is_table = self.chosen_from is None and self.source.is_table
            if self.chosen_from is None and not self.is_table:
                self.chosen_from = Cached((self.source.table,))

    def items(self, run: Pass) -> Iterator[object]:
        """Yield the items of the first pass."""
        first = replace(run, key=(0,))
        if self.form is not Form.ELEMENTS:
            return self.source.items(first)
        seeds = [seed.entropy(run) for seed in self.source.seeds()]
        if self.kept is not None and self.kept[0] == seeds:
            return map(owned, self.kept[1])
        return self._keeping(first, seeds)

    def _keeping(self, first: Pass, seeds: list[tuple[int, ...]]) -> Iterator[object]:
        kept: list[object] = []
        for element in self.source.elements(first):
            kept.append(owned(element))
            if len(kept) == self.cardinality:  # the caller may know that too, and not ask for another one
                self.kept = (seeds, kept)
            yield element
        self.kept = (seeds, kept)

    def row(self, index: int) -> object:
        """Return a copy of row ``index``."""
        if index not in self.kept_rows:
            self.kept_rows[index] = self.source.row(index)
        return owned(self.kept_rows[index])

    def read_rows(self, index: RowIndex, run: Pass) -> list[object]:
        """Return copies of the rows."""
        return list(map(owned, self._rows(index, run)))

    def read(self, index: RowIndex, run: Pass) -> object:
        """Return the rows as one batch."""
        return stack(self._rows(index, run))

    def _rows(self, index: RowIndex, run: Pass) -> list[object]:
        numbers = list(row_indices.rows([index]))
        missing = [number for number in dict.fromkeys(numbers) if number not in self.kept_rows]
        if missing:
            rows = self.source.read_rows(np.array(missing, np.int64), run)
            self.kept_rows.update(zip(missing, rows, strict=True))
        return [self.kept_rows[number] for number in numbers]

    def spec(self) -> object:
        """Return the spec of the input."""
        return self.source.spec()

    def __getstate__(self) -> dict[str, object]:
        # A worker that receives the dataset keeps the elements that it reads.
        return {**self.__dict__, "kept": None, "kept_rows": {}}


# Steps with several inputs


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
        """Return the items of each input. Row numbers are those of the table."""
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
        """Yield the elements of an input. Compare the first one with those of other inputs."""
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
        """Return the rows, those of each input read together."""
        found: list[object] = [None] * len(index)
        for node, positions, own in self._divided(index):
            for position, row in zip(positions.tolist(), node.read_rows(own, run), strict=True):
                found[position] = row
        return found

    def read(self, index: RowIndex, run: Pass) -> object:
        """Return the rows as one batch, those of each input read together."""
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
        while block := list(itertools.islice(drawn, _DRAWN_AHEAD)):
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


# Datasets made from elements

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
    """An open dataset of which a thread reads one block ahead."""

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
