"""Order the device work of a communicator: streams, queue, watchdog and reductions.

A communicator orders all its device work on one stream. Two more streams copy to and from the host. CuPy's pool reuses
memory per stream, so an array allocated on a stream may be freed as soon as its last use is enqueued there.

NCCL requires the same order of calls on all ranks, also across communicators that share a GPU. Asynchronous works
advance in any order, as messages arrive, so each call waits in the queue of its device. The program makes its calls in
the same order on every rank.

Inputs depend on the caller's current stream. The collective runs on the communicator's streams, perhaps in another
thread. The caller's stream waits for the results, never the host. Steps that can fail on one rank alone, such as an
allocation, run before the handshake, because afterwards the other ranks wait on their devices.

The host does not wait for NCCL, so it cannot cancel a call either. If a rank dies, the kernels of the others never
finish, and a thread that reads a result blocks inside CUDA, beyond any deadline. A watchdog thread checks the oldest
call of each communicator. It reports long waits, and ends the job after the deadline or when the device has failed.
"""

from __future__ import annotations

import atexit
import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple, Protocol

import numpy as np

from mpidist.arrays.device_ops import device_name, gpu_ops, is_device_array, ops_of
from mpidist.arrays.dtypes import Array, DType
from mpidist.arrays.streams import Event, Stream
from mpidist.collectives.channel.operation import Signature
from mpidist.collectives.gpu.nccl import NcclComm, nccl_dtype
from mpidist.collectives.mpi.waiting import LOOKS_BEFORE_YIELD_ON_WIRE, Steps, relax
from mpidist.collectives.node.memory import Pool, pieces
from mpidist.collectives.node.packing import Pack, overlaps
from mpidist.collectives.reduce.choice import Choice
from mpidist.collectives.reduce.plan import DeviceGroup
from mpidist.collectives.reduce.registry import Algorithm, Site
from mpidist.core.concurrency import DaemonThread, Deadline
from mpidist.core.options import CommunicationOptions, ReduceOp
from mpidist.core.text import tell_user
from mpidist.topology import end_job, import_mpi

_LOOK_SECONDS = 0.25


class DeviceStreams:
    """Hold the streams of a communicator on one device.

    Attributes:
        has_given_up: Returns True if the communicator skips calls that other ranks make.
        stream: Orders all work.
        to_host, to_device: Copy streams. All three have priority over the program's work, because other ranks wait.
        nccl: NCCL communicators to check for errors.
    """

    def __init__(self, device: int, has_given_up: Callable[[], bool] = lambda: False) -> None:
        self.ops, self.device, self.has_given_up = gpu_ops(), device, has_given_up
        self.nccl: list[NcclComm] = []
        with self.on():
            self.stream, self.to_host, self.to_device = [self.ops.stream(device, is_urgent=True) for _ in range(3)]
        self._in_flight: deque[tuple[Event, DeviceCall]] = deque()
        self._lock = threading.Lock()
        device_watch.watch(self)

    def on(self) -> AbstractContextManager[None]:
        """Return a context in which the device is current in this thread."""
        return self.ops.on(self.device)

    def empty(self, count: int, dtype: DType) -> Array:
        """Allocate a flat array for use on ``stream``."""
        with self.stream:
            return self.ops.empty((count,), dtype, self.device)

    def finish(self, call: DeviceCall) -> None:
        """Record an event after a call on ``stream``, and keep its arrays until then."""
        call.done = self.stream.record()
        with self._lock:
            self._in_flight.append((call.done, call))
        self.oldest()

    def oldest(self) -> DeviceCall | None:
        """Return the oldest unfinished call, or None (thread-safe)."""
        with self.on(), self._lock:
            while self._in_flight:
                event, call = self._in_flight[0]
                if not event.is_done:
                    return call
                self._in_flight.popleft()
        return None

    def check_in_step(self) -> None:
        """Raise RuntimeError if a sharer of an NCCL communicator failed."""
        for nccl in self.nccl:
            nccl.check_in_step()

    def abandon(self) -> None:
        """Abort NCCL and lose unfinished results. May block until other ranks abort too."""
        for nccl in self.nccl:
            nccl.abort()

    def close(self) -> None:
        """Wait until all work has run, and drop the NCCL communicators."""
        with self.on():
            for stream in (self.to_host, self.to_device, self.stream):
                stream.synchronize()
        self._in_flight.clear()
        device_watch.forget(self)
        self.nccl.clear()


# The queue of a device ------------------------------------------------------------------------------------------------


class DeviceQueue:
    """Queue the calls of one device that are not enqueued on it yet. ``last`` is the last call that was."""

    def __init__(self) -> None:
        self.calls: deque[weakref.ref[QueuePlace]] = deque()
        self.lock = threading.Lock()
        self.last: tuple[DeviceStreams, Event] | None = None


