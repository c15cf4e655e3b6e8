"""Implement the operations on NumPy arrays. The operations on CuPy arrays have the same interface."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import numpy as np

from mpidist.arrays.dtypes import Array, DType


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
