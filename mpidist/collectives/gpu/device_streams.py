"""The streams of a communicator on its device, and the order of calls there.

Everything that a communicator does on its device is ordered on one stream; two more copy between the device and the
host beside it. (CuPy's pool hands memory out again by stream, so arrays that are made while the first is current may be
let go as soon as their last use has been put on that stream.)

NCCL's calls on one device have to come in one order on all ranks, also those of several communicators, and a device
does them one after the other. Works of several communicators are moved on as messages arrive, in any order, so each
waits in the queue of its device. The program makes its calls in the same order on every rank.

The host does not wait for NCCL on the device, so it cannot give it up either: a rank that died leaves kernels
of the others waiting, and whoever reads a result waits with them, in CUDA, where no deadline acts. A thread looks at
the oldest call of each communicator now and then, says when it takes long, and ends the job when its deadline is over
or the device has failed: the results that the program has been given would never be right.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager

from mpidist.arrays.device_ops import DeviceOps
from mpidist.arrays.dtypes import Array, DType
from mpidist.arrays.streams import Event, Stream
from mpidist.collectives.gpu.nccl_comm import NcclComm
from mpidist.collectives.mpi.waiting import LOOKS_BEFORE_YIELD_ON_WIRE, Steps, relax
from mpidist.core.concurrency import DaemonThread, Deadline
from mpidist.core.text import tell_user
from mpidist.topology import end_job, import_mpi

_LOOK_SECONDS = 0.25

# Streams and calls ----------------------------------------------------------------------------------------------------


class DeviceStreams:
    """The streams of a communicator on a device.

    Args:
        ops: The operations on its arrays.
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
            self.stream, self.to_host, self.to_device = [ops.stream(device, is_urgent=True) for _ in range(3)]
        self._under_way: deque[tuple[Event, DeviceCall]] = deque()
        self._lock = threading.Lock()
        device_watch.watch(self)

    def on(self) -> AbstractContextManager[None]:
        """Return a context in which the device is current in this thread."""
        return self.ops.on(self.device)

    def empty(self, count: int, dtype: DType) -> Array:
        """Return a flat array that is used on ``stream``."""
        with self.stream:
            return self.ops.empty((count,), dtype, self.device)

    def finish(self, call: DeviceCall) -> None:
        """Note that a call so far is on ``stream``.

        Its arrays are kept until that has run.
        """
        call.done = self.stream.record()
        with self._lock:
            self._under_way.append((call.done, call))
        self.oldest()

    def watch(self, nccl: NcclComm) -> None:
        """Report errors of an NCCL communicator from now on."""
        self._nccl.append(nccl)

    def oldest(self) -> tuple[Event, DeviceCall] | None:
        """Return the call that ends first and its event, or None.

        Lets go of the calls that have ended; from any thread.
        """
        with self.on(), self._lock:
            while self._under_way:
                event, call = self._under_way[0]
                if not event.is_done:
                    return event, call
                self._under_way.popleft()
        return None

    def check_in_step(self) -> None:
        """Raise RuntimeError where NCCL's calls may not be those of the other ranks (see ``NcclShare``)."""
        for nccl in self._nccl:
            nccl.check_in_step()

    def raise_if_failed(self) -> None:
        """Raise NcclFailure if NCCL has found an error here; from any thread."""
        for nccl in self._nccl:
            nccl.check_async_error()

    def abandon(self) -> None:
        """Abort NCCL; unfinished results are lost. May block where other ranks do not as well."""
        for nccl in self._nccl:
            nccl.abort()

    def close(self) -> None:
        """Wait until all work has run, and let go."""
        with self.on():
            for stream in (self.to_host, self.to_device, self.stream):
                stream.synchronize()
        self._under_way.clear()
        device_watch.forget(self)
        self._nccl.clear()


class QueuePlace:
    """A place in the queue of a device, for a call or to start NCCL.

    Args:
        streams: Where it happens.

    Attributes:
        done: When the results are there; None until the work has been handed to the device.
    """

    def __init__(self, streams: DeviceStreams) -> None:
        self.streams = streams
        self.done: Event | None = None
        self._queue = _queues.setdefault(streams.device, DeviceQueue())

    def enter(self) -> None:
        """Have later calls wait on the device until this one leaves."""
        self._queue.enter(self)

    def wait_until_first(self) -> Steps[None]:
        """Yield until it is the first; its streams then follow the calls before."""
        return self._queue.wait_until_first(self)

    def leave(self) -> None:
        """Let later calls use the device; any number of times."""
        self._queue.leave(self)


