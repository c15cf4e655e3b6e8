"""What the pretended NCCL calls dtypes, operations and errors, and how it reduces."""

from __future__ import annotations

from operator import index
from typing import Any

import numpy as np

from tests.support.fake_cupy.memory import bytes_at

NCCL_INT8 = NCCL_CHAR = 0
NCCL_UINT8 = 1
NCCL_INT32 = NCCL_INT = 2
NCCL_UINT32 = 3
NCCL_INT64 = 4
NCCL_UINT64 = 5
NCCL_FLOAT16 = NCCL_HALF = 6
NCCL_FLOAT32 = NCCL_FLOAT = 7
NCCL_FLOAT64 = NCCL_DOUBLE = 8
NCCL_BFLOAT16 = 9
NCCL_SUM, NCCL_PROD, NCCL_MAX, NCCL_MIN, NCCL_AVG = range(5)
_DTYPES = ("i1", "u1", "i4", "u4", "i8", "u8", "f2", "f4", "f8")

_ERRORS = {
    0: ("SUCCESS", "no error"),
    1: ("UNHANDLED_CUDA_ERROR", "unhandled cuda error (run with NCCL_DEBUG=INFO for details)"),
    2: ("SYSTEM_ERROR", "unhandled system error (run with NCCL_DEBUG=INFO for details)"),
    3: ("INTERNAL_ERROR", "internal error - please report this issue to the NCCL developers"),
    4: ("INVALID_ARGUMENT", "invalid argument (run with NCCL_DEBUG=WARN for details)"),
    5: ("INVALID_USAGE", "invalid usage (run with NCCL_DEBUG=WARN for details)"),
    6: ("REMOTE_ERROR", "remote process exited or there was a network error"),
}
CUDA_ERROR, SYSTEM_ERROR, INVALID_ARGUMENT, INVALID_USAGE = 1, 2, 4, 5


class NcclError(RuntimeError):
    """As in CuPy, a status that it cannot name makes its constructor raise KeyError."""

    def __init__(self, status: int) -> None:
        self.status = status
        name, text = _ERRORS[status]
        super().__init__(f"NCCL_ERROR_{name}: {text}")


def dtype_of(datatype: int) -> np.dtype[Any]:
    """Return the NumPy dtype of a number of NCCL's."""
    if datatype == NCCL_BFLOAT16:
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    if not 0 <= index(datatype) < len(_DTYPES):
        raise NcclError(INVALID_ARGUMENT)
    return np.dtype(_DTYPES[datatype])


def put(address: int, data: bytes) -> None:
    """Write to memory of a GPU."""
    bytes_at(address, len(data))[:] = np.frombuffer(data, np.uint8)


def reduced(everything: list[bytes], datatype: int, op: int) -> bytes:
    """Reduce in rank order, in the dtype itself, and with what NCCL does to NaN."""
    dtype = dtype_of(datatype)
    arrays = [np.frombuffer(data, dtype) for data in everything]
    total = arrays[0]
    with np.errstate(all="ignore"):
        for array in arrays[1:]:
            total = _COMBINE[op](total, array)
    return total.astype(dtype).tobytes()


_COMBINE = {NCCL_SUM: np.add, NCCL_PROD: np.multiply, NCCL_MAX: np.fmax, NCCL_MIN: np.fmin}
