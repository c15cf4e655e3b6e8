"""Threads of mpidist, and deadlines of waits."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar
from weakref import WeakSet

from mpidist.core import settings
from mpidist.core.text import tell_user

T = TypeVar("T")

POLL_SECONDS = 0.25
"""Longest sleep of a wait between two readings of its stopwatch."""
# A poll takes much less, even on oversubscribed cores.
_LONGEST_GAP_SECONDS = 1.0
_NAME = "mpidist-"


class _Marks(threading.local):
    is_own = False


_thread = _Marks()


def mark_own_thread() -> None:
    """Mark this thread as mpidist's own. It stays on the first GPU that it uses, and spares CUDA graphs."""
    _thread.is_own = True


def is_own_thread() -> bool:
    """Return whether mpidist started this thread."""
    return _thread.is_own


def is_name_of_own_thread(name: str) -> bool:
    """Return whether a thread of this name is one of mpidist's."""
    return name.startswith(_NAME)


def start_daemon(name: str, run: Callable[[], object]) -> threading.Thread:
    """Start and return a thread of mpidist. The end of the program does not wait for it."""

    def marked() -> None:
        mark_own_thread()
        run()

    thread = threading.Thread(target=marked, name=f"{_NAME}{name}", daemon=True)
    thread.start()
    return thread


class DaemonThread(Generic[T]):
    """A thread that serves the ``watched`` objects, and runs while the list is not empty.

    ``lock`` is held while the list changes. Subclasses have constructors without arguments, which a forked child calls
    again, because it has no threads of its parent.
    """

    def __init__(self, name: str) -> None:
        self.watched: list[T] = []
        self.lock = threading.RLock()
        self._name = name
        # One event per thread, so that a thread that shall end is not woken for its successor.
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        _daemons.add(self)

    def look(self) -> float | None:
        """Serve all objects once. Return the seconds until the next time, or None to sleep until :meth:`wake`."""
        raise NotImplementedError

    def watch(self, thing: T) -> None:
        """Serve ``thing`` from now on. The first object starts the thread."""
        with self.lock:
            if thing not in self.watched:
                self.watched.append(thing)
            if self._thread is None:
                self._thread = start_daemon(self._name, partial(self._run, self._wake))
            self._wake.set()

    def forget(self, thing: T) -> None:
        """Stop serving ``thing``. The last object ends the thread."""
        with self.lock:
            if thing in self.watched:
                self.watched.remove(thing)
            if self.watched or self._thread is None:
                return
            thread, wake = self._thread, self._wake
            self._thread, self._wake = None, threading.Event()
        wake.set()
        if thread is not threading.current_thread():
            thread.join()

    def stop(self) -> None:
        """Forget all objects, and end the thread."""
        for thing in list(self.watched):
            self.forget(thing)

    def wake(self) -> None:
        """Let the thread serve all objects at once."""
        self._wake.set()

    def _run(self, wake: threading.Event) -> None:
        seconds: float | None = None
        while self._wake is wake:
            if seconds != 0.0:
                wake.wait(seconds)
            wake.clear()
            if self._wake is wake:
                seconds = self.look()


_daemons: WeakSet[DaemonThread[Any]] = WeakSet()


def _reset_in_child() -> None:
    for daemon in list(_daemons):
        daemon.__init__()  # type: ignore[misc]


os.register_at_fork(after_in_child=_reset_in_child)


class Stopwatch:
    """Seconds since its creation, without suspensions of the process.

    A job that was suspended (``scontrol suspend``, ``docker pause``) must not reach its deadlines when it resumes. So
    each gap between two readings counts as at most one second. A wait must read its stopwatch more often.
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
    """A wait that reports once, and raises an error at the end.

    The wait must call :meth:`check` more than once a second (see :class:`Stopwatch`).

    Args:
        report: Returns the text for the user or None, given the seconds waited.
        failure: Returns the error to raise, given the seconds waited. Without it the wait has no end.
        limit_seconds: Seconds until the error. ``MPIDIST_TIMEOUT`` by default.
        warn_seconds: Seconds until the report. ``MPIDIST_WARN_AFTER`` by default.
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
        """Report or raise if it is time. Return the seconds waited."""
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


def wait_until(is_over: Callable[[], bool], deadline: Deadline, poll_seconds: float, longest: float = 0.0) -> None:
    """Poll until ``is_over``, with a deadline. The sleeps between polls double up to ``longest``."""
    while not is_over():
        deadline.check()
        time.sleep(poll_seconds)
        poll_seconds = max(poll_seconds, min(2 * poll_seconds, longest))


def wait_at_most(seconds: float, is_over: Callable[[], bool], poll_seconds: float) -> None:
    """Poll until ``is_over``, for at most ``seconds``."""
    stopwatch = Stopwatch()
    while not is_over() and stopwatch.seconds < seconds:
        time.sleep(poll_seconds)