class DeviceCall(QueuePlace):
    """One collective on a device, and the arrays that it needs there.

    Args:
        streams: Where it happens.
        timeout: Seconds that it may take on the device.

    Attributes:
        inputs: The arrays by their index in the call, contiguous.
        results: The results by index; contiguous, written when ``done`` is.
        caller: The stream whose arrays they are.
        ready: When the inputs are there, and the results may be written.
    """

    def __init__(self, streams: DeviceStreams, timeout: float) -> None:
        super().__init__(streams)
        self.timeout = timeout
        self.inputs: dict[int, Array] = {}
        self.results: dict[int, Array] = {}
        self.caller: Stream = streams.ops.current_stream(streams.device)
        self.ready: Event

    def follow_caller(self) -> None:
        """Have the streams wait for the work on the caller's stream so far."""
        self.ready = self.caller.record()
        self.streams.stream.wait(self.ready)

    def join(self, results: list[Array]) -> list[Array]:
        """Have the current stream of this thread wait for the results, and return them."""
        self.wait_here()
        if self.streams.ops.current_stream(self.streams.device).handle == self.caller.handle:
            # Memory that is let go goes back to the stream that asked for it; that one waits for the last use now.
            self.let_go()
        return results

    def wait_here(self) -> None:
        """Have the current stream of this thread wait for the results."""
        self._wait_for(self.done)

    def _wait_for(self, event: Event | None) -> None:
        if event is not None:
            with self.streams.on():
                self.streams.ops.current_stream(self.streams.device).wait(event)

    def let_go(self) -> None:
        """Keep the arrays no longer."""
        self.inputs, self.results = {}, {}


class DeviceQueue:
    """The calls that have not been handed to one device yet."""

    def __init__(self) -> None:
        self._calls: deque[weakref.ref[QueuePlace]] = deque()
        self._lock = threading.Lock()
        self._last: tuple[DeviceStreams, Event] | None = None

    def enter(self, call: QueuePlace) -> None:
        """Put a new call at the end."""
        with self._lock:
            self._calls.append(weakref.ref(call))

    def wait_until_first(self, call: QueuePlace) -> Steps[None]:
        """Yield until ``call`` is the first; its streams then follow the calls before."""
        looks = 0
        while not self._is_first(call):
            looks += 1
            relax(looks, LOOKS_BEFORE_YIELD_ON_WIRE)
            yield
        last = self._last
        if last is not None and last[0] is not call.streams:
            with call.streams.on():
                call.streams.stream.wait(last[1])

    def leave(self, call: QueuePlace) -> None:
        """Remove a call, so that the next is the first; any number of times."""
        with self._lock:
            if call.done is not None and self._calls and self._calls[0]() is call:
                self._last = (call.streams, call.done)
            self._calls = deque(entry for entry in self._calls if entry() is not call)

    def _is_first(self, call: QueuePlace) -> bool:
        with self._lock:
            while self._calls:
                first = self._calls[0]()
                if first is call:
                    return True
                # One that was dropped, or whose communicator has been given up, does not come any more.
                if first is not None and not first.streams.has_given_up():
                    return False
                self._calls.popleft()
        return True


# By the number of the device.
_queues: dict[int, DeviceQueue] = {}


# The thread that watches ----------------------------------------------------------------------------------------------


class DeviceWatch(DaemonThread[DeviceStreams]):
    """The thread that watches, there as long as there are streams."""

    def __init__(self) -> None:
        super().__init__("device-watch")
        # The oldest call of each at the last look, and its deadline.
        self._under_way: weakref.WeakKeyDictionary[DeviceStreams, tuple[Event, Deadline]] = weakref.WeakKeyDictionary()

    def look(self) -> float:
        """Look at the oldest calls; end the job if one is late or has failed."""
        for streams in list(self.watched):
            try:
                self._look_at(streams)
            except _Late as error:
                self._end_job(streams, str(error))
            except Exception as error:
                self._end_job(streams, f"a collective on its GPU failed: {type(error).__name__}: {error}")
        return _LOOK_SECONDS

    def _look_at(self, streams: DeviceStreams) -> None:
        found, (event, deadline) = streams.oldest(), self._under_way.get(streams, (None, None))
        if found is None:
            self._under_way.pop(streams, None)
        # What the program itself has still to do before the call is no concern of the other ranks.
        elif deadline is None or found[0] is not event or not found[1].ready.is_done:
            self._under_way[streams] = found[0], _deadline(found[1].timeout)
        else:
            streams.raise_if_failed()
            deadline.check()

    def _end_job(self, streams: DeviceStreams, why: str) -> None:
        if streams in self.watched:
            tell_user(f"{_rank()} ends the job: {why}")
            # Without stopping NCCL first: that may want all ranks, and the program would go on with what it finds.
            end_job()


class _Late(Exception):
    """A call that did not end within its deadline."""


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
