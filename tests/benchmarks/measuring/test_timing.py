"""Timing: as many repetitions as promised, the slowest rank counts, wrong elements of all ranks are summed."""

from __future__ import annotations

import itertools

import pytest
from mpi4py import MPI

from benchmarks.measuring.timing import (
    CALLS_IN_GROUP,
    FAR,
    LEAST_REPETITIONS,
    MIXED,
    NEAR,
    UNKNOWN,
    Case,
    Measured,
    Sample,
    measure,
)

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
            lambda: calls.append(f"rewrite {name}"),
        )

    first, second = measure(comm, [case("a", 0), case("b", comm.rank)], seconds=1e-9)
    assert calls[:4] == ["prepare a", "a", "prepare b", "b"]
    assert calls[-4:] == ["prepare a", "a", "prepare b", "b"]
    # A check before and after, two calls for the first estimate, and the timed ones.
    assert calls.count("a") == calls.count("b") == 4 + LEAST_REPETITIONS * first.calls
    # The inputs are written before each repetition, and those of nobody else in between.
    assert calls.count("rewrite a") == LEAST_REPETITIONS
    assert all(calls[i + 1] == "a" for i, call in enumerate(calls) if call == "rewrite a")
    assert first.calls in (1, CALLS_IN_GROUP)
    assert len(first.times) == len(second.times) == LEAST_REPETITIONS
    assert (first.wrong, first.algorithm) == (0, "algorithm of a")
    assert second.wrong == 2 * sum(range(comm.size))


def test_calls_of_a_group_are_made_once_each() -> None:
    calls: list[int] = []
    group = [lambda number=number: calls.append(number) for number in range(3)]
    (measured,) = measure(MPI.COMM_WORLD, [Case("mpidist", "new", group[0], group=group)], seconds=1e-9)
    assert measured.calls == 3
    assert calls[3:-1] == [0, 1, 2] * LEAST_REPETITIONS


def test_samples_have_the_state_of_the_cores() -> None:
    latencies = itertools.cycle([40, 50, 200, 190, 40, 200])
    case = Case("mpi", "barrier", MPI.COMM_WORLD.Barrier)
    (measured,) = measure(MPI.COMM_WORLD, [case], 1e-9, least=6, latency=lambda: next(latencies))
    assert [sample.cores for sample in measured.samples] == [NEAR, FAR, MIXED] * 2


def test_states_that_occur_often_enough_are_reported_apart() -> None:
    def measured(**counts: int) -> Measured:
        samples = [Sample(1.0, state) for state, count in counts.items() for _ in range(count)]
        return Measured(Case("mpi", "barrier", print), samples)

    found = measured(near=9, far=7, mixed=3).by_cores()
    assert {state: len(times) for state, times in found.items()} == {NEAR: 9, FAR: 7}
    assert list(measured(near=9, far=4).by_cores()) == [NEAR]
    assert {state: len(times) for state, times in measured(near=4, far=4).by_cores().items()} == {MIXED: 8}
    assert list(measured(**{UNKNOWN: 9}).by_cores()) == [UNKNOWN]
