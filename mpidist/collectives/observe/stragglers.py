"""Stragglers: the ranks that the others wait for, found while the job runs.

Rank 0 asks all ranks for their samples every ten seconds, as in a hang report: through the service threads and the
leaders of nodes, so that no program is interrupted. It warns at most every five minutes.
"""

from __future__ import annotations

import time
from functools import cache

from mpidist.collectives.channel.channel import Channel
from mpidist.collectives.observe.hangs import LONGEST_SECONDS, STRAGGLER, HangObserver, Question, Report
from mpidist.collectives.observe.lateness import Verdict, sampler
from mpidist.collectives.rpc import service
from mpidist.core.concurrency import wait_at_most
from mpidist.core.text import tell_user
from mpidist.topology import import_mpi

_ASK_EVERY_SECONDS = 10
WARN_EVERY_SECONDS = 300.0


class StragglerWatch:
    """The watch of this process, over the first open communicator of all ranks.

    Attributes:
        current: The verdict on rank 0, or None.
        found: The last verdict about each set of late ranks and phase, on rank 0.
    """

    def __init__(self) -> None:
        self.current: Verdict | None = None
        self.found: dict[tuple[tuple[int, ...], str], Verdict] = {}
        self._rank, self._ranks = import_mpi().COMM_WORLD.Get_rank(), import_mpi().COMM_WORLD.Get_size()
        self._observers: list[tuple[Channel, HangObserver]] = []
        self._ticks = 0
        self._warned_at = -WARN_EVERY_SECONDS
        service.ticks.append(self._tick)

    def add(self, channel: Channel, observer: HangObserver) -> None:
        """Use a channel, if all ranks of the job have it."""
        if channel.size == self._ranks:
            self._observers.append((channel, observer))

    def _observer(self) -> HangObserver | None:
        self._observers = [each for each in self._observers if each[0].is_usable]
        return self._observers[0][1] if self._observers else None

    def _tick(self) -> None:
        if sampler().sample():
            self._ticks += 1
            observer = self._observer() if self._rank == 0 and self._ticks % _ASK_EVERY_SECONDS == 0 else None
            if observer is not None:
                observer.inquire(Question(STRAGGLER), self._hear)

    def _hear(self, report: Report) -> None:
        before, verdict = self.current, report.verdict
        self.current = verdict
        if verdict is None:
            return
        self.found[verdict.ranks, verdict.phase] = verdict
        # The same ranks twice, because a pause of some seconds is no straggler.
        is_lasting = before is not None and before.ranks == verdict.ranks
        if is_lasting and time.monotonic() - self._warned_at >= WARN_EVERY_SECONDS:
            self._warned_at = time.monotonic()
            tell_user(str(verdict))

    def ask(self) -> Verdict | None:
        """Return the verdict of now, from any rank. Waits for some seconds at most, and interrupts no rank."""
        observer, reports = self._observer(), list[Report]()
        if observer is None:
            return None
        observer.inquire(Question(STRAGGLER), reports.append)
        wait_at_most(LONGEST_SECONDS, lambda: bool(reports), 0.01)
        return reports[0].verdict if reports else None


@cache
def straggler_watch() -> StragglerWatch:
    """Return the watch of this process."""
    return StragglerWatch()
