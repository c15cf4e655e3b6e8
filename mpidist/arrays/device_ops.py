"""Implement the operations on NumPy arrays, and select the operations for an array.

Other packages use arrays of either kind through ``DeviceOps`` and never import CuPy. ``cupy_ops`` has the operations on
CuPy arrays, and is imported when they are first needed.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, TypeGuard

import numpy as np

from mpidist.arrays.dtypes import Array, DType

if TYPE_CHECKING:
    from mpidist.arrays.cupy_ops import CupyOps


class DeviceOps:
    """Implement the operations on NumPy arrays. The CPU is device 0, and each operation blocks."""

    kind: str = "cpu"  # or "gpu"

    def device_of(self, array: Array) -> int:
        """Return the device number of ``array``. The CPU is 0."""
        return 0

    def on(self, device: int) -> AbstractContextManager[None]:
        """Return a context in which ``device`` is current in this thread. Enter it once."""
        return nullcontext()

    def empty(self, shape: tuple[int, ...], dtype: DType, device: int) -> Array:
        """Allocate an array."""
        return np.empty(shape, dtype)

    def zeros(self, shape: tuple[int, ...], dtype: DType, device: int) -> Array:
        """Allocate an array of zeros."""
        return np.zeros(shape, dtype)

    def from_host(self, array: Array, device: int) -> Array:
        """Copy a NumPy array in C order. ``array`` may change after the return."""
        return np.array(array, order="C")

    def to_host(self, array: Array) -> Array:
        """Copy to a NumPy array. Blocks until done."""
        return np.array(array, order="C")

    def copy(self, array: Array, device: int | None = None) -> Array:
        """Copy in C order to ``device``, ordered on the current stream of the array's device."""
        return np.array(array, order="C")

    def pointer(self, array: Array) -> int:
        """Return the address of the first element."""
        return int(array.ctypes.data)

    def synchronize(self, device: int) -> None:
        """Block until the current stream of ``device`` is done."""


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
