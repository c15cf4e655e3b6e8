"""Shares of global batches: each row is some rank's, and predictions come back in the order of rows."""

from __future__ import annotations

import numpy as np
import pytest

from mpidist.keras.shares import own_rows, rank_parts, row_order

pytestmark = pytest.mark.one_rank

COUNTS = [(1,), (3,), (1, 1), (2, 1), (1, 2, 1)]


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("rows", [1, 2, 3, 10, 25])
def test_each_row_is_one_ranks(counts: tuple[int, ...], rows: int) -> None:
    found = [row for start, stop in rank_parts(rows, counts) for row in range(start, stop)]
    assert found == list(range(rows))


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("sizes", [[7], [5, 5, 2], [2, 2, 1], [1, 1]])
def test_predictions_come_back_in_order(counts: tuple[int, ...], sizes: list[int]) -> None:
    rows = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    gathered = []
    for rank in range(len(counts)):
        parts = [rank_parts(size, counts)[rank] for size in sizes]
        # A batch in which the rank has no rows fills it.
        predicted = [
            batch[slice(*part)] if part[0] < part[1] else batch[:1] for batch, part in zip(rows, parts, strict=True)
        ]
        gathered.append(np.concatenate(predicted)[own_rows(sizes, counts, rank)])
    assert np.concatenate(gathered)[row_order(sizes, counts)].tolist() == list(range(sum(sizes)))
