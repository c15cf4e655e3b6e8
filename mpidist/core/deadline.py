"""Deadline: how every wait reports that it takes long, and gives up."""

from __future__ import annotations

import time
from collections.abc import Callable

from mpidist.core import settings
from mpidist.core.wording import tell_user

# A poll takes much less, even on oversubscribed cores.
_LONGEST_GAP_SECONDS = 1.0
POLL_SECONDS = 0.25
"""How long a wait with a stopwatch may sleep between two readings."""


class Stopwatch:
    """Seconds since it was made, without the time for which this process was suspended.

    A suspended job (``scontrol suspend``, ``docker pause``) must not reach its deadlines when it is resumed. So a gap
    between two readings counts as at most one second, and a wait must read its stopwatch more often.

    >>> stopwatch = Stopwatch()
    >>> stopwatch.seconds < 1.0
    True
    """

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._seconds = 0.0

    @property
    def seconds(self) -> float:
        """Return the seconds so far."""
        now = time.monotonic()
        self._seconds += min(now - self._last, _LONGEST_GAP_SECONDS)
        self._last = now
        return self._seconds


class Deadline:
    """A wait that reports once and gives up in the end.

    It begins when it is made. The code that waits must check it more than once a second (see :class:`Stopwatch`).

    Args:
        report: Returns the text for the user, given the seconds waited; or None. Without it nothing is said.
        failure: Returns the error to raise at the end, given the seconds waited; without it the wait has no end.
        limit_seconds: After which the wait fails; ``MPIDIST_TIMEOUT`` by default.
        warn_seconds: After which it is reported; ``MPIDIST_WARN_AFTER`` by default.
        meanwhile: Called at each check.

    >>> deadline = Deadline(None, lambda waited: TimeoutError(f"after {waited:.0f} s"), 0.0)
    >>> time.sleep(0.001)
    >>> deadline.check()
    Traceback (most recent call last):
    TimeoutError: after 0 s
    """

    def __init__(
        self,
        report: Callable[[float], str | None] | None = None,
        failure: Callable[[float], BaseException] | None = None,
        limit_seconds: float | None = None,
        warn_seconds: float | None = None,
        meanwhile: Callable[[], object] | None = None,
    ) -> None:
        self._report = report
        self._failure = failure
        self._limit: float = settings.TIMEOUT.read() if limit_seconds is None else limit_seconds
        self._warn: float = settings.WARN_AFTER.read() if warn_seconds is None else warn_seconds
        self._meanwhile = meanwhile
        self._stopwatch = Stopwatch()

    def check(self) -> float:
        """Report or give up if it is time to, and return the seconds waited."""
        waited = self._stopwatch.seconds
        if waited > self._warn and self._report is not None:
            report, self._report = self._report, None
            text = report(waited)
            if text is not None:
                tell_user(text)
        if waited > self._limit and self._failure is not None:
            raise self._failure(waited)
        if self._meanwhile is not None:
            self._meanwhile()
        return waited

    @property
    def next_seconds(self) -> float:
        """The seconds until the next check."""
        at = [self._warn] * (self._report is not None) + [self._limit] * (self._failure is not None)
        return min(POLL_SECONDS, max(0.0, min(at, default=POLL_SECONDS) - self._stopwatch.seconds))


def wait_until(is_over: Callable[[], bool], deadline: Deadline, nap_seconds: float, longest_nap: float = 0.0) -> None:
    """Wait until ``is_over`` or the end of a deadline, with naps. Naps grow to ``longest_nap`` if that is longer."""
    while not is_over():
        deadline.check()
        time.sleep(nap_seconds)
        nap_seconds = max(nap_seconds, min(2 * nap_seconds, longest_nap))


def wait_at_most(seconds: float, is_over: Callable[[], bool], nap_seconds: float) -> None:
    """Wait until ``is_over``, for some seconds."""
    stopwatch = Stopwatch()
    while not is_over() and stopwatch.seconds < seconds:
        time.sleep(nap_seconds)
