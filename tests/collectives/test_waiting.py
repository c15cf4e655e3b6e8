"""How a wait for a request of MPI treats others that need the core."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

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
def test_short_cores_are_yielded_at_once(fresh, monkeypatch, is_short: bool) -> None:
    given_away = []
    monkeypatch.setattr(waiting, "cores_are_short", lambda: is_short)
    monkeypatch.setattr(os, "sched_yield", lambda: given_away.append(True))
    assert len(list(waiting.until_done(_Request()))) == 2
    assert len(given_away) == (2 if is_short else 0)


class _Clock:
    """Of a core of which each yield takes some seconds; naps pass at once."""

    def __init__(self, yields: float) -> None:
        self.now, self.yields, self.naps = 0.0, yields, list[float]()

    def perf_counter(self) -> float:
        return self.now

    def sched_yield(self) -> None:
        self.now += self.yields

    def sleep(self, seconds: float) -> None:
        self.naps.append(seconds)
        self.now += seconds


@pytest.fixture(params=[1e-6, 1e-3], ids=["free", "wanted"])
def clock(request, monkeypatch) -> _Clock:
    clock = _Clock(request.param)
    for name in ("perf_counter", "sleep"):
        monkeypatch.setattr(time, name, getattr(clock, name))
    monkeypatch.setattr(os, "sched_yield", clock.sched_yield)
    monkeypatch.setattr(waiting, "_processor", waiting._Processor())
    return clock


def test_naps_grow_faster_on_wanted_cores(clock: _Clock) -> None:
    looks, is_free = 0, clock.yields < 1e-4
    while sum(clock.naps) < 0.1:
        looks += waiting.looks_at(16)
        waiting.relax(looks, 20)
    waited = [sum(clock.naps[:i]) for i in range(len(clock.naps))]
    pairs = list(zip(clock.naps, waited, strict=True))
    assert clock.naps == sorted(clock.naps)
    assert clock.naps[-1] <= 1e-3
    if is_free:
        assert all(nap < before / 50 for nap, before in pairs if before > 2e-3)
    else:
        assert len(clock.naps) < 200
        assert max(nap for nap, before in pairs if before < 1e-3) < 4e-4


def test_polls_of_messages_count_on_wanted_cores(clock: _Clock) -> None:
    assert waiting.looks_at(16) == 1
    waiting.relax(21, 20)
    assert waiting.looks_at(16) == (1 if clock.yields < 1e-4 else 16)
