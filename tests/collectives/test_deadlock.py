"""Deadlocks over several communicators: which ones are found, and which waits are left alone."""

from __future__ import annotations

import pytest

from mpidist.collectives.observe.hang_report import Wait, WaitState, find_deadlock
from tests.support.ranks.jobs import run_script
from tests.support.ranks.programs import run_program
from tests.support.speed import deadlines

pytestmark = pytest.mark.one_rank


def at(rank: int, channel: str, number: int, **issued: int) -> WaitState:
    return WaitState(rank, Wait(channel, number, "a barrier", f"train.py:{rank}"), issued)


def test_two_ranks_that_block_each_other() -> None:
    found = find_deadlock("a", 5, [at(0, "a", 5, a=5, b=2), at(1, "b", 3, a=4, b=3)])
    assert found is not None
    assert found.waits == {("a", 5), ("b", 3)}
    assert "rank 0 of the job: a barrier, collective number 5 of a\n      at train.py:0" in found.text
    assert "rank 1 of the job: a barrier, collective number 3 of b\n      at train.py:1" in found.text


@pytest.mark.parametrize(
    "others",
    [
        pytest.param([], id="the other rank runs"),
        pytest.param([at(1, "b", 2, a=4, b=2)], id="waits for a third rank, or for works that this one advances"),
        pytest.param([at(1, "b", 3, a=5, b=3)], id="arrived after all, and continued"),
        pytest.param([at(1, "c", 1, a=4, b=2, c=1)], id="waits in a communicator without this rank"),
    ],
)
def test_late_ranks_are_no_deadlock(others: list[WaitState]) -> None:
    assert find_deadlock("a", 5, [at(0, "a", 5, a=5, b=2), *others]) is None


def test_a_rank_of_a_part() -> None:
    found = find_deadlock("a", 5, [at(0, "a", 5, a=5), at(1, "a", 5, a=5, b=2), at(2, "b", 3, a=4, b=3)])
    assert found is not None
    assert "rank 1 of the job" in found.text
    assert "rank 2 of the job" in found.text
    assert "rank 0 of the job" not in found.text


# A late rank with two communicators. Then one thread per communicator, in a different order on each rank.
LATE = """
import threading, time, mpidist
first, second = mpidist.Communicator(), mpidist.Communicator()
if first.rank == 1:
    time.sleep(3)
second.barrier()
first.barrier()
def use(comm, seconds):
    time.sleep(seconds)
    comm.barrier()
threads = [threading.Thread(target=use, args=(first, 2.5 * (first.rank == 0))),
           threading.Thread(target=use, args=(second, 2.5 * (first.rank == 1)))]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
second.close()
first.close()
print("done")
"""
# On each rank one thread waits at once, and the other computes for longer than finding a deadlock takes.
THREADS = """
import threading, time, mpidist
first, second = mpidist.Communicator(), mpidist.Communicator()
def use(comm, seconds):
    time.sleep(seconds)
    comm.barrier()
late = threading.Thread(target=use, args=(second if first.rank == 0 else first, 4.0))
late.start()
use(first if first.rank == 0 else second, 0.0)
late.join()
second.close()
first.close()
print("done")
"""


@pytest.mark.jobs
@pytest.mark.parametrize(("program", "ranks"), [(LATE, 3), (THREADS, 2)], ids=["late ranks", "slow threads"])
def test_waits_that_end_are_left_alone(program: str, ranks: int) -> None:
    job = run_program(program, ranks)
    assert job.returncode == 0, job.stderr
    assert job.stdout.split() == ["done"] * ranks


PART = """
import numpy as np, mpidist
from mpi4py import MPI
world = mpidist.Communicator()
part = world.split(0 if world.rank < 2 else 1)
try:
    if world.rank == 1:
        part.barrier()
    world.barrier()
except mpidist.MismatchError as error:
    print("crossed" if "different communicators" in str(error) else error, flush=True)
MPI.COMM_WORLD.Barrier()                                # each had its error before any leaves
"""


@pytest.mark.jobs
def test_a_part_and_the_whole() -> None:
    job = run_script(PART, 3, env=deadlines(10))
    assert job.stdout.split("\n").count("crossed") == 3, job.stdout + job.stderr
