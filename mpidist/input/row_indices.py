"""Choice and order of the rows of a source, as blocks of row numbers.

No data is touched here.

A block is a ``range`` where the rows are evenly spaced, so that they can be read as one slice, and an int64
array otherwise. Sequences of blocks may be endless; where one block ends and the next begins has no meaning.

Random orders of few numbers are arrays, those of many a function that needs none: a Feistel network (Luby and Rackoff,
How to construct pseudorandom permutations from pseudorandom functions, 1988) over the next power of two, with results
that are too large put in again until one fits (cycle walking: Black and Rogaway, Ciphers with arbitrary finite domains,
2002). Its rounds hash by multiply-add-shift (Dietzfelbinger, Universal hashing and k-wise independent random variables
via integer arithmetic without primes, 1996).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]
RowIndex: TypeAlias = "range | Numbers"

# Above it the array of an order would take more memory than the rows of a few batches: 32 MiB.
LARGEST_ARRAY = 1 << 22
_ROUNDS = 8
_AT_ONCE = 1 << 15


def as_array(index: RowIndex) -> Numbers:
    """Return the row numbers as an int64 array."""
    if isinstance(index, range):
        return np.arange(index.start, index.stop, index.step, dtype=np.int64)
    return index


def concatenate(blocks: Sequence[RowIndex]) -> RowIndex:
    """Return one block with the rows of all; a single range stays one.

    >>> concatenate([range(2), range(5, 7)])
    array([0, 1, 5, 6])
    """
    if len(blocks) == 1:
        return blocks[0]
    return np.concatenate([as_array(block) for block in blocks]) if blocks else range(0)


class Joined:
    """Consecutive blocks whose rows are asked for by their places. Ranges take no memory.

    >>> Joined([range(10, 20, 2), range(3)]).at(np.array([6, 1]))
    array([ 1, 12])
    """

    def __init__(self, blocks: Sequence[RowIndex]) -> None:
        if not all(isinstance(block, range) for block in blocks):
            blocks = [concatenate(blocks)]
        self._blocks = blocks
        self._starts = np.cumsum([0, *map(len, blocks)])
        ranges = [block if isinstance(block, range) else range(0) for block in blocks]
        self._firsts = np.array([block.start for block in ranges], np.int64)
        self._steps = np.array([block.step for block in ranges], np.int64)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def at(self, places: Numbers) -> Numbers:
        """Return the rows at ``places``."""
        if len(self._blocks) == 1:
            block = self._blocks[0]
            return block.start + block.step * places if isinstance(block, range) else block[places]
        chosen = np.searchsorted(self._starts, places, "right") - 1
        rows: Numbers = places - self._starts[chosen]
        return self._firsts[chosen] + self._steps[chosen] * rows


def cut(blocks: Iterable[RowIndex], start: int, stop: int | None, step: int) -> Iterator[RowIndex]:
    """Yield every ``step``-th row from place ``start`` to before ``stop``.

    >>> list(cut([range(3), range(3, 7)], 1, None, 2))
    [range(1, 3, 2), range(3, 7, 2)]
    """
    position = 0
    for block in blocks:
        first = start - position if position < start else (start - position) % step
        part = block[first : None if stop is None else stop - position : step]
        if len(part):
            yield part
        position += len(block)
        if stop is not None and position >= stop:
            return


def _pieces(block: RowIndex, size: int) -> Iterator[RowIndex]:
    """Yield a block in blocks of ``size``, which divides its length.

    Most batches come from here.
    """
    if isinstance(block, range):
        step = block.step
        stride = size * step
        return (range(first, first + stride, step) for first in block[::size])
    return (block[first : first + size] for first in range(0, len(block), size))


def batch(blocks: Iterable[RowIndex], size: int, drop_remainder: bool) -> Iterator[RowIndex]:
    """Yield blocks of exactly ``size`` rows, then the rest as a shorter one.

    >>> list(batch([range(3), range(3)], 4, False))
    [array([0, 1, 2, 0]), range(1, 3)]
    """
    pending: list[RowIndex] = []
    missing = size
    for block in blocks:
        start = 0
        if pending and len(block) >= missing:
            yield concatenate([*pending, block[:missing]])
            start, missing, pending = missing, size, []
        if not pending:
            whole = start + (len(block) - start) // size * size
            yield from _pieces(block[start:whole], size)
            start = whole
        if start < len(block):
            pending.append(block[start:])
            missing -= len(block) - start
    if pending and not drop_remainder:
        yield concatenate(pending)


def rows(blocks: Iterable[RowIndex]) -> Iterator[int]:
    """Yield the row numbers one by one as Python ints."""
    for block in blocks:
        yield from block if isinstance(block, range) else block.tolist()


class Bijection:
    """A random order of the numbers 0 ... count - 1, which takes no memory.

    >>> order = Bijection(5, np.random.default_rng(0))
    >>> sorted(order(np.arange(5)).tolist())
    [0, 1, 2, 3, 4]
    """

    def __init__(self, count: int, generator: np.random.Generator) -> None:
        bits = max(2, (count - 1).bit_length())
        low_bits, high_bits = bits // 2, bits - bits // 2
        self._count = np.uint64(count)
        self._low_bits = np.uint64(low_bits)
        self._low_mask = np.uint64((1 << low_bits) - 1)
        # A hash of b bits is the upper b of 64.
        self._shifts = (np.uint64(64 - low_bits), np.uint64(64 - high_bits))
        factors, terms = generator.integers(0, 1 << 64, (2, _ROUNDS), np.uint64)
        self._keys = list(zip(factors | np.uint64(1), terms, strict=True))

    def __call__(self, places: Numbers) -> Numbers:
        """Return the numbers at ``places`` of the order."""
        numbers = self._once(places.astype(np.uint64))
        outside = np.flatnonzero(numbers >= self._count)
        while len(outside):
            walked = self._once(numbers[outside])
            numbers[outside] = walked
            outside = outside[walked >= self._count]
        return numbers.astype(np.int64)

    def _once(self, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        changed: NDArray[np.uint64] = numbers & self._low_mask
        other: NDArray[np.uint64] = numbers >> self._low_bits
        mixed = np.empty_like(numbers)
        for number, (factor, term) in enumerate(self._keys):
            np.multiply(other, factor, out=mixed)
            mixed += term
            mixed >>= self._shifts[number % 2]
            changed ^= mixed
            changed, other = other, changed
        # After an even number of rounds each half is in its place again.
        other <<= self._low_bits
        other |= changed
        return other


def random_order(count: int, generator: np.random.Generator) -> Iterator[Numbers]:
    """Yield the numbers 0 ... count - 1 in random order, piece by piece; no two of these calls share state.

    >>> sorted(int(x) for piece in random_order(4, np.random.default_rng(0)) for x in piece)
    [0, 1, 2, 3]
    """
    if count <= LARGEST_ARRAY:
        yield generator.permutation(count)
        return
    order = Bijection(count, generator)
    for start in range(0, count, _AT_ONCE):
        yield order(np.arange(start, min(start + _AT_ONCE, count)))


def order_in_windows(
    count: int, block_rows: int, window_blocks: int, generator: np.random.Generator
) -> Iterator[Numbers]:
    """Yield the numbers 0 ... count - 1 in random order of blocks, mixed in windows.

    Blocks have ``block_rows`` numbers, of which ``window_blocks`` at a time are mixed.

    >>> pieces = order_in_windows(10, 2, 2, np.random.default_rng(0))
    >>> [sorted(set((piece // 2).tolist())) for piece in pieces]
    [[2, 4], [0, 3], [1]]
    """
    blocks = random_order(-(-count // block_rows), generator)
    for several in blocks:
        for start in range(0, len(several), window_blocks):
            window = several[start : start + window_blocks]
            rows = (window[:, None] * block_rows + np.arange(block_rows)).ravel()
            yield generator.permutation(rows[rows < count])
