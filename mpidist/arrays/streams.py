"""Streams and events of a device: the interface, and the one stream of the CPU."""

from __future__ import annotations

from types import TracebackType
from typing import Protocol


class Event(Protocol):
    """A point in a stream."""

    @property
    def is_done(self) -> bool:
        """Whether everything before the point has happened; never waits. Raises where the device has failed."""
        ...

    def synchronize(self) -> None:
        """Block the calling thread until everything before the point has happened."""
        ...


class Stream(Protocol):
    """Work that a device does in the order given; ``with stream:`` makes it current.

    Attributes:
        device: The number of the device.
    """

    device: int

    @property
    def handle(self) -> int:
        """The number by which NCCL knows the stream."""
        ...

    @property
    def raw(self) -> object:
        """The stream of CuPy; None for the CPU."""
        ...

    @property
    def is_capturing(self) -> bool:
        """Whether the stream records its work as a CUDA graph instead of doing it."""
        ...

    def record(self, *, blocks: bool = False) -> Event:
        """Return an event after all work given so far.

        A thread sleeps while it waits for an event that ``blocks``.
        """
        ...

    def wait(self, event: Event) -> None:
        """Let later work wait for ``event``, of any device, without waiting here."""
        ...

    def synchronize(self) -> None:
        """Block the calling thread until everything has happened."""
        ...

    def __enter__(self) -> object:
        """Make the stream and its device current in this thread."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Return to the stream and device that were current before."""
        ...


class HostEvent:
    """A point in the past."""

    is_done = True

    def synchronize(self) -> None:
        """Return at once."""


class HostStream:
    """The one stream of the CPU, on which nothing is ever left to do."""

    handle = 0
    device = 0
    raw = None
    is_capturing = False

    def record(self, *, blocks: bool = False) -> HostEvent:
        """Return an event that is done."""
        return HostEvent()

    def wait(self, event: Event) -> None:
        """Wait for ``event``, which may be of a GPU; on the CPU the caller waits."""
        event.synchronize()

    def synchronize(self) -> None:
        """Return at once."""

    def __enter__(self) -> HostStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None
