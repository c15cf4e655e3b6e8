"""Progress: one thread that advances started operations while the program computes.

Results are the same without it. It polls only while operations are in flight for which no thread of the program waits,
and sleeps in between: MPI makes progress only inside its calls, but messages handed to the network travel on. Each poll
costs the program processor time, so polls become rarer the longer an operation takes. While the program waits, as
DistributedDataParallel does at the end of a backward pass, the thread polls without sleeping.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import cache

from mpidist.core import settings
from mpidist.core.concurrency import DaemonThread
from mpidist.topology import import_mpi

_log = logging.getLogger("mpidist")
_SHORTEST_NAP_SECONDS = 5e-5
# In this time, less data arrives than the buffers of a network connection hold.
_LONGEST_NAP_SECONDS = 5e-4
# A program that uses less of a core waits. Then the thread may use the core, for a limited time.
_IDLE_SHARE, _LONGEST_HASTE_SECONDS = 0.1, 0.1
# Advances works, and returns the next one.
Move = Callable[[], object | None]


@cache
def mpi_takes_threads(otherwise: str) -> bool:
    """Return whether several threads may call MPI. If not, log the consequence once."""
    mpi = import_mpi()
    if mpi.Query_thread() >= mpi.THREAD_MULTIPLE:
        return True
    _log.warning(
        "mpidist: MPI was started without MPI_THREAD_MULTIPLE, so %s; start it with it "
        "(mpi4py.rc.thread_level = 'multiple'), or import mpidist first",
        otherwise,
    )
    return False


class Progress(DaemonThread[Move]):
    """The thread that advances works. It runs while something is watched."""

    def __init__(self) -> None:
        super().__init__("progress")
        self._nap = _SHORTEST_NAP_SECONDS
        self._last: list[int | None] = []
        # Start of the time in which the works are the same.
        self._since = 0.0
        # Time of the last look at the program, and the processor seconds of its threads by then.
        self._asked = self._used = 0.0
        self._is_allowed: bool | None = None

    def watch(self, move: Move) -> None:
        """Advance works with ``move``. Call it for each new work."""
        if self._is_allowed is None:
            self._is_allowed = settings.PROGRESS_THREAD.read() and mpi_takes_threads(
                "works advance only while the program waits for them"
            )
        if self._is_allowed:
            super().watch(move)

    def look(self) -> float | None:
        """Advance all works, and sleep if any is left."""
        works = [_moved(move) for move in list(self.watched)]
        if works.count(None) == len(works):
            return None
        if works == self._last:
            self._nap = min(1.25 * self._nap, _LONGEST_NAP_SECONDS)
        else:
            self._nap, self._last, self._since = _SHORTEST_NAP_SECONDS, works, time.monotonic()
        in_haste = self._program_waits() and time.monotonic() - self._since < _LONGEST_HASTE_SECONDS
        # Waking earlier would cost a program that computes more than it gains.
        time.sleep(0.0 if in_haste else self._nap)
        return 0.0

    def _program_waits(self) -> bool:
        """Return whether the other threads have hardly used a core since the last call."""
        # A thread that waits for a C++ future does not announce it.
        now, used = time.monotonic(), time.process_time() - time.thread_time()
        waits = used - self._used < _IDLE_SHARE * (now - self._asked)
        self._asked, self._used = now, used
        return waits


def _moved(move: Move) -> int | None:
    """Advance works; return the id of the next one, or None after an error."""
    try:
        work = move()
    except Exception as error:
        # The works raise it, but the program may never wait for them.
        _log.warning("mpidist: %s: %s, while works advanced in the background", type(error).__name__, error)
        return None
    return None if work is None else id(work)


progress = Progress()
