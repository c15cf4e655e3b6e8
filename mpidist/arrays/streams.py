"""Streams and events, and the page-locked memory that they read and write.

The streams of the CPU are the base of a device's.
"""

from __future__ import annotations

import threading
from collections import deque
from types import ModuleType, TracebackType

import numpy as np

from mpidist.arrays.dtypes import Array

# Of copies between the host and GPUs that are on their way at a time.
MOST_STAGED_BYTES = 32 << 20


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
        """Whether the stream records its work as a CUDA graph, or would spoil one."""
        return False

    def record(self, *, blocks: bool = False) -> Event:
        """Return an event after all work given so far.

        A thread sleeps while it waits for an event that ``blocks``.
        """
        return Event()

    def wait(self, event: Event) -> None:
        """Let later work wait for ``event``, of any device.

        Only on the CPU the caller waits.
        """
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


class Staging:
    """Pinned memory that a GPU may still be reading or writing.

    CuPy's pool would hand it out again without looking. Memory that is pinned stays with the pool for good, so there is
    a limit to the bytes on their way at a time.

    Args:
        cupy: The module.
    """

    def __init__(self, cupy: ModuleType) -> None:
        self._cupy = cupy
        self._lock = threading.Lock()
        self._items: deque[tuple[Event, Array]] = deque()

    def pinned(self, nbytes: int) -> Array:
        """Return pinned memory as an array of uint8."""
        if nbytes == 0:
            return np.empty(0, np.uint8)
        return np.frombuffer(self._cupy.cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)

    def room(self, nbytes: int) -> Array:
        """Return pinned memory, once enough earlier copies have arrived."""
        oldest = self._oldest(nbytes)
        while oldest is not None:
            oldest[0].synchronize()
            oldest = self._oldest(nbytes)
        return self.pinned(nbytes)

    def _oldest(self, nbytes: int) -> tuple[Event, Array] | None:
        """Return the oldest copy that has to arrive before ``nbytes`` are sent, or None.

        Lets go of those that have arrived.
        """
        with self._lock:
            while self._items and self._items[0][0].is_done:
                self._items.popleft()
            if sum(memory.nbytes for _, memory in self._items) + nbytes <= MOST_STAGED_BYTES or not self._items:
                return None
            return self._items.popleft()

    def keep(self, event: Event, memory: Array) -> None:
        """Keep ``memory`` until ``event`` is done."""
        with self._lock:
            self._items.append((event, memory))
