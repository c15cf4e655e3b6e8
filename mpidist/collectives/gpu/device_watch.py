"""DeviceWatch: a thread that notices when collectives on GPUs do not end.

The host does not wait for what NCCL does on the device, so it cannot give it up either: a rank that died leaves kernels
of the others waiting, and whoever reads a result waits with them, in CUDA, where no deadline acts. This thread looks at
the oldest call of each communicator now and then, says when it takes long, and ends the job when its deadline is over
or the device has failed: the results that the program has been given would never be right.
"""

from __future__ import annotations

import atexit
from typing import Protocol
from weakref import WeakKeyDictionary

from mpidist.arrays.device_ops import Event
from mpidist.core.daemon_thread import DaemonThread
from mpidist.core.deadline import Deadline
from mpidist.core.wording import tell_user
from mpidist.topology import end_job, import_mpi

_LOOK_SECONDS = 0.25


class _TimedCall(Protocol):
    timeout: float

    @property
    def ready(self) -> Event: ...


class Watchable(Protocol):
    """What has calls under way on a device."""

    def oldest(self) -> tuple[Event, _TimedCall] | None:
        """Return what has to end next, and the call that it ends; None if nothing is under way."""

    def raise_if_failed(self) -> None:
        """Raise if something went wrong on the way."""


class DeviceWatch(DaemonThread[Watchable]):
    """The thread, there as long as something is watched."""

    def __init__(self) -> None:
        super().__init__("device-watch")
        # Of each, what was under way at the last look, and until when it may be.
        self._under_way: WeakKeyDictionary[Watchable, tuple[Event, Deadline]] = WeakKeyDictionary()

    def look(self) -> float:
        """Look at the oldest call of each streams, and end the job where one is late or has failed."""
        for streams in list(self.watched):
            try:
                self._look_at(streams)
            except _Late as error:
                self._end_job(streams, str(error))
            except Exception as error:
                self._end_job(streams, f"a collective on its GPU failed: {type(error).__name__}: {error}")
        return _LOOK_SECONDS

    def _look_at(self, streams: Watchable) -> None:
        found, (event, deadline) = streams.oldest(), self._under_way.get(streams, (None, None))
        if found is None:
            self._under_way.pop(streams, None)
        # What the program itself has still to do before the call is no concern of the other ranks.
        elif deadline is None or found[0] is not event or not found[1].ready.is_done:
            self._under_way[streams] = found[0], _deadline(found[1].timeout)
        else:
            streams.raise_if_failed()
            deadline.check()

    def _end_job(self, streams: Watchable, why: str) -> None:
        if streams in self.watched:
            tell_user(f"{_rank()} ends the job: {why}")
            # Without stopping NCCL first: that may want all ranks, and the program would go on with what it finds.
            end_job()


class _Late(Exception):
    """A call did not end within its deadline."""


def _deadline(timeout: float) -> Deadline:
    return Deadline(
        lambda waited: (
            f"{_rank()} has waited {waited:.0f} s for a collective on its GPU to end; another rank may have died, or "
            "does not use its GPU"
        ),
        lambda _: _Late(
            f"a collective on its GPU did not end within {timeout:g} s. Look for a rank that died or hangs; to allow "
            "more time set MPIDIST_TIMEOUT=SECONDS"
        ),
        timeout,
    )


def _rank() -> str:
    return f"rank {import_mpi().COMM_WORLD.Get_rank()}"


device_watch = DeviceWatch()
atexit.register(device_watch.stop)
