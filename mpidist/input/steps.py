"""Steps that transform, choose, order and keep elements. Of rows they handle only the numbers if they can."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from mpidist.input import row_indices
from mpidist.input.elements import ArraySpec, call, flatten_spec, map_spec, owned, spec_of, stack
from mpidist.input.nodes import INFINITE, UNKNOWN, Form, GraphNode, Pass, PassThrough, Seed, T
from mpidist.input.row_indices import RowIndex
from mpidist.input.threads import map_batch, map_stream

# Random row numbers come in blocks of this size.
DRAWN_AHEAD = 1024


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
                yield np.fromiter(itertools.islice(numbers, DRAWN_AHEAD), np.int64, DRAWN_AHEAD)
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
