"""Check the dtypes of collectives, and choose the dtype of a sum.

float16 and bfloat16 are summed in float32, and the mean of integers is computed in float64. Other dtypes are reduced in
their own dtype. bfloat16 belongs to the ml_dtypes package, so this module knows it by name only.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidist.core.options import ReduceOp
from mpidist.core.text import pip_install

DType = np.dtype[Any]
# A NumPy or CuPy array. Use ``device_ops`` for operations that differ between them.
if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

    Array = NDArray[Any]
else:
    Array = np.ndarray


def check_transportable(dtype: DType, what: str) -> None:
    """Raise TypeError unless ``dtype`` is numeric or bool, in native byte order."""
    if not is_transportable(dtype):
        raise TypeError(
            f"{what} does not support dtype {dtype!r}. Convert the array to numbers in native byte order, for example "
            "with array.astype('float32')"
        )


def is_transportable(dtype: DType) -> bool:
    """Return True if ``dtype`` is numeric or bool, in native byte order."""
    return (dtype.kind in "biufc" and dtype.isnative) or dtype.name == "bfloat16"


@lru_cache(maxsize=64)  # NumPy builds the name on each access
def is_half(dtype: DType) -> bool:
    """Return True for 16-bit floats, which are summed in float32."""
    return dtype.name in ("float16", "bfloat16")


@lru_cache(maxsize=256)
def reduction_dtypes(dtype: DType, op: ReduceOp) -> tuple[DType, DType]:
    """Return the dtype to compute ``op`` in, and the dtype of the result.

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
            f"{op.name} of bool is not defined. Cast it: value.astype('int32'), or 'float32' for a fraction. Or use "
            "BAND, BOR or BXOR"
        )
    check_transportable(dtype, op.name)
    if is_half(dtype):
        return np.dtype(np.float32), dtype
    if dtype.kind == "c" and op in (ReduceOp.MIN, ReduceOp.MAX):
        raise TypeError(f"{op.name} of {dtype} is not defined: complex numbers have no order. Use SUM, MEAN or PROD")
    if dtype.kind in "iu" and op is ReduceOp.MEAN:
        return np.dtype(np.float64), np.dtype(np.float64)
    return dtype, dtype


def as_dtype(value: DTypeLike) -> DType:
    """Convert to a dtype like ``numpy.dtype``, and support ``"bfloat16"`` too.

    >>> as_dtype("float32")
    dtype('float32')
    """
    if not isinstance(value, str) or value != "bfloat16":
        return np.dtype(value)
    try:
        import ml_dtypes
    except ImportError:
        raise ImportError(
            f"bfloat16 needs the ml_dtypes package; type: {pip_install('half')}, or use float16"
        ) from None
    dtype: DType = np.dtype(ml_dtypes.bfloat16)
    return dtype
