"""The README: its program gives the same numbers on any number of ranks, and its first screen is free of tables."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, programs
from tests.support.ranks.jobs import run_script

pytestmark = pytest.mark.one_rank

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.jobs
def test_the_program_gives_the_same_numbers_everywhere() -> None:
    (program,) = programs(README)
    outputs = []
    for ranks in (1, 4):
        job = run_script(program, ranks)
        assert job.returncode == 0, job.stderr
        outputs.append(job.stdout)
    assert outputs == [f"{ranks} replicas: loss 0.00002, w [ 1. -2.  3.]\n" for ranks in (1, 4)]


def test_the_first_screen_has_no_table() -> None:
    assert "|" not in "".join(README.read_text().splitlines()[:50])


def test_every_table_is_whole() -> None:
    tables = [table for page in PAGES for table in re.findall(r"(?:^\|.*\n)+", page.read_text(), re.MULTILINE)]
    assert len(tables) > 30
    assert [table for table in tables if not re.match(r".*\n\| ?-", table)] == []
