"""What tests/conftest.py promises: one outcome on all ranks, and no hang without stacks."""

from __future__ import annotations

import json
import re
import subprocess
import textwrap
from collections.abc import Callable
from functools import cache
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

# Of a number of ranks: outcomes by test, and what was printed.
Seen = Callable[[int], tuple[dict[str, list[str]], str]]


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


MANY = """
from hypothesis import given, strategies as st
from mpidist.collectives import Communicator

def test_world():
    assert world.allreduce(1) == world.size
@pytest.mark.min_ranks(3)
def test_three():
    assert world.size >= 3
@pytest.mark.one_rank
def test_alone():
    assert world.size == 1
@pytest.mark.long
def test_long():
    pass
def test_layouts(strategy):
    pass
@given(st.lists(st.floats(allow_nan=False)), st.integers())
def test_drawn(values, number):
    assert len({repr(drawn) for drawn in world.allgather((values, number))}) == 1
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
def test_a_thread_is_left():
    if world.rank == world.size - 1:
        threading.Thread(target=time.sleep, args=(5,), name="forgotten", daemon=True).start()
def test_a_communicator_is_left():
    test_a_communicator_is_left.it = Communicator()
def test_goes_on():
    Communicator().close()
"""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """What became of the tests of ``MANY`` by name, each in all its variants, and what a session of it printed."""

    @cache
    def run(ranks: int) -> tuple[dict[str, list[str]], str]:
        folder = tmp_path_factory.mktemp("many")
        done = session(
            folder, MANY, ranks, "--results", str(folder / "results.json"), *(["--long"] if ranks > 1 else [])
        )
        assert done.returncode == 1, done.stdout + done.stderr
        outcomes: dict[str, list[str]] = {}
        for name, found in json.loads((folder / "results.json").read_text())["tests"].items():
            outcomes.setdefault(name.split("::")[-1].split("[")[0], []).append(found["outcome"])
        return outcomes, done.stdout

    return run


@pytest.mark.parametrize(
    ("test", "on_one", "on_three"),
    [
        ("test_world", "passed", "passed"),
        ("test_three", "skipped", "passed"),
        ("test_alone", "passed", None),
        # --long is given to the session of three.
        ("test_long", None, "passed"),
        # All ranks draw the same.
        ("test_drawn", "passed", "passed"),
        ("test_fails_on_1", "passed", "failed"),
        ("test_setup", "passed", "failed"),
        ("test_expected_failure", "skipped", "failed"),
        ("test_teardown", "passed", "failed"),
        ("test_a_thread_is_left", "failed", "failed"),
        ("test_a_communicator_is_left", "failed", "failed"),
        ("test_goes_on", "passed", "passed"),
    ],
)
def test_one_outcome(test: str, on_one: str | None, on_three: str | None, seen: Seen) -> None:
    for ranks, expected in ((1, on_one), (3, on_three)):
        assert seen(ranks)[0].get(test) == (None if expected is None else [expected]), ranks


def test_layouts_of_one_process_stay_out_of_sessions_of_several_ranks(
    seen: Seen,
) -> None:
    # multi_worker and central_node, with one and with two replicas on each rank.
    assert seen(3)[0]["test_layouts"] == ["passed"] * 4
    assert len(seen(1)[0]["test_layouts"]) > 4


def test_what_rank_0_tells_of_the_others(seen: Seen) -> None:
    printed = seen(3)[1]
    for told in (
        "test_fails_on_1 - passed on rank 0, failed on rank [1] of 3",
        "seen on 1",
        "reason of rank 1",
        "OSError: setup of rank 2",
        "the same test on rank 2",
        "XPASS(strict)",
        "teardown: ",
        "thread 'forgotten' is still alive",
        "is still open; close() the strategy or communicator",
    ):
        assert told in printed
    # Once: the other ranks are quiet.
    assert printed.count("5 failed, 10 passed, ") == 1
    assert "needs 3 ranks, this session has 1" in seen(1)[1]


@pytest.mark.long
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
    assert re.search(r"Failed: Timeout \(>[\d.]+s\) from pytest-timeout", done.stdout)
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


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.long), 2])
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


@pytest.mark.parametrize("bad", [[1], pytest.param([0, 1], marks=pytest.mark.long)])
def test_a_collection_error_stops_all(tmp_path: Path, bad: list[int]) -> None:
    done = session(tmp_path, f"assert world.rank not in {bad}, 'import fails'\ndef test_ok(): pass\n")
    assert done.returncode == 2
    assert "import fails" in done.stdout


@pytest.mark.long
def test_a_session_of_other_size_is_refused(tmp_path: Path) -> None:
    done = session(tmp_path, "def test_ok(): pass\n", 2, "--ranks", "3")
    assert done.returncode != 0
    assert "--ranks 3 was given and MPI.COMM_WORLD has 2" in done.stdout + done.stderr


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
