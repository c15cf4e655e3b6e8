"""The rows of global batches that each rank has."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpidist.arrays.dtypes import Array
from mpidist.input.rules import parts


def rank_parts(rows: int, replica_counts: Sequence[int]) -> list[tuple[int, int]]:
    """Return the ``(start, stop)`` rows of a global batch of each rank's replicas.

    >>> rank_parts(10, (1, 2)), rank_parts(1, (1, 1))
    ([(0, 4), (4, 10)], [(0, 1), (1, 1)])
    """
    of_replicas = parts(rows, sum(replica_counts))
    ends = np.cumsum(replica_counts)
    firsts = ends - replica_counts
    return [(of_replicas[first][0], of_replicas[end - 1][1]) for first, end in zip(firsts, ends, strict=True)]


def own_rows(sizes: Sequence[int], replica_counts: Sequence[int], rank: int) -> Array:
    """Return which outputs of a rank belong to its own rows.

    For a batch without own rows, a rank has one output of another rank's row.

    >>> own_rows([3, 1], (1, 1), 1)
    array([ True, False])
    """
    found = [rank_parts(size, replica_counts)[rank] for size in sizes]
    return np.concatenate([np.full(max(stop - start, 1), stop > start) for start, stop in found])


def row_order(sizes: Sequence[int], replica_counts: Sequence[int]) -> Array:
    """Return the positions of all rows among the outputs of all ranks in order.

    >>> row_order([4, 2], (1, 1))
    array([0, 1, 3, 4, 2, 5])
    """
    of_batches = [
        [np.arange(start, stop) + end - size for start, stop in rank_parts(size, replica_counts)]
        for size, end in zip(sizes, np.cumsum(sizes), strict=True)
    ]
    of_ranks = [rows for of_rank in zip(*of_batches, strict=True) for rows in of_rank]
    return np.argsort(np.concatenate(of_ranks))
