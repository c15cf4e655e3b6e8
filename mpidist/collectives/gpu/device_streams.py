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
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from mpidist.arrays.device_ops import DeviceOps, device_name, is_device_array, ops_of
from mpidist.arrays.dtypes import Array, DType
from mpidist.arrays.streams import Event, Stream
from mpidist.collectives.gpu.nccl_comm import NcclComm
from mpidist.collectives.mpi.waiting import LOOKS_BEFORE_YIELD_ON_WIRE, Steps, relax
from mpidist.collectives.node.memory import Pool
from mpidist.collectives.node.packing import overlaps
from mpidist.collectives.reduce.choice import Choice
from mpidist.collectives.reduce.device_packs import DevicePack
from mpidist.collectives.reduce.plan import ReductionPlan
from mpidist.collectives.reduce.registry import Algorithm, Site
from mpidist.core.concurrency import DaemonThread, Deadline
from mpidist.core.options import ReduceOp
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


def device_of_arrays(arrays: Sequence[Array]) -> tuple[str, int]:
    """Return the kind and number of the device of those ``arrays`` not on the host.

    Raises:
        ValueError: They lie on different devices.
    """
    devices = {(ops_of(array).kind, ops_of(array).device_of(array)) for array in arrays if is_device_array(array)}
    if len(devices) > 1:
        names = " and ".join(sorted({device_name(array) for array in arrays if is_device_array(array)}))
        raise ValueError(f"arrays on {names} in one call; expected all on one device, which a rank keeps to")
    return devices.pop()


class Flat(NamedTuple):
    """A pack on its way through an algorithm.

    Attributes:
        source, target: The flat input and where its reduction goes, often the same.
        spread, starts: Which arrays the target is copied into, and where each begins in it; None where the results are
            views of the target.
    """

    source: Array
    target: Array
    spread: list[Array] | None
    starts: Sequence[int] | None


