"""Progress: one thread that moves works on while the program computes.

Results are the same as without it. It acts only while a work waits that nobody waits for, and lets go of the core in
between: MPI moves messages inside its calls only, but those that it has handed to the network go on without it. Each
look costs the program some of its core, so the longer a work takes the rarer the looks become; while the program waits,
as DistributedDataParallel does at the end of a backward pass, one look follows the other.
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
# In this time less passes than the buffers of a network connection hold.
_LONGEST_NAP_SECONDS = 5e-4
# A program that uses less of a core waits; its core is the works', unless it waits for long.
_IDLE_SHARE, _LONGEST_HASTE_SECONDS = 0.1, 0.1
# Moves works on, and returns the one that is next to be moved on.
Move = Callable[[], object | None]


@cache
def mpi_takes_threads(otherwise: str) -> bool:
    """Return whether several threads may call MPI; if not, log the consequence once."""
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
    """The thread that moves works on, there as long as something is watched."""

    def __init__(self) -> None:
        super().__init__("progress")
        self._nap = _SHORTEST_NAP_SECONDS
        self._last: list[int | None] = []
        # Since when these are the works.
        self._since = 0.0
        # When the program was last asked for, and the seconds for which its threads had used a core by then.
        self._asked = self._used = 0.0
        self._is_allowed: bool | None = None

    def watch(self, move: Move) -> None:
        """Move works with ``move`` from now on; called each time there is a new one."""
        if self._is_allowed is None:
            self._is_allowed = settings.PROGRESS_THREAD.read() and mpi_takes_threads(
                "works move on only while they are waited for"
            )
        if self._is_allowed:
            super().watch(move)

    def look(self) -> float | None:
        """Move all works on, and take a nap if any is left."""
        works = [_moved(move) for move in list(self.watched)]
        if works.count(None) == len(works):
            return None
        if works == self._last:
            self._nap = min(1.25 * self._nap, _LONGEST_NAP_SECONDS)
        else:
            self._nap, self._last, self._since = _SHORTEST_NAP_SECONDS, works, time.monotonic()
        in_haste = self._program_waits() and time.monotonic() - self._since < _LONGEST_HASTE_SECONDS
        # To be woken earlier would cost a program that computes more than it gains.
        time.sleep(0.0 if in_haste else self._nap)
        return 0.0

    def _program_waits(self) -> bool:
        """Return whether the other threads have hardly used a core since the last call.

        One that waits for a future in C++ tells nobody.
        """
        now, used = time.monotonic(), time.process_time() - time.thread_time()
        waits = used - self._used < _IDLE_SHARE * (now - self._asked)
        self._asked, self._used = now, used
        return waits


def _moved(move: Move) -> int | None:
    """Move works on; return the id of the next one, or None after an error."""
    try:
        work = move()
    except Exception as error:
        # The program gets it from its works; it is told here, too, as it may never wait for them.
        _log.warning("mpidist: %s: %s, while works moved on in the background", type(error).__name__, error)
        return None
    return None if work is None else id(work)


progress = Progress()
