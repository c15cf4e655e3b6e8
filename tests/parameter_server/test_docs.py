"""The programs of docs/parameter_servers.md run as they are printed there."""

from __future__ import annotations

import re

import pytest

from tests.support.ranks.jobs import ROOT, run_script

pytestmark = [pytest.mark.jobs, pytest.mark.one_rank, pytest.mark.timeout(120)]

TEXT = (ROOT / "docs" / "parameter_servers.md").read_text()
PROGRAMS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.parametrize("number", range(2))
def test_a_program(number: int) -> None:
    job = run_script(PROGRAMS[number], 4, env={"MPIDIST_TIMEOUT": "60"})
    assert (job.returncode, job.stderr) == (0, "")
    assert "weights [ 1. -2.  3.]" in job.stdout


@pytest.mark.parametrize("number", range(2))
def test_a_program_of_which_the_servers_do_not_end(number: int) -> None:
    pasted = PROGRAMS[number].replace("    sys.exit()", "    pass")
    assert pasted != PROGRAMS[number]
    job = run_script(pasted, 4, env={"MPIDIST_TIMEOUT": "60"})
    assert job.returncode != 0
    assert "RuntimeError: ps 0 has served, its job is over" in job.stderr
