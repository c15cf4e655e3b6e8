"""Observers: what looks on at the collectives of a channel, and the events that it may see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from mpidist.collectives.channel.operation import Operation

# The phases of a collective.
PACK, OTHERS, REDUCE, MOVE, UNPACK = "pack", "wait for others", "reduce", "move", "unpack"


class Chunk(NamedTuple):
    """A part of an array that has been moved on.

    Attributes:
        event: What was done, such as ``"reduce chunk"``.
        number: Of the chunk.
        start: When that began, in nanoseconds of ``time.perf_counter_ns``.
        nbytes: That were between nodes meanwhile; 0 for what is done inside a node.
    """

    event: str
    number: int
    start: int
    nbytes: int


class Observer:
    """Looks on at the collectives of one communicator; a subclass overrides the events that it wants to see.

    Events come in the thread that carries the collective out, one collective at a time, and the ranks wait meanwhile.
    An event that nobody overrides costs nothing. An exception here is one of the collective.

    >>> class Counter(Observer):
    ...     ended_so_far = 0
    ...
    ...     def ended(self, operation):
    ...         self.ended_so_far += 1
    """

    def __repr__(self) -> str:
        return f"<{type(self).__name__}, an observer>"

    def issued(self, operation: Operation[Any]) -> None:
        """Take note of a call by the program, before it waits for its turn; in the thread that calls."""

    def began(self, operation: Operation[Any]) -> None:
        """Take note of the first step."""

    def phase(self, operation: Operation[Any], name: str) -> None:
        """Take note of a new phase: ``"pack"``, ``"wait for others"``, ``"reduce"``, ``"move"`` or ``"unpack"``."""

    def met(self, operation: Operation[Any]) -> None:
        """Take note that all ranks have come."""

    def chunk(self, operation: Operation[Any], chunk: Chunk) -> None:
        """Take note of a chunk of an all-reduce that has been moved on."""

    def ended(self, operation: Operation[Any]) -> None:
        """Take note of the end, with ``operation.error`` if there was one."""

    def waited(self, operation: Operation[Any], start: int) -> None:
        """Take note that the program has waited for a work since ``start``, in nanoseconds of ``perf_counter_ns``."""

    def waits(self, operation: Operation[Any]) -> Exception | None:
        """Return an error for which a long wait is to be given up, or None; called now and then while it lasts."""

    def tells(self, operation: Operation[Any]) -> bool:
        """Whether this observer tells the user that the wait takes longer than ``MPIDIST_WARN_AFTER``."""
        return False

    def explanation(self, operation: Operation[Any]) -> str | None:
        """Return what keeps the others from coming, for the error of a deadline; None where that is not known."""

    def closed(self) -> None:
        """Take note that the communicator is closed or given up."""


class Observers:
    """The observers of one channel: for each event those that override it.

    >>> observers = Observers()
    >>> observers.add(Observer())
    >>> observers.phase
    ()
    """

    def __init__(self) -> None:
        self._all: tuple[Observer, ...] = ()
        self._sort()

    def add(self, observer: Observer) -> None:
        """Have an observer see all events from now on."""
        self._all = (*self._all, observer)
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
        self.closed = self._overriding(Observer.closed)
        self.see_steps = bool(self.began or self.ended)

    def _overriding(self, event: Callable[..., Any]) -> tuple[Callable[..., Any], ...]:
        name = event.__name__
        return tuple(getattr(each, name) for each in self._all if getattr(type(each), name) is not event)