# Keyed by device number.
_queues: dict[int, DeviceQueue] = {}


class QueuePlace:
    """Reserve a position in a device's queue, for a call or to start NCCL.

    Attributes:
        done: Event of the results, or None until the work is enqueued.
    """

    def __init__(self, streams: DeviceStreams) -> None:
        self.streams = streams
        self.done: Event | None = None
        self._queue = _queues.setdefault(streams.device, DeviceQueue())

    def enter(self) -> None:
        """Block later calls on the device until this position is released."""
        with self._queue.lock:
            self._queue.calls.append(weakref.ref(self))

    def wait_until_first(self) -> Steps[None]:
        """Yield until this position is first, then order its streams after earlier calls."""
        failed_polls = 0
        while not self._is_first():
            failed_polls += 1
            relax(failed_polls, LOOKS_BEFORE_YIELD_ON_WIRE)
            yield
        last = self._queue.last
        if last is not None and last[0] is not self.streams:
            with self.streams.on():
                self.streams.stream.wait(last[1])

    def leave(self) -> None:
        """Release the position (idempotent)."""
        queue = self._queue
        with queue.lock:
            if self.done is not None and queue.calls and queue.calls[0]() is self:
                queue.last = (self.streams, self.done)
            queue.calls = deque(entry for entry in queue.calls if entry() is not self)

    def _is_first(self) -> bool:
        with self._queue.lock:
            calls = self._queue.calls
            while calls:
                first = calls[0]()
                if first is self:
                    return True
                # Skip dropped calls and calls of failed communicators, because they never run.
                if first is not None and not first.streams.has_given_up():
                    return False
                calls.popleft()
        return True


def device_of_arrays(arrays: Sequence[Array]) -> tuple[str, int]:
    """Return the kind and number of the device of the non-host ``arrays``, or raise ValueError."""
    on_device = [array for array in arrays if is_device_array(array)]
    devices = {(ops_of(array).kind, ops_of(array).device_of(array)) for array in on_device}
    if len(devices) > 1:
        names = " and ".join(sorted({device_name(array) for array in on_device}))
        raise ValueError(f"one call has arrays on {names}. Pass arrays on one device")
    return devices.pop()


# The watchdog thread --------------------------------------------------------------------------------------------------


class DeviceWatch(DaemonThread[DeviceStreams]):
    """Watch the devices while any communicator has streams. End the job if a call is late or failed."""

    def __init__(self) -> None:
        super().__init__("device-watch")

    def look(self) -> float:
        """Check the oldest calls."""
        for streams in list(self.watched):
            try:
                self._look_at(streams)
            except Exception as error:
                failed = f"a collective on its GPU failed: {type(error).__name__}: {error}"
                if streams in self.watched:
                    tell_user(f"{_rank()} ends the job: {error if isinstance(error, TimeoutError) else failed}")
                    # Do not abort NCCL first. Its abort may wait for all ranks, and the program would continue with
                    # wrong data.
                    end_job()
        return _LOOK_SECONDS

    def _look_at(self, streams: DeviceStreams) -> None:
        call = streams.oldest()
        if call is None:
            return
        # The deadline starts when the call is the oldest, and the program's own work before it is done.
        if call.deadline is None or not call.ready.is_done:
            call.deadline = _deadline(call.timeout)
        else:
            for nccl in streams.nccl:
                nccl.check_async_error()
            call.deadline.check()


def _deadline(timeout: float) -> Deadline:
    return Deadline(
        lambda waited: (
            f"{_rank()} has waited {waited:.0f} s for a collective on its GPU to end; another rank may have died, or "
            "may not have used its GPU"
        ),
        lambda _: TimeoutError(
            f"a collective on its GPU did not end within {timeout:g} s. Look for a rank that died or hangs; to allow "
            "more time set MPIDIST_TIMEOUT=SECONDS"
        ),
        timeout,
    )


def _rank() -> str:
    return f"rank {import_mpi().COMM_WORLD.Get_rank()}"


device_watch = DeviceWatch()
atexit.register(device_watch.stop)


# Reductions -----------------------------------------------------------------------------------------------------------


# NCCL reduces an array of this size about as fast as a copy kernel packs it.
SMALL_BYTES = 64 << 10


class HostChunk(NamedTuple):
    """A chunk of a pack in host memory. Its spans are piece, slice of the piece, and slice of the chunk."""

    pack: Pack
    spans: list[tuple[int, slice, slice]]


