"""Streams and events: those of the CPU, which are the base of a device's."""

from __future__ import annotations

from types import TracebackType


class Event:
    """A point in a stream; on the CPU it has passed."""

    @property
    def is_done(self) -> bool:
        """Whether everything before the point has happened; never waits. Raises where the device has failed."""
        return True

    def synchronize(self) -> None:
        """Block the calling thread until everything before the point has happened."""


class Stream:
    """Work that a device does in the order given; ``with stream:`` makes it current.

    The one stream of the CPU has never anything left to do.

    Attributes:
        device: The number of the device.
        raw: The stream of CuPy; None for the CPU.
    """

    device: int = 0
    raw: object = None

    @property
    def handle(self) -> int:
        """The number by which NCCL knows the stream."""
        return 0

    @property
    def is_capturing(self) -> bool:
        """Whether the stream records its work as a CUDA graph instead of doing it, or would spoil one."""
        return False

    def record(self, *, blocks: bool = False) -> Event:
        """Return an event after all work given so far.

        A thread sleeps while it waits for an event that ``blocks``.
        """
        return Event()

    def wait(self, event: Event) -> None:
        """Let later work wait for ``event``, of any device, without waiting here; on the CPU the caller waits."""
        event.synchronize()

    def synchronize(self) -> None:
        """Block the calling thread until everything has happened."""

    def __enter__(self) -> object:
        """Make the stream and its device current in this thread."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Return to the stream and device that were current before."""
