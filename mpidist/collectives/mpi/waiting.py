"""Polling: collectives are generators that yield while they wait, and never block in MPI.

Between polls, mpidist checks deadlines, reports long waits and advances other works.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator
from functools import cache
from typing import TYPE_CHECKING, TypeVar

from mpidist.core.concurrency import Deadline
from mpidist.topology import cores_are_short

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpidist.arrays.streams import Event

    Comm = MPI.Intracomm
else:
    # For annotations, because functions import MPI when they need it.
    Comm = object

T = TypeVar("T")
Steps = Generator[None, None, T]

_POLLS_BETWEEN_CHECKS, _SECONDS_BETWEEN_CHECKS = 256, 0.02
_POLLS_BETWEEN_CLOCK_READS = 256
# Failed polls before sched_yield. After ten times as many, ranks sleep, because sched_yield may not run every waiting
# thread, and latency no longer matters in a wait that long.
LOOKS_BEFORE_YIELD = 500
# Between nodes an early yield costs little, and the network stack or other ranks may need the core.
LOOKS_BEFORE_YIELD_ON_WIRE = 20
_POLLS_BETWEEN_MPI = 16
# The back-off grows with the wait, up to a hundredth of it. A long wait must not occupy a core.
_NAP_SECONDS, _LONGEST_NAP_SECONDS, _POLLS_TO_GROW = 2e-5, 1e-3, 500
# If one of the last yields took this long, the core is oversubscribed, maybe by the rank that this one waits for. Then
# each sleep is longer than the last by a constant, so the back-off grows with the square root of the wait.
_LONG_YIELD_SECONDS, _LAST_YIELDS, _GROWTH_SECONDS = 5e-5, 1000, 2e-6
# A server uses the longest back-off after this time without a request. It delays the next one by half of that, on
# average.
_IDLE_SECONDS = 0.5


class _Processor:
    """Back-off on the core of this process."""

    def __init__(self) -> None:
        self._short_yields = _LAST_YIELDS

    @property
    def is_wanted(self) -> bool:
        """Whether the core seems oversubscribed."""
        return self._short_yields < _LAST_YIELDS

    def release(self) -> None:
        """Yield the core, and measure how long other processes use it."""
        start = time.perf_counter()
        os.sched_yield()
        is_long = time.perf_counter() - start > _LONG_YIELD_SECONDS
        self._short_yields = 0 if is_long else self._short_yields + 1

    def nap(self, naps: int) -> None:
        """Sleep for the next interval of the back-off."""
        seconds = _GROWTH_SECONDS * naps if self.is_wanted else _NAP_SECONDS * (1 + naps // _POLLS_TO_GROW)
        time.sleep(min(seconds, _LONGEST_NAP_SECONDS))


_processor = _Processor()


def relax(polls: int, limit: int = LOOKS_BEFORE_YIELD) -> None:
    """Yield the core or sleep, after more than ``limit`` failed polls."""
    if polls > limit:
        naps = polls - 10 * max(limit, LOOKS_BEFORE_YIELD_ON_WIRE)
        if naps > 0:
            _processor.nap(naps)
        else:
            _processor.release()


def looks_at(messages: int) -> int:
    """Return the number of polls that a poll of several messages counts as."""
    # On an oversubscribed core, polling several messages delays other processes as long as several polls.
    return messages if _processor.is_wanted else 1


def pause(comm: MPI.Intracomm, polls: int) -> None:
    """Back off after failed polls of shared memory, and let MPI make progress."""
    relax(polls, LOOKS_BEFORE_YIELD_ON_WIRE)
    # Otherwise a rank that only polls memory would not notice messages or the end of the job.
    if polls % _POLLS_BETWEEN_MPI == 0:
        comm.Iprobe()


@cache
def looks_before_yield() -> int:
    """Return the failed polls before a yield, 0 if there are more ranks than cores."""
    # MPI_Test does not yield in every library. MPICH yields in blocking calls only.
    return 0 if cores_are_short() else LOOKS_BEFORE_YIELD


class Naps:
    """Back-off of a thread that polls for messages."""

    def __init__(self) -> None:
        self._limit = looks_before_yield()
        self.reset()

    def reset(self) -> None:
        """Restart the back-off after a message."""
        self._polls = 0
        self._since: float | None = None
        self._is_idle = False

    def take(self, is_busy: bool = False) -> None:
        """Back off after a failed poll. ``is_busy``: a message is in flight."""
        self._polls += 1
        if self._is_idle and not is_busy:
            time.sleep(_LONGEST_NAP_SECONDS)
            return
        relax(self._polls, self._limit)
        if self._polls % _POLLS_BETWEEN_CLOCK_READS == 0:
            now = time.monotonic()
            self._since = self._since or now
            self._is_idle = now - self._since > _IDLE_SECONDS


def until_done(request: MPI.Request) -> Steps[None]:
    """Yield until ``request`` is complete."""
    polls, limit = 0, looks_before_yield()
    while not request.Test():
        polls += 1
        relax(polls, limit)
        yield


def all_done(requests: list[MPI.Request]) -> bool:
    """Remove complete ``requests``. Return whether all are complete."""
    # Do not use MPI_Testall, because its error does not identify the failed rank.
    while requests and requests[-1].Test():
        requests.pop()
    return not requests


def until_all_done(requests: list[MPI.Request]) -> Steps[None]:
    """Yield until all ``requests`` are complete."""
    left = list(requests)
    while not all_done(left):
        # No back-off here, because the caller has other messages in flight.
        yield


def until_event(event: Event, relaxes: bool = True) -> Steps[None]:
    """Yield until a device has reached ``event``. ``relaxes``: back off here, not in the caller."""
    polls = 0
    while not event.is_done:
        polls += 1
        if relaxes:
            relax(polls, LOOKS_BEFORE_YIELD_ON_WIRE)
        yield


def drive(steps: Steps[T], make_deadline: Callable[[], Deadline]) -> T:
    """Run ``steps`` and return their value. Long runs check a deadline."""
    try:
        _poll(steps)
        deadline = make_deadline()
        while True:
            deadline.check()
            _poll(steps)
    except StopIteration as stop:
        value: T = stop.value
        return value


def _poll(steps: Steps[object]) -> None:
    """Run a batch of steps, limited in number and in time."""
    end = time.monotonic() + _SECONDS_BETWEEN_CHECKS
    for _ in range(_POLLS_BETWEEN_CHECKS):
        next(steps)
        if time.monotonic() > end:
            return
