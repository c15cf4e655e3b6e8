"""The operations that mpidist needs on arrays, on the CPU and on a GPU.

Every other room works with arrays of either kind through ``DeviceOps`` and never imports CuPy. Asynchronous operations
take a stream; the others happen on the current stream of the array's device.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import TypeGuard

import numpy as np

from mpidist.arrays.cupy_module import require_cupy
from mpidist.arrays.dtypes import Array
from mpidist.arrays.host_ops import DeviceOps as DeviceOps

_HOST = DeviceOps()


def is_device_array(value: object) -> TypeGuard[Array]:
    """Return whether ``value`` is an array on a GPU. Imports nothing: where nobody has imported CuPy there is none.

    >>> is_device_array(np.zeros(3))
    False
    """
    if type(value) is np.ndarray:
        return False
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(value, getattr(cupy, "ndarray", ()))


def ops_of(array: Array) -> DeviceOps:
    """Return the operations for ``array``, a NumPy or CuPy array."""
    return _gpu_ops() if is_device_array(array) else _HOST


def ops_for(kind: str) -> DeviceOps:
    """Return the operations for ``"cpu"`` or ``"gpu"``.

    Raises:
        DeviceError: There is no GPU that this process can use; the text says why.
    """
    if kind == "cpu":
        return _HOST
    if kind == "gpu":
        return _gpu_ops()
    raise ValueError(f"there is no kind of device {kind!r}; expected 'cpu' or 'gpu'")


def device_name(array: Array) -> str:
    """Return where ``array`` lies: ``"cpu"``, or ``"gpu:0"`` and so on.

    >>> device_name(np.zeros(3))
    'cpu'
    """
    return f"gpu:{_gpu_ops().device_of(array)}" if is_device_array(array) else "cpu"


@cache
def _gpu_ops() -> DeviceOps:
    cupy = require_cupy()
    from mpidist.arrays.cupy_ops import CupyOps

    return CupyOps(cupy)
