"""Implement the operations on CuPy arrays.

Asynchronous operations receive a stream. Other operations run on the current stream of the array's device.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import ModuleType

import numpy as np

from mpidist.arrays.dtypes import Array, DType
from mpidist.arrays.host_ops import DeviceOps
from mpidist.arrays.kernels import CastKernels
from mpidist.arrays.streams import MOST_STAGED_BYTES, CurrentDevice, Event, Staging, Stream
from mpidist.core.errors import DeviceError

# Size of the pieces in which arrays are copied through pinned memory.
_PIECE_BYTES = 4 << 20
_PER_THREAD = 2  # cudaStreamPerThread
# CUDA clamps this to the highest priority of the device, which CuPy does not expose.
_URGENT = -100


class CupyOps(CastKernels, DeviceOps):
    """Implement operations on CuPy arrays. Callers keep each array until the last event of a stream that uses it."""

    kind = "gpu"

    def __init__(self, cupy: ModuleType) -> None:
        super().__init__(cupy)
        self._staging = Staging(cupy)
        self._current = CurrentDevice(cupy)
        # Keyed by device and number.
        self._of_others: dict[tuple[int, int], Stream] = {}

    def device_of(self, array: Array) -> int:
        """Return the device number of ``array``."""
        return int(array.data.device_id)  # type: ignore[attr-defined]

    def on(self, device: int) -> AbstractContextManager[None]:
        """Return a context in which ``device`` is current. Enter it once."""
        return self._current.on(device)

    def empty(self, shape: tuple[int, ...], dtype: DType, device: int) -> Array:
        """Allocate an array."""
        with self.on(device):
            array: Array = self._cupy.empty(shape, dtype)
        return array

    def zeros(self, shape: tuple[int, ...], dtype: DType, device: int) -> Array:
        """Allocate an array of zeros."""
        with self.on(device):
            array: Array = self._cupy.zeros(shape, dtype)
        return array

    def from_host(self, array: Array, device: int) -> Array:
        """Copy a NumPy array in C order. ``array`` may change after the return."""
        # Not cupy.asarray, which reads pinned memory later, when the caller may overwrite it.
        target = self.empty(array.shape, array.dtype, device)
        source, flat = np.ascontiguousarray(array).reshape(-1), target.reshape(-1)
        stream, per_piece = self.current_stream(device), max(1, _PIECE_BYTES // array.itemsize)
        with self.on(device):
            for start in range(0, source.size, per_piece):
                piece = source[start : start + per_piece]
                staged = self._staging.room(piece.nbytes)
                np.copyto(staged.view(array.dtype), piece)
                self.copy_to_device(flat[start : start + per_piece], staged, stream)
                self._staging.keep(stream.record(blocks=True), staged)
        return target

    def to_host(self, array: Array) -> Array:
        """Copy to a NumPy array. Blocks until done."""
        (copy,) = self.all_to_host([array])
        return copy

    def all_to_host(self, arrays: Sequence[Array]) -> list[Array]:
        """Copy arrays of one device to NumPy arrays. Blocks until done."""
        targets = [np.empty(array.shape, array.dtype) for array in arrays]
        if not arrays:
            return targets
        # Copies in flight: event, pinned memory, target. Copies into pageable memory would be slower.
        in_flight: deque[tuple[Event, Array, Array]] = deque()
        bytes_in_flight = 0
        device = self.device_of(arrays[0])
        with self.on(device):
            stream = self.current_stream(device)
            for array, target in zip(arrays, targets, strict=True):
                source, flat = self._cupy.ascontiguousarray(array).reshape(-1), target.reshape(-1)
                per_piece = max(1, _PIECE_BYTES // array.itemsize)
                for start in range(0, flat.size, per_piece):
                    piece = source[start : start + per_piece]
                    while bytes_in_flight + piece.nbytes > MOST_STAGED_BYTES // 2:
                        bytes_in_flight -= _arrive(in_flight.popleft())
                    staged = self._staging.room(piece.nbytes)
                    self.copy_to_host(staged, piece, stream)
                    event = stream.record()
                    self._staging.keep(event, staged)
                    in_flight.append((event, staged.view(array.dtype), flat[start : start + per_piece]))
                    bytes_in_flight += piece.nbytes
            while in_flight:
                _arrive(in_flight.popleft())
        return targets

    def copy(self, array: Array, device: int | None = None) -> Array:
        """Copy in C order to ``device``, by default the device of ``array``."""
        source = self.device_of(array)
        if device is None or device == source:
            with self.on(source):
                same: Array = array.copy()
            return same
        # CuPy orders a copy between devices on the target's stream only.
        with self.on(source):
            contiguous = self._cupy.ascontiguousarray(array)
        there, here = self.current_stream(source), self.current_stream(device)
        here.wait(there.record())
        target = self.empty(array.shape, array.dtype, device)
        with self.on(device):
            target.data.copy_from_device_async(contiguous.data, contiguous.nbytes, here.raw)  # type: ignore[attr-defined]
        there.wait(here.record())
        return target

    def pointer(self, array: Array) -> int:
        """Return the address of the first element in GPU memory."""
        return int(array.data.ptr)  # type: ignore[attr-defined]

    def pinned(self, nbytes: int) -> Array:
        """Allocate page-locked host memory as an array of uint8."""
        return self._staging.pinned(nbytes)

    def stream(self, device: int, *, is_urgent: bool = False) -> Stream:
        """Create an independent stream. Urgent streams have priority."""
        priority = _URGENT if is_urgent else None
        with self.on(device):
            raw = self._cupy.cuda.Stream(non_blocking=True, priority=priority)
            return Stream(self._cupy, self._current, device, raw)

    def current_stream(self, device: int) -> Stream:
        """Return the current stream of ``device``. Raises DeviceError for per-thread streams."""
        raw = self._cupy.cuda.get_current_stream(device)
        if raw.ptr == _PER_THREAD:
            raise DeviceError(
                f"the current stream of gpu:{device} is CUDA's per-thread default stream, which differs in mpidist's "
                "threads. Type: unset CUPY_CUDA_PER_THREAD_DEFAULT_STREAM. Or make another stream current: "
                "cupy.cuda.Stream(non_blocking=True).use()"
            )
        return Stream(self._cupy, self._current, device, raw)

    def synchronize(self, device: int) -> None:
        """Block until the current stream of ``device`` is done."""
        self.current_stream(device).synchronize()

    def stream_of_others(self, device: int, handle: int) -> Stream:
        """Return a stream of another library by its number."""
        if (device, handle) not in self._of_others:
            with warnings.catch_warnings():
                # The replacement, Stream.from_external, destroys the stream when it is dropped.
                warnings.simplefilter("ignore", DeprecationWarning)
                raw = self._cupy.cuda.ExternalStream(handle, device)
            self._of_others[device, handle] = Stream(self._cupy, self._current, device, raw)
        return self._of_others[device, handle]

    def copy_to_host(self, target: Array, source: Array, stream: Stream) -> None:
        """Enqueue a copy of ``source`` into ``target``, a NumPy array over pinned memory."""
        _check_copy(target, source)
        with self.on(self.device_of(source)):
            source.data.copy_to_host_async(target.ctypes.data, source.nbytes, stream.raw)  # type: ignore[attr-defined]

    def copy_to_device(self, target: Array, source: Array, stream: Stream) -> None:
        """Enqueue a copy of ``source``, a NumPy array over pinned memory."""
        _check_copy(target, source)
        with self.on(self.device_of(target)):
            target.data.copy_from_host_async(source.ctypes.data, source.nbytes, stream.raw)  # type: ignore[attr-defined]


def _check_copy(target: Array, source: Array) -> None:
    """Raise ValueError unless both arrays are contiguous and have the same number of bytes."""
    if target.nbytes != source.nbytes:
        raise ValueError(f"cannot copy {source.nbytes} bytes into {target.nbytes}. Pass arrays of one size")
    if not (target.flags.c_contiguous and source.flags.c_contiguous):
        raise ValueError("an array to copy as bytes is not contiguous. Pass both arrays in C order")


def _arrive(copy: tuple[Event, Array, Array]) -> int:
    """Finish a copy to the host, and return its bytes."""
    event, staged, target = copy
    event.synchronize()
    np.copyto(target, staged)
    return staged.nbytes
