"""Timing: as many repetitions as promised, the slowest rank counts, wrong elements of all ranks are summed."""

from __future__ import annotations

import pytest
from mpi4py import MPI

from benchmarks.measuring.timing import CALLS_IN_GROUP, LEAST_REPETITIONS, Case, measure

pytestmark = pytest.mark.one_rank


def test_calls_in_turn_and_their_checks() -> None:
    comm = MPI.COMM_WORLD
    calls: list[str] = []

    def case(name: str, wrong: int) -> Case:
        return Case(
            "mpidist",
            name,
            lambda: calls.append(name),
            lambda _: wrong,
            lambda: f"algorithm of {name}",
            lambda: calls.append(f"prepare {name}"),
        )

    first, second = measure(comm, [case("a", 0), case("b", comm.rank)], seconds=1e-9)
    assert calls[:4] == ["prepare a", "a", "prepare b", "b"]
    assert calls[-4:] == ["prepare a", "a", "prepare b", "b"]
    # A check before and after, two calls for the first estimate, and the timed ones.
    assert calls.count("a") == calls.count("b") == 4 + LEAST_REPETITIONS * first.calls
    assert first.calls in (1, CALLS_IN_GROUP)
    assert len(first.times) == len(second.times) == LEAST_REPETITIONS
    assert (first.wrong, first.algorithm) == (0, "algorithm of a")
    assert second.wrong == 2 * sum(range(comm.size))


def test_the_times_are_the_same_on_all_ranks() -> None:
    comm = MPI.COMM_WORLD
    (measured,) = measure(comm, [Case("mpi", "barrier", comm.Barrier)], seconds=0.001)
    assert measured.wrong is None
    assert comm.allgather(measured.times) == [measured.times] * comm.size


def test_nothing_to_time() -> None:
    assert measure(MPI.COMM_WORLD, [], seconds=1.0) == []
