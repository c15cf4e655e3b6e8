"""Implement operations on NumPy arrays, the base class for those on GPU arrays."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np

from mpidist.arrays.dtypes import Array, DType, is_half
from mpidist.arrays.streams import Stream


class DeviceOps:
    """Implement the operations on arrays of one kind, here NumPy.

    The CPU is one device with one stream, and all operations are synchronous. Callers keep each buffer until the
    last event of a stream that uses it.
    """

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

    def all_to_host(self, arrays: Sequence[Array]) -> list[Array]:
        """Copy arrays of one device to NumPy arrays. Blocks until done."""
        return [self.to_host(array) for array in arrays]

    def copy(self, array: Array, device: int | None = None) -> Array:
        """Copy in C order to ``device``, ordered on the current stream of the array's device."""
        return np.array(array, order="C")

    def pointer(self, array: Array) -> int:
        """Return the address of the first element."""
        return int(array.ctypes.data)

    def is_contiguous(self, array: Array) -> bool:
        """Return True if the array is C-contiguous."""
        return bool(array.flags.c_contiguous)

    def pinned(self, nbytes: int) -> Array:
        """Allocate page-locked host memory as an array of uint8. The device that uses it must be current."""
        return np.empty(nbytes, np.uint8)

    def stream(self, device: int, *, is_urgent: bool = False) -> Stream:
        """Create an independent stream. Urgent streams have priority."""
        return _STREAM

    def current_stream(self, device: int) -> Stream:
        """Return the current stream of ``device``. Raises DeviceError for per-thread streams."""
        return _STREAM

    def stream_of_others(self, device: int, handle: int) -> Stream:
        """Return a stream of another library by its number (cudaStream_t)."""
        return _STREAM

    def copy_to_host(self, target: Array, source: Array, stream: Stream) -> None:
        """Copy the bytes of ``source`` into ``target``, in pinned memory. Both are contiguous."""
        check_copy(target, source)
        if source.nbytes:
            np.copyto(_bytes(target), _bytes(source))

    def copy_to_device(self, target: Array, source: Array, stream: Stream) -> None:
        """Copy the bytes of ``source``, in pinned memory, into ``target``. Both are contiguous."""
        self.copy_to_host(target, source, stream)

    def compile(self, source: DType, target: DType, divides: bool) -> None:
        """Compile the kernel of a cast for the current device in advance."""

    def cast(
        self, sources: Sequence[Array], targets: Sequence[Array], stream: Stream, divisor: float | None = None
    ) -> None:
        """Cast contiguous arrays into contiguous ``targets`` of their sizes, divided by ``divisor`` before.

        A target may be its own source. 16-bit floats are divided in float32, to round only once.
        """
        for source, target in zip(sources, targets, strict=True):
            value = source.reshape(-1)
            if divisor is not None:
                value = value.astype(np.float32) if is_half(value.dtype) else value
                value = np.true_divide(value, value.dtype.type(divisor))
            np.copyto(target.reshape(-1), value, casting="unsafe")


_STREAM = Stream()


def check_copy(target: Array, source: Array) -> None:
    """Raise ValueError unless both arrays are contiguous and have the same number of bytes."""
    if target.nbytes != source.nbytes:
        raise ValueError(f"cannot copy {source.nbytes} bytes into {target.nbytes}. Pass arrays of one size")
    if not (target.flags.c_contiguous and source.flags.c_contiguous):
        raise ValueError("an array to copy as bytes is not contiguous. Pass both arrays in C order")


def _bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)
