"""Waits that never block in MPI: collectives are generators that yield meanwhile.

A generator is driven by polling, so that a deadline, a warning or another piece of work can act in between.
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
    # MPI is imported where it is needed; annotations take this name.
    Comm = object

T = TypeVar("T")
Steps = Generator[None, None, T]

_POLLS_BETWEEN_CHECKS, _SECONDS_BETWEEN_CHECKS = 256, 0.02
_POLLS_BETWEEN_CLOCK_READS = 256
# Looks in vain, one after the other, after which others may have the core: for as long as they wish, and then, as a
# wait so long is no longer about latency, also those that the operating system would not give it to for a mere yield.
LOOKS_BEFORE_YIELD = 500
# Between nodes little is lost by yielding early: other ranks, or the system's network stack, may need the core.
LOOKS_BEFORE_YIELD_ON_WIRE = 20
_LOOKS_BETWEEN_MPI = 16
# A nap grows with the wait, to less than a hundredth of it: who waits for seconds shall not use a core up.
_NAP_SECONDS, _LONGEST_NAP_SECONDS, _LOOKS_TO_GROW = 2e-5, 1e-3, 500
# Where it took so long to have the core back in one of the last yields, others need it, maybe to do what is waited for.
# Then each nap is so much longer than the one before, and naps grow with the root of the wait.
_LONG_YIELD_SECONDS, _LAST_YIELDS, _GROWTH_SECONDS = 5e-5, 1000, 2e-6
# A server that nobody asks for so long is not about to be asked; a nap costs the next request half of it.
_IDLE_SECONDS = 0.5


class _Processor:
    """The processor core that this process runs on."""

    def __init__(self) -> None:
        self._short_yields = _LAST_YIELDS

    @property
    def is_wanted(self) -> bool:
        """Whether others need it, as far as is known."""
        return self._short_yields < _LAST_YIELDS

    def give_away(self) -> None:
        """Let others have it for as long as they wish."""
        start = time.perf_counter()
        os.sched_yield()
        is_long = time.perf_counter() - start > _LONG_YIELD_SECONDS
        self._short_yields = 0 if is_long else self._short_yields + 1

    def nap(self, naps: int) -> None:
        """Let it rest, after so many naps in this wait."""
        seconds = _GROWTH_SECONDS * naps if self.is_wanted else _NAP_SECONDS * (1 + naps // _LOOKS_TO_GROW)
        time.sleep(min(seconds, _LONGEST_NAP_SECONDS))


_processor = _Processor()


def relax(looks: int, limit: int = LOOKS_BEFORE_YIELD) -> None:
    """Let others have the core, after more than ``limit`` looks in vain."""
    if looks > limit:
        naps = looks - 10 * max(limit, LOOKS_BEFORE_YIELD_ON_WIRE)
        if naps > 0:
            _processor.nap(naps)
        else:
            _processor.give_away()


def looks_at(messages: int) -> int:
    """Return the number of looks that one at several messages counts as.

    Where others need the core as many as messages, as it keeps the core as long.
    """
    return messages if _processor.is_wanted else 1


def pause(comm: MPI.Intracomm, looks: int) -> None:
    """Let others have the core after looks at memory in vain, and MPI make progress."""
    relax(looks, LOOKS_BEFORE_YIELD_ON_WIRE)
    # A rank that only looks at memory would not notice messages, nor the end of the job.
    if looks % _LOOKS_BETWEEN_MPI == 0:
        comm.Iprobe()


@cache
def looks_before_yield() -> int:
    """Return the looks in vain before others may have the core.

    There are none where there are more ranks than cores.
    Not every MPI library gives the core away in MPI_Test: MPICH does so in blocking calls only.
    """
    return 0 if cores_are_short() else LOOKS_BEFORE_YIELD


class Naps:
    """Naps of a thread that polls for messages, longer the longer nothing happens."""

    def __init__(self) -> None:
        self._limit = looks_before_yield()
        self.reset()

    def reset(self) -> None:
        """Look at once again: something has happened."""
        self._looks = 0
        self._since: float | None = None
        self._is_idle = False

    def take(self, is_busy: bool = False) -> None:
        """Take a nap, as nothing has happened; ``is_busy`` says that something is under way."""
        self._looks += 1
        if self._is_idle and not is_busy:
            time.sleep(_LONGEST_NAP_SECONDS)
            return
        relax(self._looks, self._limit)
        if self._looks % _POLLS_BETWEEN_CLOCK_READS == 0:
            now = time.monotonic()
            self._since = self._since or now
            self._is_idle = now - self._since > _IDLE_SECONDS


def until_done(request: MPI.Request) -> Steps[None]:
    """Yield until ``request`` is complete."""
    looks, limit = 0, looks_before_yield()
    while not request.Test():
        looks += 1
        relax(looks, limit)
        yield


def all_done(requests: list[MPI.Request]) -> bool:
    """Return whether all ``requests`` are complete, and take out those that are.

    One by one: where several are asked for together, MPI's error does not tell a lost rank.
    """
    while requests and requests[-1].Test():
        requests.pop()
    return not requests


def until_all_done(requests: list[MPI.Request]) -> Steps[None]:
    """Yield until all ``requests`` are complete."""
    left = list(requests)
    while not all_done(left):
        # The caller has other messages under way, and relaxes when none of them moves.
        yield


def until_event(event: Event, relaxes: bool = True) -> Steps[None]:
    """Yield until a device has come to ``event``; the caller may relax itself, as above."""
    looks = 0
    while not event.is_done:
        looks += 1
        if relaxes:
            relax(looks, LOOKS_BEFORE_YIELD_ON_WIRE)
        yield


def drive(steps: Steps[T], make_deadline: Callable[[], Deadline]) -> T:
    """Run ``steps`` and return their value; a deadline is made if that takes long."""
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
    """Take steps for a while, which is short also where each takes its time."""
    end = time.monotonic() + _SECONDS_BETWEEN_CHECKS
    for _ in range(_POLLS_BETWEEN_CHECKS):
        next(steps)
        if time.monotonic() > end:
            return
