"""Inputs sum exactly, and every wrong element is counted."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.measuring.inputs import count_wrong, input_of, spoil, sum_of_inputs

pytestmark = pytest.mark.one_rank


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 250, 251, 1000])
def test_the_sum_is_that_of_the_inputs(ranks: int, count: int) -> None:
    total = np.sum([input_of(rank, count).astype(np.float64) for rank in range(ranks)], axis=0)
    assert sum_of_inputs(ranks, count).dtype == np.float32
    assert np.array_equal(sum_of_inputs(ranks, count), total)


def test_wrong_elements_are_counted() -> None:
    expected = sum_of_inputs(2, 100)
    result = expected.copy()
    assert count_wrong(result, expected) == 0
    result[[3, 50]] += 1
    assert count_wrong(result, expected) == 2
    spoil(result)
    assert count_wrong(result, expected) == 100
