"""The examples with parameter servers as a user starts them: accuracy, roles, and what is said to too few ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.ranks.jobs import ROOT, run_script

pytestmark = [pytest.mark.jobs, pytest.mark.one_rank]

ASYNCHRONOUS = ROOT / "examples" / "parameter_server.py"
FACTORIZATION = ROOT / "examples" / "factorization.py"


def run(script: Path, ranks: int, *arguments: str, env: dict[str, str] | None = None) -> str:
    done = run_script(script, ranks, *arguments, env=env, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def accuracy(output: str) -> float:
    return float(re.findall(r"done after \d+ updates: test accuracy ([\d.]+)%", output)[0])


def test_three_workers_reach_the_accuracy() -> None:
    output = run(ASYNCHRONOUS, 4)
    assert len(re.findall(r"worker \d: \d+ steps", output)) == 3
    assert accuracy(output) >= 96


def test_workers_that_are_held_together_on_two_servers() -> None:
    env = {"MPIDIST_JOBS": "ps:2,worker:2"}
    output = run(ASYNCHRONOUS, 4, "--epochs", "4", "--max-staleness", "2", env=env)
    steps = re.findall(r"worker \d: (\d+) steps", output)
    assert f"done after {sum(map(int, steps))} updates" in output
    assert accuracy(output) >= 80


def test_a_coordinator() -> None:
    output = run(ASYNCHRONOUS, 4, "--coordinator", "--epochs", "10")
    assert output.count("epoch ") == 10
    assert "done after 440 updates" in output
    assert accuracy(output) >= 94


def test_a_table_in_shards() -> None:
    output = run(FACTORIZATION, 4, "--epochs", "40")
    assert "table in shards of [899, 898] rows" in output
    error, best = map(float, re.findall(r"(?:error|possible) (\d\.\d+)", output))
    assert best <= error < 1.15 * best


@pytest.mark.parametrize(
    ("script", "arguments", "ranks"),
    [(ASYNCHRONOUS, [], 2), (ASYNCHRONOUS, ["--coordinator"], 3), (FACTORIZATION, [], 2)],
)
def test_too_few_ranks(script: Path, arguments: list[str], ranks: int) -> None:
    done = run_script(script, 1, *arguments)
    assert done.returncode == 1
    assert f"expected {ranks} ranks or more; type: mpirun -n " in done.stderr
