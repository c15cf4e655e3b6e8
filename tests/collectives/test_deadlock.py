"""Ranks that wait for one another in different communicators: what is found, and what is not mistaken for it."""

from __future__ import annotations

import pytest

from mpidist.collectives.watch.deadlock import Wait, WaitState, find_deadlock
from tests.support.ranks.jobs import run_script
from tests.support.ranks.programs import run_program
from tests.support.speed import deadlines

pytestmark = pytest.mark.one_rank


def at(rank: int, wait: tuple[str, int] | None, **issued: int) -> WaitState:
    return WaitState(rank, None if wait is None else Wait(*wait, "a barrier", f"train.py:{rank}"), issued)


def test_two_ranks_in_each_others_way() -> None:
    found = find_deadlock("a", 5, [at(0, ("a", 5), a=5, b=2), at(1, ("b", 3), a=4, b=3), at(2, None, a=4, b=2)])
    assert found is not None
    assert found.waits == {("a", 5), ("b", 3)}
    assert "rank 0 of the job: a barrier, collective number 5 of a\n      at train.py:0" in found.text
    assert "rank 1 of the job: a barrier, collective number 3 of b\n      at train.py:1" in found.text
    assert "rank 2" not in found.text


def test_ranks_that_are_only_late() -> None:
    waits = at(0, ("a", 5), a=5, b=2)
    assert find_deadlock("a", 5, [waits, at(1, None, a=4, b=2)]) is None
    # The other waits for a third, or for works that this one has issued and moves on.
    assert find_deadlock("a", 5, [waits, at(1, ("b", 2), a=4, b=2)]) is None
    # It has come meanwhile, and went on.
    assert find_deadlock("a", 5, [waits, at(1, ("b", 3), a=5, b=3)]) is None
    # It waits in a communicator that this one is no member of.
    assert find_deadlock("a", 5, [waits, at(1, ("c", 1), a=4, b=2, c=1)]) is None


def test_a_rank_of_a_part() -> None:
    found = find_deadlock("a", 5, [at(0, ("a", 5), a=5), at(1, ("a", 5), a=5, b=2), at(2, ("b", 3), a=4, b=3)])
    assert found is not None
    assert "rank 1 of the job" in found.text
    assert "rank 2 of the job" in found.text
    assert "rank 0 of the job" not in found.text


LATE = """
import threading, time, mpidist
first, second = mpidist.Communicator(), mpidist.Communicator()
if first.rank == 1:
    time.sleep(3)
second.barrier()                                        # a rank that is late, with two communicators
first.barrier()
# Each thread has its communicator; their order differs from rank to rank, and every wait ends.
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


@pytest.mark.jobs
def test_waits_that_end_are_let_alone() -> None:
    job = run_program(LATE, 3)
    assert job.returncode == 0, job.stderr
    assert job.stdout.split() == ["done"] * 3


THREADS = """
import threading, time, mpidist
first, second = mpidist.Communicator(), mpidist.Communicator()
# On each rank one thread waits at once, and the other computes for longer than a deadlock takes to be found.
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
def test_threads_that_are_slow_to_begin() -> None:
    job = run_program(THREADS, 2)
    assert job.returncode == 0, job.stderr
    assert job.stdout.split() == ["done"] * 2


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
