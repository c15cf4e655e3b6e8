"""Recorder: flight record, trace and totals of this process, and the report of all totals."""

from __future__ import annotations

import threading
import time
from collections import Counter
from functools import cache
from weakref import WeakKeyDictionary

from mpidist.collectives.channel.channel import Channel
from mpidist.collectives.channel.observers import OTHERS, Chunk, Observer
from mpidist.collectives.channel.operation import HOUSEKEEPING, Operation
from mpidist.collectives.channel.shutdown import after_shutdown, before_shutdown, on_uncaught_error
from mpidist.collectives.mpi.exchange import Mailbox
from mpidist.collectives.mpi.waiting import Comm
from mpidist.collectives.observe.record import FlightFile, Kind, State, clock, record_thread
from mpidist.collectives.observe.stragglers import straggler_watch
from mpidist.collectives.observe.trace import TraceFile, merge
from mpidist.collectives.reduce.registry import size_text
from mpidist.core import message_tags, settings
from mpidist.core.concurrency import wait_at_most
from mpidist.core.text import numbered_ranks, ranks_text, tell_user, user_call_site
from mpidist.topology import import_mpi, world_topology

# How long rank 0 waits at its end for the totals of the others.
EXIT_SECONDS = 5.0
_POLL_SECONDS = 1e-4
Totals = dict[str, Counter[str]]
"""By operation: calls, nbytes, and nanoseconds: time, for_others, works and waited."""


def record_channel(channel: Channel) -> None:
    """Record the collectives of a channel (collective)."""
    _recorder().add(channel)


@cache
def _recorder() -> Recorder:
    recorder = Recorder(settings.TRACE.read(), settings.REPORT.read(), settings.FLIGHT_RECORD.read())
    before_shutdown(recorder.save)
    on_uncaught_error(recorder.save)
    after_shutdown(_finish)
    return recorder


def _finish() -> None:
    _recorder().finish()


class Recorder:
    """The trace, the totals and the flight record of this process."""

    def __init__(self, traces: str | None, reports: bool, flights: str | None) -> None:
        world = import_mpi().COMM_WORLD
        self._rank, self._ranks = world.Get_rank(), world.Get_size()
        self._reports = reports
        self._totals = _CallTotals()
        self.trace = None if traces is None else TraceFile(traces, self._rank, self._ranks)
        self._flight = None if flights is None else FlightFile(flights, self._rank, self._ranks)
        self._world: Comm | None = None
        self._start = time.monotonic()
        if self.trace is not None:
            record_thread.watch(self.trace)

    def add(self, channel: Channel) -> None:
        """Record a channel (collective)."""
        if self._world is None and channel.size == self._ranks:
            # All ranks are here. A communicator of mpidist's own carries the totals at the end.
            self._world = world_topology().world
        if self._reports or self.trace is not None:
            channel.observers.add(_SpanObserver(self.trace, self._totals, channel.name))
        if self._flight is not None:
            channel.observers.add(_FlightObserver(self._flight, channel))

    def save(self, _error: BaseException | None = None) -> None:
        """Write the trace, with unfinished collectives, because the job may be aborted."""
        if self.trace is not None:
            self.trace.save()

    def finish(self) -> None:
        """Finish the trace and send the totals to rank 0, which reports and merges."""
        is_whole = self.trace is None or self.trace.save(is_last=True)
        by_rank = self._gather_totals()
        if self._rank == 0:
            if self._reports:
                verdicts = "".join(f"\n  {verdict}" for verdict in straggler_watch().found.values())
                tell_user(f"{report_text(by_rank, self._ranks, time.monotonic() - self._start)}{verdicts}")
            if self.trace is not None:
                self._merge(self.trace.folder, is_whole, by_rank)

    def _gather_totals(self) -> dict[int, Totals]:
        """Return, on rank 0, the totals of the ranks that send them in time. Their traces are complete."""
        by_rank = {self._rank: self._totals.by_operation}
        if self._world is None or import_mpi().Is_finalized():
            return by_rank
        mailbox = Mailbox(self._world, message_tags.TALLIES, on_loss=lambda _: None)
        if self._rank:
            mailbox.send(0, self._totals.by_operation)

        def is_over() -> bool:
            by_rank.update(mailbox.received())
            return mailbox.all_sent() and (self._rank > 0 or len(by_rank) == self._ranks)

        wait_at_most(EXIT_SECONDS, is_over, _POLL_SECONDS)
        return by_rank

    def _merge(self, folder: str, is_whole: bool, by_rank: dict[int, Totals]) -> None:
        missing = [rank for rank in range(self._ranks) if rank not in by_rank]
        if missing:
            reason = f"{numbered_ranks(missing)} did not report the end of the program"
        elif not is_whole:
            reason = "the file of rank 0 is incomplete"
        else:
            try:
                merge(folder)
                return
            except (OSError, ValueError) as error:
                reason = str(error)
        command = f"python -m mpidist trace {folder}"
        tell_user(f"the traces are not merged: {reason}. When {folder} has all files, run: {command}")


