"""The dtypes that collectives take, and the dtype in which a sum is formed.

float16 and bfloat16 are summed in float32, the mean of integers is formed in float64, everything else in its
own dtype. bfloat16 is the dtype of the ml_dtypes package and known here by its name only.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from mpidist.core.options import ReduceOp
from mpidist.core.text import pip_install

DType = np.dtype[Any]
# A NumPy array or a CuPy array; what differs between them goes through ``device_ops``.
Array = NDArray[Any]


def check_transportable(dtype: DType, what: str) -> None:
    """Raise TypeError unless elements of ``dtype`` are numbers or bools in this machine's byte order."""
    if not is_transportable(dtype):
        raise TypeError(
            f"{what} takes numbers in native byte order, and was given dtype {dtype!r}; "
            "convert it first, for example with array.astype('float32')"
        )


def is_transportable(dtype: DType) -> bool:
    """Return whether elements of ``dtype`` are numbers or bools in this machine's byte order."""
    return (dtype.kind in "biufc" and dtype.isnative) or dtype.name == "bfloat16"


@lru_cache(maxsize=64)  # NumPy puts a name together each time
def is_half(dtype: DType) -> bool:
    """Return whether ``dtype`` is one of 16 bits that is summed in float32."""
    return dtype.name in ("float16", "bfloat16")


@lru_cache(maxsize=256)
def reduction_dtypes(dtype: DType, op: ReduceOp) -> tuple[DType, DType]:
    """Return the dtype to compute ``op`` over ``dtype`` in, and that of the result.

    Raises:
        TypeError: The dtype cannot be reduced by ``op``.

    >>> reduction_dtypes(np.dtype("float16"), ReduceOp.SUM)
    (dtype('float32'), dtype('float16'))
    >>> reduction_dtypes(np.dtype("int64"), ReduceOp.MEAN)
    (dtype('float64'), dtype('float64'))
    """
    if op.is_bitwise:
        if dtype.kind not in "biu":
            raise TypeError(f"{op.name} of {dtype} is not defined; expected whole numbers or bool")
        return dtype, dtype
    if dtype.kind == "b":
        raise TypeError(
            f"{op.name} of bool is not defined; cast it first: value.astype('int32'), or 'float32' for a share; or "
            "take BAND, BOR or BXOR"
        )
    check_transportable(dtype, op.name)
    if is_half(dtype):
        return np.dtype(np.float32), dtype
    if dtype.kind == "c" and op in (ReduceOp.MIN, ReduceOp.MAX):
        raise TypeError(f"{op.name} of {dtype} is not defined: complex numbers have no order; use SUM, MEAN or PROD")
    if dtype.kind in "iu" and op is ReduceOp.MEAN:
        return np.dtype(np.float64), np.dtype(np.float64)
    return dtype, dtype


def as_dtype(given: DTypeLike) -> DType:
    """Return the dtype that a user gave, as ``numpy.dtype`` does.

    Takes ``"bfloat16"``, too, which NumPy alone does not know.

    Raises:
        ImportError: bfloat16 without the ml_dtypes package.
        TypeError: There is no such dtype.

    >>> as_dtype("float32")
    dtype('float32')
    """
    dtype: DType
    if not isinstance(given, str) or given != "bfloat16":
        dtype = np.dtype(given)
        return dtype
    try:
        import ml_dtypes
    except ImportError:
        raise ImportError(
            f"bfloat16 needs the ml_dtypes package; type: {pip_install('half')}, or use float16"
        ) from None
    dtype = np.dtype(ml_dtypes.bfloat16)
    return dtype
