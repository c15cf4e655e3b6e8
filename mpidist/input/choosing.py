"""Steps that choose and order elements unseen: take, skip, shard, repeat, shuffle.

Of rows and batches that are known by row numbers they choose numbers, and nothing is read.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mpidist.input import row_indices
from mpidist.input.graph import DRAWN_AHEAD, INFINITE, UNKNOWN, Form, GraphNode, Pass, PassThrough, Seed, T


class Chosen(PassThrough):
    """Some of the elements, each maybe several times, in some order."""

    def row_count(self) -> int:
        """Return the number of rows of the chosen batches.

        It is unknown where it depends on more than the number of batches.
        """
        rows, size, count = self.source.row_count(), self.source.batch_size(), self.source.cardinality
        if self.cardinality < 0 or rows < 0 or not count:
            return self.cardinality if self.cardinality < 0 else UNKNOWN if self.cardinality else 0
        if size is not None and rows == size * count:
            return size * self.cardinality
        if isinstance(self, (Repeated, Shuffled)):
            return rows * (self.cardinality // count)
        return UNKNOWN


class Sliced(Chosen):
    """The elements that a slice chooses from all of them."""

    def choose(self, chosen: slice, text: str) -> None:
        """Set the slice and the text; the last part of making a node."""
        self.chosen, self.text = chosen, text
        if self.cardinality >= 0:
            self.cardinality = len(range(self.cardinality)[chosen])
        elif chosen.stop is not None and (chosen.stop == 0 or self.cardinality == INFINITE):
            self.cardinality = chosen.stop

    def items(self, run: Pass) -> Iterator[object]:
        """Yield the chosen items."""
        if self.chosen.stop == 0:
            return iter(())
        cut = row_indices.cut if self.form is Form.ROWS else itertools.islice
        return cut(self.source.items(run), self.chosen.start, self.chosen.stop, self.chosen.step)


@dataclass(eq=False, repr=False)
class Take(Sliced):
    """The first ``limit`` elements; -1 is all of them."""

    limit: int

    def _set_up(self) -> None:
        self.choose(slice(0, None if self.limit < 0 else self.limit, 1), f"take({self.limit})")


@dataclass(eq=False, repr=False)
class Skip(Sliced):
    """All but the first ``number`` elements; -1 skips them all."""

    number: int

    def _set_up(self) -> None:
        self.choose(slice(0, 0, 1) if self.number < 0 else slice(self.number, None, 1), f"skip({self.number})")


@dataclass(eq=False, repr=False)
class Shard(Sliced):
    """Every ``num_shards``-th element, beginning with element ``index``."""

    num_shards: int
    index: int

    def _set_up(self) -> None:
        self.choose(slice(self.index, None, self.num_shards), f"shard({self.num_shards}, {self.index})")


class ShardHint(Chosen):
    """A shard that is filled in when the dataset is distributed with AutoShardPolicy.HINT."""

    def _set_up(self) -> None:
        self.text = "shard(SHARD_HINT, SHARD_HINT)"
        if self.cardinality > 0:  # it depends on the number of workers
            self.cardinality = UNKNOWN

    def items(self, run: Pass) -> Iterator[object]:
        """Raise ValueError: the numbers of the shard are not known."""
        raise ValueError(
            "shard(SHARD_HINT, SHARD_HINT) waits for the number of ranks, which only experimental_distribute_dataset() "
            "fills in, for dataset.with_options(auto_shard_policy=AutoShardPolicy.HINT); anywhere else write the "
            "numbers: shard(num_shards, index)"
        )


@dataclass(eq=False, repr=False)
class Repeated(Chosen):
    """The elements repeated ``times`` times, or without end for None."""

    times: int | None

    def _set_up(self) -> None:
        self.text = "repeat()" if self.times is None else f"repeat({self.times})"
        if self.times == 0:
            self.cardinality = 0
        elif self.cardinality:
            each = self.cardinality
            self.cardinality = INFINITE if self.times is None else each if each < 0 else each * self.times

    def items(self, run: Pass) -> Iterator[object]:
        """Yield the items of each repetition.

        Raises:
            ValueError: Endless repetition of an input that turns out to give nothing.
        """
        if self.source.cardinality == 0:
            return
        for number in itertools.count() if self.times is None else range(self.times):
            nothing = True
            for item in self.source.items(run.repetition(number)):
                nothing = False
                yield item
            if nothing and self.times is None:
                raise ValueError(
                    f"repeat() found no element in pass {number + 1} of its input; expected a source that "
                    "gives its elements anew in each pass: from_generator() takes a function that returns a "
                    "new iterator every time it is called"
                )


@dataclass(eq=False, repr=False)
class Shuffled(Chosen):
    """The elements in random order, the same for the same seed and pass.

    Args:
        buffer_size: The number of elements of a stream that are held to choose from; None holds them all. With
            ``block_size``, the number of rows that are mixed at a time.
        seed: The seed of the order.
        block_size: The number of consecutive rows that stay together until they are mixed; None mixes all rows at once.
    """

    buffer_size: int | None
    seed: Seed
    block_size: int | None = None

    def _set_up(self) -> None:
        self.own_seed = self.seed
        seed, blocks = self.seed.number if self.seed.given else None, f", block_size={self.block_size}"
        self.text = (
            f"shuffle({self.buffer_size}, seed={seed}, reshuffle_each_iteration={self.seed.is_renewed}"
            f"{'' if self.block_size is None else blocks})"
        )

    def items(self, run: Pass) -> Iterator[object]:
        """Yield all items in another order, or draw from a buffer of them."""
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
        """Yield the items in random order, drawn from a buffer that is filled up again."""
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
                f"block_size is {block_size} and buffer_size None; expected how many rows are mixed at a time, several "
                f"blocks: shuffle(buffer_size={64 * block_size}, block_size={block_size})"
            )
        if node.form is not Form.ROWS or node.cardinality == INFINITE:
            raise ValueError(
                f"block_size is {block_size}, and the elements of {node} are no rows of a finite dataset; "
                "call shuffle(buffer_size, block_size=...) before batch() and repeat(), of a source whose rows are "
                "read by number"
            )
    unknown = node.cardinality == UNKNOWN and node.form is not Form.ROWS
    if buffer_size is None and (node.cardinality == INFINITE or unknown):
        raise ValueError(
            f"shuffle() of {node}, whose number of elements is endless or unknown, got no "
            "buffer_size; say how many elements to draw from, shuffle(buffer_size=1000), or call "
            "shuffle() before repeat()"
        )
