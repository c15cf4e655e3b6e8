"""The elements that each rank reduces, and pieces of them that fit in cache."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

Piece = tuple[int, int, int, int]


@lru_cache(maxsize=256)
def slices(count: int, ranks: int) -> tuple[tuple[int, int], ...]:
    """Return the range of elements that each rank reduces.

    They have equal lengths, the first ones one longer.

    >>> slices(5, 2)
    ((0, 3), (3, 5))
    """
    length, more = divmod(count, ranks)
    borders = [rank * length + min(rank, more) for rank in range(ranks + 1)]
    return tuple(pairwise(borders))


@lru_cache(maxsize=256)
def borders(count: int, ranks: int) -> tuple[int, ...]:
    """Return where the slices begin, and where the last ends.

    >>> borders(5, 2)
    (0, 3, 5)
    """
    return (*tuple([start for start, _ in slices(count, ranks)]), count)


@lru_cache(maxsize=1024)
def pieces(counts: tuple[int, ...], start: int, stop: int, limit: int) -> tuple[Piece, ...]:
    """Cut elements ``start`` to ``stop`` of concatenated parts into pieces of one part.

    Each is at most ``limit`` long.

    Returns:
        For each piece: the part, the first element in it, the number of elements, the offset in the whole.

    >>> pieces((3, 4), 1, 6, 2)
    ((0, 1, 2, 1), (1, 0, 2, 3), (1, 2, 1, 5))
    """
    found = []
    first = 0
    for part, count in enumerate(counts):
        position, end = max(start, first), min(stop, first + count)
        while position < end:
            length = min(limit, end - position)
            found.append((part, position - first, length, position))
            position += length
        first += count
        if first >= stop:
            break
    return tuple(found)
