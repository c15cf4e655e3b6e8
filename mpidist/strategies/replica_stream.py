"""ReplicaStream: in which order the work of a replica's thread and of the coordinating thread reaches a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from mpidist.values.placement import Place


class ReplicaStream:
    """The stream of the coordinating thread, on which a replica computes unless it chooses another one.

    Made in the coordinating thread. A replica that has another stream current when it meets the others, or returns,
    has the two wait for one another there, so that values may be handed over. The host never waits.

    Args:
        place: Where the replica computes.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._outer = place.ops.current_stream(place.number)

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Make device and stream current in the replica's thread."""
        with self._place.current(), self._outer:
            yield

    def hand_over(self) -> None:
        """Let the coordinating thread's stream wait for what the replica has started."""
        inner = self._place.ops.current_stream(self._place.number)
        if inner.handle != self._outer.handle:
            self._outer.wait(inner.record())

    def take_back(self) -> None:
        """Let the replica's stream wait for what the coordinating thread has started."""
        inner = self._place.ops.current_stream(self._place.number)
        if inner.handle != self._outer.handle:
            inner.wait(self._outer.record())
