"""What a result may hold, and the lines that it is written as."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.estimator.evaluations import FILE, append, plain_metrics
from mpidist.estimator.specs import EvalResult

pytestmark = pytest.mark.one_rank


def test_metrics_become_what_json_has() -> None:
    found = plain_metrics(
        {
            "loss": np.float32(0.5),
            "hits": np.int64(3),
            "good": np.bool_(True),
            "rows": np.ones((1, 2)),
            "nested": {"a": (1, np.array(2))},
            "name": "digits",
            "none": None,
            "variable": mpidist.Variable(1.5),
        }
    )
    assert json.loads(json.dumps(found)) == {
        "loss": 0.5,
        "hits": 3,
        "good": True,
        "rows": [[1.0, 1.0]],
        "nested": {"a": [1, 2]},
        "name": "digits",
        "none": None,
        "variable": 1.5,
    }
    assert type(found["loss"]) is float
    assert type(found["good"]) is bool


def test_metrics_of_16_bits() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="bfloat16 needs ml_dtypes")
    assert plain_metrics({"loss": np.array(0.5, ml_dtypes.bfloat16)}) == {"loss": 0.5}


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (None, "eval_fn returned None of type NoneType; expected a dict from names to numbers"),
        (0.5, "eval_fn returned 0.5 of type float"),
        ({1: 0.5}, "expected a dict from names"),
        ({"a": {"b": object}}, "of type type as 'a/b'; expected numbers"),
        ({"a": 1j}, "as 'a'; expected numbers"),
        ({"a": np.array(["x"])}, "as 'a'; expected numbers"),
    ],
)
def test_metrics_that_are_none(returned: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        plain_metrics(returned)


def test_lines_are_added(tmp_path: Path) -> None:
    first = EvalResult("out/ckpt-1", {"loss": 0.5}, 1.0, 2.0)
    append(tmp_path, first)
    append(tmp_path, EvalResult("out/ckpt-2", {"loss": float("nan"), "all": [float("inf"), -float("inf")]}, 3.0, 4.0))
    lines = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    assert EvalResult(**lines[0]) == first
    # JSON has no such numbers; float() reads these strings.
    assert lines[1]["metrics"] == {"loss": "NaN", "all": ["Infinity", "-Infinity"]}
