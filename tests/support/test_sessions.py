"""Sessions of several ranks have one outcome per test on all ranks, and no hang without stacks (tests/conftest.py)."""

from __future__ import annotations

import json
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
from hypothesis import given, strategies as st
from mpi4py import MPI
from mpidist.collectives import Communicator
from tests.support.ranks.layouts import layouts
world = MPI.COMM_WORLD
"""


def session(folder: Path, tests: str, ranks: int, *options: str) -> subprocess.CompletedProcess[str]:
    """Run ``tests`` as a session of its own, with the conftest and the settings of this one."""
    path = folder / "test_toy.py"
    path.write_text(HEAD + textwrap.dedent(tests))
    arguments = ["-p", "tests.conftest", "-c", str(jobs.ROOT / "pyproject.toml"), "-p", "no:cacheprovider"]
    under_mpi = ["--with-mpi"] if ranks > 1 else []
    arguments += [*under_mpi, "--color=no", "--ranks", str(ranks), *options, str(path)]
    return jobs.run_script(PYTEST, ranks, *arguments, timeout=60.0)


MANY = """
@pytest.mark.min_ranks(3)
def test_three():
    assert world.size >= 3
@pytest.mark.one_rank
def test_alone():
    assert world.size == 1
@pytest.mark.long
def test_long():
    pass
@given(st.lists(st.floats(allow_nan=False)), st.integers())
def test_drawn(values, number):
    assert len({repr(drawn) for drawn in world.allgather((values, number))}) == 1
def test_fails_on_1():
    print("seen on", world.rank)
    assert world.rank != 1, "reason of rank 1"
@pytest.fixture
def untidy():
    if world.rank == 2:
        raise OSError("setup of rank 2")
    yield
def test_setup(untidy):
    pass
@pytest.mark.xfail(reason="known on rank 0", strict=True)
def test_expected_failure():
    assert world.rank != 0, "expected"
def test_a_thread_is_left():
    if world.rank == world.size - 1:
        threading.Thread(target=time.sleep, args=(5,), name="forgotten", daemon=True).start()
def test_a_communicator_is_left():
    test_a_communicator_is_left.it = Communicator()
@pytest.mark.timeout(2)
def test_slow():
    while world.rank == 1:
        time.sleep(0.01)
def test_continues():
    assert world.allreduce(1) == world.size
"""
OUTCOMES = {
    "test_three": ("skipped", "passed"),
    "test_alone": ("passed", None),
    "test_long": (None, "passed"),
    "test_drawn": ("passed", "passed"),
    "test_fails_on_1": ("passed", "failed"),
    "test_setup": ("passed", "failed"),
    "test_expected_failure": ("skipped", "failed"),
    "test_a_thread_is_left": ("failed", "failed"),
    "test_a_communicator_is_left": ("failed", "failed"),
    "test_slow": ("passed", "failed"),
    "test_continues": ("passed", "passed"),
}


@pytest.mark.parametrize("ranks", [1, 3])
def test_one_outcome_on_all_ranks(ranks: int, tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    options = ["--long"] if ranks > 1 else []
    done = session(tmp_path, MANY, ranks, "--results", str(results), *options)
    assert done.returncode == 1, done.stdout + done.stderr
    found = {name.split("::")[-1]: each["outcome"] for name, each in json.loads(results.read_text())["tests"].items()}
    assert found == {name: of[ranks > 1] for name, of in OUTCOMES.items() if of[ranks > 1] is not None}
    told = (
        "test_fails_on_1 - passed on rank 0, failed on rank [1] of 3",
        "seen on 1",
        "reason of rank 1",
        "OSError: setup of rank 2",
        "thread 'forgotten' is still alive",
        "is still open; close() the strategy or communicator",
        "from pytest-timeout",
    )
    assert [text for text in told if text not in done.stdout] == [] or ranks == 1


def test_a_rank_blocked_in_mpi_is_named(tmp_path: Path) -> None:
    tests = """
        def test_blocked():
            if world.rank == 1:
                world.recv(source=0)
        """
    done = session(tmp_path, tests, 2, "--timeout=1")
    assert done.returncode != 0
    assert "rank 0 of 2 waits: rank [1] has not finished" in done.stderr
    assert "in test_blocked" in done.stderr


def test_ranks_that_collect_different_tests_stop(tmp_path: Path) -> None:
    tests = """
        @pytest.mark.parametrize("x", [world.rank])
        def test_other_names(x):
            pass
        """
    done = session(tmp_path, tests, 2)
    assert done.returncode == 2
    assert "the ranks collected different tests" in done.stdout
    assert "rank 1: ::test_other_names[1]" in done.stdout


def test_tests_share_strategies_until_one_breaks_it(tmp_path: Path) -> None:
    tests = """
        seen = []
        which = pytest.mark.parametrize("strategy", layouts("multi_worker-1local"), indirect=True)
        @which
        def test_first(strategy):
            seen.append(strategy)
        @which
        @pytest.mark.own_strategy
        def test_closes_its_own(strategy):
            strategy.close()
        @which
        def test_same(strategy):
            assert strategy is seen[-1]
            assert world.rank == 0, "fails on rank 1 alone"
        @which
        def test_another_after_a_failure(strategy):
            assert strategy is not seen[-1]
            strategy.close()
        @which
        def test_another_after_a_close(strategy):
            assert strategy.reduce("SUM", 1, axis=None) == world.size
        """
    done = session(tmp_path, tests, 2)
    assert "1 failed, 4 passed, 1 error in" in done.stdout, done.stdout
    assert "multi_worker-1local, which others share, unusable; mark it own_strategy" in done.stdout
