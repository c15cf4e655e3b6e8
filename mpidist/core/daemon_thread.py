"""mpidist's own threads: they run one function, or serve a list of objects."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Generic, TypeVar
from weakref import WeakSet

T = TypeVar("T")


class _Own(threading.local):
    is_own = False


_thread = _Own()


def mark_own_thread() -> None:
    """Mark this thread as one that mpidist started.

    It stays on the first GPU that it uses, and does not disturb a CUDA graph.

    To be called at its begin, whether it will ever have to do with one or not: nothing is asked of CUDA yet.
    """
    _thread.is_own = True


def is_own_thread() -> bool:
    """Return whether mpidist started this thread."""
    return _thread.is_own


def is_name_of_own_thread(name: str) -> bool:
    """Return whether a thread of this name is one of mpidist's."""
    return name.startswith("mpidist-")


def start_daemon(name: str, run: Callable[[], object]) -> threading.Thread:
    """Start and return a thread of mpidist's own. A program that ends does not wait for it."""

    def marked() -> None:
        mark_own_thread()
        run()

    thread = threading.Thread(target=marked, name=f"mpidist-{name}", daemon=True)
    thread.start()
    return thread


class DaemonThread(Generic[T]):
    """A thread that serves ``watched`` objects, and runs while there are any.

    To be subclassed; made without arguments. A forked child, which has none of its parent's threads, makes it anew,
    with an empty list.

    Args:
        name: Of the thread.

    Attributes:
        watched: The objects that it serves.
        lock: Held while ``watched`` changes.
    """

    def __init__(self, name: str) -> None:
        self.watched: list[T] = []
        self.lock = threading.RLock()
        self._name = name
        # Of the present thread alone: one that has been told to end is not woken by what its successor gets.
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        _daemons.add(self)

    def look(self) -> float | None:
        """Serve all objects once. Return the seconds until the next time, or None to sleep until it is woken."""
        raise NotImplementedError

    def watch(self, thing: T) -> None:
        """Serve ``thing`` from now on, at once; the first one starts the thread."""
        with self.lock:
            if thing not in self.watched:
                self.watched.append(thing)
            if self._thread is None:
                self._thread = start_daemon(self._name, partial(self._run, self._wake))
            self._wake.set()

    def forget(self, thing: T) -> None:
        """Serve ``thing`` no more; the last one ends the thread."""
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
        """Have the thread serve all objects at once."""
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


def _begin_anew() -> None:
    for daemon in list(_daemons):
        daemon.__init__()  # type: ignore[misc]


os.register_at_fork(after_in_child=_begin_anew)
