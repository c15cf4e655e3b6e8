"""SideThread: one thread over which ranks talk beside their collectives, at any time.

Messages are small and rare: they go point to point over the private communicators of open channels, with a tag of their
own. The thread looks for them a few times a second, and more often while something is going on.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any

from mpidist.collectives.channel.progress import mpi_takes_threads
from mpidist.collectives.channel.shutdown import after_the_end
from mpidist.collectives.mpi.mailbox import Mailbox
from mpidist.collectives.mpi.waiting import Comm
from mpidist.core import message_tags
from mpidist.core.concurrency import DaemonThread, Stopwatch

_IDLE_SECONDS, _BUSY_SECONDS = 0.25, 0.005
# After a message there are often more.
_BUSY_FOR_SECONDS = 1.0


class SideLine:
    """A line between side threads, until it is closed or a rank is lost.

    Args:
        comm: The communicator.
        receive: Called in the thread with source, kind and content of each message.
    """

    def __init__(self, comm: Comm, receive: Callable[[int, str, Any], None]) -> None:
        # The program hears of a lost rank by itself.
        self.mailbox = Mailbox(comm, message_tags.SIDE_THREAD, on_loss=lambda _: side_thread.drop(self))
        self.receive = receive

    def open(self) -> None:
        """Send and receive from now on; the first line that is opened begins the thread."""
        side_thread.watch(self)

    def send(self, rank: int, kind: str, content: object) -> None:
        """Send a message of at most a few KiB; called in the thread."""
        if self in side_thread.watched:
            self.mailbox.send(rank, (kind, content))
            side_thread.be_busy()

    def close(self) -> None:
        """Send and receive nothing more; the last line that is closed ends the thread."""
        side_thread.forget(self)


class SideThread(DaemonThread[SideLine]):
    """The side thread, there as long as a line with several ranks is open."""

    def __init__(self) -> None:
        super().__init__("side")
        self._asked: deque[Callable[[], None]] = deque()
        # A suspended job has time for its answers after it is resumed.
        self._stopwatch = Stopwatch()
        self._timers: list[tuple[float, Callable[[], None]]] = []
        # With messages that may not have left, also of lines that are closed.
        self._mailboxes: list[Mailbox] = []
        self._busy_until = 0.0

    def is_allowed(self) -> bool:
        """Return whether this process can have the thread; logs once why not."""
        return mpi_takes_threads("a rank that waits cannot ask the others what they do")

    def watch(self, thing: SideLine) -> None:
        """Take part in the talk over a line from now on."""
        after_the_end(self.stop)
        with self.lock:
            self._mailboxes.append(thing.mailbox)
            super().watch(thing)

    def drop(self, line: SideLine) -> None:
        """Forget a line that lost a rank; called in the thread, which goes on."""
        if line in self.watched:
            self.watched.remove(line)

    def call(self, function: Callable[[], None]) -> None:
        """Have the thread call ``function`` soon."""
        self._asked.append(function)
        self.wake()

    def later(self, seconds: float, function: Callable[[], None]) -> None:
        """Have the thread call ``function`` after some seconds; called in the thread."""
        self._timers.append((self._stopwatch.seconds + seconds, function))

    def be_busy(self) -> None:
        """Look often for a while."""
        self._busy_until = time.monotonic() + _BUSY_FOR_SECONDS

    def look(self) -> float:
        """Make the calls that were asked for, receive messages, and make calls that are due."""
        # The lock is held meanwhile, so that no line is closed and its communicator freed.
        with self.lock:
            while self._asked:
                self._asked.popleft()()
            for line in list(self.watched):
                for source, (kind, content) in line.mailbox.received():
                    self.be_busy()
                    line.receive(source, kind, content)
            in_use = [line.mailbox for line in self.watched]
            self._mailboxes = [each for each in self._mailboxes if not each.all_sent() or each in in_use]
            now = self._stopwatch.seconds
            due = [function for moment, function in self._timers if moment <= now]
            self._timers = [timer for timer in self._timers if timer[0] > now]
            for function in due:
                function()
        return _BUSY_SECONDS if self._timers or time.monotonic() < self._busy_until else _IDLE_SECONDS


side_thread = SideThread()
