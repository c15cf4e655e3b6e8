"""Packs of arrays on a GPU: fused into one flat array there and spread again, cast and divided on the way."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mpidist.arrays.convert import Array
from mpidist.arrays.device_ops import DeviceOps, Stream
from mpidist.arrays.dtypes import DType
from mpidist.collectives.node.packing import Pack
from mpidist.collectives.reduce.nccl_types import nccl_dtype
from mpidist.core.enums import ReduceOp

# At multiples of so many bytes arrays begin in a flat one: kernels read and write so many at a time, and XLA takes no
# array that begins elsewhere.
_ALIGNMENT = 16
# And slices that NCCL is given, which reads element by element where they begin elsewhere.
SLICE_ALIGNMENT = 128


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
        indices, starts: The arrays in the order in which they travel, and where each begins in their flat array.
        count: The elements of the flat array, up to the last array's end.
        gaps_from: Where the first gap between arrays begins; ``count`` where there is none.
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
        self.result_dtype = result_dtype
        self._place(indices, [math.prod(shape) for shape in shapes], min(self.dtype.itemsize, result_dtype.itemsize))
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

    def _place(self, indices: Sequence[int], sizes: Sequence[int], itemsize: int) -> None:
        unit = max(1, _ALIGNMENT // itemsize)
        # What is no multiple of it comes last, so that the gaps lie close together.
        self.indices = tuple(sorted(indices, key=lambda index: sizes[index] % unit > 0))
        self.starts: list[int] = []
        self.count = 0
        gaps = []
        for index in self.indices:
            start = -(-self.count // unit) * unit
            if start > self.count:
                gaps.append(self.count)
            self.starts.append(start)
            self.count = start + sizes[index]
        self.gaps_from = gaps[0] if gaps else self.count

    def load(self, ops: DeviceOps, arrays: Sequence[Array], flat: Array, stream: Stream) -> None:
        """Put the arrays of this pack, contiguous and in its order, into a flat array that may be longer."""
        if self.gaps_from < flat.size:
            # They travel, too, and should be numbers.
            ops.blank(flat[self.gaps_from :], stream)
        ops.pack(arrays, flat, stream, self.starts)

    def parts(self, flat: Array, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
        """Return the arrays that lie in a flat one, as views."""
        return [
            flat[start : start + math.prod(shapes[index])].reshape(shapes[index])
            for index, start in zip(self.indices, self.starts, strict=True)
        ]

    def deliver(self, pieces: Sequence[Array], results: list[Array]) -> None:
        """Put the arrays of this pack, reduced, into ``results``."""
        for index, piece in zip(self.indices, pieces, strict=True):
            results[index] = piece
