"""Rows at repeated positions: the same as NumPy's ufunc.at, without atomic operations."""

from __future__ import annotations

from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from mpidist.values.indexed_slices import combined, last_of_each

pytestmark = pytest.mark.one_rank

_POSITIONS = st.lists(st.integers(0, 5), max_size=40)


@pytest.mark.parametrize("ufunc", [np.add, np.multiply, np.minimum, np.maximum])
@hypothesis.given(positions=_POSITIONS, seed=st.integers(0, 1000))
def test_combined_is_what_ufunc_at_gives(ufunc: Any, positions: list[int], seed: int) -> None:
    rows = np.random.default_rng(seed).integers(1, 4, (len(positions), 2))
    expected = np.full((6, 2), 2)
    ufunc.at(expected, np.array(positions, int), rows)

    own, once = combined(rows, np.array(positions, int), ufunc)
    assert list(once) == sorted(set(positions))
    result = np.full((6, 2), 2)
    result[once] = ufunc(result[once], own)
    np.testing.assert_array_equal(result, expected)


@hypothesis.given(positions=_POSITIONS)
def test_last_of_each_is_what_assignment_leaves(positions: list[int]) -> None:
    rows = np.arange(len(positions))
    expected = {position: row for row, position in enumerate(positions)}

    own, once = last_of_each(rows, np.array(positions, int))
    assert dict(zip(once.tolist(), own.tolist(), strict=True)) == expected
    assert list(once) == sorted(expected)


def test_sums_of_many_small_numbers_stay_exact_enough() -> None:
    rows = np.full(100_000, 0.1, np.float32)
    own, _ = combined(rows, np.zeros(len(rows), int), np.add)
    np.testing.assert_allclose(own, [10_000], rtol=1e-6)
