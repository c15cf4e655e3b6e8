"""SideThread: one thread over which ranks talk beside their collectives, also while the program computes or waits.

Messages are small and rare: they go point to point over the private communicators of open channels, with a tag of their
own. The thread looks for them a few times a second, and more often while something is going on.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from mpidist.collectives.channel.shutdown import after_the_end
from mpidist.topology import import_mpi
from mpidist.topology.faults import says_rank_is_lost

if TYPE_CHECKING:
    from mpi4py import MPI

_log = logging.getLogger("mpidist")
_TAG = 32766
_IDLE_SECONDS, _BUSY_SECONDS = 0.25, 0.005
# After a message there are often more.
_BUSY_FOR_SECONDS = 1.0


class Line(Protocol):
    """What ranks talk over."""

    comm: MPI.Intracomm

    def hear(self, source: int, kind: str, content: Any) -> None:
        """Take note of a message; called in the thread."""


class SideThread:
    """The thread, there as long as a line with several ranks is watched."""

    def __init__(self) -> None:
        self._lines: list[Line] = []
        # Held while MPI is called and while messages are heard, so that a line is not freed meanwhile.
        self._lock = threading.RLock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._asked: deque[Callable[[], None]] = deque()
        self._timers: list[tuple[float, Callable[[], None]]] = []
        self._sending: list[MPI.Request] = []
        self._busy_until = 0.0
        self._is_allowed: bool | None = None

    def is_allowed(self) -> bool:
        """Whether this process can have the thread; says once why not."""
        if self._is_allowed is None:
            mpi = import_mpi()
            self._is_allowed = mpi.Query_thread() >= mpi.THREAD_MULTIPLE
            if not self._is_allowed:
                _log.warning(
                    "mpidist: MPI was started without MPI_THREAD_MULTIPLE, so a rank that waits cannot ask the others "
                    "what they do; start it with it (mpi4py.rc.thread_level = 'multiple'), or import mpidist first"
                )
        return bool(self._is_allowed)

    def watch(self, line: Line) -> None:
        """Take part in what is said over ``line`` from now on."""
        with self._lock:
            self._lines.append(line)
            if self._thread is None:
                after_the_end(self.stop)
                self._thread = threading.Thread(target=self._run, name="mpidist-side", daemon=True)
                self._thread.start()

    def forget(self, line: Line) -> None:
        """Say and hear nothing more over ``line``; the last one ends the thread."""
        with self._lock:
            if line in self._lines:
                self._lines.remove(line)
            if self._lines or self._thread is None:
                return
            thread, self._thread = self._thread, None
        self._wake.set()
        if thread is not threading.current_thread():
            thread.join()

    def stop(self) -> None:
        """End the thread."""
        for line in list(self._lines):
            self.forget(line)

    def call(self, function: Callable[[], None]) -> None:
        """Have the thread call ``function`` soon."""
        self._asked.append(function)
        self._wake.set()

    def later(self, seconds: float, function: Callable[[], None]) -> None:
        """Have the thread call ``function`` after some seconds; called in the thread."""
        self._timers.append((time.monotonic() + seconds, function))

    def send(self, line: Line, rank: int, kind: str, content: Any) -> None:
        """Send a message of at most a few KiB (MPI_Isend); called in the thread."""
        if line in self._lines:
            try:
                self._sending.append(line.comm.isend((kind, content), rank, _TAG))
            except import_mpi().Exception as error:
                self._drop_if_lost(line, error)
            self._busy_until = time.monotonic() + _BUSY_FOR_SECONDS

    def lose(self) -> None:
        """Begin anew in a forked child, which has no thread."""
        self.__init__()  # type: ignore[misc]

    def _run(self) -> None:
        me = threading.current_thread()
        while self._thread is me:
            self._wake.wait(_BUSY_SECONDS if self._is_busy() else _IDLE_SECONDS)
            self._wake.clear()
            with self._lock:
                while self._asked:
                    self._asked.popleft()()
                self._hear()
                self._sending = [request for request in self._sending if not self._is_sent(request)]
                now = time.monotonic()
                due = [function for moment, function in self._timers if moment <= now]
                self._timers = [timer for timer in self._timers if timer[0] > now]
                for function in due:
                    function()

    def _is_busy(self) -> bool:
        return bool(self._timers) or time.monotonic() < self._busy_until

    def _hear(self) -> None:
        status = import_mpi().Status()
        for line in list(self._lines):
            try:
                while line in self._lines and line.comm.iprobe(tag=_TAG, status=status):
                    kind, content = line.comm.recv(source=status.Get_source(), tag=_TAG)
                    self._busy_until = time.monotonic() + _BUSY_FOR_SECONDS
                    line.hear(status.Get_source(), kind, content)
            except import_mpi().Exception as error:
                self._drop_if_lost(line, error)

    def _drop_if_lost(self, line: Line, error: BaseException) -> None:
        """Say nothing more over a line whose ranks are not all there any more; the program hears of it by itself."""
        if not says_rank_is_lost(error):
            raise error
        if line in self._lines:
            self._lines.remove(line)

    def _is_sent(self, request: MPI.Request) -> bool:
        try:
            done: bool = request.Test()
            return done
        except import_mpi().Exception as error:
            if not says_rank_is_lost(error):
                raise
            return True


side_thread = SideThread()
os.register_at_fork(after_in_child=side_thread.lose)
