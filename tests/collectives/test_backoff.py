"""Waits and the progress thread back off, so that other processes and threads get the core that they need."""

from __future__ import annotations

import os
import time
from types import SimpleNamespace

import pytest

from mpidist.collectives.channel import progress as progress_module
from mpidist.collectives.channel.progress import Progress
from mpidist.collectives.mpi import waiting

pytestmark = pytest.mark.one_rank


class Clock:
    """A clock that only naps, yields and polls advance, in a process that uses a share of a core."""

    def __init__(self, yields: float = 0.0, share: float = 0.0) -> None:
        self.now, self.yields, self.share, self.naps = 1.0, yields, share, list[float]()

    def read(self) -> float:
        return self.now

    def process_time(self) -> float:
        return self.share * self.now

    def sched_yield(self) -> None:
        self.now += self.yields

    def sleep(self, seconds: float, poll_seconds: float = 1e-4) -> None:
        self.naps.append(seconds)
        self.now += seconds + poll_seconds


@pytest.fixture(params=[1e-6, 1e-3], ids=["free", "wanted"])
def clock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock for waits, on a free core or on a core that another process wants."""
    clock = Clock(request.param)
    monkeypatch.setattr(time, "perf_counter", clock.read)
    monkeypatch.setattr(time, "sleep", lambda seconds: clock.sleep(seconds, 0.0))
    monkeypatch.setattr(os, "sched_yield", clock.sched_yield)
    monkeypatch.setattr(waiting, "_processor", waiting._Processor())
    return clock


def test_naps_grow_faster_on_wanted_cores(clock: Clock) -> None:
    polls = 0
    while sum(clock.naps) < 0.1:
        polls += waiting.looks_at(16)
        waiting.relax(polls, 20)
    pairs = [(nap, sum(clock.naps[:i])) for i, nap in enumerate(clock.naps)]
    assert clock.naps == sorted(clock.naps)
    assert clock.naps[-1] <= 1e-3
    if clock.yields < 1e-4:
        assert all(nap < before / 50 for nap, before in pairs if before > 2e-3)
    else:
        assert len(clock.naps) < 200
        assert max(nap for nap, before in pairs if before < 1e-3) < 4e-4


def test_polls_of_messages_count_on_wanted_cores(clock: Clock) -> None:
    assert waiting.looks_at(16) == 1
    waiting.relax(21, 20)
    assert waiting.looks_at(16) == (1 if clock.yields < 1e-4 else 16)


@pytest.mark.parametrize("is_short", [False, True])
def test_short_cores_are_yielded_at_once(monkeypatch: pytest.MonkeyPatch, is_short: bool) -> None:
    yielded = []
    monkeypatch.setattr(waiting, "cores_are_short", lambda: is_short)
    monkeypatch.setattr(waiting, "looks_before_yield", waiting.looks_before_yield.__wrapped__)  # without its cache
    monkeypatch.setattr(os, "sched_yield", lambda: yielded.append(True))
    is_done = iter([False, False, True])
    assert len(list(waiting.until_done(SimpleNamespace(Test=lambda: next(is_done))))) == 2
    assert len(yielded) == (2 if is_short else 0)


@pytest.mark.parametrize("share", [0.0, 0.9])
def test_the_progress_thread_yields_to_computation(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    clock, progress, work = Clock(share=share), Progress(), object()
    names = SimpleNamespace(
        monotonic=clock.read, process_time=clock.process_time, thread_time=lambda: 0.0, sleep=clock.sleep
    )
    monkeypatch.setattr(progress_module, "time", names)
    # Without a thread it polls on request.
    progress.watched.append(lambda: work)
    for _ in range(2000):
        assert progress.look() == 0.0
    if share:
        assert min(clock.naps) > 0
        assert clock.naps == sorted(clock.naps)
        assert clock.naps[-1] == pytest.approx(5e-4)
    else:
        # A program that waits gets polls without naps, but not for long.
        assert not any(clock.naps[:900])
        assert all(clock.naps[1100:])
