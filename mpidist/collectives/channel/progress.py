"""Progress: one thread that moves works on while the program computes; results are the same as without it.

It acts only while a work waits that nobody waits for, and lets go of the core in between: MPI moves messages inside its
calls only, but what it has handed to the network goes on without it. Each look costs the program some of its core,
so the longer a work takes the rarer the looks become.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Protocol

from mpidist.arrays.current_device import mark_own_thread
from mpidist.core import settings
from mpidist.topology import import_mpi

_log = logging.getLogger("mpidist")
_SHORTEST_NAP_SECONDS = 5e-5
# In this time less passes than the buffers of a network connection hold.
_LONGEST_NAP_SECONDS = 5e-4


class Movable(Protocol):
    """What has works to be moved on."""

    def oldest_work(self) -> object | None:
        """Return the one that is next to be moved on."""

    def move(self) -> None:
        """Move them on, unless another thread is doing so; an error settles all of them."""


class Progress:
    """The thread, there as long as something is watched."""

    def __init__(self) -> None:
        self._watched: list[Movable] = []
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_allowed: bool | None = None

    def watch(self, movable: Movable) -> None:
        """Move the works of ``movable`` from now on; called each time it gets one."""
        if not self._allowed():
            return
        with self._wake:
            if movable not in self._watched:
                self._watched.append(movable)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mpidist-progress", daemon=True)
                self._thread.start()
            self._wake.notify()

    def forget(self, movable: Movable) -> None:
        """Do not move the works of ``movable`` any more; the last one ends the thread."""
        with self._wake:
            if movable in self._watched:
                self._watched.remove(movable)
            if self._watched or self._thread is None:
                return
            thread, self._thread = self._thread, None
            self._wake.notify()
        if thread is not threading.current_thread():
            thread.join()

    def moves(self, movable: Movable) -> bool:
        """Whether works of ``movable`` are moved on."""
        return movable in self._watched

    def stop(self) -> None:
        """End the thread."""
        for movable in list(self._watched):
            self.forget(movable)

    def lose(self) -> None:
        """Begin anew in a forked child, which has no thread."""
        self.__init__()  # type: ignore[misc]

    def _allowed(self) -> bool:
        if self._is_allowed is None:
            mpi = import_mpi()
            self._is_allowed = settings.PROGRESS_THREAD.read()
            if self._is_allowed and mpi.Query_thread() < mpi.THREAD_MULTIPLE:
                self._is_allowed = False
                _log.warning(
                    "mpidist: MPI was started without MPI_THREAD_MULTIPLE, so works move on only while they are waited "
                    "for; start it with it (mpi4py.rc.thread_level = 'multiple'), or import mpidist first"
                )
        return self._is_allowed

    def _run(self) -> None:
        mark_own_thread()
        me = threading.current_thread()
        nap = _SHORTEST_NAP_SECONDS
        last: list[int] = []
        while True:
            with self._wake:
                while self._thread is me and not any(movable.oldest_work() for movable in self._watched):
                    self._wake.wait()
                if self._thread is not me:
                    return
                watched = list(self._watched)
            for movable in watched:
                _move(movable)
            works = [id(movable.oldest_work()) for movable in watched]
            nap = min(1.25 * nap, _LONGEST_NAP_SECONDS) if works == last else _SHORTEST_NAP_SECONDS
            last = works
            time.sleep(nap)


def _move(movable: Movable) -> None:
    try:
        movable.move()
    except Exception as error:
        # The program gets it from its works; it is told here, too, as it may never wait for them.
        _log.warning("mpidist: %s: %s, while works moved on in the background", type(error).__name__, error)


progress = Progress()
os.register_at_fork(after_in_child=progress.lose)