class _CallTotals:
    """The totals of this rank."""

    def __init__(self) -> None:
        self.by_operation: Totals = {}
        self._lock = threading.Lock()

    def add(self, operation: str, **counts: int) -> None:
        with self._lock:
            self.by_operation.setdefault(operation, Counter()).update(counts)


def _outcome(operation: Operation[object]) -> tuple[State, str]:
    """Return the state of a finished operation, and its error or algorithms."""
    if operation.error is not None:
        return State.FAILED, type(operation.error).__name__
    return State.DONE, ", ".join(operation.algorithms)


class _FlightObserver(Observer):
    """Adds the collectives and messages of one channel, and calls of the fast path."""

    def __init__(self, file: FlightFile, channel: Channel) -> None:
        self._file = file
        self._name = channel.name
        # Number on the communicator and serial number of the last collective.
        self._number = self._serial = 0
        self._messages: dict[Operation[object], int] = {}
        # Not the fast path itself, because the core keeps this function and must not keep itself alive.
        descriptions = channel.executor.fast.descriptions

        def began(signature: int) -> int:
            return self._add(descriptions[signature].text, user_call_site())

        self.sees_fast_path = channel.node.core is not None
        if channel.node.core is not None:
            channel.node.core.record(began, file.calls.finish)

    def _add(self, text: str, call_site: str) -> int:
        self._number += 1
        self._serial = self._file.calls.begin(Kind.COLLECTIVE, self._number, self._name, text, call_site)
        return self._serial

    def issued(self, operation: Operation[object]) -> None:
        if operation.call_site is None:
            operation.call_site = user_call_site()

    def began(self, operation: Operation[object]) -> None:
        if not operation.is_resumed:  # the fast path has added the entry
            self._add(operation.text, operation.call_site or "")

    def ended(self, operation: Operation[object]) -> None:
        self._file.calls.finish(self._serial, *_outcome(operation))

    def message_began(self, operation: Operation[object]) -> None:
        call_site = operation.call_site or ""
        self._messages[operation] = self._file.messages.begin(Kind.MESSAGE, 0, self._name, operation.text, call_site)

    def message_ended(self, operation: Operation[object]) -> None:
        self._file.messages.finish(self._messages.pop(operation), *_outcome(operation))


class _SpanObserver(Observer):
    """Adds the spans of one channel to the trace, and its calls to the totals."""

    def __init__(self, trace: TraceFile | None, totals: _CallTotals, name: str) -> None:
        self._trace = trace
        self._totals = totals
        self._name = name
        self._number = 0
        # Collectives that have not begun: when they were called, and the works finished by then.
        self._asked: WeakKeyDictionary[Operation[object], tuple[int, int]] = WeakKeyDictionary()
        self._works, self._last_work = 0, ""
        # The current collective: its entry and track, when it began, and how long it has waited for other ranks.
        self._call: int | None = None
        self._track, self._began, self._for_others, self._handshakes = "", 0, 0, 0
        # Its current phase, and when a wait for other ranks began.
        self._phase: int | None = None
        self._waits_since: int | None = None
        self._messages: dict[Operation[object], tuple[int, int]] = {}
        # When each track of the wire becomes free.
        self._wires: list[int] = []

    def issued(self, operation: Operation[object]) -> None:
        self._asked[operation] = clock(), self._works

    def began(self, operation: Operation[object]) -> None:
        asked, works = self._asked.pop(operation, (clock(), self._works))
        text, nbytes = operation.text, operation.description.nbytes
        # A blocking call waits for the works before it.
        waited = not operation.is_async and self._works > works
        # Collectives are carried out in the same order on every rank.
        self._number += 1
        self._track = "works" if operation.is_async else ""
        if operation.is_async or waited:
            self._add(Kind.QUEUE, "" if waited else text, asked, self._track, nbytes, end=clock())
        self._began, self._for_others, self._handshakes = clock(), 0, 0
        if waited:
            self._totals.add(self._last_work, waited=self._began - asked)
        self._call = self._add(Kind.COLLECTIVE, text, asked if waited else self._began, self._track, nbytes)

    def phase(self, operation: Operation[object], name: str) -> None:
        if self._call is not None:
            self._end_phase()
            began = clock()
            self._phase = self._add(Kind.PHASE, name, began, self._track)
            self._waits_since = began if name == OTHERS else None

    def met(self, operation: Operation[object]) -> None:
        self._handshakes += 1
        self._end_phase(str(self._handshakes))

    def _end_phase(self, note: str = "") -> None:
        if self._phase is not None:
            if self._waits_since is not None:
                self._for_others += clock() - self._waits_since
            self._finish(self._phase, note=note)
            self._phase = None

    def chunk(self, operation: Operation[object], chunk: Chunk) -> None:
        if self._call is not None:
            end = clock()
            track = self._wire(chunk.start, end) if chunk.nbytes else self._track
            self._add(Kind.CHUNK, chunk.event, chunk.start, track, chunk.nbytes, end=end, number=chunk.number)

    def _wire(self, start: int, end: int) -> str:
        """Return the first wire that is free from ``start``, and occupy it until ``end``."""
        free = next((wire for wire, until in enumerate(self._wires) if until <= start), len(self._wires))
        self._wires[free : free + 1] = [end]
        return f"wire {free}"

    def ended(self, operation: Operation[object]) -> None:
        if self._call is None:
            return
        self._end_phase()
        self._finish(self._call, *_outcome(operation))
        self._call = None
        description, took = operation.description, clock() - self._began
        # Programs do not wait for housekeeping.
        works = took if operation.is_async and description.operation != HOUSEKEEPING else 0
        counts = {"nbytes": description.nbytes, "time": took, "for_others": self._for_others, "works": works}
        self._totals.add(description.operation, calls=1, **counts)
        if operation.is_async:
            self._works += 1
            self._last_work = description.operation

    def waited(self, operation: Operation[object], start: int) -> None:
        end = clock()
        self._totals.add(operation.description.operation, waited=end - start)
        self._add(Kind.WAIT, operation.text, start, end=end)

    def message_began(self, operation: Operation[object]) -> None:
        began, nbytes = clock(), operation.description.nbytes
        self._messages[operation] = self._add(Kind.MESSAGE, operation.text, began, "messages", nbytes), began

    def message_ended(self, operation: Operation[object]) -> None:
        serial, began = self._messages.pop(operation)
        self._finish(serial, *_outcome(operation))
        description = operation.description
        self._totals.add(description.operation, calls=1, nbytes=description.nbytes, time=clock() - began)

    def _add(
        self,
        kind: Kind,
        text: str,
        begin: int,
        track: str = "",
        nbytes: int = 0,
        *,
        end: int = 0,
        number: int | None = None,
    ) -> int:
        if self._trace is None:
            return 0
        number = self._number if number is None else number
        tid = self._trace.track(self._name, track)
        return self._trace.ring.begin(kind, number, self._name, text, nbytes=nbytes, track=tid, begin=begin, end=end)

    def _finish(self, serial: int, state: State = State.DONE, note: str = "") -> None:
        if self._trace is not None:
            self._trace.ring.finish(serial, state, note)
            self._trace.make_room()


