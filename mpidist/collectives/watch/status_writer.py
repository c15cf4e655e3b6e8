"""StatusWriter: a thread writes the status file of this process.

The program's thread does nothing for it: channels say where they are when they are asked. The thread is its own, and
not the side thread, since a file system may hang, and ranks that ask what keeps this one are to have an answer. So the
program's thread neither writes nor waits for the thread without a limit.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections import deque
from pathlib import Path

from mpidist.collectives.channel.channel import Channel
from mpidist.collectives.channel.executor import ChannelStatus
from mpidist.collectives.channel.observers import Observer
from mpidist.collectives.channel.operation import Operation
from mpidist.collectives.channel.shutdown import after_the_end, before_an_uncaught_error
from mpidist.collectives.watch.status_files import (
    COMPUTING,
    ENDED,
    FAILED,
    RUNNING,
    UNDER_WAY,
    WAITING,
    Activity,
    RankReport,
    RankTotals,
    Rates,
    status_path,
    write_report,
)
from mpidist.core import context, settings
from mpidist.core.concurrency import DaemonThread
from mpidist.core.files import folder_to_write, remove_unfinished
from mpidist.core.text import error_text, is_of_package, main_thread_frame, program_line, tell_user
from mpidist.topology import import_mpi
from mpidist.topology.exit import is_interactive
from mpidist.topology.topology import has_world, world_topology

# How many files a second a file system is to take from all ranks, and how often one is written at most.
_FILES_PER_SECOND, _LEAST_SECONDS = 500, 1.0
# Over which rates are means.
_RATE_SECONDS = 10.0
# How long a program that ends waits for its last file.
_END_SECONDS = 2.0
_LONGEST_TEXT = 300
_ACTIVITY_KINDS = (WAITING, UNDER_WAY, COMPUTING)


class StatusObserver(Observer):
    """Has the state of one channel at hand; sees its messages, and of collectives none.

    Args:
        channel: The channel.
        writer: Of this process.
    """

    def __init__(self, channel: Channel, writer: StatusWriter) -> None:
        self._channel = channel
        self._writer = writer
        self._message_bytes = 0
        # When those that are on their way began.
        self._messages: dict[Operation[object], float] = {}
        # The number of its last collective, and when that was first seen: calls that take the short way keep no time.
        self._issued, self.last_seen = 0, 0.0

    def message_began(self, operation: Operation[object]) -> None:
        """See ``Observer``."""
        self._messages[operation] = time.monotonic()

    def message_ended(self, operation: Operation[object]) -> None:
        """See ``Observer``."""
        self._messages.pop(operation, None)
        self._message_bytes += operation.description.nbytes

    def closed(self) -> None:
        """See ``Observer``."""
        self._writer.forget(self)

    def totals(self) -> RankTotals:
        """Return the work on the channel."""
        executor = self._channel.executor
        return RankTotals(0, executor.issued, executor.nbytes + self._message_bytes)

    def activity(self, call_site: str, is_inside: bool) -> Activity:
        """Return the activity of this rank, as far as this channel knows.

        Args:
            call_site: Line of the program.
            is_inside: Whether the program is in a call of the package.
        """
        executor, now = self._channel.executor, time.monotonic()
        status, waits = executor.status(), bool(executor.waiting())
        if status.issued != self._issued:
            self._issued, self.last_seen = status.issued, now
        kind = WAITING if waits else UNDER_WAY if executor.oldest_work() is not None else COMPUTING
        message = min(self._messages.copy().items(), key=lambda item: item[1], default=None)
        if kind == COMPUTING and message is not None and is_inside:
            operation, began = message
            status = ChannelStatus(0, 0, operation.text, True, now - began, False)
            kind = WAITING
        text = status.text if len(status.text) <= _LONGEST_TEXT else f"{status.text[:_LONGEST_TEXT]}..."
        seconds = now - self.last_seen if kind == COMPUTING else status.seconds
        return Activity(kind, text, status.number, self._channel.name, round(seconds if text else 0.0, 1), call_site)


class StatusWriter:
    """The status file of this process.

    Args:
        folder: Where it goes; made if need be.
    """

    def __init__(self, folder: str) -> None:
        world = import_mpi().COMM_WORLD
        self._rank, self._ranks = world.Get_rank(), world.Get_size()
        self._folder = os.path.abspath(folder)
        self._job = ""
        self._observers: list[StatusObserver] = []
        # The work on channels that have been closed.
        self._past = RankTotals(0, 0, 0)
        self._samples: deque[tuple[float, RankTotals]] = deque()
        self._started = time.time()
        self._born = process_born(os.getpid())
        self._is_clean = self._is_told = False
        # State, error and activity at the end.
        self._end: tuple[str, str, Activity] | None = None
        self._is_over = threading.Event()
        self.every = max(_LEAST_SECONDS, self._ranks / _FILES_PER_SECOND)

    def see(self, channel: Channel) -> None:
        """Look at a channel, too."""
        observer = StatusObserver(channel, self)
        self._observers = [*self._observers, observer]  # which the thread may go through
        channel.observers.add(observer)

    def forget(self, observer: StatusObserver) -> None:
        """Look no more at the channel of an observer, which is closed."""
        self._observers = [each for each in self._observers if each is not observer]
        self._past = _sum([self._past, observer.totals()])

    def write(self) -> bool:
        """Replace the file, and return whether that was the last time; called in the thread.

        Where it fails the user is told once, and it is tried again the next time.
        """
        end = self._end
        try:
            with folder_to_write(self._folder, settings.STATUS.name, is_private=True):
                if not self._is_clean:
                    remove_unfinished(status_path(self._folder, self._rank))
                    self._is_clean = True
                write_report(self._folder, self._report(*(end or (RUNNING, "", self._activity()))))
        except OSError as problem:
            if not self._is_told:
                self._is_told = True
                tell_user(f"rank {self._rank} goes on without its status file: {problem}")
        if end is not None:
            self._is_over.set()
        return end is not None

    def finish(self, state: str, error: str = "") -> None:
        """Have the thread write the last file, and give it a moment. The first state counts."""
        if self._end is None:
            self._end = (state, error, self._activity())
            status_thread.wake()
            self._is_over.wait(_END_SECONDS)

    def _report(self, state: str, error: str, activity: Activity) -> RankReport:
        if not self._job and has_world():
            self._job = world_topology().job
        totals = _sum([self._past, *(observer.totals() for observer in self._observers)])
        return RankReport(
            rank=self._rank,
            ranks=self._ranks,
            job=self._job,
            host=socket.gethostname(),
            process=os.getpid(),
            born=self._born,
            program=" ".join(sys.argv)[:_LONGEST_TEXT],
            started=self._started,
            written=time.time(),
            every=self.every,
            state=state,
            error=error[:_LONGEST_TEXT],
            activity=activity,
            totals=totals,
            rates=self._rates(totals),
        )

    def _activity(self) -> Activity:
        """Return the activity of the program: its wait, else its last call."""
        frame = main_thread_frame()
        call_site = "" if frame is None else program_line(frame)[-_LONGEST_TEXT:]
        is_inside = frame is not None and is_of_package(frame.f_code.co_filename)
        found = [(observer.activity(call_site, is_inside), observer.last_seen) for observer in self._observers]
        # Of channels that were used since the last look, the youngest: the first is often that of all ranks.
        found.reverse()
        found.sort(key=lambda each: (_ACTIVITY_KINDS.index(each[0].kind), not each[0].operation, -each[1]))
        return found[0][0] if found else Activity(COMPUTING, "", 0, "", 0.0, call_site)

    def _rates(self, totals: RankTotals) -> Rates:
        now = time.monotonic()
        self._samples.append((now, totals))
        while len(self._samples) > 2 and self._samples[1][0] < now - _RATE_SECONDS:
            self._samples.popleft()
        before, past = self._samples[0]
        seconds = max(now - before, 1e-9)
        return Rates(
            round((totals.steps - past.steps) / seconds, 3),
            round((totals.collectives - past.collectives) / seconds, 3),
            round((totals.nbytes - past.nbytes) / seconds, 1),
        )


def _sum(parts: list[RankTotals]) -> RankTotals:
    return RankTotals(context.steps_made, sum(part.collectives for part in parts), sum(part.nbytes for part in parts))


def process_born(process: int) -> int:
    """Return when a process here was started, in clock ticks; 0 without one.

    >>> process_born(os.getpid()) > 0
    True
    """
    try:
        fields = Path("/proc", str(process), "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] == "Z" else int(fields[19])


class StatusThread(DaemonThread[StatusWriter]):
    """The thread that writes, as long as there is a file to write."""

    def __init__(self) -> None:
        super().__init__("status")

    def look(self) -> float:
        """Write."""
        for writer in list(self.watched):
            if writer.write():
                self.forget(writer)
        return min((writer.every for writer in self.watched), default=_LEAST_SECONDS)


status_thread = StatusThread()


def watch_status(channel: Channel) -> None:
    """Have the status file tell of a channel, where one is asked for."""
    folder = settings.STATUS.read()
    if folder is None:
        return
    if not status_thread.watched:
        writer = StatusWriter(folder)
        before_an_uncaught_error(_fail)
        after_the_end(_end)
        status_thread.watch(writer)
    status_thread.watched[0].see(channel)


def _fail(error: BaseException) -> None:
    """Write down the error that the program ends with."""
    for writer in [] if is_interactive() else list(status_thread.watched):
        writer.finish(FAILED, error_text(error))


def _end() -> None:
    """Write down that the program has ended."""
    for writer in list(status_thread.watched):
        writer.finish(ENDED)
