"""Select the operations for an array.

Other packages use arrays of either kind through ``DeviceOps`` and never import CuPy. ``cupy_ops`` is imported when its
operations are first needed.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import TYPE_CHECKING, TypeGuard

import numpy as np

from mpidist.arrays.dtypes import Array
from mpidist.arrays.host_ops import DeviceOps as DeviceOps

if TYPE_CHECKING:
    from mpidist.arrays.cupy_ops import CupyOps


_HOST = DeviceOps()


def is_device_array(value: object) -> TypeGuard[Array]:
    """Return True if ``value`` is an array on a GPU. Imports nothing.

    >>> is_device_array(np.zeros(3))
    False
    """
    if type(value) is np.ndarray:
        return False
    cupy = sys.modules.get("cupy")
    return cupy is not None and isinstance(value, getattr(cupy, "ndarray", ()))


def ops_of(array: Array) -> DeviceOps:
    """Return the operations for ``array``, a NumPy or CuPy array."""
    return gpu_ops() if is_device_array(array) else _HOST


def ops_for(kind: str) -> DeviceOps:
    """Return the operations for ``"cpu"`` or ``"gpu"``. Raises DeviceError without a usable GPU."""
    if kind == "cpu":
        return _HOST
    if kind == "gpu":
        return gpu_ops()
    raise ValueError(f"unknown kind of device {kind!r}. Pass 'cpu' or 'gpu'")


def device_name(array: Array) -> str:
    """Return the device of ``array``, such as ``"cpu"`` or ``"gpu:0"``.

    >>> device_name(np.zeros(3))
    'cpu'
    """
    return f"gpu:{gpu_ops().device_of(array)}" if is_device_array(array) else "cpu"


@cache
def gpu_ops() -> CupyOps:
    """Return the operations for CuPy arrays. Raises DeviceError without a usable GPU."""
    from mpidist.arrays.cupy_ops import CupyOps
    from mpidist.arrays.streams import require_cupy

    return CupyOps(require_cupy())
