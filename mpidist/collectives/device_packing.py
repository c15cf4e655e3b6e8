"""Packs of arrays on a GPU: fused into one flat array there and spread again, cast and divided on the way."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mpidist.arrays.convert import Array
from mpidist.arrays.device_ops import DeviceOps
from mpidist.arrays.dtypes import DType
from mpidist.collectives.device_call import DeviceCall
from mpidist.collectives.nccl_types import nccl_dtype
from mpidist.collectives.packing import Pack
from mpidist.core.enums import ReduceOp
from mpidist.core.options import CommunicationOptions


class DevicePack:
    """Arrays of one dtype that travel together.

    Args:
        indices: Which arrays of the call, in the order they travel in.
        shapes: Shapes of all arrays of the call.
        dtype: Dtype in which the reduction is formed.
        source_dtype: Dtype of the arrays.
        result_dtype: Dtype of the results.
        op: The operation.

    Attributes:
        dtype: In which the arrays travel: NCCL lacks some, whose place a wider one takes.
        suits_nccl: Whether NCCL can reduce them at all.
    """

    def __init__(
        self,
        indices: Sequence[int],
        shapes: Sequence[tuple[int, ...]],
        dtype: DType,
        source_dtype: DType,
        result_dtype: DType,
        op: ReduceOp,
    ) -> None:
        nccl = nccl_dtype(dtype, op)
        self.suits_nccl = nccl is not None
        self.dtype = dtype if nccl is None else nccl
        self.indices = tuple(indices)
        self.count = sum(math.prod(shapes[index]) for index in indices)
        self.nbytes = self.count * self.dtype.itemsize
        self.is_plain = len(self.indices) == 1 and source_dtype == result_dtype == self.dtype
        """Whether the one array can travel as it is."""
        self._on_host: list[Pack] = []
        self.residuals: dict[int, Array] = {}
        self._casts = ((source_dtype, self.dtype), (self.dtype, result_dtype))
        self._is_compiled = False

    def on_host(self, per_chunk: int) -> Sequence[Pack]:
        """Return what travels on the host: flat chunks, of ``per_chunk`` elements but for the last; always as many."""
        if not self._on_host:
            for start in range(0, self.count, per_chunk):
                count = min(per_chunk, self.count - start)
                self._on_host.append(Pack([0], [(count,)], self.dtype, self.dtype, self.dtype))
        return self._on_host

    def compile(self, ops: DeviceOps, divides: bool) -> None:
        """Compile the kernels that put the arrays together and take them apart, on the current device.

        Only the first time, as a communicator keeps to one device.
        """
        if not self._is_compiled:
            together, apart = self._casts
            ops.compile(*together, divides=False)
            ops.compile(*apart, divides=divides)
            self._is_compiled = True

    def deliver(self, pieces: Sequence[Array], results: list[Array]) -> None:
        """Put the arrays of this pack, reduced, into ``results``."""
        for index, piece in zip(self.indices, pieces, strict=True):
            results[index] = piece


class DeviceReduction:
    """One pack on its way through an algorithm for arrays on a GPU.

    Args:
        pack: What travels.
        number: Of the pack in its plan.
        call: The arrays.
        op: The operation; a mean is a sum that is divided afterwards.
        divisor: What a mean divides the sum by; None for other operations.
        options: Those of the call.

    Attributes:
        source, target: The flat input and where its reduction goes, often the same, on the lane's stream.
    """

    def __init__(
        self,
        pack: DevicePack,
        number: int,
        call: DeviceCall,
        op: ReduceOp,
        divisor: int | None,
        options: CommunicationOptions,
    ) -> None:
        self.pack = pack
        self.call = call
        self.op = ReduceOp.SUM if op is ReduceOp.MEAN else op
        self.divisor = divisor
        self.options = options
        self.residuals = pack.residuals if options.error_feedback else None
        self.count, self.nbytes, self.dtype = pack.count, pack.nbytes, pack.dtype
        self.source, self.target = call.flats[number]

    def copy(self) -> None:
        """Copy the source to the target, unless they are the same memory, on the lane's stream."""
        lane = self.call.lane
        if self.source is not self.target and lane.ops.pointer(self.source) != lane.ops.pointer(self.target):
            lane.ops.unpack(self.source, [self.target], None, lane.stream)

    def store(self) -> list[Array]:
        """Divide and spread the reduction, which is in ``target``, and return the results, on the lane's stream."""
        lane, flat = self.call.lane, self.target
        results = [self.call.results[index] for index in self.pack.indices]
        if flat is self.source or flat.size > self.count:
            lane.ops.unpack(flat[: self.count], results, self.divisor, lane.stream)
        elif self.divisor is not None:
            lane.ops.unpack(flat, [flat], self.divisor, lane.stream)
        lane.finish(self.call)
        return results
