"""How a wait for a request of MPI treats others that need the core."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from itertools import count

import pytest

from mpidist.collectives.mpi import waiting

pytestmark = pytest.mark.one_rank


class _Request:
    """Is complete at the third look."""

    def __init__(self) -> None:
        self.looks = 0

    def Test(self) -> bool:  # noqa: N802 - the name of mpi4py
        self.looks += 1
        return self.looks == 3


@pytest.fixture
def fresh() -> Iterator[None]:
    """Forget what this process knows of its cores, before and after."""
    waiting.looks_before_yield.cache_clear()
    yield
    waiting.looks_before_yield.cache_clear()


@pytest.mark.parametrize("is_short", [False, True])
def test_the_core_is_given_away_at_once_where_cores_are_short(fresh, monkeypatch, is_short: bool) -> None:
    given_away = []
    monkeypatch.setattr(waiting, "cores_are_short", lambda: is_short)
    monkeypatch.setattr(os, "sched_yield", lambda: given_away.append(True))
    assert len(list(waiting.until_done(_Request()))) == 2
    assert len(given_away) == (2 if is_short else 0)


def test_a_wait_of_a_second_takes_few_looks_and_one_of_a_millisecond_ends_soon(monkeypatch) -> None:
    naps: list[float] = []
    monkeypatch.setattr(time, "sleep", naps.append)
    looks = 0
    while sum(naps) < 1:
        looks += 1
        waiting.relax(looks, 0)
    assert looks < 2500
    assert naps == sorted(naps)
    waited = [sum(naps[:i]) for i in range(len(naps))]
    assert max(nap for nap, before in zip(naps, waited, strict=True) if before < 1e-3) < 1e-4
    assert naps[-1] <= 1e-3


def test_who_looks_at_many_messages_naps_sooner(monkeypatch) -> None:
    naps: list[float] = []
    monkeypatch.setattr(time, "sleep", naps.append)

    def rounds(each: int) -> int:
        naps.clear()
        return next(n for n in count(1) if waiting.relax(n * each, 20) or naps)

    assert rounds(16) < rounds(1) / 10
