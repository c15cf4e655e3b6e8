"""Observers: objects that see the collectives of a channel, event by event."""

from __future__ import annotations

from collections.abc import Callable
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

from mpidist.collectives.channel.operation import Operation

P = ParamSpec("P")
R = TypeVar("R")

# Phases of a collective.
PACK, OTHERS, REDUCE, MOVE, UNPACK = "pack", "wait for others", "reduce", "move", "unpack"


class Chunk(NamedTuple):
    """One step of a part of an array.

    Attributes:
        event: Name of the step, such as ``"reduce chunk"``.
        number: Number of the chunk.
        start: Start of the step, in nanoseconds of ``time.perf_counter_ns``.
        nbytes: Bytes sent between nodes in this step; 0 for a step inside a node.
    """

    event: str
    number: int
    start: int
    nbytes: int


class Observer:
    """Sees the collectives of one communicator. Override the events that you want to see.

    Events are called in the thread that runs the collective, one collective at a time, and the ranks wait until they
    return. Events that no observer overrides cost nothing. An exception in an event is an exception of the collective.

    >>> class Counter(Observer):
    ...     ended_so_far = 0
    ...
    ...     def ended(self, operation):
    ...         self.ended_so_far += 1
    """

    sees_fast_path = False
    """Whether it sees calls of the fast path in another way. If so, the fast path stays enabled."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__}, an observer>"

    def issued(self, operation: Operation[object]) -> None:
        """Handle a call of the program, in its thread, before the collective begins."""

    def began(self, operation: Operation[object]) -> None:
        """Handle the first step."""

    def phase(self, operation: Operation[object], name: str) -> None:
        """Handle the start of a phase.

        Its name is ``"pack"``, ``"wait for others"``, ``"reduce"``, ``"move"`` or ``"unpack"``.
        """

    def met(self, operation: Operation[object]) -> None:
        """Handle the arrival of all ranks."""

    def chunk(self, operation: Operation[object], chunk: Chunk) -> None:
        """Handle one step of a chunk of an all-reduce."""

    def ended(self, operation: Operation[object]) -> None:
        """Handle the end. ``operation.error`` is the error, if any."""

    def waited(self, operation: Operation[object], start: int) -> None:
        """Handle the end of a wait for a started operation.

        Args:
            operation: The operation.
            start: Start of the wait, in nanoseconds of ``time.perf_counter_ns``.
        """

    def waits(self, operation: Operation[object]) -> Exception | None:
        """Return an error that ends a long wait, or None. Called repeatedly during the wait."""

    def tells(self, operation: Operation[object]) -> bool:
        """Return whether this observer reports a wait longer than ``MPIDIST_WARN_AFTER``."""
        return False

    def explanation(self, operation: Operation[object]) -> tuple[str, int] | None:
        """Return a report for the error of a deadline, and the rank that prints it."""

    def message_began(self, operation: Operation[object]) -> None:
        """Handle the start of a send or recv, in the calling thread. An exception here is logged."""

    def message_ended(self, operation: Operation[object]) -> None:
        """Handle the end of a send or recv, in any thread. An exception here is logged."""

    def message_tells(self, operation: Operation[object], rank: int | None) -> bool:
        """Return whether this observer reports a wait for a message longer than ``MPIDIST_WARN_AFTER``.

        Args:
            operation: The message. The observer may set its ``hopeless``.
            rank: The other side; None for any rank.
        """
        return False

    def message_asks(self, operation: Operation[object], rank: int | None) -> None:
        """Find out whether a message is ``hopeless``. Called now and then in a long wait, as :meth:`message_tells`."""

    def closed(self) -> None:
        """Handle the close of the communicator, or its failure. An exception here is logged."""


class Observers:
    """The observers of one channel. For each event, it lists the methods that override it.

    Attributes:
        changed: Called when an observer is added or removed.
        see_calls: Whether an observer sees calls, so that they must not take the fast path.

    >>> observers = Observers()
    >>> observers.add(Observer())
    >>> observers.phase
    ()
    """

    def __init__(self) -> None:
        self._all: tuple[Observer, ...] = ()
        self.changed: Callable[[], None] = lambda: None
        self._sort()

    def add(self, observer: Observer) -> None:
        """Add an observer."""
        self._all = (*self._all, observer)
        self._sort()

    def remove(self, observer: Observer) -> None:
        """Remove an observer, if it is there."""
        self._all = tuple(each for each in self._all if each is not observer)
        self._sort()

    def _sort(self) -> None:
        self.issued = self._overriding(Observer.issued)
        self.began = self._overriding(Observer.began)
        self.phase = self._overriding(Observer.phase)
        self.met = self._overriding(Observer.met)
        self.chunk = self._overriding(Observer.chunk)
        self.ended = self._overriding(Observer.ended)
        self.waited = self._overriding(Observer.waited)
        self.waits = self._overriding(Observer.waits)
        self.tells = self._overriding(Observer.tells)
        self.explanation = self._overriding(Observer.explanation)
        self.message_began = self._overriding(Observer.message_began)
        self.message_ended = self._overriding(Observer.message_ended)
        self.message_tells = self._overriding(Observer.message_tells)
        self.message_asks = self._overriding(Observer.message_asks)
        self.closed = self._overriding(Observer.closed)
        self.see_steps = bool(self.began or self.ended)
        self.see_calls = any(not each.sees_fast_path and _sees_calls(each) for each in self._all)
        self.changed()

    def _overriding(self, event: Callable[Concatenate[Observer, P], R]) -> tuple[Callable[P, R], ...]:
        name = event.__name__
        return tuple(getattr(each, name) for each in self._all if getattr(type(each), name) is not event)


def _sees_calls(observer: Observer) -> bool:
    events = (Observer.issued, Observer.began, Observer.phase, Observer.met, Observer.chunk, Observer.ended)
    return any(getattr(type(observer), event.__name__) is not event for event in events)
