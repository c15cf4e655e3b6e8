"""Which rows of a source come, and in which order, as blocks of row numbers: no data is touched here.

A block is a ``range`` where the rows are evenly spaced, so that they can be read as one slice, and an int64
array otherwise. Sequences of blocks may be endless; where one block ends and the next begins has no meaning.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import numpy as np

RowIndex: TypeAlias = "range | np.ndarray[Any, np.dtype[np.int64]]"


def as_array(index: RowIndex) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the row numbers as an int64 array."""
    if isinstance(index, range):
        return np.arange(index.start, index.stop, index.step, dtype=np.int64)
    return index


def concatenate(blocks: Sequence[RowIndex]) -> RowIndex:
    """Return one block with the rows of all, still a range where there is only one.

    >>> concatenate([range(2), range(5, 7)])
    array([0, 1, 5, 6])
    """
    if len(blocks) == 1:
        return blocks[0]
    return np.concatenate([as_array(block) for block in blocks]) if blocks else range(0)


class Joined:
    """Blocks one after the other, whose rows are asked for by their places; ranges take no memory.

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

    def at(self, places: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Return the rows at ``places``."""
        if len(self._blocks) == 1:
            block = self._blocks[0]
            return block.start + block.step * places if isinstance(block, range) else block[places]
        chosen = np.searchsorted(self._starts, places, "right") - 1
        rows: np.ndarray[Any, np.dtype[np.int64]] = places - self._starts[chosen]
        return self._firsts[chosen] + self._steps[chosen] * rows


def cut(blocks: Iterable[RowIndex], start: int, stop: int | None, step: int) -> Iterator[RowIndex]:
    """Yield the rows from place ``start`` to before ``stop`` that are ``step`` places from one another.

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
    """Yield a block, whose length ``size`` divides, in blocks of ``size``; most batches come from here."""
    if isinstance(block, range):
        step = block.step
        stride = size * step
        return (range(first, first + stride, step) for first in block[::size])
    return (block[first : first + size] for first in range(0, len(block), size))


def batch(blocks: Iterable[RowIndex], size: int, drop_remainder: bool) -> Iterator[RowIndex]:
    """Yield blocks of exactly ``size`` rows, and what is left over as a shorter one.

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
