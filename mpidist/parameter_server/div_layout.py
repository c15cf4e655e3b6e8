"""The "div" rule: how the rows of an array are dealt to shards, and arrays cut the way that shards are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from mpidist.arrays.convert import Array
from mpidist.values import Variable


def div_sizes(rows: int, shards: int) -> list[int]:
    """Return how many of ``rows`` rows each of ``shards`` shards holds: sizes differ by at most one, larger ones first.

    Raises:
        ValueError: Fewer than no rows, or no shard.

    >>> div_sizes(13, 5)
    [3, 3, 3, 2, 2]
    """
    if rows < 0 or shards < 1:
        raise ValueError(f"{rows} rows were to be dealt to {shards} shards; expected rows >= 0 and shards >= 1")
    quotient, larger = divmod(rows, shards)
    return [quotient + 1] * larger + [quotient] * (shards - larger)


def offsets_of(sizes: Sequence[int]) -> list[int]:
    """Return the first row of each shard, and behind them the number of all rows.

    >>> offsets_of(div_sizes(10, 4))
    [0, 3, 6, 8, 10]
    """
    return [0, *accumulate(sizes)]


def cut(array: Array, variables: Sequence[Variable]) -> list[Array]:
    """Return the rows of ``array`` that belong to each of ``variables``: views, where it lies.

    Args:
        array: Of shape (rows, ...), with as many rows as the variables have together.
        variables: Of shapes (rows of the shard, ...).

    Raises:
        ValueError: Another number of rows.

    >>> import numpy as np
    >>> [part.tolist() for part in cut(np.arange(5), [Variable([0, 0, 0]), Variable([0, 0])])]
    [[0, 1, 2], [3, 4]]
    """
    offsets = offsets_of([variable.shape[0] for variable in variables])
    if array.ndim == 0 or array.shape[0] != offsets[-1]:
        raise ValueError(
            f"an array of shape {array.shape} was to be cut for {len(variables)} variables of {offsets[-1]} rows "
            f"together; expected the shape ({offsets[-1]}, ...)"
        )
    return [array[start:stop] for start, stop in pairwise(offsets)]
