"""Rows at repeated positions brought down to one row each, by array operations that every library has.

A GPU adds at repeated positions by atomic operations, in another order each time, so that copies of one variable would
come to differ in their last bits; CuPy has them for some operations and dtypes only, and rounds some to float32. Here
rows are sorted by position and then combined in pairs, the same pairs every time.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mpidist.arrays.convert import Array

Combine = Callable[[Array, Array], Array]


def combined(rows: Array, positions: Array, combine: Combine) -> tuple[Array, Array]:
    """Return each position once, in rising order, and with it all of its rows, combined.

    Args:
        rows: Array of shape (k, ...).
        positions: Integers, of shape (k,); on the device of the rows, which is current.
        combine: An associative operation on arrays, such as ``np.add``.

    >>> combined(np.array([1.0, 2.0, 4.0]), np.array([3, 0, 3]), np.add)
    (array([2., 5.]), array([0, 3]))
    """
    if len(positions) == 0:
        return rows, positions
    order, starts, places = _sorted(positions)
    rows = rows[order]
    # The number of a row among those of its position; in each round odd ones join the even ones before them.
    number = places - starts[np.cumsum(_begins(positions[order])) - 1]
    while int(number.max()):
        odd = np.flatnonzero(number & 1)
        rows[odd - 1] = combine(rows[odd - 1], rows[odd])
        even = np.flatnonzero((number & 1) == 0)
        rows, number = rows[even], number[even] >> 1
    return rows, positions[order][starts]


def last_of_each(rows: Array, positions: Array) -> tuple[Array, Array]:
    """Return each position once, in rising order, and with it the last of its rows.

    >>> last_of_each(np.array([1.0, 2.0, 4.0]), np.array([3, 0, 3]))
    (array([2., 4.]), array([0, 3]))
    """
    if len(positions) == 0:
        return rows, positions
    order = np.argsort(positions, kind="stable")
    ends = np.flatnonzero(_begins(positions[order][::-1])[::-1])
    return rows[order][ends], positions[order][ends]


def _sorted(positions: Array) -> tuple[Array, Array, Array]:
    """Return the stable order of the positions, where each new one starts in it, and the numbers from 0."""
    order = np.argsort(positions, kind="stable")
    starts = np.flatnonzero(_begins(positions[order]))
    return order, starts, np.cumsum(np.ones_like(order)) - 1


def _begins(ordered: Array) -> Array:
    """Return for each element whether it differs from the one before it."""
    begins = np.ones_like(ordered, dtype=bool)
    begins[1:] = ordered[1:] != ordered[:-1]
    return begins
