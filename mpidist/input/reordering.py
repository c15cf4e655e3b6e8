"""Transforms that choose and order elements without looking at them: take, skip, shard, repeat, shuffle.

Each works on blocks of row numbers where the elements are rows of a table (nothing is read), and on the
elements one by one elsewhere.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

import numpy as np

from mpidist.input import row_indices
from mpidist.input.permutations import order_in_windows, random_order
from mpidist.input.read_ahead import Readers
from mpidist.input.row_indices import RowIndex

INFINITE = -1
UNKNOWN = -2

_DRAWN_AHEAD = 1024

T = TypeVar("T")


@dataclass(frozen=True)
class Pass:
    """One pass over a dataset: with the pipeline, all that its random choices depend on.

    Args:
        key: Which pass it is, then which repetition inside it, one number for each ``repeat``.
        seeds: What stands in for the seed of a shuffle that was given none; ranks agree on it.
        readers: Holds the threads of the pass. None, for a look at an element: nothing is read ahead.
    """

    key: tuple[int, ...] = (0,)
    seeds: Mapping[Shuffle, tuple[int, ...]] = field(default_factory=dict)
    readers: Readers | None = field(default=None, compare=False)

    def repetition(self, number: int) -> Pass:
        """Return the pass that repetition ``number`` makes."""
        return Pass((*self.key, number), self.seeds, self.readers)

    def first(self) -> Pass:
        """Return the first pass of all over the same pipeline."""
        return replace(self, key=(0,))

    def read_ahead(self, open_source: Callable[[], Iterator[T]], size: int) -> Iterator[T]:
        """Return the iterator of ``open_source``, of which a thread keeps ``size`` elements ready; 0: no thread."""
        if size == 0 or self.readers is None:
            return open_source()
        return self.readers.open(open_source, size)


@dataclass(frozen=True)
class Source(Generic[T]):
    """What a reordering chooses from.

    Args:
        open: Begins a pass.
        cardinality: Number of elements in a pass.
    """

    open: Callable[[Pass], Iterator[T]]
    cardinality: int


class Reordering(ABC):
    """A choice and order of elements."""

    @abstractmethod
    def cardinality(self, count: int) -> int:
        """Return how many elements come out of ``count``."""

    @abstractmethod
    def blocks(self, source: Source[RowIndex], run: Pass) -> Iterator[RowIndex]:
        """Yield the row numbers that come out."""

    @abstractmethod
    def items(self, source: Source[Any], run: Pass) -> Iterator[Any]:
        """Yield the elements that come out."""


@dataclass(frozen=True)
class Take(Reordering):
    """The first ``limit`` elements; -1 is all of them."""

    limit: int

    def __str__(self) -> str:
        return f"take({self.limit})"

    def cardinality(self, count: int) -> int:
        """Return the smaller of both."""
        if self.limit < 0 or count == UNKNOWN:
            return count if self.limit else 0
        return self.limit if count == INFINITE else min(count, self.limit)

    def blocks(self, source: Source[RowIndex], run: Pass) -> Iterator[RowIndex]:
        """Yield the first row numbers."""
        return source.open(run) if self.limit < 0 else row_indices.take(source.open(run), self.limit)

    def items(self, source: Source[Any], run: Pass) -> Iterator[Any]:
        """Yield the first elements."""
        return itertools.islice(source.open(run), None if self.limit < 0 else self.limit)


@dataclass(frozen=True)
class Skip(Reordering):
    """All but the first ``number`` elements; -1 skips them all."""

    number: int

    def __str__(self) -> str:
        return f"skip({self.number})"

    def cardinality(self, count: int) -> int:
        """Return what is left."""
        if self.number < 0:
            return 0
        return count if count < 0 else max(count - self.number, 0)

    def blocks(self, source: Source[RowIndex], run: Pass) -> Iterator[RowIndex]:
        """Yield the other row numbers."""
        return iter(()) if self.number < 0 else row_indices.skip(source.open(run), self.number)

    def items(self, source: Source[Any], run: Pass) -> Iterator[Any]:
        """Yield the other elements."""
        return iter(()) if self.number < 0 else itertools.islice(source.open(run), self.number, None)


@dataclass(frozen=True)
class Shard(Reordering):
    """Every ``num_shards``-th element, beginning with element ``index``."""

    num_shards: int
    index: int

    def __str__(self) -> str:
        return f"shard({self.num_shards}, {self.index})"

    def cardinality(self, count: int) -> int:
        """Return the size of this shard."""
        return count if count < 0 else len(range(self.index, count, self.num_shards))

    def blocks(self, source: Source[RowIndex], run: Pass) -> Iterator[RowIndex]:
        """Yield the row numbers of this shard."""
        return row_indices.shard(source.open(run), self.num_shards, self.index)

    def items(self, source: Source[Any], run: Pass) -> Iterator[Any]:
        """Yield the elements of this shard."""
        return itertools.islice(source.open(run), self.index, None, self.num_shards)


@dataclass(frozen=True)
class ShardHint(Reordering):
    """A shard that is chosen when the dataset is distributed with AutoShardPolicy.HINT."""

    def __str__(self) -> str:
        return "shard(SHARD_HINT, SHARD_HINT)"

    def cardinality(self, count: int) -> int:
        """Return unknown: it depends on the number of workers."""
        return UNKNOWN if count > 0 else count

    def blocks(self, source: Source[RowIndex], run: Pass) -> Iterator[RowIndex]:
        """Raise ValueError: nobody has said which shard."""
        return self.items(source, run)

    def items(self, source: Source[Any], run: Pass) -> Iterator[Any]:
        """Raise ValueError: nobody has said which shard."""
        raise ValueError(
            "shard(SHARD_HINT, SHARD_HINT) waits for the number of ranks, which only experimental_distribute_dataset() "
            "fills in, for dataset.with_options(auto_shard_policy=AutoShardPolicy.HINT); anywhere else write the "
            "numbers: shard(num_shards, index)"
        )


@dataclass(frozen=True)
class Repeat(Reordering):
    """The elements over and over: ``times`` times, or without end where that is None."""

    times: int | None

    def __str__(self) -> str:
        return "repeat()" if self.times is None else f"repeat({self.times})"

    def cardinality(self, count: int) -> int:
        """Return how many come in all repetitions together."""
        if count == 0 or self.times == 0:
            return 0
        if self.times is None:
            return INFINITE
        return count if count < 0 else count * self.times

    def blocks(self, source: Source[RowIndex], run: Pass) -> Iterator[RowIndex]:
        """Yield the row numbers of each repetition."""
        return self.items(source, run)

    def items(self, source: Source[Any], run: Pass) -> Iterator[Any]:
        """Yield the elements of each repetition.

        Raises:
            ValueError: Endless repetition of an input that turns out to give nothing.
        """
        if source.cardinality == 0:
            return
        for number in itertools.count() if self.times is None else range(self.times):
            nothing = True
            for item in source.open(run.repetition(number)):
                nothing = False
                yield item
            if nothing and self.times is None:
                raise ValueError(
                    f"repeat() found no element in pass {number + 1} of its input; expected a source that "
                    "gives its elements anew in each pass: from_generator() takes a function that returns a "
                    "new iterator every time it is called"
                )


@dataclass(frozen=True, eq=False)
class Shuffle(Reordering):
    """The elements in random order, the same for the same seed and pass.

    Args:
        buffer_size: How many elements of a stream are held to choose from; None holds them all. With ``block_size``,
            how many rows are mixed at a time.
        seed: Where the order comes from.
        given: Whether the user chose the seed; another one is replaced when ranks must agree.
        reshuffle: Whether each pass has an order of its own.
        block_size: How many consecutive rows stay together until they are mixed; None mixes all rows at once.
    """

    buffer_size: int | None
    seed: int
    given: bool
    reshuffle: bool
    block_size: int | None = None

    def __str__(self) -> str:
        seed = self.seed if self.given else None
        blocks = "" if self.block_size is None else f", block_size={self.block_size}"
        return f"shuffle({self.buffer_size}, seed={seed}, reshuffle_each_iteration={self.reshuffle}{blocks})"

    def cardinality(self, count: int) -> int:
        """Return ``count``."""
        return count

    def generator(self, run: Pass) -> np.random.Generator:
        """Return what draws the order of a pass."""
        entropy = run.seeds.get(self, (self.seed,))
        return np.random.default_rng([*entropy, *run.key] if self.reshuffle else list(entropy))

    def blocks(self, source: Source[RowIndex], run: Pass) -> Iterator[RowIndex]:
        """Yield a permutation of all row numbers, or draw from a buffer of them if they are endless."""
        if source.cardinality != INFINITE:
            rows = row_indices.Joined(list(source.open(run)))
            generator = self.generator(run)
            if self.block_size is None:
                order = random_order(len(rows), generator)
            else:
                window = max(1, (self.buffer_size or 0) // self.block_size)
                order = order_in_windows(len(rows), self.block_size, window, generator)
            yield from map(rows.at, order)
            return
        numbers = self.items(Source(lambda same: row_indices.rows(source.open(same)), INFINITE), run)
        while True:
            yield np.fromiter(itertools.islice(numbers, _DRAWN_AHEAD), np.int64, _DRAWN_AHEAD)

    def items(self, source: Source[Any], run: Pass) -> Iterator[Any]:
        """Yield the elements, each drawn from a buffer that the next element then fills up again."""
        generator = self.generator(run)
        items = source.open(run)
        buffer = list(itertools.islice(items, self.buffer_size))
        for item in items:
            chosen = int(generator.integers(len(buffer)))
            yield buffer[chosen]
            buffer[chosen] = item
        for chosen in generator.permutation(len(buffer)):
            yield buffer[chosen]
