"""Trace: watches the collectives of this process, where MPIDIST_TRACE, MPIDIST_REPORT or MPIDIST_FLIGHT_RECORD asks.

A channel that is watched has a :class:`ChannelTrace`, any other has None. What is watched is wrapped (the steps of a
collective, the handshake, works, wires), so that what is not watched takes no notice.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from mpidist.arrays.convert import Array
from mpidist.collectives.channel.handshake import Handshake
from mpidist.collectives.channel.work import Work
from mpidist.collectives.mpi.waiting import Steps
from mpidist.collectives.watch.recorder import Recorder, recorder_for
from mpidist.collectives.watch.report import Tally
from mpidist.collectives.watch.trace_file import Span
from mpidist.core.callsite import user_call_site
from mpidist.core.enums import ReduceOp

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpidist.collectives.node.board import Board
    from mpidist.collectives.node.pipeline import Wire

T = TypeVar("T")

# The phases of a collective.
PACK, OTHERS, REDUCE, MOVE, UNPACK = "pack", "wait for others", "reduce", "move", "unpack"
_OPERATIONS = (
    *("all_reduce", "reduce", "reduce_scatter", "all_gather", "broadcast", "barrier"),
    *("all_gather_object", "broadcast_object"),
)
_OTHER = "housekeeping"
# A text longer than this, of very many arrays, is cut.
_TEXT = 300
# Values whose size is kept; more than there are plans.
_MOST_SIZES = 4096
clock = time.perf_counter_ns


def watch(comm: MPI.Intracomm, name: str) -> ChannelTrace | None:
    """Return what watches the collectives on ``comm``, called ``name``; None if nothing is to be seen (collective)."""
    recorder = recorder_for(comm)
    if recorder is None:
        return None
    trace = ChannelTrace(recorder, name)
    recorder.watched.add(trace)
    return trace


def _name(text: str) -> str:
    """Return what a collective is, without what it is of, of the text that describes it."""
    return text.split(" of ", 1)[0]


def _operation(text: str) -> str:
    """Return what a collective counts as in the report."""
    word = text.split(" ", 1)[0]
    return word if word in _OPERATIONS else _OTHER


def _shortened(text: str) -> str:
    return text if len(text) <= _TEXT else f"{text[:_TEXT]}..."


class _Call:
    """A collective on its way."""

    def __init__(self, text: str, number: int, nbytes: int, track: int, start: int) -> None:
        self.text = text
        self.name = _name(text)
        self.operation = _operation(text)
        self.number = number
        self.nbytes = nbytes
        self.track = track
        self.start = start
        self.phase: str | None = None
        self.phase_start = start
        self.algorithms: list[str] = []
        self.for_others = 0
        self.meetings = 0
        self.error: str | None = None
        self.is_told = False


class ChannelTrace:
    """Watches the collectives of one channel, which carries out one at a time.

    Args:
        recorder: Of this process.
        name: Of the communicator, the same on all its ranks and no other's.
    """

    def __init__(self, recorder: Recorder, name: str) -> None:
        self._recorder = recorder
        self._name = name
        self._sizes: dict[str, int] = {}
        self._numbers = 0
        self._works = 0
        self._last_work = Tally()
        self._call: _Call | None = None
        self._lanes: list[bool] = []

    # Calls ------------------------------------------------------------------------------------------------------

    def blocking(self, steps: Steps[T], text: str) -> Steps[T]:
        """Return ``steps`` of a blocking call so that they are seen."""
        call_site = "" if self._recorder.flight is None else user_call_site()
        return self._watched(steps, text, call_site, clock(), self._works, is_work=False)

    def work(self, *args: Any) -> Work:
        """Return a Work, made from the same arguments, that is seen."""
        return WatchedWork(self, *args)

    def submitted(self, steps: Steps[T], text: str, call_site: str) -> Steps[T]:
        """Return ``steps`` of a work so that they are seen."""
        return self._watched(steps, text, call_site, clock(), self._works, is_work=True)

    def _watched(self, steps: Steps[T], text: str, call_site: str, asked: int, works: int, is_work: bool) -> Steps[T]:
        now = clock()
        # The number counts in the order in which collectives are carried out, which is the same on every rank.
        self._numbers += 1
        track = self._track("works") if is_work else self._recorder.track_of_thread()
        # A blocking call begins with finishing the works before it.
        waited_for_works = not is_work and self._works > works
        start = asked if waited_for_works else now
        call = self._call = _Call(text, self._numbers, self._sizes.get(text, 0), track, start)
        if waited_for_works:
            with self._recorder.lock:
                self._last_work.waited += now - asked
            self._span("queue", "queue", track, asked, now)
        if is_work:
            args = self._args(call)
            self._span(f"queue {call.name}", "queue", track, asked, now, args, f"{self._name} {call.number}")
        flight = self._recorder.flight
        serial = 0 if flight is None else flight.begin(self._name, call.number, text, call_site)
        try:
            return (yield from steps)
        except GeneratorExit:  # the program ends while it is on its way, and the flight record shall say so
            serial = 0
            raise
        except BaseException as error:
            call.error = type(error).__name__
            raise
        finally:
            if flight is not None and serial:
                flight.end(serial, failed=call.error is not None)
            self._end(call, now, is_work)

    def _end(self, call: _Call, began: int, is_work: bool) -> None:
        now = clock()
        self._close_phase(call, now)
        self._call = None
        tally = self._recorder.tally(call.operation)
        with self._recorder.lock:
            tally.calls += 1
            tally.nbytes += call.nbytes
            tally.time += now - began
            tally.for_others += call.for_others
            # Nobody waits for news to other ranks in particular.
            tally.works += now - began if is_work and call.operation != _OTHER else 0
        if is_work:
            self._works += 1
            self._last_work = tally
        self._span(call.name, "collective", call.track, call.start, now, self._args(call))
        self._recorder.settle(at_once=call.error is not None)

    def tell_unfinished(self) -> None:
        """Record the collective that is on its way, as far as it has got; once."""
        call = self._call
        if call is not None and not call.is_told:
            call.is_told = True
            args, identity = self._args(call), f"{self._name} {call.number} unfinished"
            args["phase"] = call.phase
            self._span(f"unfinished {call.name}", "unfinished", call.track, call.start, clock(), args, identity)

    def _args(self, call: _Call) -> dict[str, Any]:
        args = {"text": _shortened(call.text), "communicator": self._name, "number": call.number, "bytes": call.nbytes}
        if call.algorithms:
            args["algorithm"] = ", ".join(call.algorithms)
        if call.error is not None:
            args["error"] = call.error
        return args

    def _span(self, *args: Any) -> None:
        self._recorder.add(Span(*args))

    def _track(self, what: str) -> int:
        return self._recorder.track((self._name, what), f"{what} of {self._name}")

    # What is inside a call, said by its steps; outside of one, when a rank takes leave, there is nothing to tell ----

    def planned(self, text: str, nbytes: int) -> None:
        """Note the size of the values of all collectives of this text."""
        if len(self._sizes) >= _MOST_SIZES:
            del self._sizes[next(iter(self._sizes))]
        self._sizes[text] = nbytes

    def moves(self, nbytes: int) -> None:
        """Note the size of the values, and that they move from now on."""
        if self._call is not None:
            self._call.nbytes = nbytes
            self.phase(MOVE)

    def took(self, algorithm: str) -> None:
        """Note which algorithm was taken."""
        call = self._call
        if call is not None and algorithm not in call.algorithms:
            call.algorithms.append(algorithm)

    def phase(self, name: str | None) -> None:
        """End the phase of the collective that is on its way, and begin another; None for nothing to tell."""
        call, now = self._call, clock()
        if call is not None:
            self._close_phase(call, now)
            call.phase, call.phase_start = name, now

    def met(self) -> None:
        """End the wait for all ranks of the communicator: they leave it at the same time, but for microseconds."""
        call, now = self._call, clock()
        if call is not None:
            call.meetings += 1
            self._close_phase(call, now, {"meeting": f"{self._name}, {call.number}, {call.meetings}"})

    def _close_phase(self, call: _Call, now: int, args: dict[str, Any] | None = None) -> None:
        if call.phase is None:
            return
        if call.phase == OTHERS:
            call.for_others += now - call.phase_start
        self._span(call.phase, "phase", call.track, call.phase_start, now, args)
        call.phase = None

    def chunk(self, what: str, chunk: int, start: int) -> None:
        """Record what was done to a chunk inside the node since ``start``."""
        if self._call is not None:
            self._span(what, "inside the node", self._call.track, start, clock(), {"chunk": chunk})

    @contextmanager
    def on_wire(self, chunk: int, nbytes: int) -> Iterator[None]:
        """Record that a chunk is on the wire during a block; several are, each in a lane of its own."""
        start = clock()
        lane = self._lanes.index(False) if False in self._lanes else len(self._lanes)
        self._lanes[lane : lane + 1] = [True]
        try:
            yield
        finally:
            self._lanes[lane] = False
            args = {"chunk": chunk, "bytes": nbytes}
            self._span("chunk", "between nodes", self._track(f"wire {lane}"), start, clock(), args)

    def waited(self, text: str, start: int) -> None:
        """Record that the program has waited for a work."""
        now = clock()
        tally = self._recorder.tally(_operation(text))
        with self._recorder.lock:
            tally.waited += now - start
        track = self._recorder.track_of_thread()
        self._span(f"wait for {_name(text)}", "wait", track, start, now, {"text": _shortened(text)})


class WatchedHandshake(Handshake):
    """A handshake that is seen.

    Args:
        comm: The private communicator.
        board: Of the node of this rank.
        trace: Of the channel.
    """

    def __init__(self, comm: MPI.Intracomm, board: Board, trace: ChannelTrace) -> None:
        super().__init__(comm, board)
        self._trace = trace

    def payload(self, count: int) -> Array:
        """See ``Handshake``."""
        self._trace.took("handshake")
        return super().payload(count)

    def begin(self, identity: int) -> bool:
        """See ``Handshake``."""
        self._trace.phase(OTHERS)
        is_done = super().begin(identity)
        if is_done:
            self._trace.met()
        return is_done

    def finish(self, text: str, call_site: str | None) -> Steps[None]:
        """See ``Handshake``."""
        yield from super().finish(text, call_site)
        self._trace.met()


class WatchedWork(Work):
    """A work that is seen: how long the program waits for it.

    Args:
        trace: Of the channel.
        channel, steps, text, call_site, timeout: See ``Work``.
    """

    def __init__(
        self, trace: ChannelTrace, channel: Any, steps: Steps[Any], text: str, call_site: str, *args: Any
    ) -> None:
        super().__init__(channel, trace.submitted(steps, text, call_site), text, call_site, *args)
        self._trace = trace

    def wait(self, timeout: float | None = None) -> Any:
        """See ``Work``."""
        if self.is_done:
            return super().wait(timeout)
        start = clock()
        try:
            return super().wait(timeout)
        finally:
            self._trace.waited(self.text, start)


class WatchedWire:
    """A wire that is seen: how long each chunk is on it.

    Args:
        wire: The wire.
        trace: Of the channel.
    """

    def __init__(self, wire: Wire, trace: ChannelTrace) -> None:
        self._wire = wire
        self._trace = trace

    def all_reduce(self, source: Array, flat: Array, op: ReduceOp, chunk: int, residual: Array | None) -> Steps[None]:
        """See ``Wire``."""
        with self._trace.on_wire(chunk, flat.nbytes):
            yield from self._wire.all_reduce(source, flat, op, chunk, residual)
