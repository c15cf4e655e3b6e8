"""Timing between nodes: every case as often as promised, checked at the start and at the end."""

from __future__ import annotations

import pytest
from mpi4py import MPI

from benchmarks.cases.between_nodes import LEAST_REPETITIONS, measure_cases
from benchmarks.measuring.session import Session
from benchmarks.measuring.timing import UNKNOWN, Case

pytestmark = pytest.mark.one_rank


def test_cases_in_turn() -> None:
    session = Session(MPI.COMM_SELF, seconds=1e-9, with_gloo=False, progress=False)
    calls: list[str] = []
    cases = [Case("mpidist", name, lambda name=name: calls.append(name), lambda _: 1) for name in "ab"]
    measured = measure_cases(session, None, cases)
    session.close()
    for one in measured:
        assert len(one.times) == LEAST_REPETITIONS
        assert list(one.by_cores()) == [UNKNOWN]
        assert one.wrong == 2
        assert calls.count(one.case.variant) == 1 + LEAST_REPETITIONS
