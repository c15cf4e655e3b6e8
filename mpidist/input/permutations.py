"""Random orders of row numbers: of few numbers as an array, of many by a function that needs none.

The function is a Feistel network (Luby and Rackoff, How to construct pseudorandom permutations from pseudorandom
functions, 1988) over the next power of two, with results that are too large put in again until one fits (cycle walking:
Black and Rogaway, Ciphers with arbitrary finite domains, 2002). Its rounds hash by multiply-add-shift (Dietzfelbinger,
Universal hashing and k-wise independent random variables via integer arithmetic without primes, 1996).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

Numbers = np.ndarray[Any, np.dtype[np.int64]]

# Above it the array of an order would take more memory than the rows of a few batches: 32 MiB.
LARGEST_ARRAY = 1 << 22
_ROUNDS = 8
_AT_ONCE = 1 << 15


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

    def _once(self, numbers: np.ndarray[Any, np.dtype[np.uint64]]) -> np.ndarray[Any, np.dtype[np.uint64]]:
        changed: np.ndarray[Any, np.dtype[np.uint64]] = numbers & self._low_mask
        other: np.ndarray[Any, np.dtype[np.uint64]] = numbers >> self._low_bits
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
    """Yield the numbers 0 ... count - 1 in random order of blocks of ``block_rows``, mixed ``window_blocks`` at a time.

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
