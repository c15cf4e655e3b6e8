"""One reduction of arrays on a GPU, and the interface of its algorithm.

A call is made in the caller's thread, whose current stream the inputs depend on. The collective itself runs on
streams of the communicator, perhaps in another thread; the caller's stream, never the host, waits for its results.

Whatever may fail on one rank alone, for lack of memory above all, happens here, before the ranks meet: they would
wait for it on their devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from mpidist.arrays.device_ops import device_name, is_device_array, ops_of
from mpidist.arrays.dtypes import Array
from mpidist.arrays.streams import Event
from mpidist.collectives.gpu.device_streams import DeviceCall, DeviceStreams
from mpidist.collectives.mpi.waiting import Steps
from mpidist.collectives.node.memory import Pool
from mpidist.collectives.node.packing import overlaps
from mpidist.collectives.reduce.choice import Choice
from mpidist.collectives.reduce.device_packs import DevicePack
from mpidist.collectives.reduce.plan import ReductionPlan
from mpidist.collectives.reduce.registry import Algorithm, Site
from mpidist.core.options import ReduceOp


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
