"""Points: inputs of their own for each call, written anew, and right answers wherever a result is."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from benchmarks.measuring.points import Inputs, Point

pytestmark = pytest.mark.one_rank


@pytest.mark.parametrize(("count", "sets"), [(1, 20), (4 << 10, 16), (64 << 10, 1), (1 << 20, 1)])
def test_a_group_fits_a_cache(count: int, sets: int) -> None:
    inputs = Inputs(np.arange(count, dtype=np.float32))
    assert len(inputs.sets) == len({array.ctypes.data for array in inputs.sets}) == sets


def test_inputs_are_written_and_restored() -> None:
    value = [np.arange(3, dtype=np.float32), np.arange(2, dtype=np.float32)]
    inputs = Inputs(value)
    assert [array.tolist() for array in inputs.sets[-1]] == [[0, 1, 2], [0, 1]]
    inputs.rewrite()
    assert [array.tolist() for array in inputs.sets[-1]] == [[1, 1, 1], [1, 1]]
    inputs.restore()
    assert [array.tolist() for array in inputs.sets[0]] == [[0, 1, 2], [0, 1]]


def test_results_are_checked_where_they_are() -> None:
    point = Point(np.ones(3, np.float32), np.full(3, 2, np.float32))

    def double(value: Any) -> Any:
        return np.add(value, value, out=value)

    returned = point.case("mpidist", "new", lambda value: partial(np.add, value, value), point.check)
    out = point.case("mpidist", "out=", lambda value: partial(np.add, value, value, point.out), point.check_out)
    place = point.case("mpidist", "in place", partial(partial, double), point.check_in_place)
    for case in (returned, out, place):
        assert case.check is not None
        case.prepare()
        assert case.check(case.call()) == 0
    out.prepare()
    assert out.check is not None
    assert out.check(None) == 3
