"""Recorder: spans and totals of this process's collectives, for files and rank 0."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields
from weakref import WeakMethod

from mpidist.collectives.channel.shutdown import after_the_end, before_an_uncaught_error
from mpidist.collectives.mpi.mailbox import Mailbox
from mpidist.collectives.mpi.waiting import Comm
from mpidist.collectives.watch import trace_files
from mpidist.collectives.watch.flight_record import FlightFile
from mpidist.collectives.watch.trace_files import Span, TraceFile
from mpidist.core import message_tags, settings
from mpidist.core.concurrency import wait_at_most
from mpidist.core.text import numbered_ranks, ranks_text, tell_user
from mpidist.topology import import_mpi, world_topology

Totals = dict[str, "OperationTotals"]
# Spans kept in memory at most, and how long.
_MOST_SPANS = 4096
_KEEP_SECONDS = 1.0
# How long rank 0 waits, at its end, for what the others tell at theirs.
_EXIT_SECONDS = 5.0
_NAP_SECONDS = 1e-4
_recorders: list[Recorder] = []


@dataclass
class OperationTotals:
    """The totals of one operation on one rank; times in nanoseconds.

    Attributes:
        calls: How many.
        nbytes: Of the values that this rank passed in.
        time: From the first to the last step of each.
        for_others: Of that, in wait for other ranks to make the same call.
        works: Of ``time``, that of works (the ``_async`` forms).
        waited: How long the program waited for works.
    """

    calls: int = 0
    nbytes: int = 0
    time: int = 0
    for_others: int = 0
    works: int = 0
    waited: int = 0

    def add(self, other: OperationTotals) -> None:
        """Add another."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


def report_text(by_rank: dict[int, Totals], ranks: int, seconds: float) -> str:
    """Return the report.

    Args:
        by_rank: Totals by operation, of the ranks that told.
        ranks: Number of ranks of the job.
        seconds: How long the program ran with a communicator.
    """
    told = f"{ranks} rank{'s' if ranks > 1 else ''}"
    missing = sorted(set(range(ranks)) - set(by_rank))
    if missing:
        told = f"{len(by_rank)} of {told} (without {ranks_text(missing)})"
    lines = [f"collectives of {told}, means over ranks, in {seconds:.1f} s"]
    rows: list[tuple[str, ...]] = [("operation", "calls", "bytes", "time", "for others", "hidden", "slowest rank")]
    by_operation: dict[str, dict[int, OperationTotals]] = {}
    for rank, operations in by_rank.items():
        for operation, totals in operations.items():
            by_operation.setdefault(operation, {})[rank] = totals
    longest_first = sorted(by_operation.items(), key=lambda item: -max(each.time for each in item[1].values()))
    rows.extend(_row(operation, found) for operation, found in longest_first)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for first, *middle, last in rows:
        cells = [text.rjust(width) for text, width in zip(middle, widths[1:-1], strict=True)]
        lines.append("  ".join(["", first.ljust(widths[0]), *cells, last]))
    return "\n".join(lines)


def _row(operation: str, by_rank: dict[int, OperationTotals]) -> tuple[str, ...]:
    total = OperationTotals()
    for totals in by_rank.values():
        total.add(totals)
    number = len(by_rank)
    hidden = "-"
    if total.works:
        hidden = f"{max(0.0, 1 - total.waited / total.works):.0%}"
    return (
        operation,
        f"{total.calls / number:.10g}",
        _bytes_text(total.nbytes / number),
        _seconds_text(total.time / number),
        _seconds_text(total.for_others / number),
        hidden,
        _slowest(by_rank),
    )


def _slowest(by_rank: dict[int, OperationTotals]) -> str:
    """Return the rank that arrived last: the others waited, and it did not."""
    if len(by_rank) == 1:
        return "-"
    slowest = min(by_rank, key=lambda rank: by_rank[rank].for_others)
    others = [totals.for_others for rank, totals in by_rank.items() if rank != slowest]
    longer = sum(others) / len(others) - by_rank[slowest].for_others
    if longer == 0:
        return "-"
    return f"{slowest} (waited for {_seconds_text(longer)})"


def _bytes_text(number: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.4g} {unit}"
        number /= 1024
    return f"{number:.4g} TiB"


def _seconds_text(nanoseconds: float) -> str:
    """Return a time as text.

    >>> _seconds_text(1234567), _seconds_text(0)
    ('1.23 ms', '0 us')
    """
    for unit, size in (("s", 1e9), ("ms", 1e6)):
        if nanoseconds >= size:
            return f"{nanoseconds / size:.3g} {unit}"
    return f"{nanoseconds / 1e3:.3g} us"


def recorder_for(comm: Comm) -> Recorder | None:
    """Return the recorder of this process, or None without a setting for one (collective)."""
    folder, reports, flights = settings.TRACE.read(), settings.REPORT.read(), settings.FLIGHT_RECORD.read()
    if folder is None and not reports and flights is None:
        return None
    if not _recorders:
        _recorders.append(Recorder(folder, reports, flights))
        atexit.register(_before_leaving)
        after_the_end(_finish_recording)
        before_an_uncaught_error(_before_leaving)
    _recorders[0].see(comm)
    return _recorders[0]


