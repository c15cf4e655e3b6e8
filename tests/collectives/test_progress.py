"""The progress thread naps between its looks, but not while the program waits."""

from __future__ import annotations

import pytest

from mpidist.collectives.channel import progress as module
from mpidist.collectives.channel.progress import Progress

pytestmark = pytest.mark.one_rank
# Of a look itself.
LOOK_SECONDS = 1e-4


class Clock:
    """A clock that goes on in naps and looks alone, while the program uses a share of a core."""

    def __init__(self, share: float) -> None:
        self.share, self.now, self.naps = share, 0.0, list[float]()

    def monotonic(self) -> float:
        return self.now

    def process_time(self) -> float:
        return self.share * self.now

    def thread_time(self) -> float:
        return 0.0

    def sleep(self, seconds: float) -> None:
        self.naps.append(seconds)
        self.now += seconds + LOOK_SECONDS


def naps_of(monkeypatch: pytest.MonkeyPatch, share: float, looks: int) -> list[float]:
    """Return the naps between looks at one work, whose program uses a share of a core."""
    clock, progress, work = Clock(share), Progress(), object()
    monkeypatch.setattr(module, "time", clock)
    # No thread: it looks when it is told to.
    progress.watched.append(lambda: work)
    clock.now = 1.0
    for _ in range(looks):
        assert progress.look() == 0.0
    return clock.naps


def test_a_program_that_computes_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    naps = naps_of(monkeypatch, 0.9, 30)
    assert min(naps) > 0
    assert naps == sorted(naps)
    assert naps[-1] == pytest.approx(5e-4)


def test_polls_follow_at_once_while_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    naps = naps_of(monkeypatch, 0.0, 5000)
    assert not any(naps[:900])
    # A rank that waits for long does not use a core up.
    assert all(naps[1100:])
