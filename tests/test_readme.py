"""The README: its program runs, alone and on several ranks, and gives the same numbers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import programs
from tests.support.ranks.jobs import run_script

pytestmark = pytest.mark.one_rank

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.jobs
def test_the_training_loop_runs_everywhere() -> None:
    (program,) = programs(README)
    outputs = []
    for ranks in (1, 3):
        job = run_script(program, ranks)
        assert job.returncode == 0, job.stderr
        outputs.append(job.stdout)
    assert outputs[0] == outputs[1]
    assert "epoch 4: loss 0.0" in outputs[0]


def test_every_table_is_whole() -> None:
    tables = re.findall(r"(?:^\|.*\n)+", README.read_text(), re.MULTILINE)
    assert len(tables) > 3
    assert [table for table in tables if not re.match(r".*\n\|-", table)] == []