class DevicePack:
    """Arrays of one dtype. Large ones are reduced in place, the others in one flat array.

    Arrays of less than ``small_bytes`` are packed, and all arrays that NCCL or the rounding require to cast.

    Attributes:
        op: Operation. A mean is a SUM that is divided by ``divisor``.
        dtype: Dtype in transit: wider than the dtype of the reduction if NCCL lacks that one.
        suits_nccl: Whether NCCL can reduce the arrays.
        apart: Indices of the arrays that are reduced in place.
        together: Indices of the arrays in the flat array, of ``flat_count`` elements.
        residuals: Rounding errors of the last call, keyed by chunk.
    """

    def __init__(
        self,
        group: DeviceGroup,
        shapes: Sequence[tuple[int, ...]],
        op: ReduceOp,
        divisor: int | None,
        small_bytes: int,
        options: CommunicationOptions | None = None,
    ) -> None:
        self.group, self.divisor = group, divisor
        self.options = options or CommunicationOptions()
        self.op = ReduceOp.SUM if op is ReduceOp.MEAN else op
        nccl = nccl_dtype(group.formed, op)
        self.suits_nccl = nccl is not None
        self.dtype = group.formed if nccl is None else nccl
        sizes = {index: math.prod(shapes[index]) for index in group.indices}
        casts = not group.source == self.dtype == group.result
        self.together = [i for i in sizes if casts or sizes[i] * self.dtype.itemsize < small_bytes]
        if len(self.together) == 1 and not casts:
            self.together = []
        packed = set(self.together)
        self.apart = [index for index in sizes if index not in packed]
        self._borders = list(accumulate((sizes[index] for index in self.together), initial=0))
        self.flat_count = self._borders[-1]
        flat = [self.flat_count] if self.together else []
        self._counts = (*flat, *(sizes[index] for index in self.apart))
        self.nbytes = sum(self._counts) * self.dtype.itemsize
        self.residuals: dict[int, Array] = {}
        self._on_host: list[HostChunk] = []

    def parts(self, flat: Array) -> list[Array]:
        """Return the parts of the flat array, in the order of ``together``."""
        return [flat[start:stop] for start, stop in pairwise(self._borders)]

    def compile(self) -> None:
        """Compile the kernels of a call on the current device, before other ranks wait."""
        compile_cast = gpu_ops().compile
        divides = self.divisor is not None
        if self.together:
            compile_cast(self.group.source, self.dtype, divides=False)
            compile_cast(self.dtype, self.group.result, divides)
        elif divides:
            compile_cast(self.dtype, self.dtype, divides)

    def on_host(self, per_chunk: int) -> list[HostChunk]:
        """Return cached chunks of at most ``per_chunk`` elements for host memory."""
        if not self._on_host:
            for start in range(0, sum(self._counts), per_chunk):
                found = pieces(self._counts, start, start + per_chunk)
                spans = [
                    (piece, slice(first, first + count), slice(at - start, at - start + count))
                    for piece, first, count, at in found
                ]
                size = sum(count for _, _, count, _ in found)
                self._on_host.append(HostChunk(Pack([0], [(size,)], self.dtype, self.dtype, self.dtype), spans))
        return self._on_host


class DeviceReduction:
    """Hold the arrays of one pack during a call.

    Attributes:
        pieces: Flat source and target of each piece to reduce, often the same array.
    """

    def __init__(
        self,
        pack: DevicePack,
        inputs: Mapping[int, Array],
        results: Mapping[int, Array],
        flat: Array | None,
        stream: Stream,
    ) -> None:
        self.pack, self._ops, self._stream = pack, gpu_ops(), stream
        self._inputs = [inputs[index] for index in pack.together]
        self._parts = [] if flat is None else pack.parts(flat)
        self._outputs = [results[index] for index in pack.together]
        in_place = [(inputs[index].reshape(-1), results[index].reshape(-1)) for index in pack.apart]
        self.pieces = in_place if flat is None else [(flat, flat), *in_place]

    def load(self) -> None:
        """Copy the inputs into the flat array."""
        self._ops.cast(self._inputs, self._parts, self._stream)

    def copy(self) -> None:
        """Copy the sources to the targets unless they share an address."""
        pointer = self._ops.pointer
        moved = [(source, target) for source, target in self.pieces if pointer(source) != pointer(target)]
        self._ops.cast([source for source, _ in moved], [target for _, target in moved], self._stream)

    def store(self) -> None:
        """Divide the reduced pieces if needed, and copy the flat array to its results."""
        divisor, first = self.pack.divisor, int(bool(self.pack.together))
        in_place = [] if divisor is None else [target for _, target in self.pieces[first:]]
        self._ops.cast([*self._parts, *in_place], [*self._outputs, *in_place], self._stream, divisor)


