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


def test_ranks_and_places_differ() -> None:
    first, second = input_of(0, 251), input_of(1, 251)
    assert not np.any(first == second)
    assert len(set(first.tolist())) == 251


def test_wrong_elements_are_counted() -> None:
    expected = sum_of_inputs(2, 100)
    result = expected.copy()
    assert count_wrong(result, expected) == 0
    result[[3, 50]] += 1
    assert count_wrong(result, expected) == 2
    spoil(result)
    assert count_wrong(result, expected) == 100


def test_another_shape_or_dtype_is_wrong_altogether() -> None:
    expected = sum_of_inputs(2, 100)
    assert count_wrong(expected.astype(np.float64), expected) == 100
    assert count_wrong(expected[:50], expected) == 100
    assert count_wrong(None, expected) == 100
