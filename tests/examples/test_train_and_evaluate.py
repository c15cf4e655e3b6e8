"""examples/train_and_evaluate.py as a user starts it: with and without an evaluator, and started again."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.ranks.jobs import ROOT
from tests.support.ranks.programs import run_program

pytestmark = [pytest.mark.jobs, pytest.mark.one_rank]

SCRIPT = ROOT / "examples" / "train_and_evaluate.py"


def train(out: Path, ranks: int, *arguments: str, jobs: str | None = None) -> str:
    env = {} if jobs is None else {"MPIDIST_JOBS": jobs}
    done = run_program(SCRIPT, ranks, "--out", str(out), *arguments, env=env, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def evaluations(out: Path) -> list[dict[str, float]]:
    return [json.loads(line)["metrics"] for line in (out / "eval" / "metrics.jsonl").read_text().splitlines()]


def test_three_ranks_train_and_one_evaluates(tmp_path: Path) -> None:
    output = train(tmp_path, 4, "--epochs", "4", "--batch-size", "64")
    assert "3 replica(s) train" in output
    found = evaluations(tmp_path)
    epochs = [metrics["epoch"] for metrics in found]
    assert epochs == sorted(set(epochs))
    assert epochs[-1] == 4
    assert found[-1]["accuracy"] >= 0.95
    assert [int(epoch) for epoch in re.findall(r"^epoch +(\d+)  test loss ", output, re.MULTILINE)] == epochs


def test_without_an_evaluator_and_started_again(tmp_path: Path) -> None:
    output = train(tmp_path, 2, "--epochs", "1", "--batch-size", "64", jobs="chief:1,worker:1")
    assert "2 replica(s) train" in output
    assert [metrics["epoch"] for metrics in evaluations(tmp_path)] == [1]
    train(tmp_path, 2, "--epochs", "2", "--batch-size", "64")
    assert evaluations(tmp_path)[-1]["epoch"] == 2
