"""Jobs of the tests, warm and of their own: results, errors, hangs, environments and leftovers."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

import mpidist
from tests.support.ranks import jobs, pool

pytestmark = [pytest.mark.jobs, pytest.mark.one_rank]

Run = Callable[..., list[Any]]


@pytest.fixture(params=[pool.run, jobs.run_alone], ids=["warm", "alone"])
def run(request: pytest.FixtureRequest) -> Run:
    """Each way to call a function on ranks."""
    return request.param


def misbehave(how: str) -> tuple[int, str | None]:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    is_last = world.rank == world.size - 1
    if how == "raise" and is_last:
        raise KeyError(f"rank {world.rank} says no")
    if how == "die" and is_last:
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "leave a communicator open":
        misbehave.left = mpidist.Communicator()
    if how == "hang":
        return (world.recv(source=0) if is_last else 0), None
    if how in ("raise", "die"):
        world.barrier()
    return world.allreduce(world.rank), os.environ.get("PAINT")


def test_results_arrive_by_rank(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMIX_RANK", "5")
    for ranks in (1, 3):
        assert run(misbehave, ranks, "well", env={"PAINT": "red"}) == [(sum(range(ranks)), "red")] * ranks
    with pytest.raises(ValueError, match="lambda"):
        run(lambda: 1, 2)


def test_errors_show_the_rank(run: Run) -> None:
    with pytest.raises(KeyError, match="rank 2 says no") as caught:
        run(misbehave, 3, "raise")
    assert "rank 2 of 3:\nTraceback" in str(caught.value.__cause__)
    assert "ranks without a result, ended with the job: [0, 1]" in str(caught.value.__cause__)
    with pytest.raises(jobs.RankError, match=r"ranks without a result: \[0, 1\]"):
        run(misbehave, 2, "die")


def test_a_hang_is_killed_with_stacks() -> None:
    source = f"import os, time\nprint(os.environ[{jobs.JOB!r}], flush=True)\ntime.sleep(1000)\n"
    with pytest.raises(jobs.MpirunTimeoutError) as caught:
        jobs.run_script(source, 2, timeout=3.0)
    # It is the last name if the tests themselves are a job.
    assert jobs.members(caught.value.stdout.splitlines()[0].rstrip(".").split(".")[-1]) == {}
    # The first call imports this module, which may take a second.
    pool.run(misbehave, 3, "well")
    with pytest.raises(jobs.MpirunTimeoutError) as caught:
        pool.run(misbehave, 3, "hang", timeout=1.0)
    assert "test_a_hang_is_killed_with_stacks (call): rank [2] of 3 did not come back" in caught.value.stderr
    assert "in misbehave" in caught.value.stderr
    assert pool.run(misbehave, 3, "well") == [(3, None)] * 3


def test_leftovers_on_warm_ranks_are_errors() -> None:
    with pytest.raises(jobs.RankError, match=r"rank 1: .*still open; close\(\)"):
        pool.run(misbehave, 2, "leave a communicator open")
    assert pool.run(misbehave, 2, "well") == [(1, None)] * 2


def test_scripts_return_status_and_output() -> None:
    source = "import sys; from mpi4py import MPI\nprint('out', sys.argv[1]); sys.exit(sys.argv[1])"
    done = jobs.run_script(source, 2, "why")
    assert (done.returncode, done.stdout.splitlines()) == (1, ["out why"] * 2)
    assert "why" in done.stderr
