"""Blocks of row numbers: choose and order the rows of a source without reading them.

A block is a ``range`` if its rows are evenly spaced, because they are then read as one slice. Otherwise it is an int64
array. Sequences of blocks may be endless. The border between two blocks has no meaning.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.int64]
RowIndex: TypeAlias = "range | Numbers"

# Larger random orders are computed as needed. An array of this many numbers has 32 MiB.
LARGEST_ARRAY = 1 << 22
_AT_ONCE = 1 << 15


def as_array(index: RowIndex) -> Numbers:
    """Return the row numbers as an int64 array."""
    return np.arange(index.start, index.stop, index.step, dtype=np.int64) if isinstance(index, range) else index


def concatenate(blocks: Sequence[RowIndex]) -> RowIndex:
    """Return one block with the rows of all. A single range stays a range."""
    if len(blocks) == 1:
        return blocks[0]
    return np.concatenate([as_array(block) for block in blocks]) if blocks else range(0)


def rows(blocks: Iterable[RowIndex]) -> Iterator[int]:
    """Yield the row numbers as Python ints."""
    for block in blocks:
        yield from block if isinstance(block, range) else block.tolist()


def shifted(blocks: Iterable[RowIndex], by: int) -> Iterator[RowIndex]:
    """Yield the blocks with ``by`` added to each number."""
    for block in blocks:
        yield range(block.start + by, block.stop + by, block.step) if isinstance(block, range) else block + by


def cut(blocks: Iterable[RowIndex], start: int, stop: int | None, step: int) -> Iterator[RowIndex]:
    """Yield every ``step``-th row from position ``start`` to before ``stop``.

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


def batch(blocks: Iterable[RowIndex], size: int, drop_remainder: bool) -> Iterator[RowIndex]:
    """Yield blocks of ``size`` rows, and a shorter last one.

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
            for first in range(start, whole, size):
                yield block[first : first + size]
            start = whole
        if start < len(block):
            pending.append(block[start:])
            missing -= len(block) - start
    if pending and not drop_remainder:
        yield concatenate(pending)


class Joined:
    """Consecutive blocks as one sequence. Ranges take no memory."""

    def __init__(self, blocks: Sequence[RowIndex]) -> None:
        if not all(isinstance(block, range) for block in blocks):
            blocks = [np.concatenate([as_array(block) for block in blocks])]
        self._array = blocks[0] if blocks and isinstance(blocks[0], np.ndarray) else None
        ranges = [block for block in blocks if isinstance(block, range)]
        self._starts = np.cumsum([0, *map(len, blocks)])
        self._firsts = np.array([block.start for block in ranges], np.int64)
        self._steps = np.array([block.step for block in ranges], np.int64)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def at(self, positions: Numbers) -> Numbers:
        """Return the rows at ``positions``."""
        if self._array is not None:
            return self._array[positions]
        if len(self._firsts) == 1:
            only: Numbers = self._firsts[0] + self._steps[0] * positions
            return only
        chosen = np.searchsorted(self._starts, positions, "right") - 1
        found: Numbers = self._firsts[chosen] + self._steps[chosen] * (positions - self._starts[chosen])
        return found


def permuted(numbers: Numbers, count: int, keys: NDArray[np.uint64]) -> Numbers:
    """Apply a random permutation of 0 ... count - 1 to ``numbers``. The pairs of ``keys`` define it."""
    # A Feistel network (Luby and Rackoff 1988) over the next power of two, whose rounds hash by multiply-add-shift
    # (Dietzfelbinger 1996). Results of `count` and more are encrypted again until they fit (cycle walking: Black and
    # Rogaway 2002). Saved positions depend on this order.
    bits = max(2, (count - 1).bit_length())
    low_bits, mask = np.uint64(bits // 2), np.uint64((1 << bits // 2) - 1)
    # The upper b bits of 64 are a hash of b bits.
    shifts = (np.uint64(64 - bits // 2), np.uint64(64 - (bits - bits // 2)))
    found = numbers.astype(np.uint64)
    walking: Any = slice(None)
    while True:
        changed, other = found[walking] & mask, found[walking] >> low_bits
        for number, (factor, term) in enumerate(keys):
            mixed = other * (factor | np.uint64(1))
            mixed += term
            mixed >>= shifts[number % 2]
            changed ^= mixed
            changed, other = other, changed
        other <<= low_bits
        other |= changed
        found[walking] = other
        walking = np.flatnonzero(found >= count)
        if not len(walking):
            result: Numbers = found.astype(np.int64)
            return result


def random_order(count: int, generator: np.random.Generator) -> Iterator[Numbers]:
    """Yield the numbers 0 ... count - 1 in random order, in pieces."""
    if count <= LARGEST_ARRAY:
        yield generator.permutation(count)
        return
    keys = generator.integers(0, 1 << 64, (2, 8), np.uint64).T
    for start in range(0, count, _AT_ONCE):
        yield permuted(np.arange(start, min(start + _AT_ONCE, count)), count, keys)


def order_in_windows(
    count: int, block_rows: int, window_blocks: int, generator: np.random.Generator
) -> Iterator[Numbers]:
    """Yield blocks of ``block_rows`` numbers in random order, and mix ``window_blocks`` blocks at a time.

    >>> pieces = order_in_windows(10, 2, 2, np.random.default_rng(0))
    >>> [sorted(set((piece // 2).tolist())) for piece in pieces]
    [[2, 4], [0, 3], [1]]
    """
    for blocks in random_order(-(-count // block_rows), generator):
        for start in range(0, len(blocks), window_blocks):
            window = blocks[start : start + window_blocks]
            numbers = (window[:, None] * block_rows + np.arange(block_rows)).ravel()
            yield generator.permutation(numbers[numbers < count])
