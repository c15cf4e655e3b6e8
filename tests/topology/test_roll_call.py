"""Ranks that do not make the first strategy: the error of the others says where they are."""

from __future__ import annotations

import re

import pytest

from tests.support.ranks.jobs import run_script
from tests.support.speed import deadlines

pytestmark = [pytest.mark.one_rank, pytest.mark.jobs]

FIRST_ALONE = """
import time, mpidist
from mpi4py import MPI
if MPI.COMM_WORLD.Get_rank() == 0:
    strategy = mpidist.MultiWorkerMirroredStrategy()
else:
    time.sleep(60)                                      # line 7
"""


def test_an_absent_rank_is_named_with_its_line() -> None:
    job = run_script(FIRST_ALONE, 2, env=deadlines(3, 1))
    assert job.returncode != 0
    assert re.search(r"rank 0 of 2 has waited \d+ s for the other ranks in making the first strategy", job.stderr)
    assert "rank 1 has not made a strategy or communicator; it is at " in job.stderr
    assert ":7 (<module>)" in job.stderr


def test_a_rank_whose_program_has_ended() -> None:
    program = FIRST_ALONE.replace("time.sleep(60)", "pass")
    job = run_script(program, 2, env=deadlines(3))
    assert job.returncode != 0
    assert "rank 1 gave no answer: its program has ended, it has not imported mpidist" in job.stderr


def test_messages_of_the_program_are_its_own() -> None:
    program = """
    import time, mpidist
    from mpi4py import MPI
    world = MPI.COMM_WORLD
    if world.rank == 0:
        world.send("hello", 1)
        time.sleep(1.5)
    else:
        assert world.recv(source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG) == "hello"
    mpidist.Communicator().close()
    print("done")
    MPI.Finalize()
    """
    job = run_script(program, 2, env={"MPIDIST_WARN_AFTER": "0.5"})
    assert job.returncode == 0, job.stderr
    assert job.stdout.split() == ["done"] * 2
