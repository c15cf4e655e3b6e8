"""Lane: the streams of one communicator on its device, and what is on its way there.

Everything that a communicator does on its device is ordered on one stream; two more copy between the device and the
host beside it. (CuPy's pool hands memory out again by stream, so what is made while the first is current may be let go
as soon as its last use has been put on that stream.)
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager

from mpidist.arrays.convert import Array
from mpidist.arrays.device_ops import DeviceOps, Event
from mpidist.arrays.dtypes import DType
from mpidist.collectives.device_call import DeviceCall
from mpidist.collectives.device_watch import device_watch
from mpidist.collectives.nccl import NcclComm


class Lane:
    """The streams of a communicator on a device.

    Args:
        ops: What handles arrays on it.
        device: Its number.
        has_given_up: Whether the communicator carries out no more calls, also of those that other ranks do.

    Attributes:
        stream: On which all work is ordered.
        to_host, to_device: For copies. All three go before the program's own work: other ranks wait for theirs.
    """

    def __init__(self, ops: DeviceOps, device: int, has_given_up: Callable[[], bool] = lambda: False) -> None:
        self.ops = ops
        self.device = device
        self.has_given_up = has_given_up
        self._nccl: list[NcclComm] = []
        with ops.on(device):
            self.stream = ops.stream(device, is_urgent=True)
            self.to_host = ops.stream(device, is_urgent=True)
            self.to_device = ops.stream(device, is_urgent=True)
        self._under_way: deque[tuple[Event, DeviceCall]] = deque()
        self._lock = threading.Lock()
        device_watch.watch(self)

    def on(self) -> AbstractContextManager[None]:
        """Return a block in which the device is current in this thread."""
        return self.ops.on(self.device)

    def empty(self, count: int, dtype: DType) -> Array:
        """Return a flat array that is used on ``stream``."""
        with self.stream:
            return self.ops.empty((count,), dtype, self.device)

    def finish(self, call: DeviceCall) -> None:
        """Note that all of a call so far has been put on ``stream``; its arrays are kept until that has run."""
        call.done = self.stream.record()
        with self._lock:
            self._under_way.append((call.done, call))
        self.oldest()

    def watch(self, nccl: NcclComm) -> None:
        """See to it that NCCL's errors are noticed, from now on (see ``device_watch``)."""
        self._nccl.append(nccl)

    def oldest(self) -> tuple[Event, DeviceCall] | None:
        """Return what ends first of all that is under way, and let go of what has ended; from any thread."""
        with self.on(), self._lock:
            while self._under_way:
                event, call = self._under_way[0]
                if not event.is_done:
                    return event, call
                self._under_way.popleft()
        return None

    def check_in_step(self) -> None:
        """Raise RuntimeError where NCCL's calls may not be those of the other ranks (see ``nccl_sharing``)."""
        for nccl in self._nccl:
            nccl.check_in_step()

    def raise_if_failed(self) -> None:
        """Raise NcclFailure if NCCL has found an error here; from any thread."""
        for nccl in self._nccl:
            nccl.check_async_error()

    def abandon(self) -> None:
        """Stop what NCCL does here; what is under way never ends right. May block where other ranks do not as well."""
        for nccl in self._nccl:
            nccl.abort()

    def synchronize(self) -> None:
        """Wait until everything has run; blocks."""
        with self.on():
            for stream in (self.to_host, self.to_device, self.stream):
                stream.synchronize()
        self._under_way.clear()

    def close(self) -> None:
        """Wait until everything has run, and let go."""
        self.synchronize()
        device_watch.forget(self)
        self._nccl.clear()