# The report -------------------------------------------------------------------------------------------------------


def report_text(by_rank: dict[int, Totals], ranks: int, seconds: float) -> str:
    """Return the report of the ranks that sent their totals, in ``seconds`` of the program."""
    of_ranks = f"{ranks} rank{'s' if ranks > 1 else ''}"
    missing = sorted(set(range(ranks)) - set(by_rank))
    if missing:
        of_ranks = f"{len(by_rank)} of {of_ranks} (without {ranks_text(missing)})"
    by_operation: dict[str, dict[int, Counter[str]]] = {}
    for rank, totals in by_rank.items():
        for operation, counts in totals.items():
            by_operation.setdefault(operation, {})[rank] = counts
    longest_first = sorted(by_operation.items(), key=lambda item: -max(each["time"] for each in item[1].values()))
    rows: list[tuple[str, ...]] = [("operation", "calls", "bytes", "time", "for others", "hidden", "slowest rank")]
    rows += [_row(operation, found) for operation, found in longest_first]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"collectives of {of_ranks}, means over ranks, in {seconds:.1f} s"]
    for first, *middle, last in rows:
        cells = [text.rjust(width) for text, width in zip(middle, widths[1:-1], strict=True)]
        lines.append("  ".join(["", first.ljust(widths[0]), *cells, last]))
    return "\n".join(lines)


def _row(operation: str, by_rank: dict[int, Counter[str]]) -> tuple[str, ...]:
    total: Counter[str] = Counter()
    for counts in by_rank.values():
        total.update(counts)
    ranks = len(by_rank)
    return (
        operation,
        f"{total['calls'] / ranks:.10g}",
        size_text(round(total["nbytes"] / ranks)),
        _time_text(total["time"] / ranks),
        _time_text(total["for_others"] / ranks),
        f"{max(0.0, 1 - total['waited'] / total['works']):.0%}" if total["works"] else "-",
        _slowest(by_rank),
    )


def _slowest(by_rank: dict[int, Counter[str]]) -> str:
    """Return the rank that arrived last, because it waited least."""
    waits = {rank: counts["for_others"] for rank, counts in by_rank.items()}
    slowest = min(waits, key=lambda rank: waits[rank])
    least = waits.pop(slowest)
    longer = sum(waits.values()) / len(waits) - least if waits else 0
    return f"{slowest} (waited for {_time_text(longer)})" if longer else "-"


def _time_text(nanoseconds: float) -> str:
    """Return a time as text.

    >>> _time_text(1234567), _time_text(0)
    ('1.23 ms', '0 us')
    """
    for unit, size in (("s", 1e9), ("ms", 1e6)):
        if nanoseconds >= size:
            return f"{nanoseconds / size:.3g} {unit}"
    return f"{nanoseconds / 1e3:.3g} us"
