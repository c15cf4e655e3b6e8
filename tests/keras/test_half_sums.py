"""Means over ranks of values with 16 bits, weighted by more rows than those can count."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest

import mpidist
from tests.support.ranks.layouts import layouts

pytestmark = [pytest.mark.counts, pytest.mark.min_ranks(2), pytest.mark.filterwarnings("default")]
ON_RANKS = pytest.mark.parametrize("strategy", layouts("multi_worker-1local"), indirect=True)
VALUES = np.array([300.0, -2.0, 60000.0])


@ON_RANKS
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("rows", [257, 70_000])
def test_means_of_halves(strategy: Any, keras: ModuleType, dtype: str, rows: int) -> None:
    import ml_dtypes  # noqa: F401, so that NumPy knows bfloat16

    from mpidist.keras.rank_sums import RankSums, pack, unpack

    sums = RankSums(strategy)
    array = VALUES.astype(dtype)
    marks = sums.take_mean([array], rows if mpidist.rank() == 0 else 0, [mpidist.rank() == 0, False])
    assert array.dtype == dtype
    np.testing.assert_array_equal(array, VALUES.astype(dtype))
    assert marks == [True, False]
    tensors = [keras.ops.convert_to_tensor(VALUES.reshape(3, 1), dtype)]
    [mean] = unpack(sums.mean_by_rows(pack(tensors, rows), rows), tensors)
    assert keras.backend.standardize_dtype(mean.dtype) == dtype
    found = keras.ops.convert_to_numpy(keras.ops.cast(mean, "float32"))
    np.testing.assert_allclose(found, VALUES.astype(dtype).astype("float32").reshape(3, 1), rtol=1e-6)
