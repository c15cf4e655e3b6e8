"""The program of docs/evaluation.md runs, with and without an evaluator."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.docs.pages import programs
from tests.support.ranks.jobs import run_script

pytestmark = [pytest.mark.jobs, pytest.mark.one_rank]


@pytest.mark.parametrize("jobs", ["", "chief:1,evaluator:1"])
def test_the_program(jobs: str, tmp_path: Path) -> None:
    (program,) = programs("docs/evaluation.md")
    done = run_script(program, 2, str(tmp_path), env={"MPIDIST_JOBS": jobs})
    assert done.returncode == 0, done.stderr
    found = [ast.literal_eval(line) for line in done.stdout.splitlines()]
    assert found[-1]["step"] == 40
    assert found[-1]["distance"] < 0.02
