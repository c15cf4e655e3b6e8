"""Stragglers: the ranks that the others wait for, found while the job runs.

Rank 0 asks all ranks for their samples every ten seconds, as in a hang report: through the service threads and the
leaders of nodes, so that no program is interrupted. It warns at most every five minutes. In larger jobs, in which the
connections for questions are not open, it asks only when the program does.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

from mpidist.collectives.channel.channel import Channel
from mpidist.collectives.channel.connections import MOST_CONNECTED_RANKS
from mpidist.collectives.observe.hangs import LONGEST_SECONDS, STRAGGLER, HangObserver, Question, Report
from mpidist.collectives.observe.lateness import MUCH_MOVING, LateRanks, Verdict, sampler, slow_link
from mpidist.collectives.rpc import service
from mpidist.core.concurrency import wait_at_most
from mpidist.core.text import tell_user
from mpidist.topology import import_mpi

_ASK_EVERY_SECONDS = 10
WARN_EVERY_SECONDS = 300.0
Hear = Callable[[Verdict | None], object]


class StragglerWatch:
    """The watch of this process, over the newest open communicator of all ranks.

    Attributes:
        current: The verdict on rank 0, or None.
        found: The last verdict about each set of late ranks or link, on rank 0.
    """

    def __init__(self) -> None:
        self.current: Verdict | None = None
        self._last: Verdict | None = None
        self.found: dict[object, Verdict] = {}
        self._rank, self._ranks = import_mpi().COMM_WORLD.Get_rank(), import_mpi().COMM_WORLD.Get_size()
        self._observers: list[tuple[Channel, HangObserver]] = []
        self._ticks = 0
        self._warned_at = -WARN_EVERY_SECONDS
        service.ticks.append(self._tick)

    def add(self, channel: Channel, observer: HangObserver) -> None:
        """Use a channel, if all ranks of the job have it."""
        if channel.size == self._ranks:
            self._forget_closed()
            self._observers.append((channel, observer))

    def _forget_closed(self) -> None:
        self._observers = [each for each in self._observers if each[0].is_usable]

    def _observer(self) -> HangObserver | None:
        self._forget_closed()
        # The newest, because another rank may have closed or lost an older one.
        return self._observers[-1][1] if self._observers else None

    def _tick(self) -> None:
        if sampler().sample():
            self._ticks += 1
            is_time = self._ticks % _ASK_EVERY_SECONDS == 0 and self._ranks <= MOST_CONNECTED_RANKS
            observer = self._observer() if self._rank == 0 and is_time else None
            if observer is not None:
                observer.inquire(Question(STRAGGLER), lambda report: self._look_into(observer, report, self._keep))

    def _look_into(self, observer: HangObserver, report: Report, hear: Hear) -> None:
        """Pass the verdict about late ranks to ``hear``, or else about links.

        Links are compared if nobody is late and data move for long.
        """
        if report.straggler is not None or report.moving < MUCH_MOVING or self._rank != 0:
            hear(report.straggler)
        elif not observer.probe_links(lambda times: hear(slow_link(times, observer.hosts, report.moving))):
            hear(None)

    def _keep(self, verdict: Verdict | None) -> None:
        before, self._last = self._last, verdict
        # Twice, because a pause of some seconds is no straggler.
        is_lasting = before is not None and verdict is not None and _subject(before) == _subject(verdict)
        self.current = verdict if is_lasting else None
        if self.current is None:
            return
        self.found[_subject(self.current)] = self.current
        if time.monotonic() - self._warned_at >= WARN_EVERY_SECONDS:
            self._warned_at = time.monotonic()
            tell_user(str(self.current))

    def ask(self) -> Verdict | None:
        """Return the verdict of now, from any rank. Waits for some seconds at most, and interrupts no rank.

        Only rank 0 compares links.
        """
        observer, verdicts = self._observer(), list[Verdict | None]()
        if observer is None:
            return None
        observer.inquire(Question(STRAGGLER), lambda report: self._look_into(observer, report, verdicts.append))
        wait_at_most(LONGEST_SECONDS, lambda: bool(verdicts), 0.01)
        return verdicts[0] if verdicts else None


def _subject(verdict: Verdict) -> object:
    """Return what a verdict is about, without figures."""
    if isinstance(verdict, LateRanks):
        return verdict.ranks, verdict.phase
    return verdict.source, verdict.target


@cache
def straggler_watch() -> StragglerWatch:
    """Return the watch of this process."""
    return StragglerWatch()
