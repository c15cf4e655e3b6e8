"""Deadline: how every wait reports that it takes long, and gives up."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from mpidist.core import settings
from mpidist.core.wording import tell_user


class Deadline:
    """A wait that reports once and gives up in the end.

    It begins when it is made; the code that waits checks it now and then.

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
        self._start = time.monotonic()

    def check(self) -> float:
        """Report or give up if it is time to, and return the seconds waited."""
        waited = time.monotonic() - self._start
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
        """The seconds until there is something to do at the next check."""
        at = [self._warn] * (self._report is not None) + [self._limit] * (self._failure is not None)
        return max(0.0, min([*at, threading.TIMEOUT_MAX]) - (time.monotonic() - self._start))


def wait_until(is_over: Callable[[], bool], deadline: Deadline, nap_seconds: float, longest_nap: float = 0.0) -> None:
    """Wait until ``is_over`` or the end of a deadline, with naps. Naps grow to ``longest_nap`` if that is longer."""
    while not is_over():
        deadline.check()
        time.sleep(nap_seconds)
        nap_seconds = max(nap_seconds, min(2 * nap_seconds, longest_nap))


def wait_at_most(seconds: float, is_over: Callable[[], bool], nap_seconds: float) -> None:
    """Wait until ``is_over``, for some seconds."""
    end = time.monotonic() + seconds
    while not is_over() and time.monotonic() < end:
        time.sleep(nap_seconds)
