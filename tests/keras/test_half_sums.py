"""Means over ranks of values with 16 bits, weighted by more rows than those can count."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest

import mpidist
from tests.support.ranks.layouts import layouts

pytestmark = [pytest.mark.counts, pytest.mark.min_ranks(2), pytest.mark.filterwarnings("default")]
VALUES = np.array([300.0, -2.0, 60000.0])


def mean_of(strategy: Any, keras: ModuleType, values: Any, rows: int) -> Any:
    """Return the mean over ranks of a gradient, by their rows."""
    if keras.backend.backend() == "jax":
        from mpidist.keras.jax_step import pack, room_for, unpack
        from mpidist.keras.rank_sums import RankSums

        arrays = [*map(np.asarray, pack([values], [rows]))]
        sums = room_for(arrays)
        count = RankSums(strategy).add_up(arrays, rows, out=sums)
        return unpack(sums, count, [values])[0]
    from mpidist.keras.replica_model import Adoption
    from mpidist.keras.torch_step import mean_gradients

    adoption, variables = Adoption(strategy, object), [keras.Variable(values) for _ in range(2)]
    adoption.rows = rows
    mean, none = mean_gradients(adoption, [values, None], variables)
    assert none is None
    return mean


@pytest.mark.parametrize("strategy", layouts("multi_worker-1local"), indirect=True)
@pytest.mark.parametrize("of_first", [True, False])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("rows", [257, 70_000])
def test_means_of_halves(strategy: Any, keras: ModuleType, dtype: str, rows: int, of_first: bool) -> None:
    """All ranks have rows, or the first one alone."""
    values = keras.ops.convert_to_tensor(VALUES.reshape(3, 1), dtype)
    expected = keras.ops.convert_to_numpy(keras.ops.cast(values, "float32"))
    mean = mean_of(strategy, keras, values, 0 if of_first and mpidist.rank() else rows)
    assert keras.backend.standardize_dtype(mean.dtype) == dtype
    np.testing.assert_allclose(keras.ops.convert_to_numpy(keras.ops.cast(mean, "float32")), expected, rtol=1e-6)