class Recorder:
    """The spans of this process, to be written, and the totals of its operations.

    Args:
        folder: Where trace files go; None for no trace.
        reports: Whether a report is printed at the end.
        flights: Where flight records go, if anywhere.

    Attributes:
        lock: To be held while totals are changed.
        totals: By operation.
        flight: The flight record, if any.
    """

    def __init__(self, folder: str | None, reports: bool, flights: str | None = None) -> None:
        world = import_mpi().COMM_WORLD
        self.rank, self.ranks = world.Get_rank(), world.Get_size()
        self.reports = reports
        self.lock = threading.Lock()
        self.totals: Totals = {}
        self._tell_unfinished: list[WeakMethod[Callable[[], None]]] = []
        self.file = None if folder is None else TraceFile(folder, self.rank, self.ranks)
        self.flight = None if flights is None else FlightFile(flights, self.rank, self.ranks)
        self._world: Comm | None = None
        self._tracks: dict[Hashable, int] = {}
        self._spans: list[Span] = []
        self._start = self._written = time.monotonic()

    def see(self, comm: Comm) -> None:
        """Take notice of a new communicator (collective)."""
        if self._world is None and comm.Get_size() == self.ranks:
            # All ranks are here. What is told at the end takes a communicator of mpidist's own.
            self._world = world_topology().world

    @property
    def makes_spans(self) -> bool:
        """Whether a trace or a report is asked for."""
        return self.reports or self.file is not None

    def add_unfinished(self, tell: Callable[[], None]) -> None:
        """Have a method called before the last writing, which adds spans of unfinished collectives."""
        alive = [reference for reference in self._tell_unfinished if reference() is not None]
        self._tell_unfinished = [*alive, WeakMethod(tell)]

    def track_of_thread(self) -> int:
        """Return the track of the current thread."""
        return self.track(threading.get_ident(), threading.current_thread().name)

    def track(self, key: Hashable, name: str) -> int:
        """Return the track of ``key``, which gets a new one, called ``name``, the first time."""
        if key not in self._tracks:
            with self.lock:
                number = self._tracks.setdefault(key, len(self._tracks) + 1)
                if self.file is not None:
                    self.file.name_track(number, name)
        return self._tracks[key]

    def add(self, span: Span) -> None:
        """Record a span."""
        if self.file is None:
            return
        with self.lock:
            self._spans.append(span)
            is_full = len(self._spans) >= _MOST_SPANS
        if is_full:
            self.write()

    def totals_of(self, operation: str) -> OperationTotals:
        """Return the totals of an operation."""
        return self.totals.setdefault(operation, OperationTotals())

    def forget(self) -> None:
        """Record nothing from now on, in a forked child: the files are its parent's."""
        self.file = self.flight = None

    def settle(self, at_once: bool) -> None:
        """Write the spans out if that is due; called after each collective."""
        if at_once or time.monotonic() - self._written > _KEEP_SECONDS:
            self.write()

    def write(self) -> None:
        """Write the spans out."""
        if self.file is None:
            return
        with self.lock:
            spans, self._spans = self._spans, []
            self.file.write(spans)
            self._written = time.monotonic()

    def save(self) -> None:
        """Write all spans out, with those of unfinished collectives."""
        for reference in self._tell_unfinished:
            tell = reference()
            if tell is not None:
                tell()
        self.write()

    def finish(self) -> None:
        """Close the file; tell rank 0, and there, report and merge."""
        self.save()
        folder = None
        if self.file is not None:
            folder = self.file.folder
            self.file.close()
            self.file = None
        by_rank = self._tell()
        if self.rank == 0:
            if self.reports:
                tell_user(report_text(by_rank, self.ranks, time.monotonic() - self._start))
            if folder is not None:
                self._merge(folder, by_rank)

    def _tell(self) -> dict[int, Totals]:
        """Return the totals of all ranks that tell them in time, on rank 0."""
        by_rank = {self.rank: self.totals}
        if self._world is None or import_mpi().Is_finalized():
            return by_rank
        mailbox = Mailbox(self._world, message_tags.TALLIES, on_loss=lambda _: None)
        if self.rank:
            mailbox.send(0, self.totals)

        def is_over() -> bool:
            by_rank.update(mailbox.received())
            return mailbox.all_sent() and (self.rank > 0 or len(by_rank) == self.ranks)

        wait_at_most(_EXIT_SECONDS, is_over, _NAP_SECONDS)
        return by_rank

    def _merge(self, folder: str, by_rank: dict[int, Totals]) -> None:
        missing = [rank for rank in range(self.ranks) if rank not in by_rank]
        if missing:
            reason = f"{numbered_ranks(missing)} did not tell that their files are complete"
        else:
            try:
                trace_files.merge(folder)
                return
            except (OSError, ValueError) as error:
                reason = str(error)
        tell_user(f"the traces are not merged: {reason}; {trace_files.how(folder)}")


def _before_leaving(_error: BaseException | None = None) -> None:
    """Save the recording early: the end of the job may be an abort."""
    for recorder in _recorders:
        recorder.save()


def _forget() -> None:
    while _recorders:
        _recorders.pop().forget()


os.register_at_fork(after_in_child=_forget)


def _finish_recording() -> None:
    """Write the recording out and tell rank 0, after the last collective of all ranks."""
    while _recorders:
        _recorders.pop().finish()