class ReductionCall(DeviceCall):
    """A reduction on a device.

    Args:
        plan: Of the reduction.
        arrays: All arrays of the call.
        out: Where the results go; None for new arrays.
        streams: See ``DeviceCall``.
        multiple: Of which the bytes of flat arrays have to be.
        timeout: See ``DeviceCall``.

    Attributes:
        plan: See above.
        flats: For each pack.
    """

    def __init__(
        self,
        plan: ReductionPlan,
        arrays: Sequence[Array],
        out: Sequence[Array] | None,
        streams: DeviceStreams,
        multiple: int,
        timeout: float,
    ) -> None:
        super().__init__(streams, timeout)
        self.plan = plan
        self._out = out
        self._delivered: Event | None = None
        indices = [index for index, is_on_device in enumerate(plan.on_device) if is_on_device]
        ops = streams.ops
        with streams.on():
            self.inputs = {index: arrays[index] for index in indices}
            written_early = self._written_early()
            for index in indices:
                if index in written_early or not ops.is_contiguous(arrays[index]):
                    self.inputs[index] = ops.copy(arrays[index])
            self.flats = [self._flat(pack, multiple) for pack in plan.device_packs]
            for index in indices:
                if index not in self.results:
                    self.results[index] = self._result(index)
            self.follow_caller()
            for pack in plan.device_packs:
                pack.compile(ops, divides=plan.divisor is not None)
            for pack, flat in zip(plan.device_packs, self.flats, strict=True):
                self.load(pack, flat)
        self.enter()

    def _written_early(self) -> set[int]:
        """Return the inputs that results may overwrite before they are read.

        Another array's result may, or their own at another address. Those of packs that are copied into a flat array
        have been read by then, and one that is its own result is nobody else's.
        """
        out = self._out
        if out is None:
            return set()
        plain = [index for pack in self.plan.device_packs if pack.is_plain for index in pack.indices]
        moved = [index for index in plain if self.inputs[index] is not out[index]]
        if not moved:
            return set()
        counts = overlaps([self.inputs[index] for index in moved], [out[index] for index in self.inputs])
        return {
            index
            for index, count in zip(moved, counts, strict=True)
            if count > 1 or (count and not self._is_same(self.inputs[index], out[index]))
        }

    def _is_same(self, array: Array, other: Array) -> bool:
        pointer = self.streams.ops.pointer
        return pointer(array) == pointer(other) and (array.strides, array.dtype) == (other.strides, other.dtype)

    def _result(self, index: int) -> Array:
        if self._out is not None and self.streams.ops.is_contiguous(self._out[index]):
            return self._out[index]
        shape, dtype = self.plan.result_signature[index]
        return self.streams.ops.empty(shape, dtype, self.streams.device)

    def _flat(self, pack: DevicePack, multiple: int) -> Flat:
        """Return the memory that a pack takes.

        Memory of results belongs to the caller's stream.
        """
        streams, itemsize = self.streams, pack.dtype.itemsize
        length = -(-pack.nbytes // multiple) * multiple // itemsize
        if pack.is_plain and length == pack.count:
            (index,) = pack.indices
            self.results[index] = result = self._result(index)
            return Flat(self.inputs[index].reshape(-1), result.reshape(-1), None, None)
        if self._out is not None:
            spread = [self._result(index) for index in pack.indices]
            self.results.update(zip(pack.indices, spread, strict=True))
            flat = streams.empty(length, pack.dtype)
            return Flat(flat, flat, spread, pack.starts)
        block = streams.ops.empty((length,), pack.result_dtype, streams.device)
        self.results.update(zip(pack.indices, pack.parts(block, self.plan.shapes), strict=True))
        if pack.dtype == pack.result_dtype:
            return Flat(block, block, None, None)
        flat = streams.empty(length, pack.dtype)
        return Flat(flat, flat, [block], None)

    def load(self, pack: DevicePack, flat: Flat) -> None:
        """Copy the inputs of a pack into its flat array, unless they are that array.

        On the communicator's stream.
        """
        if flat.source is flat.target:
            inputs = [self.inputs[index] for index in pack.indices]
            pack.load(self.streams.ops, inputs, flat.source, self.streams.stream)

    def join(self, results: list[Array]) -> list[Array]:
        """See ``DeviceCall``."""
        streams, out = self.streams, self._out
        apart = [] if out is None else [index for index, result in self.results.items() if result is not out[index]]
        with streams.on():
            if out is not None and apart:
                self.wait_here()
                for index in apart:
                    np.copyto(out[index], self.results[index])
                    results[index] = out[index]
                self._delivered = streams.ops.current_stream(streams.device).record()
            return super().join(results)

    def wait_here(self) -> None:
        """See ``DeviceCall``."""
        self._wait_for(self._delivered or self.done)

    def let_go(self) -> None:
        """See ``DeviceCall``."""
        super().let_go()
        self.flats = []


class DeviceReduction:
    """One pack on its way through an algorithm for arrays on a GPU.

    Args:
        call: The arrays of all packs.
        number: Of the pack in the plan of the call.

    Attributes:
        op: The operation; a mean is a sum that is divided afterwards.
        source, target: The flat input and where its reduction goes, often the same, on the communicator's stream.
    """

    def __init__(self, call: ReductionCall, number: int) -> None:
        plan, self.call = call.plan, call
        self.pack = pack = plan.device_packs[number]
        self.op = ReduceOp.SUM if plan.op is ReduceOp.MEAN else plan.op
        self.options = plan.options
        self.residuals = pack.residuals if plan.options.error_feedback else None
        self.nbytes, self.dtype = pack.nbytes, pack.dtype
        self._flat = call.flats[number]
        self.source, self.target = self._flat.source, self._flat.target

    def copy(self) -> None:
        """Copy the source to the target on the communicator's stream, unless they are one."""
        streams = self.call.streams
        if self.source is not self.target and streams.ops.pointer(self.source) != streams.ops.pointer(self.target):
            streams.ops.unpack(self.source, [self.target], None, streams.stream)

    def store(self) -> list[Array]:
        """Divide the reduction, which is in ``target``, and return the results, on the communicator's stream."""
        streams, flat, divisor = self.call.streams, self._flat, self.call.plan.divisor
        if flat.spread is not None:
            streams.ops.unpack(flat.target, flat.spread, divisor, streams.stream, flat.starts)
        elif divisor is not None:
            streams.ops.unpack(flat.target, [flat.target], divisor, streams.stream)
        streams.finish(self.call)
        return [self.call.results[index] for index in self.pack.indices]


@dataclass(frozen=True)
class DeviceSite(Site):
    """The place of work of an algorithm for arrays on GPUs.

    Attributes:
        comm: The communicator.
        node: Its node of this rank.
        between_nodes: The costs of messages between nodes.
        streams: Of the communicator, on its device.
        on_host: The choice for arrays in host memory.
        pool: Host memory.
    """

    streams: DeviceStreams
    on_host: Choice[Algorithm]
    pool: Pool


class DeviceAlgorithm(Protocol):
    """The interface of an algorithm for arrays on GPUs."""

    def all_reduce(self, job: DeviceReduction) -> Steps[list[Array]]:
        """Reduce over all ranks, which have met.

        Returns the results once all work has been put on the streams.
        """

    def close(self) -> None:
        """Free the memory and communicators of the algorithm (collective), if it has any."""
