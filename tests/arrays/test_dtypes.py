"""The dtypes that users name: bfloat16 wherever one is given, or what to install for it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

import mpidist
from mpidist.experimental.partitioners import MinSizePartitioner

pytestmark = pytest.mark.one_rank

MADE: dict[str, Callable[[Any], Any]] = {
    "Variable": lambda dtype: mpidist.Variable(1.0, dtype=dtype).dtype,
    "Communicator.empty": lambda dtype: _empty(dtype),
    "a strategy's empty": lambda dtype: mpidist.get_strategy().extended.empty(3, dtype).dtype,
    "a metric": lambda dtype: mpidist.metrics.Sum(dtype=dtype).variables[0].dtype,
    "a partitioner": lambda dtype: MinSizePartitioner(1, 4)((4, 2), dtype) and dtype,
}


def _empty(dtype: Any) -> Any:
    comm = mpidist.Communicator()
    try:
        return comm.empty(3, dtype).dtype
    finally:
        comm.close()


@pytest.mark.parametrize("where", MADE)
def test_bfloat16_by_name(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MADE[where]("bfloat16") == "bfloat16"
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(ImportError, match=r"bfloat16 needs the ml_dtypes package; type: pip install -e '.*\[half\]'"):
        MADE[where]("bfloat16")
    assert MADE[where]("float16") == "float16"
    with pytest.raises(TypeError):
        MADE[where]("float17")