class DeviceCall(QueuePlace):
    """Hold one collective on a device with its arrays.

    Args:
        inputs: Arrays on the device by index in the call.
        signature: Results of the call that are known before the handshake.
        out: Output arrays of the call, or None to allocate them.
        packs: Packs of the inputs that are reduced.

    Attributes:
        inputs: Contiguous inputs by index in the call.
        results: Contiguous results by index, valid after ``done``.
        reductions: Packs in transit.
        caller: Stream on which the inputs were computed.
        ready: Event after which inputs may be read and results written.
        deadline: Deadline of the watchdog, or None until it has started.
    """

    ready: Event
    deadline: Deadline | None = None

    def __init__(
        self,
        streams: DeviceStreams,
        timeout: float,
        inputs: Mapping[int, Array],
        signature: Signature,
        out: Sequence[Array] | None = None,
        packs: Sequence[DevicePack] = (),
    ) -> None:
        super().__init__(streams)
        ops = streams.ops
        self.timeout, self._out = timeout, out
        self.caller: Stream = ops.current_stream(streams.device)
        self.results: dict[int, Array] = {}
        self._delivered: Event | None = None
        with streams.on():
            early = set() if out is None else _written_early(inputs, out, packs)
            self.inputs = {
                index: ops.copy(array) if index in early or not array.flags.c_contiguous else array
                for index, array in inputs.items()
            }
            self.allocate(signature)
            self.reductions = [
                DeviceReduction(
                    pack,
                    self.inputs,
                    self.results,
                    streams.empty(pack.flat_count, pack.dtype) if pack.together else None,
                    streams.stream,
                )
                for pack in packs
            ]
            for pack in packs:
                pack.compile()
            self.load()
        # Enter last, so that an earlier failure does not block the queue.
        self.enter()

    def allocate(self, signature: Signature) -> None:
        """Allocate the results on the current stream. Order the streams after the caller's work so far."""
        streams, out = self.streams, self._out
        for index, (shape, dtype) in enumerate(signature):
            if index in self.inputs:
                result = None if out is None else out[index]
                if result is None or not result.flags.c_contiguous:
                    result = streams.ops.empty(shape, dtype, streams.device)
                self.results[index] = result
        self.ready = self.caller.record()
        streams.stream.wait(self.ready)

    def load(self) -> None:
        """Copy the inputs into the flat arrays."""
        for reduction in self.reductions:
            reduction.load()

    def store(self, reduction: DeviceReduction) -> None:
        """Finish a reduction after its algorithm has enqueued all work."""
        with self.streams.on():
            reduction.store()
            self.streams.finish(self)

    def join(self, results: list[Array]) -> list[Array]:
        """Order the current stream of this thread after the results. Copy them into ``out``."""
        streams, out = self.streams, self._out
        with streams.on():
            self.wait_here()
            current = streams.ops.current_stream(streams.device)
            if out is not None:
                apart = [index for index, result in self.results.items() if result is not out[index]]
                for index in apart:
                    np.copyto(out[index], self.results[index])
                if apart:
                    self._delivered = current.record()
            if current.handle == self.caller.handle:
                # CuPy returns freed memory to the stream that allocated it, which now waits for the last use.
                self.inputs, self.results, self.reductions = {}, {}, []
        return results

    def wait_here(self) -> None:
        """Order the current stream of this thread after the results."""
        event = self._delivered or self.done
        if event is not None:
            with self.streams.on():
                self.streams.ops.current_stream(self.streams.device).wait(event)


def _written_early(inputs: Mapping[int, Array], out: Sequence[Array], packs: Sequence[DevicePack]) -> set[int]:
    """Return the inputs that a result may overwrite before they are read.

    That happens if another result, or their own at another address, overlaps them. Packed inputs are safe.
    """
    apart = [index for pack in packs for index in pack.apart if inputs[index] is not out[index]]
    counts = overlaps([inputs[index] for index in apart], [out[index] for index in inputs]) if apart else []
    return {
        index
        for index, count in zip(apart, counts, strict=True)
        if count > 1 or (count and not _is_same(inputs[index], out[index]))
    }


def _is_same(array: Array, other: Array) -> bool:
    pointer = gpu_ops().pointer
    return pointer(array) == pointer(other) and (array.strides, array.dtype) == (other.strides, other.dtype)


@dataclass(frozen=True)
class DeviceSite(Site):
    """Collect everything that a GPU algorithm works with."""

    streams: DeviceStreams
    on_host: Choice[Algorithm]
    pool: Pool


class DeviceAlgorithm(Protocol):
    """Define the interface of an all-reduce algorithm for GPU arrays."""

    def all_reduce(self, job: DeviceReduction) -> Steps[None]:
        """Reduce over all ranks after the handshake. Return once all work is enqueued."""

    def close(self) -> None:
        """Free the memory and communicators of the algorithm (collective)."""
