"""Packs of arrays on a GPU, flat and in a dtype of NCCL.

Arrays that are only moved, not reduced, are sent as bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from mpidist.arrays.device_ops import DeviceOps
from mpidist.arrays.dtypes import Array, DType
from mpidist.arrays.streams import Stream
from mpidist.collectives.node.packing import Pack
from mpidist.core.options import ReduceOp

# Dtypes and operations of NCCL ----------------------------------------------------------------------------------------


# ncclDataType_t and ncclRedOp_t, part of NCCL's binary interface. By name, because extension dtypes share type letters.
_INTEGERS = {"int8": 0, "uint8": 1, "int32": 2, "uint32": 3, "int64": 4, "uint64": 5}
_FLOATS = {"float16": 6, "float32": 7, "float64": 8, "bfloat16": 9}
_COMPLEX = {"complex64": 7, "complex128": 8}
_WIDER = {"int16": "int32", "uint16": "uint32"}
_OPS = {ReduceOp.SUM: 0, ReduceOp.PROD: 1, ReduceOp.MAX: 2, ReduceOp.MIN: 3}
BYTES = 1
"""ncclUint8, to send any dtype as bytes."""


class NcclCode(NamedTuple):
    """A reduction in the codes of NCCL."""

    datatype: int
    """The ncclDataType_t."""
    op: int
    """The ncclRedOp_t."""
    numbers: int
    """Numbers of that type per element: two for complex elements."""


@lru_cache(maxsize=256)
def nccl_reduction(dtype: DType, op: ReduceOp) -> NcclCode:
    """Return NCCL's codes of a reduction, or raise TypeError if NCCL does not support it.

    A mean is a SUM that is divided afterwards. NCCL adds and multiplies float16 and bfloat16 in their own precision,
    and its MIN and MAX of floating point ignore NaN.

    >>> nccl_reduction(np.dtype("complex64"), ReduceOp.SUM)
    NcclCode(datatype=7, op=0, numbers=2)
    """
    name = dtype.name
    if not dtype.isnative:
        raise TypeError(f"NCCL does not support dtype {dtype!r}. Convert it to native byte order")
    if op is ReduceOp.MEAN:
        raise TypeError("NCCL has no MEAN. Use SUM, and divide the result")
    if op.is_bitwise:
        raise TypeError(f"NCCL has no {op.name}")
    if name in _COMPLEX and op is ReduceOp.SUM:
        return NcclCode(_COMPLEX[name], _OPS[op], 2)
    if name in _FLOATS:
        return NcclCode(_FLOATS[name], _OPS[op], 1)
    if name in _INTEGERS:
        return NcclCode(_INTEGERS[name], _OPS[op], 1)
    raise TypeError(f"NCCL has no {op.name} of {name}. {_instead(name)}")


def _instead(name: str) -> str:
    if name in _COMPLEX:
        return "It supports SUM of complex numbers only"
    if name in _WIDER:
        return f"Cast to {_WIDER[name]} first"
    if name == "bool":
        return "Cast to uint8 first, for which MAX is 'any' and MIN is 'all'"
    return f"Use one of {', '.join([*_INTEGERS, *_FLOATS, *_COMPLEX])}"


@lru_cache(maxsize=256)
def nccl_dtype(dtype: DType, op: ReduceOp) -> DType | None:
    """Return the dtype in which NCCL reduces ``dtype`` by ``op``, or None.

    The values must be cast to it, and back. None for MIN and MAX of floating point, because NCCL ignores NaN and NumPy
    does not. A mean counts as SUM.

    >>> nccl_dtype(np.dtype("int16"), ReduceOp.SUM)
    dtype('int32')
    >>> nccl_dtype(np.dtype("float32"), ReduceOp.MAX) is None
    True
    """
    summed = ReduceOp.SUM if op is ReduceOp.MEAN else op
    if dtype.name in _FLOATS and op in (ReduceOp.MIN, ReduceOp.MAX):
        return None
    target = np.dtype(_WIDER[dtype.name]) if dtype.name in _WIDER and dtype.isnative else dtype
    try:
        nccl_reduction(target, summed)
    except TypeError:
        return None
    return target


# Packs ----------------------------------------------------------------------------------------------------------------


# Alignment of arrays in a flat array, in bytes. Kernels access this many bytes at a time, and XLA requires it.
_ALIGNMENT = 16
# Alignment of slices for NCCL, which otherwise reads single elements.
SLICE_ALIGNMENT = 128


class DevicePack:
    """Arrays of one dtype that are sent together.

    ``indices`` selects the arrays of the call, and ``shapes`` has the shapes of all.

    Attributes:
        dtype: Dtype in transit: wider than the dtype of the reduction if NCCL lacks that one.
        suits_nccl: Whether NCCL can reduce the arrays.
        indices, starts: The arrays in order, and the first element of each in the flat array.
        count: Elements of the flat array, up to the end of the last array.
        gaps_from: First element of the first gap between arrays, or ``count`` without gaps.
        is_plain: Whether the single array needs no flat array.
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
        self._on_host: list[Pack] = []
        self.residuals: dict[int, Array] = {}
        self._casts = ((source_dtype, self.dtype), (self.dtype, result_dtype))
        self._is_compiled = False

    def on_host(self, per_chunk: int) -> Sequence[Pack]:
        """Return cached flat chunks for the host, of at most ``per_chunk`` elements."""
        if not self._on_host:
            for start in range(0, self.count, per_chunk):
                count = min(per_chunk, self.count - start)
                self._on_host.append(Pack([0], [(count,)], self.dtype, self.dtype, self.dtype))
        return self._on_host

    def compile(self, ops: DeviceOps, divides: bool) -> None:
        """Compile the kernels that pack and unpack, on the current device."""
        # Once is enough, because a communicator uses one device.
        if not self._is_compiled:
            together, apart = self._casts
            ops.compile(*together, divides=False)
            ops.compile(*apart, divides=divides)
            self._is_compiled = True

    def _place(self, indices: Sequence[int], sizes: Sequence[int], itemsize: int) -> None:
        unit = max(1, _ALIGNMENT // itemsize)
        # Sizes that are no multiple of the unit come last, so that the gaps are close together.
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
        """Copy the arrays, contiguous and in order, to the front of a flat array."""
        if self.gaps_from < flat.size:
            # Gaps are sent and reduced too, so they should be numbers.
            ops.blank(flat[self.gaps_from :], stream)
        ops.pack(arrays, flat, stream, self.starts)

    def parts(self, flat: Array, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
        """Return the arrays in a flat array, as views."""
        return [
            flat[start : start + math.prod(shapes[index])].reshape(shapes[index])
            for index, start in zip(self.indices, self.starts, strict=True)
        ]

    def deliver(self, pieces: Sequence[Array], results: list[Array]) -> None:
        """Store the reduced arrays of this pack in ``results``."""
        for index, piece in zip(self.indices, pieces, strict=True):
            results[index] = piece
