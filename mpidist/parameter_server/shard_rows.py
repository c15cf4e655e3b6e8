"""The rows of a value in shards: their division, an index's rows, cut arrays."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from mpidist.arrays.dtypes import Array
from mpidist.values import Variable
from mpidist.values.operators import as_operand
from mpidist.values.placement import array_of, on_host

# Rows in rising order, each once.
Rows = range | Array


def div_sizes(rows: int, shards: int) -> list[int]:
    """Return the rows of each of ``shards`` shards, of ``rows`` in all.

    Sizes differ by at most one, larger ones first ("div").

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


def select_rows(key: object, shape: tuple[int, ...]) -> tuple[Rows, tuple[object, ...]]:
    """Return the rows that ``array[key]`` needs, and the key for these rows alone.

    Args:
        key: Whatever NumPy takes as an index.
        shape: Of the array; at least one axis.

    Raises:
        IndexError: NumPy's, for a key that does not fit the shape.

    >>> rows, rest = select_rows([5, 2, 5], (10, 3))
    >>> array = np.arange(30).reshape(10, 3)
    >>> rows, np.array_equal(array[rows][rest], array[[5, 2, 5]])
    (array([2, 5]), True)
    """
    items = [_plain(item) for item in (key if isinstance(key, tuple) else (key,))]
    # An array of this shape without memory: NumPy's own errors, before anything is read.
    np.broadcast_to(np.False_, shape)[tuple(items)]
    left = len(shape) - sum(map(_axes, items))
    for place, item in enumerate(items):
        if item is Ellipsis and left:
            break
        if _axes(item):
            rows, instead = _taken(item, shape[0])
            return rows, (*items[:place], *instead, *items[place + 1 :])
    return range(shape[0]), tuple(items)


def _plain(item: object) -> Any:
    """Return one item of a key in plain form.

    That is a slice, None, Ellipsis, bool, int, or NumPy array of at least one axis.
    """
    if item is None or item is Ellipsis or isinstance(item, (slice, bool, int)):
        return item
    array = on_host(array_of(as_operand(item)))
    if array.size == 0 and isinstance(item, (list, tuple)):
        array = array.astype(np.intp)
    return array.item() if array.ndim == 0 and array.dtype.kind in "biu" else array


def _axes(item: object) -> int:
    """Return how many axes of the array an item of a key speaks of."""
    if isinstance(item, np.ndarray):
        return item.ndim if item.dtype.kind == "b" else 1
    return 0 if item is None or item is Ellipsis or isinstance(item, bool) else 1


def _taken(item: int | slice | Array, count: int) -> tuple[Rows, tuple[object, ...]]:
    """Return an item's rows, of ``count``, and its replacement for these rows alone."""
    if isinstance(item, int):
        row = range(count)[item]
        return range(row, row + 1), (0,)
    if isinstance(item, slice):
        rows = range(*item.indices(count))
        return (rows, (slice(None),)) if rows.step > 0 else (rows[::-1], (slice(None, None, -1),))
    # A mask stands for the positions of what is true in it, of which the first are rows.
    first, *others = item.nonzero() if item.dtype.kind == "b" else (item,)
    positions = first.astype(np.intp, copy=False)
    taken, numbers = np.unique(np.where(positions < 0, positions + count, positions), return_inverse=True)
    return taken, (numbers.reshape(positions.shape), *others)
