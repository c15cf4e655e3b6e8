"""ChannelTrace: spans and totals of a channel's collectives, for MPIDIST_TRACE and MPIDIST_REPORT."""

from __future__ import annotations

import time
from itertools import count
from weakref import WeakKeyDictionary

from mpidist.collectives.channel.observers import OTHERS, Chunk, Observer
from mpidist.collectives.channel.operation import HOUSEKEEPING, Operation
from mpidist.collectives.watch.recorder import OperationTotals, Recorder
from mpidist.collectives.watch.trace_files import Span

# A text longer than this, of very many arrays, is cut.
_TEXT = 300
clock = time.perf_counter_ns


class _TracedCall:
    """A collective on its way."""

    def __init__(self, operation: Operation[object], number: int, track: int, began: int, start: int) -> None:
        self.operation = operation
        self.number = number
        self.track = track
        self.began = began
        self.start = start
        self.phase: str | None = None
        self.phase_start = start
        self.for_others = 0
        self.meetings = 0
        self.is_told = False


class ChannelTrace(Observer):
    """Writes down the collectives of one channel.

    Args:
        recorder: Of this process.
        name: Of the communicator, the same on all its ranks and no other's.
    """

    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder = recorder
        self._name = name
        self._numbers = 0
        self._works = 0
        self._last_work = OperationTotals()
        # Of collectives that have been issued and have not begun: when, and how many works had ended by then.
        self._asked: WeakKeyDictionary[Operation[object], tuple[int, int]] = WeakKeyDictionary()
        self._call: _TracedCall | None = None
        # Messages on their way: their number, and when they began.
        self._messages: dict[Operation[object], tuple[int, int]] = {}
        self._message_numbers = count(1)
        # Those that were written down before their end.
        self._told_messages: set[int] = set()
        # When each of the tracks of the wire is free again.
        self._wire_tracks: list[int] = []
        recorder.add_unfinished(self.tell_unfinished)

    def issued(self, operation: Operation[object]) -> None:
        """See ``Observer``."""
        self._asked[operation] = clock(), self._works

    def began(self, operation: Operation[object]) -> None:
        """See ``Observer``."""
        asked, works = self._asked.pop(operation, (clock(), self._works))
        now = clock()
        # The number counts in the order in which collectives are carried out, which is the same on every rank.
        self._numbers += 1
        track = self._track("works") if operation.is_async else self._recorder.track_of_thread()
        # A blocking call begins with finishing the works before it.
        waited_for_works = not operation.is_async and self._works > works
        call = self._call = _TracedCall(operation, self._numbers, track, now, asked if waited_for_works else now)
        if waited_for_works:
            with self._recorder.lock:
                self._last_work.waited += now - asked
            self._recorder.add(Span("queue", "queue", track, asked, now))
        if operation.is_async:
            name, identity = f"queue {operation.description.title}", f"{self._name} {call.number}"
            self._recorder.add(Span(name, "queue", track, asked, now, self._args(call), identity))

    def ended(self, operation: Operation[object]) -> None:
        """See ``Observer``."""
        call, now = self._call, clock()
        if call is None:
            return
        self._close_phase(call, now)
        self._call = None
        description = operation.description
        totals = self._recorder.totals_of(description.operation)
        with self._recorder.lock:
            totals.calls += 1
            totals.nbytes += description.nbytes
            totals.time += now - call.began
            totals.for_others += call.for_others
            # Nobody waits for news to other ranks in particular.
            totals.works += now - call.began if operation.is_async and description.operation != HOUSEKEEPING else 0
        if operation.is_async:
            self._works += 1
            self._last_work = totals
        self._recorder.add(Span(description.title, "collective", call.track, call.start, now, self._args(call)))
        self._recorder.settle(at_once=operation.error is not None)

    def tell_unfinished(self) -> None:
        """Write down what is unfinished as far as it has got, once."""
        for operation, (number, start) in list(self._messages.items()):
            if number not in self._told_messages:
                self._told_messages.add(number)
                self._add_message(operation, "unfinished ", number, start)
        call = self._call
        if call is not None and not call.is_told:
            call.is_told = True
            args, identity = self._args(call), f"{self._name} {call.number} unfinished"
            args["phase"] = call.phase
            title = f"unfinished {call.operation.description.title}"
            self._recorder.add(Span(title, "unfinished", call.track, call.start, clock(), args, identity))

    def phase(self, operation: Operation[object], name: str) -> None:
        """See ``Observer``."""
        call, now = self._call, clock()
        if call is not None:
            self._close_phase(call, now)
            call.phase, call.phase_start = name, now

    def met(self, operation: Operation[object]) -> None:
        """See ``Observer``: the ranks leave the meeting at the same time, but for microseconds."""
        call, now = self._call, clock()
        if call is not None:
            call.meetings += 1
            self._close_phase(call, now, {"meeting": f"{self._name}, {call.number}, {call.meetings}"})

    def chunk(self, operation: Operation[object], chunk: Chunk) -> None:
        """See ``Observer``."""
        call, now = self._call, clock()
        if call is None:
            return
        if not chunk.nbytes:
            args: dict[str, object] = {"chunk": chunk.number}
            self._recorder.add(Span(chunk.event, "inside the node", call.track, chunk.start, now, args))
            return
        args = {"chunk": chunk.number, "bytes": chunk.nbytes}
        track = self._track(f"wire {self._free_wire_track(chunk.start, now)}")
        self._recorder.add(Span(chunk.event, "between nodes", track, chunk.start, now, args))

    def waited(self, operation: Operation[object], start: int) -> None:
        """See ``Observer``."""
        now, description = clock(), operation.description
        totals = self._recorder.totals_of(description.operation)
        with self._recorder.lock:
            totals.waited += now - start
        args: dict[str, object] = {"text": _shortened(description.text)}
        track = self._recorder.track_of_thread()
        self._recorder.add(Span(f"wait for {description.title}", "wait", track, start, now, args))

    def message_began(self, operation: Operation[object]) -> None:
        """See ``Observer``."""
        self._messages[operation] = next(self._message_numbers), clock()

    def message_ended(self, operation: Operation[object]) -> None:
        """See ``Observer``."""
        number, start = self._messages.pop(operation)
        self._told_messages.discard(number)
        totals = self._recorder.totals_of(operation.description.operation)
        with self._recorder.lock:
            totals.calls += 1
            totals.nbytes += operation.description.nbytes
            totals.time += clock() - start
        self._add_message(operation, "", number, start)
        self._recorder.settle(at_once=operation.error is not None)

    def _add_message(self, operation: Operation[object], prefix: str, number: int, start: int) -> None:
        args: dict[str, object] = {"text": operation.text, "bytes": operation.description.nbytes}
        if operation.error is not None:
            args["error"] = type(operation.error).__name__
        name, track = f"{prefix}{operation.description.title}", self._track("messages")
        identity = f"{self._name} {prefix}message {number}"
        self._recorder.add(Span(name, "message", track, start, clock(), args, identity))

    def _free_wire_track(self, start: int, end: int) -> int:
        """Return a wire's track that is free from ``start``, and take it until ``end``."""
        free = next((track for track, until in enumerate(self._wire_tracks) if until <= start), len(self._wire_tracks))
        self._wire_tracks[free : free + 1] = [end]
        return free

    def _close_phase(self, call: _TracedCall, now: int, args: dict[str, object] | None = None) -> None:
        if call.phase is None:
            return
        if call.phase == OTHERS:
            call.for_others += now - call.phase_start
        self._recorder.add(Span(call.phase, "phase", call.track, call.phase_start, now, args))
        call.phase = None

    def _args(self, call: _TracedCall) -> dict[str, object]:
        operation = call.operation
        args: dict[str, object] = {
            "text": _shortened(operation.text),
            "communicator": self._name,
            "number": call.number,
            "bytes": operation.description.nbytes,
        }
        if operation.algorithms:
            args["algorithm"] = ", ".join(operation.algorithms)
        if operation.error is not None:
            args["error"] = type(operation.error).__name__
        return args

    def _track(self, title: str) -> int:
        return self._recorder.track((self._name, title), f"{title} of {self._name}")


def _shortened(text: str) -> str:
    return text if len(text) <= _TEXT else f"{text[:_TEXT]}..."
