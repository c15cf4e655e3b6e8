"""Observers: they look on at the collectives of a channel, event by event."""

from __future__ import annotations

from collections.abc import Callable
from typing import Concatenate, NamedTuple, ParamSpec, TypeVar

from mpidist.collectives.channel.operation import Operation

P = ParamSpec("P")
R = TypeVar("R")

# The phases of a collective.
PACK, OTHERS, REDUCE, MOVE, UNPACK = "pack", "wait for others", "reduce", "move", "unpack"


class Chunk(NamedTuple):
    """A part of an array that has been moved on.

    Attributes:
        event: Name of the step, such as ``"reduce chunk"``.
        number: Of the chunk.
        start: When the step began, in nanoseconds of ``time.perf_counter_ns``.
        nbytes: That were between nodes meanwhile; 0 for a step inside a node.
    """

    event: str
    number: int
    start: int
    nbytes: int


class Observer:
    """Looks on at the collectives of one communicator.

    A subclass overrides the events that it wants to see. Events come in the thread that carries the collective out,
    one collective at a time, and the ranks wait meanwhile. An event that nobody overrides costs nothing. An exception
    here is one of the collective.

    >>> class Counter(Observer):
    ...     ended_so_far = 0
    ...
    ...     def ended(self, operation):
    ...         self.ended_so_far += 1
    """

    def __repr__(self) -> str:
        return f"<{type(self).__name__}, an observer>"

    def issued(self, operation: Operation[object]) -> None:
        """Take note of a call by the program, in the calling thread, before it begins."""

    def began(self, operation: Operation[object]) -> None:
        """Take note of the first step."""

    def phase(self, operation: Operation[object], name: str) -> None:
        """Take note of a new phase.

        It is called ``"pack"``, ``"wait for others"``, ``"reduce"``, ``"move"`` or ``"unpack"``.
        """

    def met(self, operation: Operation[object]) -> None:
        """Take note that all ranks have come."""

    def chunk(self, operation: Operation[object], chunk: Chunk) -> None:
        """Take note of a chunk of an all-reduce that has been moved on."""

    def ended(self, operation: Operation[object]) -> None:
        """Take note of the end, with ``operation.error`` if there was one."""

    def waited(self, operation: Operation[object], start: int) -> None:
        """Take note that the program has waited for a work.

        Args:
            operation: The work's.
            start: When the wait began, in nanoseconds of ``time.perf_counter_ns``.
        """

    def waits(self, operation: Operation[object]) -> Exception | None:
        """Return an error that ends a long wait, or None; called repeatedly while it lasts."""

    def tells(self, operation: Operation[object]) -> bool:
        """Return whether this observer reports a wait longer than ``MPIDIST_WARN_AFTER``."""
        return False

    def explanation(self, operation: Operation[object]) -> tuple[str, int] | None:
        """Return the report for the error of a deadline, and the rank to print it."""

    def message_began(self, operation: Operation[object]) -> None:
        """Take note that a message is to go or come, in the calling thread.

        An exception here is logged.
        """

    def message_ended(self, operation: Operation[object]) -> None:
        """Take note that it has gone or come, in the thread that finds out.

        An exception here is logged.
        """

    def message_tells(self, operation: Operation[object], rank: int | None) -> bool:
        """Return whether this observer reports a wait for a message longer than ``MPIDIST_WARN_AFTER``.

        Args:
            operation: The message's, which the observer may call ``hopeless``.
            rank: The other side; None for any.
        """
        return False

    def message_asks(self, operation: Operation[object], rank: int | None) -> None:
        """Find out whether a message is ``hopeless``, now and then in a long wait.

        Arguments as of :meth:`message_tells`.
        """

    def closed(self) -> None:
        """Take note that the communicator is closed or given up; an exception here is logged."""


class Observers:
    """The observers of one channel: for each event those that override it.

    Attributes:
        changed: Called when there are more or fewer.

    >>> observers = Observers()
    >>> observers.add(Observer())
    >>> observers.phase
    ()
    """

    def __init__(self) -> None:
        self._all: tuple[Observer, ...] = ()
        self._see_short: tuple[Observer, ...] = ()
        self.changed: Callable[[], None] = _nobody_asks
        self._sort()

    def add(self, observer: Observer, *, sees_short: bool = False) -> None:
        """Have an observer see all events from now on.

        Args:
            observer: The observer.
            sees_short: Whether it learns of short calls in another way, which then need not go the long one for it.
        """
        self._all = (*self._all, observer)
        if sees_short:
            self._see_short = (*self._see_short, observer)
        self._sort()

    def remove(self, observer: Observer) -> None:
        """Have an observer see no more events; one that is not there is no error."""
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
        self.see_calls = any(each not in self._see_short and _sees_calls(each) for each in self._all)
        self.changed()

    def _overriding(self, event: Callable[Concatenate[Observer, P], R]) -> tuple[Callable[P, R], ...]:
        name = event.__name__
        return tuple(getattr(each, name) for each in self._all if getattr(type(each), name) is not event)


def _sees_calls(observer: Observer) -> bool:
    events = (Observer.issued, Observer.began, Observer.phase, Observer.met, Observer.chunk, Observer.ended)
    return any(getattr(type(observer), event.__name__) is not event for event in events)


def _nobody_asks() -> None:
    """Do nothing: observers of a channel that is being made."""
