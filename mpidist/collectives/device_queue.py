"""The order in which calls use NCCL on a device: that in which the program made them, over all communicators.

NCCL's calls on one device have to come in one order on all ranks, also those of several communicators, and a device
does them one after the other. Works of several communicators are moved on as messages arrive, in any order, so each
waits for its turn. What holds on every rank is that the program makes its calls in the same order.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING

from mpidist.collectives.waiting import LOOKS_BEFORE_YIELD_ON_WIRE, Steps, relax

if TYPE_CHECKING:
    from mpidist.arrays.device_ops import Event
    from mpidist.collectives.device_call import DeviceCall
    from mpidist.collectives.lane import Lane


class Turn:
    """A turn among the calls of a device for what is none: to start NCCL, or to close it.

    Args:
        lane: Where it happens.
    """

    done: Event | None = None

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.is_void = lane.has_given_up


class DeviceQueue:
    """The calls that have not been handed to one device yet."""

    def __init__(self) -> None:
        self._calls: deque[weakref.ref[DeviceCall | Turn]] = deque()
        self._lock = threading.Lock()
        self._last: tuple[Lane, Event] | None = None

    def enter(self, call: DeviceCall | Turn) -> None:
        """Put a new call at the end."""
        with self._lock:
            self._calls.append(weakref.ref(call))

    def turn(self, call: DeviceCall | Turn) -> Steps[None]:
        """Yield until it is the turn of ``call``; its lane then follows whatever came before."""
        looks = 0
        while not self._is_first(call):
            looks += 1
            relax(looks, LOOKS_BEFORE_YIELD_ON_WIRE)
            yield
        last = self._last
        if last is not None and last[0] is not call.lane:
            with call.lane.on():
                call.lane.stream.wait(last[1])

    def leave(self, call: DeviceCall | Turn) -> None:
        """Let the next call have its turn; any number of times."""
        with self._lock:
            if call.done is not None and self._calls and self._calls[0]() is call:
                self._last = (call.lane, call.done)
            self._calls = deque(entry for entry in self._calls if entry() is not call)

    def _is_first(self, call: DeviceCall | Turn) -> bool:
        with self._lock:
            while self._calls:
                first = self._calls[0]()
                if first is call:
                    return True
                # One that was dropped, or whose communicator has been given up, does not come any more.
                if first is not None and not first.is_void():
                    return False
                self._calls.popleft()
        return True


_queues: dict[int, DeviceQueue] = {}


def queue_of(device: int) -> DeviceQueue:
    """Return the queue of a device of this process."""
    return _queues.setdefault(device, DeviceQueue())
