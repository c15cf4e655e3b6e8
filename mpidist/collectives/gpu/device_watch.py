"""DeviceWatch: a thread that notices when collectives on GPUs do not end.

The host does not wait for what NCCL does on the device, so it cannot give it up either: a rank that died leaves kernels
of the others waiting, and whoever reads a result waits with them, in CUDA, where no deadline acts. This thread looks at
the oldest call of each communicator now and then, says when it takes long, and ends the job when its deadline is over
or the device has failed: the results that the program has been given would never be right.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from typing import Protocol

from mpidist.arrays.current_device import mark_own_thread
from mpidist.core import settings
from mpidist.topology import end_job, import_mpi

_LOOK_SECONDS = 0.25


class _Event(Protocol):
    @property
    def is_done(self) -> bool: ...


class _Call(Protocol):
    timeout: float

    @property
    def ready(self) -> _Event: ...


class Watchable(Protocol):
    """What has calls under way on a device."""

    def oldest(self) -> tuple[_Event, _Call] | None:
        """Return what has to end next, and the call that it ends; None if nothing is under way."""

    def raise_if_failed(self) -> None:
        """Raise if something went wrong on the way."""


class _Watched:
    """One streams, and since when it is at the same call."""

    def __init__(self, streams: Watchable) -> None:
        self.streams = streams
        self._event: _Event | None = None
        self._since = 0.0
        self._has_warned = False

    def look(self, warn_after: float) -> str | None:
        """Return why the job has to end, None if it has not to."""
        try:
            found = self.streams.oldest()
            now = time.monotonic()
            # What the program itself has still to do before the call is no concern of the other ranks.
            if found is None or found[0] is not self._event or not found[1].ready.is_done:
                self._event, self._since, self._has_warned = None if found is None else found[0], now, False
                return None
            self.streams.raise_if_failed()
        except Exception as error:
            return f"a collective on its GPU failed: {type(error).__name__}: {error}"
        waited, timeout = now - self._since, found[1].timeout
        if waited > timeout:
            return (
                f"a collective on its GPU did not end within {timeout:g} s. Look for a rank that died or hangs; to "
                "allow more time set MPIDIST_TIMEOUT=SECONDS"
            )
        if waited > warn_after and not self._has_warned:
            self._has_warned = True
            _say(
                f"has waited {waited:.0f} s for a collective on its GPU to end; another rank may have died, or does "
                "not use its GPU"
            )
        return None


class DeviceWatch:
    """The thread, there as long as something is watched."""

    def __init__(self) -> None:
        self._watched: dict[int, _Watched] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def watch(self, streams: Watchable) -> None:
        """Watch what is under way in a streams, from now on."""
        with self._lock:
            self._watched.setdefault(id(streams), _Watched(streams))
            if self._thread is None:
                self._stop = threading.Event()
                self._thread = threading.Thread(
                    target=self._run, args=(self._stop,), name="mpidist-device-watch", daemon=True
                )
                self._thread.start()

    def forget(self, streams: Watchable) -> None:
        """Do not watch it any more; the last one ends the thread."""
        with self._lock:
            self._watched.pop(id(streams), None)
            thread = None if self._watched else self._thread
            if thread is not None:
                self._stop.set()
                self._thread = None
        if thread is not None:
            thread.join()

    def stop(self) -> None:
        """End the thread."""
        with self._lock:
            self._watched.clear()
            thread, self._thread = self._thread, None
            self._stop.set()
        if thread is not None:
            thread.join()

    def lose(self) -> None:
        """Begin anew in a forked child, which has no thread."""
        self.__init__()  # type: ignore[misc]

    def _run(self, stop: threading.Event) -> None:
        mark_own_thread()
        warn_after: float = settings.WARN_AFTER.read()
        while not stop.wait(_LOOK_SECONDS):
            with self._lock:
                watched = list(self._watched.values())
            for one in watched:
                why = one.look(warn_after)
                if why is not None and not stop.is_set():
                    _end_job(why)


def _end_job(why: str) -> None:
    _say(f"ends the job: {why}")
    # Without stopping NCCL first: that may want all ranks, and the program would go on with what it finds.
    end_job()


def _say(what: str) -> None:
    print(f"mpidist: rank {import_mpi().COMM_WORLD.Get_rank()} {what}", file=sys.stderr, flush=True)


device_watch = DeviceWatch()
atexit.register(device_watch.stop)
os.register_at_fork(after_in_child=device_watch.lose)
