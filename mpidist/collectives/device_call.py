"""DeviceCall: the arrays of one call that lie on a GPU, and the order of its work among the caller's own.

Made in the thread that calls, whose current stream tells what the arrays wait for. The collective itself runs on
streams of the communicator, perhaps in another thread; the caller's stream, never the host, waits for its results.

Whatever may fail on one rank alone, for lack of memory above all, happens here, before the ranks meet: they would
wait for it on their devices.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mpidist.arrays.convert import Array
from mpidist.arrays.device_ops import Event, Stream, device_name, is_device_array, ops_of
from mpidist.collectives.device_queue import queue_of
from mpidist.collectives.packing import overlaps

if TYPE_CHECKING:
    from mpidist.collectives.device_packing import DevicePack
    from mpidist.collectives.lane import Lane
    from mpidist.collectives.plan import ReductionPlan


def device_of_arrays(arrays: Sequence[Array]) -> tuple[str, int]:
    """Return the kind and number of the device on which those of ``arrays`` lie that are not on the host.

    Raises:
        ValueError: They lie on different devices.
    """
    devices = {(ops_of(array).kind, ops_of(array).device_of(array)) for array in arrays if is_device_array(array)}
    if len(devices) > 1:
        names = " and ".join(sorted({device_name(array) for array in arrays if is_device_array(array)}))
        raise ValueError(f"arrays on {names} in one call; expected all on one device, which a rank keeps to")
    return devices.pop()


class DeviceCall:
    """One collective on a device, and the arrays that it needs there.

    Args:
        lane: Where it happens.
        timeout: Seconds that it may take on the device.
        is_void: Whether it will never happen, because its communicator has been given up.

    Attributes:
        inputs: The arrays by their index in the call, contiguous.
        results: The results by index; contiguous, written when ``done`` is.
        caller: The stream whose arrays they are.
        ready: When the inputs are there, and the results may be written.
        done: When the results are there; None until the work has been handed to the device.
    """

    def __init__(self, lane: Lane, timeout: float, is_void: Callable[[], bool]) -> None:
        self.lane = lane
        self.timeout = timeout
        self.is_void = is_void
        self.done: Event | None = None
        self.inputs: dict[int, Array] = {}
        self.results: dict[int, Array] = {}
        self.caller: Stream = lane.ops.current_stream(lane.device)
        self.ready: Event
        self._queue = queue_of(lane.device)

    def enter(self) -> None:
        """Have later calls wait for their turn on the device until this one leaves."""
        self._queue.enter(self)

    def leave(self) -> None:
        """Let later calls use the device; any number of times."""
        self._queue.leave(self)

    def follow_caller(self) -> None:
        """Have the lane wait for what the caller's stream has been given so far."""
        self.ready = self.caller.record()
        self.lane.stream.wait(self.ready)

    def join(self, results: list[Array]) -> list[Array]:
        """Have the current stream of this thread wait for the results, and return them."""
        self.wait_here()
        if self.lane.ops.current_stream(self.lane.device).handle == self.caller.handle:
            # Memory that is let go goes back to the stream that asked for it; that one waits for the last use now.
            self.let_go()
        return results

    def wait_here(self) -> None:
        """Have the current stream of this thread wait for the results."""
        self._wait_for(self.done)

    def _wait_for(self, event: Event | None) -> None:
        if event is not None:
            with self.lane.on():
                self.lane.ops.current_stream(self.lane.device).wait(event)

    def let_go(self) -> None:
        """Keep the arrays no longer."""
        self.inputs, self.results = {}, {}


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
        lane: See ``DeviceCall``.
        multiple: Of which the bytes of flat arrays have to be.
        timeout: See ``DeviceCall``.
        is_void: See ``DeviceCall``.

    Attributes:
        flats: For each pack.
    """

    def __init__(
        self,
        plan: ReductionPlan,
        arrays: Sequence[Array],
        out: Sequence[Array] | None,
        lane: Lane,
        multiple: int,
        timeout: float,
        is_void: Callable[[], bool],
    ) -> None:
        super().__init__(lane, timeout, is_void)
        self._out = out
        self._delivered: Event | None = None
        indices = [index for index, is_on_device in enumerate(plan.on_device) if is_on_device]
        ops = lane.ops
        with lane.on():
            self.inputs = {index: arrays[index] for index in indices}
            written_early = self._written_early(plan)
            for index in indices:
                if index in written_early or not ops.is_contiguous(arrays[index]):
                    self.inputs[index] = ops.copy(arrays[index])
            self.flats = [self._flat(plan, pack, multiple) for pack in plan.device_packs]
            for index in indices:
                if index not in self.results:
                    self.results[index] = self._result(plan, index)
            self.follow_caller()
            for pack in plan.device_packs:
                pack.compile(ops, divides=plan.divisor is not None)
            for pack, flat in zip(plan.device_packs, self.flats, strict=True):
                self.load(pack, flat)
        self.enter()

    def _written_early(self, plan: ReductionPlan) -> set[int]:
        """Return which inputs other results, or their own at another place, may be written over before they are read.

        Those of packs that are copied into a flat array have been read by then, and one that is its own result is
        nobody else's.
        """
        out = self._out
        if out is None:
            return set()
        plain = [index for pack in plan.device_packs if pack.is_plain for index in pack.indices]
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
        pointer = self.lane.ops.pointer
        return pointer(array) == pointer(other) and (array.strides, array.dtype) == (other.strides, other.dtype)

    def _result(self, plan: ReductionPlan, index: int) -> Array:
        if self._out is not None and self.lane.ops.is_contiguous(self._out[index]):
            return self._out[index]
        shape, dtype = plan.result_signature[index]
        return self.lane.ops.empty(shape, dtype, self.lane.device)

    def _flat(self, plan: ReductionPlan, pack: DevicePack, multiple: int) -> Flat:
        """Return the memory that a pack takes; what becomes results is that of the caller's stream."""
        lane, itemsize = self.lane, pack.dtype.itemsize
        length = -(-pack.nbytes // multiple) * multiple // itemsize
        if pack.is_plain and length == pack.count:
            (index,) = pack.indices
            self.results[index] = result = self._result(plan, index)
            return Flat(self.inputs[index].reshape(-1), result.reshape(-1), None, None)
        if self._out is not None:
            spread = [self._result(plan, index) for index in pack.indices]
            self.results.update(zip(pack.indices, spread, strict=True))
            flat = lane.empty(length, pack.dtype)
            return Flat(flat, flat, spread, pack.starts)
        block = lane.ops.empty((length,), pack.result_dtype, lane.device)
        self.results.update(zip(pack.indices, pack.parts(block, plan.shapes), strict=True))
        if pack.dtype == pack.result_dtype:
            return Flat(block, block, None, None)
        flat = lane.empty(length, pack.dtype)
        return Flat(flat, flat, [block], None)

    def load(self, pack: DevicePack, flat: Flat) -> None:
        """Put the inputs of a pack where it travels from, on the lane's stream, unless it travels from where it is."""
        if flat.source is flat.target:
            inputs = [self.inputs[index] for index in pack.indices]
            pack.load(self.lane.ops, inputs, flat.source, self.lane.stream)

    def join(self, results: list[Array]) -> list[Array]:
        """See ``DeviceCall``."""
        lane, out = self.lane, self._out
        apart = [] if out is None else [index for index, result in self.results.items() if result is not out[index]]
        with lane.on():
            if out is not None and apart:
                self.wait_here()
                for index in apart:
                    np.copyto(out[index], self.results[index])
                    results[index] = out[index]
                self._delivered = lane.ops.current_stream(lane.device).record()
            return super().join(results)

    def wait_here(self) -> None:
        """See ``DeviceCall``."""
        self._wait_for(self._delivered or self.done)

    def let_go(self) -> None:
        """See ``DeviceCall``."""
        super().let_go()
        self.flats = []
