"""What TrainSpec and EvalSpec refuse."""

from __future__ import annotations

from typing import Any

import pytest

from mpidist.estimator import EvalSpec, TrainSpec

pytestmark = pytest.mark.one_rank


def nothing(_: Any) -> None:
    return None


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"train_fn": 3}, TypeError, "train_fn is 3 of type int; expected a function"),
        ({"checkpoint_dir": None}, TypeError, "checkpoint_dir is None; expected the path of a directory"),
        ({"checkpoint_dir": ""}, TypeError, "checkpoint_dir is ''"),
        ({"max_steps": 0}, ValueError, "max_steps is 0; expected a whole number of 1 or more, or None"),
        ({"max_steps": True}, ValueError, "max_steps is True"),
        ({"train_jobs": "chief"}, ValueError, "train_jobs is 'chief'; expected"),
        ({"train_jobs": ()}, ValueError, r"train_jobs is \(\)"),
        ({"train_jobs": ("ps",)}, ValueError, "train_jobs is"),
    ],
)
def test_wrong_train_specs(arguments: dict[str, Any], error: type[Exception], said: str) -> None:
    right: dict[str, Any] = {"train_fn": nothing, "checkpoint_dir": "out"}
    with pytest.raises(error, match=said):
        TrainSpec(**right | arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ({"eval_fn": "evaluate"}, TypeError, "eval_fn is 'evaluate' of type str; expected a function"),
        ({"on_result": 1}, TypeError, "on_result is 1"),
        ({"steps": 1.5}, ValueError, "steps is 1.5"),
        ({"throttle_secs": -1}, ValueError, "throttle_secs is -1; expected seconds, 0 or more"),
        ({"throttle_secs": float("nan")}, ValueError, "throttle_secs is nan"),
        ({"start_delay_secs": "1"}, ValueError, "start_delay_secs is '1'"),
    ],
)
def test_wrong_eval_specs(arguments: dict[str, Any], error: type[Exception], said: str) -> None:
    right: dict[str, Any] = {"eval_fn": nothing}
    with pytest.raises(error, match=said):
        EvalSpec(**right | arguments)
