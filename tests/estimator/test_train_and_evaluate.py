"""Training and evaluating side by side, on real ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import mpidist
from mpidist.estimator.evaluations import FILE
from tests.estimator import programs
from tests.estimator.programs import STEPS
from tests.support.ranks.jobs import run_alone

pytestmark = [pytest.mark.jobs, pytest.mark.one_rank]

JOBS = {"MPIDIST_JOBS": "chief:1,worker:2,evaluator:1"}
LAST = {"step": STEPS, "weight": 1 - 0.5**STEPS, "replicas": 1}


def lines_of(directory: Path) -> list[object]:
    return [json.loads(line)["metrics"] for line in (directory / FILE).read_text().splitlines()]


def test_the_evaluator_evaluates_while_the_others_train(tmp_path: Path) -> None:
    *trained, evaluator = run_alone(programs.side_by_side, 4, str(tmp_path), env=JOBS)
    # Three ranks make the strategy, and the evaluator is in none of its collectives.
    assert trained == [[[3, LAST["weight"]]] * 2] * 3
    for is_async, evaluated in zip((False, True), evaluator, strict=True):
        assert evaluated[0]["step"] <= 2
        assert evaluated[-1] == LAST
        steps = [metrics["step"] for metrics in evaluated]
        assert steps == sorted(set(steps))
        assert lines_of(tmp_path / str(is_async)) == evaluated


def test_without_an_evaluator_the_chief_evaluates_in_between_and_at_last(tmp_path: Path) -> None:
    chief, worker = run_alone(programs.in_between, 2, str(tmp_path))
    assert chief == (2, LAST["weight"], [(1, True), (3, True)])
    assert worker == (2, LAST["weight"], [])
    assert [metrics["step"] for metrics in lines_of(tmp_path)] == [1, 3, STEPS]  # type: ignore[index]


def test_a_parameter_server_serves_the_workers(tmp_path: Path) -> None:
    found = run_alone(programs.serving, 4, str(tmp_path / "out"))
    assert found == [(None, None), (2.0, 2.0), (2.0, 2.0), (None, [{"total": 2.0}])]


def test_with_a_coordinator_the_workers_serve(tmp_path: Path) -> None:
    pytest.importorskip("cloudpickle", reason="the coordinator needs cloudpickle")
    assert run_alone(programs.coordinated, 4, str(tmp_path)) == [STEPS, None, None, [{"total": STEPS}]]


def test_one_process(tmp_path: Path) -> None:
    seen = []
    value = mpidist.train_and_evaluate(
        mpidist.TrainSpec(programs.make_train(lambda *_: None), tmp_path),
        mpidist.EvalSpec(programs.evaluate, on_result=seen.append),
    )
    assert value == [1, LAST["weight"]]
    assert [result.metrics for result in seen] == [LAST]


def test_inside_run_there_is_no_evaluation(tmp_path: Path) -> None:
    def train(context: mpidist.TrainContext) -> None:
        strategy = mpidist.OneDeviceStrategy("cpu:0")
        strategy.run(context.evaluate)

    with pytest.raises(RuntimeError, match=r"context.evaluate\(\) was called inside strategy.run\(\)"):
        mpidist.train_and_evaluate(mpidist.TrainSpec(train, tmp_path), mpidist.EvalSpec(programs.evaluate))


def test_wrong_arguments(tmp_path: Path) -> None:
    train_spec, eval_spec = mpidist.TrainSpec(print, tmp_path), mpidist.EvalSpec(programs.evaluate)
    with pytest.raises(TypeError, match=r"train_spec is .* of type EvalSpec; expected mpidist.TrainSpec"):
        mpidist.train_and_evaluate(eval_spec, eval_spec)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"eval_spec is None of type NoneType; expected mpidist.EvalSpec"):
        mpidist.train_and_evaluate(train_spec, None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"cluster_resolver is 'mpi'; expected None or an object such as"):
        mpidist.train_and_evaluate(train_spec, eval_spec, "mpi")  # type: ignore[arg-type]
