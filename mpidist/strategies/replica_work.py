"""ReplicaWork: one replica's handle of a collective that several started together."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from mpidist.arrays.streams import Event, Stream
from mpidist.collectives import FinishedWork, PartOfWork, Work
from mpidist.values import select_replica
from mpidist.values.placement import Place


class _Arrival:
    """The results of a collective on the devices of the local replicas.

    Made in the coordinating thread. Whichever replica waits first puts the results of all on their devices: its own by
    way of its current stream, those of the others by way of the streams of the coordinating thread, which they started
    from: the streams that are current in the waiting thread mean nothing to them.

    Args:
        work: The collective.
        places: Of the replicas; at least one is a device.
    """

    def __init__(self, work: Work | FinishedWork | PartOfWork, places: Sequence[Place]) -> None:
        self._work = work
        self._places = places
        self._streams = [_current_stream(place) for place in places]
        self._events = self._record(self._streams)
        self._has_come = False
        self._result: object = None

    def wait(self, replica: int, timeout: float | None) -> object:
        """Return the result; the current stream of the replica's device waits for it."""
        streams = list(self._streams)
        streams[replica] = here = _current_stream(self._places[replica])
        event = self._events[replica]
        if here is not None and event is not None:
            here.wait(event)
        if not self._has_come:
            with ExitStack() as entered:
                for place, stream in zip(self._places, streams, strict=True):
                    # CuPy forgets a stream that a thread was told to use() when it leaves another one.
                    if stream is not None and stream.handle != place.ops.current_stream(place.number).handle:
                        entered.enter_context(stream)
                self._result = self._work.wait(timeout)
            self._events = self._record(streams)
            self._has_come = True
        return self._result

    @staticmethod
    def _record(streams: Sequence[Stream | None]) -> list[Event | None]:
        return [None if stream is None else stream.record() for stream in streams]


class ReplicaWork(PartOfWork):
    """One replica's handle; as ``Work``."""

    def __init__(self, work: Work | FinishedWork | PartOfWork, arrival: _Arrival, replica: int) -> None:
        super().__init__(work, partial(select_replica, replica))
        self._arrival = arrival
        self._replica = replica

    def wait(self, timeout: float | None = None) -> Any:
        """See ``Work``."""
        return self._select(self._arrival.wait(self._replica, timeout))


def replica_works(work: Work | FinishedWork | PartOfWork, places: Sequence[Place]) -> list[PartOfWork]:
    """Return a handle for each local replica, from the coordinating thread."""
    if all(place.is_host for place in places):
        return [PartOfWork(work, partial(select_replica, i)) for i in range(len(places))]
    arrival = _Arrival(work, places)
    return [ReplicaWork(work, arrival, i) for i in range(len(places))]


def finished_work(result: object, gpu: Place | None) -> FinishedWork | PartOfWork:
    """Return the handle of a lone replica's result, on ``gpu`` unless that is None."""
    work = FinishedWork(result)
    return work if gpu is None else replica_works(work, [gpu])[0]


def _current_stream(place: Place) -> Stream | None:
    return None if place.is_host else place.ops.current_stream(place.number)
