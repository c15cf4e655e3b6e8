"""Job status: where this rank is, in files that a thread replaces each second.

``python -m mpidist top`` reads the status files of all ranks, node_exporter the metrics. Collectives cost as
much as without them.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from mpidist.collectives.channel.channel import Channel
from mpidist.collectives.channel.executor import ChannelStatus
from mpidist.collectives.channel.observers import Observer
from mpidist.collectives.channel.operation import Operation
from mpidist.collectives.channel.shutdown import after_shutdown, on_uncaught_error
from mpidist.collectives.observe.lateness import LateRanks, Verdict
from mpidist.collectives.observe.record import Head, RankFile, read_folder, read_head, record_thread
from mpidist.collectives.observe.stragglers import straggler_watch
from mpidist.core import settings
from mpidist.core.files import folder_to_write, remove_unfinished, replacing
from mpidist.core.phases import CHECKPOINT, INPUT, counts
from mpidist.core.text import cut_text, error_text, is_of_package, main_thread_frame, program_line
from mpidist.topology import import_mpi
from mpidist.topology.exit import is_interactive
from mpidist.topology.topology import has_world, world_topology

RUNNING, ENDED, FAILED = "running", "ended", "failed"
"""The states of a program."""
WAITING, IN_FLIGHT, COMPUTING = "waiting", "in flight", "computing"
"""The kinds of activity. ``IN_FLIGHT`` is computing while an asynchronous operation is in flight."""
_ACTIVITY_KINDS = (WAITING, IN_FLIGHT, COMPUTING)
# How many files a file system receives from all ranks per second.
_FILES_PER_SECOND = 500
_RATE_SECONDS = 10.0
_LONGEST_TEXT = 300
_MOST_BYTES = 1 << 16


@dataclass(frozen=True)
class Activity:
    """The activity of a rank."""

    kind: str
    operation: str  # the last one, if the rank is computing
    number: int  # on the communicator, 0 for a message
    communicator: str
    seconds: float  # in the operation, or since the last one began
    call_site: str  # current line of the program


@dataclass(frozen=True)
class WorkCount:
    """Work since the program began, or per second."""

    steps: float  # calls of strategy.run
    collectives: float
    nbytes: float  # passed into collectives, and of messages
    waited: float  # seconds of waits for other ranks at the start of collectives
    reading: float  # seconds that the program waited for input
    saving: float  # seconds that it saved or restored checkpoints


@dataclass(frozen=True)
class RankReport(Head):
    """The content of one rank's file."""

    job: str  # the same on all ranks, empty before they have met
    born: int  # start of the process in clock ticks, because process numbers are reused
    program: str
    started: float  # wall clock
    written: float
    every: float  # seconds between two writes
    state: str
    error: str
    activity: Activity
    totals: WorkCount
    rates: WorkCount
    straggler: str  # on rank 0: who keeps the others waiting


def status_path(folder: str | os.PathLike[str], rank: int) -> Path:
    """Return the path of a rank's file.

    >>> status_path("status", 3).name
    'status-rank-0003.json'
    """
    return Path(folder, f"status-rank-{rank:04d}.json")


def write_report(folder: str | os.PathLike[str], report: RankReport) -> None:
    """Replace the file of a rank, which only its user can read."""
    path = status_path(folder, report.rank)
    with replacing(path, mode=0o600) as descriptor, open(descriptor, "wb", closefd=False) as file:
        file.write(report.text())


def read_report(path: Path) -> RankReport:
    """Return the content of a file."""
    return read_head(path, RankReport, _MOST_BYTES)[0]


class StatusFolder(NamedTuple):
    """The reports of the latest job, the number of files of others, and reading errors."""

    reports: list[RankReport]
    others: int
    problems: list[str]


def read_status_folder(folder: str | os.PathLike[str]) -> StatusFolder:
    """Return the reports of the latest job in a folder (see ``read_folder``)."""
    problems: list[str] = []
    found = list(read_folder(folder, "status-rank-*.json", settings.STATUS.name, read_report, problems))
    latest = max((report for report in found if report.job), key=lambda each: each.started, default=found[0])
    reports = [each for each in found if each.job in (latest.job, "") and each.ranks == latest.ranks]
    reports.sort(key=lambda report: report.rank)
    return StatusFolder(reports, len(found) - len(reports), problems)


