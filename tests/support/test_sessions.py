"""What tests/conftest.py promises: one outcome on all ranks, and no hang without stacks."""

from __future__ import annotations

import subprocess
import textwrap
from pathlib import Path

import pytest

from tests.support.ranks import jobs

pytestmark = [pytest.mark.jobs, pytest.mark.one_rank]

PYTEST = """
import sys, pytest
sys.exit(pytest.main(sys.argv[1:]))
"""
HEAD = """
import threading, time
import pytest
from mpi4py import MPI
world = MPI.COMM_WORLD
"""


def session(
    folder: Path, tests: str, ranks: int = 2, *options: str, timeout: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """Run ``tests`` as a session of its own, with the conftest and the settings of this one."""
    path = folder / "test_toy.py"
    path.write_text(HEAD + textwrap.dedent(tests))
    arguments = ["-p", "tests.conftest", "-c", str(jobs.ROOT / "pyproject.toml"), "-p", "no:cacheprovider"]
    under_mpi = ["--with-mpi"] if ranks > 1 else []
    arguments += [*under_mpi, "--color=no", "--ranks", str(ranks), *options, str(path)]
    return jobs.run_script(PYTEST, ranks, *arguments, timeout=timeout)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_a_session_that_passes(tmp_path: Path, ranks: int) -> None:
    done = session(
        tmp_path,
        """
        def test_world():
            assert world.allreduce(1) == world.size
        @pytest.mark.min_ranks(3)
        def test_three():
            assert world.size >= 3
        @pytest.mark.one_rank
        def test_alone():
            assert world.size == 1
        """,
        ranks,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    expected = {
        1: "2 passed, 1 skipped in",
        2: "1 passed, 1 skipped, 1 deselected in",
        3: "2 passed, 1 deselected in",
    }
    # Once: the other ranks are quiet.
    assert done.stdout.count(expected[ranks]) == 1, done.stdout
    if ranks < 3:
        assert f"needs 3 ranks, this session has {ranks}" in done.stdout


def test_one_failing_rank_fails_the_test_on_all(tmp_path: Path) -> None:
    done = session(
        tmp_path,
        """
        def test_fails_on_1():
            print("seen on", world.rank)
            assert world.rank != 1, "reason of rank 1"
        @pytest.fixture
        def broken():
            if world.rank == 2:
                raise OSError("setup of rank 2")
        def test_setup(broken):
            pass
        @pytest.mark.xfail(reason="known on rank 0", strict=True)
        def test_expected_failure():
            assert world.rank != 0, "expected"
        @pytest.fixture
        def untidy():
            yield
            assert world.rank != 1, "teardown of rank 1"
        def test_teardown(untidy):
            pass
        def test_goes_on():
            assert world.allreduce(1) == world.size
        """,
        3,
    )
    assert done.returncode == 1
    assert "4 failed, 1 passed in" in done.stdout
    for told in (
        "test_fails_on_1 - passed on rank 0, failed on rank [1] of 3",
        "seen on 1",
        "reason of rank 1",
        "OSError: setup of rank 2",
        "the same test on rank 2",
        "XPASS(strict)",
        "teardown: ",
    ):
        assert told in done.stdout


def test_stopping_at_the_first_failure_stops_all(tmp_path: Path) -> None:
    done = session(
        tmp_path,
        """
        def test_a():
            assert world.rank == 0
        def test_b():
            world.barrier()
        """,
        2,
        "-x",
    )
    assert done.returncode == 1
    assert "1 failed in" in done.stdout


def test_a_rank_that_runs_out_of_time_fails_the_test_on_all(tmp_path: Path) -> None:
    done = session(
        tmp_path,
        """
        def test_slow():
            while world.rank == 1:
                time.sleep(0.01)
        def test_goes_on():
            assert world.allreduce(1) == world.size
        """,
        2,
        "--timeout=1",
    )
    assert done.returncode == 1
    assert "Failed: Timeout (>1.0s) from pytest-timeout" in done.stdout
    assert "1 failed, 1 passed in" in done.stdout


def test_a_rank_blocked_inside_mpi_is_named_and_ends_the_job(tmp_path: Path) -> None:
    done = session(
        tmp_path,
        """
        def test_blocked():
            if world.rank == 1:
                world.recv(source=0)
        """,
        2,
        "--timeout=1",
    )
    assert done.returncode != 0
    assert "rank 0 of 2 waits: rank [1] has not finished" in done.stderr
    assert "::test_blocked" in done.stderr
    assert "in test_blocked" in done.stderr


@pytest.mark.parametrize("ranks", [1, 2])
def test_all_ranks_blocked_inside_mpi(tmp_path: Path, ranks: int) -> None:
    done = session(
        tmp_path,
        """
        def test_deadlock():
            world.recv(source=(world.rank + 1) % world.size)
        """,
        ranks,
        "--timeout=1",
    )
    assert done.returncode != 0
    assert "in test_deadlock" in done.stderr


def test_a_rank_that_dies_ends_the_job(tmp_path: Path) -> None:
    done = session(
        tmp_path,
        """
        import os
        def test_dies():
            if world.rank == 1:
                os._exit(7)
        """,
    )
    assert done.returncode != 0


def test_ranks_that_collect_different_tests_are_stopped(tmp_path: Path) -> None:
    done = session(
        tmp_path,
        """
        @pytest.mark.parametrize("x", [world.rank])
        def test_other_names(x):
            pass
        """,
    )
    assert done.returncode == 2
    assert "the ranks collected different tests" in done.stdout
    for rank in (0, 1):
        assert f"rank {rank}: ::test_other_names[{rank}]" in done.stdout


@pytest.mark.parametrize("bad", [[1], [0, 1]])
def test_a_collection_error_stops_all(tmp_path: Path, bad: list[int]) -> None:
    done = session(tmp_path, f"assert world.rank not in {bad}, 'import fails'\ndef test_ok(): pass\n")
    assert done.returncode == 2
    assert "import fails" in done.stdout


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_thread_left_behind_fails_the_test(tmp_path: Path, ranks: int) -> None:
    done = session(
        tmp_path,
        """
        def test_leaks():
            if world.rank == world.size - 1:
                threading.Thread(target=time.sleep, args=(5,), name="forgotten", daemon=True).start()
        """,
        ranks,
    )
    assert done.returncode == 1
    assert "thread 'forgotten' is still alive" in done.stdout


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_open_communicator_fails_the_test(tmp_path: Path, ranks: int) -> None:
    done = session(
        tmp_path,
        """
        from mpidist.collectives import Communicator
        def test_leaks():
            test_leaks.communicator = Communicator()
        def test_closes():
            Communicator().close()
        """,
        ranks,
    )
    assert done.returncode == 1
    assert "is still open; close() the strategy or communicator" in done.stdout
    assert "test_closes" not in done.stdout.partition("short test summary")[2]


def test_a_session_of_other_size_is_refused(tmp_path: Path) -> None:
    done = session(tmp_path, "def test_ok(): pass\n", 2, "--ranks", "3")
    assert done.returncode != 0
    assert "--ranks 3 was given and MPI.COMM_WORLD has 2" in done.stdout + done.stderr


def test_hypothesis_draws_alike_on_all_ranks(tmp_path: Path) -> None:
    done = session(
        tmp_path,
        """
        from hypothesis import given, strategies as st
        @given(st.lists(st.floats(allow_nan=False)), st.integers())
        def test_draw(values, number):
            assert len({repr(drawn) for drawn in world.allgather((values, number))}) == 1
        """,
        3,
    )
    assert done.returncode == 0, done.stdout


SHARING = """
seen = []
which = pytest.mark.parametrize("strategy", layouts("multi_worker-1local"), indirect=True)
"""


def test_tests_share_strategies_until_one_fails_or_breaks_its_own(tmp_path: Path) -> None:
    done = session(
        tmp_path,
        "from tests.support.ranks.layouts import layouts\n"
        + SHARING
        + textwrap.dedent(
            """
            @which
            def test_first(strategy):
                seen.append(strategy)
            @which
            def test_same(strategy):
                assert strategy is seen[-1]
            @which
            @pytest.mark.own_strategy
            def test_closes_its_own(strategy):
                assert strategy is not seen[-1]
                strategy.close()
            @which
            def test_same_still(strategy):
                assert strategy is seen[-1]
                assert world.rank == 0, "fails on rank 1 alone"
            @which
            def test_another_after_a_failure(strategy):
                assert strategy is not seen[-1]
                seen.append(strategy)
                strategy.close()
            @which
            def test_another_after_one_that_was_closed(strategy):
                assert strategy is not seen[-1]
                assert strategy.reduce("SUM", 1, axis=None) == world.size
            """
        ),
    )
    assert "1 failed, 5 passed, 1 error in" in done.stdout, done.stdout
    assert "multi_worker-1local, which others share, unusable; mark it own_strategy" in done.stdout
    assert "fails on rank 1 alone" in done.stdout


def test_layouts_of_one_process_stay_out_of_sessions_of_several_ranks(tmp_path: Path) -> None:
    done = session(tmp_path, "def test_any(strategy): pass\n")
    # multi_worker and central_node, with one and with two replicas on each rank.
    assert "4 passed, 9 deselected in" in done.stdout, done.stdout


def test_long_tests_run_where_they_are_asked_for(tmp_path: Path) -> None:
    tests = "@pytest.mark.long\ndef test_soak(): pass\ndef test_short(): pass\n"
    assert "1 passed, 1 deselected in" in session(tmp_path, tests, 1).stdout
    assert "2 passed in" in session(tmp_path, tests, 1, "--long").stdout
