"""The programs of docs/parameter_servers.md with servers that go on after their job."""

from __future__ import annotations

import pytest

from tests.docs.pages import programs
from tests.support.ranks.jobs import run_script
from tests.support.speed import deadlines

pytestmark = [pytest.mark.jobs, pytest.mark.one_rank, pytest.mark.timeout(120)]

PROGRAMS = programs("docs/parameter_servers.md")


@pytest.mark.parametrize("number", range(2))
def test_a_program_of_which_the_servers_do_not_end(number: int) -> None:
    pasted = PROGRAMS[number].replace("    sys.exit()", "    pass")
    assert pasted != PROGRAMS[number]
    job = run_script(pasted, 4, env=deadlines(60))
    assert job.returncode != 0
    assert "RuntimeError: ps 0 has served, its job is over" in job.stderr
