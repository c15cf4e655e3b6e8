"""NumPy dtypes and reduce operations as NCCL knows them.

What is only moved, and not reduced, travels as bytes, whatever its dtype.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from mpidist.arrays.dtypes import DType
from mpidist.core.enums import ReduceOp

# ncclDataType_t and ncclRedOp_t: part of NCCL's binary interface. By name, as extension dtypes share their letters.
_INTEGERS = {"int8": 0, "uint8": 1, "int32": 2, "uint32": 3, "int64": 4, "uint64": 5}
_FLOATS = {"float16": 6, "float32": 7, "float64": 8, "bfloat16": 9}
_COMPLEX = {"complex64": 7, "complex128": 8}
_WIDER = {"int16": "int32", "uint16": "uint32"}
_OPS = {ReduceOp.SUM: 0, ReduceOp.PROD: 1, ReduceOp.MAX: 2, ReduceOp.MIN: 3}
BYTES = 1
"""ncclUint8, as which everything can be moved."""


class NcclCode(NamedTuple):
    """What NCCL is told of a reduction.

    Args:
        datatype: The ncclDataType_t.
        op: The ncclRedOp_t.
        numbers: How many numbers of that type an element is: two for complex ones.
    """

    datatype: int
    op: int
    numbers: int


@lru_cache(maxsize=256)
def nccl_reduction(dtype: DType, op: ReduceOp) -> NcclCode:
    """Return what NCCL is told to reduce elements of ``dtype`` by ``op``; a mean is a SUM that is divided afterwards.

    NCCL adds and multiplies float16 and bfloat16 in their own precision, and lets MIN and MAX of floating point pass
    over NaN.

    Raises:
        TypeError: NCCL has no such reduction.

    >>> nccl_reduction(np.dtype("complex64"), ReduceOp.SUM)
    NcclCode(datatype=7, op=0, numbers=2)
    """
    name = dtype.name
    if not dtype.isnative:
        raise TypeError(f"NCCL reduces numbers in native byte order, and was given dtype {dtype!r}")
    if op is ReduceOp.MEAN:
        raise TypeError("NCCL was asked for a MEAN; expected a SUM, to be divided afterwards")
    if name in _COMPLEX and op is ReduceOp.SUM:
        return NcclCode(_COMPLEX[name], _OPS[op], 2)
    if name in _FLOATS:
        return NcclCode(_FLOATS[name], _OPS[op], 1)
    if name in _INTEGERS:
        return NcclCode(_INTEGERS[name], _OPS[op], 1)
    raise TypeError(f"NCCL has no {op.name} of {name}; {_instead(name)}")


def _instead(name: str) -> str:
    if name in _COMPLEX:
        return "of complex numbers it forms SUM"
    if name in _WIDER:
        return f"cast to {_WIDER[name]} first"
    if name == "bool":
        return "cast to uint8 first, in which MAX is 'any' and MIN is 'all'"
    return f"expected one of {', '.join([*_INTEGERS, *_FLOATS, *_COMPLEX])}"


@lru_cache(maxsize=256)
def nccl_dtype(dtype: DType, op: ReduceOp) -> DType | None:
    """Return the dtype in which NCCL forms what mpidist means by ``op`` over ``dtype``; None where it cannot.

    The values are to be cast to it, and back. Of floating point MIN and MAX are not formed here: NCCL loses NaN, which
    NumPy keeps. A mean counts as the sum that it is divided from.

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