def process_born(process: int) -> int:
    """Return when a process of this host started in clock ticks, or 0 without it.

    >>> process_born(os.getpid()) > 0
    True
    """
    try:
        fields = Path("/proc", str(process), "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return 0 if fields[0] == "Z" else int(fields[19])


# Writing ----------------------------------------------------------------------------------------------------------


class StatusFile(RankFile):
    """The status file and the metrics of this process."""

    def __init__(self, folder: str | None, metrics: str | None) -> None:
        world = import_mpi().COMM_WORLD
        self._rank, self._ranks = world.Get_rank(), world.Get_size()
        super().__init__(f"the status file of rank {self._rank}", max(1.0, self._ranks / _FILES_PER_SECOND))
        self._folder, self._metrics = (each and os.path.abspath(each) for each in (folder, metrics))
        self._program, self._started = " ".join(sys.argv)[:_LONGEST_TEXT], time.time()
        self._channels: tuple[_ChannelActivity, ...] = ()
        self._closed = WorkCount(0, 0, 0, 0, 0, 0)
        self._samples: deque[tuple[float, WorkCount]] = deque()
        self._is_clean = False
        # State, error and activity at the end.
        self._end: tuple[str, str, Activity] | None = None

    def add(self, channel: Channel) -> None:
        """Report the activity on a channel."""
        observer = _ChannelActivity(channel, self)
        self._channels = (*self._channels, observer)
        channel.observers.add(observer)

    def remove(self, closed: _ChannelActivity) -> None:
        """Stop reporting the activity on a closed channel."""
        self._channels = tuple(each for each in self._channels if each is not closed)
        self._closed = _sum(self._closed, closed.work())

    def fail(self, error: BaseException) -> None:
        """Write the error that ends the program."""
        if not is_interactive():
            self.finish(FAILED, error_text(error))

    def finish(self, state: str = ENDED, error: str = "") -> None:
        """Write the last state. The first call counts."""
        if self._end is None:
            self._end = (state, error[:_LONGEST_TEXT], self._activity())
            self.save(is_last=True)

    def write(self, is_saving: bool) -> None:
        """Replace the files of this rank."""
        state, error, activity = self._end or (RUNNING, "", self._activity())
        totals = _sum(self._closed, *(each.work() for each in self._channels))
        report = RankReport(
            rank=self._rank,
            ranks=self._ranks,
            job=world_topology().job if has_world() else "",
            host=os.uname().nodename,
            process=os.getpid(),
            born=process_born(os.getpid()),
            program=self._program,
            started=self._started,
            written=time.time(),
            every=self.every,
            state=state,
            error=error,
            activity=activity,
            totals=totals,
            rates=self._rates(totals),
            straggler=str(straggler_watch().current or ""),
        )
        if self._folder is not None:
            with folder_to_write(self._folder, settings.STATUS.name, is_private=True):
                self._remove_unfinished(status_path(self._folder, self._rank))
                write_report(self._folder, report)
        if self._metrics is not None:
            with folder_to_write(self._metrics, settings.METRICS.name):
                self._remove_unfinished(metrics_path(self._metrics, self._rank))
                write_metrics(self._metrics, report, straggler_watch().current)
        self._is_clean = True

    def _remove_unfinished(self, path: Path) -> None:
        if not self._is_clean:
            remove_unfinished(path)

    def _activity(self) -> Activity:
        """Return the wait of the program, or its last call."""
        frame = main_thread_frame()
        line = "" if frame is None else program_line(frame)[-_LONGEST_TEXT:]
        is_inside = frame is not None and is_of_package(frame.f_code.co_filename)
        found = [(each.activity(line, is_inside), each.last_seen) for each in self._channels]
        # Of channels first seen together, the newest has the latest time. The first is often the one of all ranks.
        found.sort(key=lambda each: (_ACTIVITY_KINDS.index(each[0].kind), not each[0].operation, -each[1]))
        return found[0][0] if found else Activity(COMPUTING, "", 0, "", 0.0, line)

    def _rates(self, totals: WorkCount) -> WorkCount:
        now = time.monotonic()
        self._samples.append((now, totals))
        while len(self._samples) > 2 and self._samples[1][0] < now - _RATE_SECONDS:
            self._samples.popleft()
        before, past = self._samples[0]
        seconds = max(now - before, 1e-9)
        rates = {name: round((count - getattr(past, name)) / seconds, 3) for name, count in vars(totals).items()}
        return WorkCount(**rates)


class _ChannelActivity(Observer):
    """The activity on one channel. It observes messages alone, so that the fast path stays enabled."""

    def __init__(self, channel: Channel, file: StatusFile) -> None:
        self._channel = channel
        self._file = file
        self._message_bytes = 0
        # When the messages in flight began.
        self._messages: dict[Operation[object], float] = {}
        # Number of the last collective and when it was first seen. The fast path keeps no times.
        self._issued, self.last_seen = 0, 0.0

    def message_began(self, operation: Operation[object]) -> None:
        self._messages[operation] = time.monotonic()

    def message_ended(self, operation: Operation[object]) -> None:
        self._messages.pop(operation, None)
        self._message_bytes += operation.description.nbytes

    def closed(self) -> None:
        self._file.remove(self)

    def work(self) -> WorkCount:
        executor = self._channel.executor
        waited = self._channel.handshake.waited / 1e9
        return WorkCount(0, executor.issued, executor.nbytes + self._message_bytes, waited, 0, 0)

    def activity(self, line: str, is_inside: bool) -> Activity:
        """Return the activity of this rank as far as this channel knows it.

        ``is_inside`` is whether the program, which is at ``line``, has called the package.
        """
        executor, now = self._channel.executor, time.monotonic()
        status, waits = executor.status(), bool(executor.waiting())
        if status.issued != self._issued:
            self._issued, self.last_seen = status.issued, now
        kind = WAITING if waits else IN_FLIGHT if executor.oldest_work() is not None else COMPUTING
        message = min(self._messages.copy().items(), key=lambda item: item[1], default=None)
        if kind == COMPUTING and message is not None and is_inside:
            operation, began = message
            kind, status = WAITING, ChannelStatus(0, 0, operation.text, True, now - began, False)
        text = cut_text(status.text, _LONGEST_TEXT)
        seconds = now - self.last_seen if kind == COMPUTING else status.seconds
        return Activity(kind, text, status.number, self._channel.name, round(seconds if text else 0.0, 1), line)


def _sum(*parts: WorkCount) -> WorkCount:
    return WorkCount(
        counts.steps,
        sum(part.collectives for part in parts),
        sum(part.nbytes for part in parts),
        sum(part.waited for part in parts),
        INPUT.nanoseconds / 1e9,
        CHECKPOINT.nanoseconds / 1e9,
    )


def report_channel(channel: Channel) -> None:
    """Report the activity on a channel if ``MPIDIST_STATUS`` or ``MPIDIST_METRICS`` is set."""
    folder, metrics = settings.STATUS.read(), settings.METRICS.read()
    if folder is not None or metrics is not None:
        _status_file(folder, metrics).add(channel)


@cache
def _status_file(folder: str | None, metrics: str | None) -> StatusFile:
    file = StatusFile(folder, metrics)
    record_thread.watch(file)
    on_uncaught_error(file.fail)
    after_shutdown(file.finish)
    return file


# Metrics ----------------------------------------------------------------------------------------------------------

_COUNTERS = {
    "steps": ("steps", "Steps, which are calls of strategy.run or of a torch optimizer"),
    "collectives": ("collectives", "Collectives issued"),
    "bytes": ("nbytes", "Bytes passed into collectives, and of messages"),
    "wait_seconds": ("waited", "Seconds of waits for other ranks at the start of collectives"),
    "input_seconds": ("reading", "Seconds that the program waited for input"),
    "checkpoint_seconds": ("saving", "Seconds that it saved or restored checkpoints"),
}


def metrics_path(folder: str | os.PathLike[str], rank: int) -> Path:
    """Return the path of a rank's file of metrics. The textfile collector of node_exporter reads ``*.prom``.

    >>> metrics_path("metrics", 3).name
    'mpidist-rank-0003.prom'
    """
    return Path(folder, f"mpidist-rank-{rank:04d}.prom")


def write_metrics(folder: str | os.PathLike[str], report: RankReport, verdict: Verdict | None) -> None:
    """Replace the metrics of a rank, or remove them at the end of its program."""
    path = metrics_path(folder, report.rank)
    if report.state != RUNNING:
        path.unlink(missing_ok=True)
        return
    labels = f'rank="{report.rank}",host="{report.host}"'
    lines = []
    for name, (field, text) in _COUNTERS.items():
        lines += [f"# HELP mpidist_{name} {text}.", f"# TYPE mpidist_{name} counter"]
        lines.append(f"mpidist_{name}_total{{{labels}}} {getattr(report.totals, field):.10g}")
    if report.rank == 0:
        lines += ["# HELP mpidist_lateness_ratio Share of the time that the other ranks wait for a late rank."]
        lines += ["# TYPE mpidist_lateness_ratio gauge"]
        if isinstance(verdict, LateRanks):
            late = [f'late_rank="{rank}",phase="{verdict.phase}"' for rank in verdict.ranks]
            lines += [f"mpidist_lateness_ratio{{{labels},{each}}} {verdict.share:.4g}" for each in late]
    with replacing(path, mode=0o644) as descriptor, open(descriptor, "w", closefd=False) as file:
        file.write("\n".join([*lines, "# EOF", ""]))
