"""Leaves in flat arrays, which needs no JAX."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

import numpy as np
import pytest

from tests.support.ranks.jobs import ROOT

pytestmark = pytest.mark.one_rank


@pytest.fixture
def leaf_packs() -> Any:
    """The module by itself: the package imports JAX."""
    spec = spec_from_file_location("leaf_packs", ROOT / "mpidist" / "jax" / "leaf_packs.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.LeafPacks


def test_leaves_come_back(leaf_packs: Any) -> None:
    leaves = [
        np.arange(6.0).reshape(2, 3),
        np.arange(3),
        np.array(7.0),
        np.ones((0, 2)),
        np.arange(4).reshape(2, 1, 2),
        np.array([8.0, 9.0]),
    ]
    packs = leaf_packs(leaves)
    joined = packs.join(leaves, np)
    assert [(pack.dtype, pack.shape) for pack in joined] == [(np.dtype("float64"), (9,)), (np.dtype("int64"), (7,))]
    for before, after in zip(leaves, packs.cut(joined), strict=True):
        np.testing.assert_array_equal(before, after, strict=True)


def test_results_may_be_of_other_dtypes(leaf_packs: Any) -> None:
    leaves = [np.arange(2), np.arange(3.0)]
    packs = leaf_packs(leaves)
    whole, _ = packs.cut([pack / 2 for pack in packs.join(leaves, np)])
    assert whole.tolist() == [0.0, 0.5]
