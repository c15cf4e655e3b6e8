"""The operations that mpidist needs on arrays, on the CPU and on a GPU.

Every other room works with arrays of either kind through ``DeviceOps`` and never imports CuPy. Asynchronous operations
take a stream; the others happen on the current stream of the array's device.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache
from typing import Protocol, TypeGuard

import numpy as np

from mpidist.arrays.cupy_module import require_cupy
from mpidist.arrays.dtypes import Array, DType
from mpidist.arrays.host_ops import HostOps
from mpidist.arrays.streams import Stream


class DeviceOps(Protocol):
    """The operations on arrays of one kind.

    A buffer must live until the last event of a stream that uses it: nothing here keeps it.
    """

    kind: str  # "cpu" or "gpu"

    def device_of(self, array: Array) -> int:
        """Return the number of the device on which ``array`` lies; 0 for the CPU."""
        ...

    def on(self, device: int) -> AbstractContextManager[None]:
        """Return a block in which ``device`` is current in this thread.

        To be entered once. The device before is current again afterwards, unless this process does not use it.
        """
        ...

    def empty(self, shape: tuple[int, ...], dtype: DType, device: int) -> Array:
        """Return an array with any content."""
        ...

    def zeros(self, shape: tuple[int, ...], dtype: DType, device: int) -> Array:
        """Return an array of zeros."""
        ...

    def from_host(self, array: Array, device: int) -> Array:
        """Return a copy of a NumPy array, C-contiguous; ``array`` may be changed on return."""
        ...

    def to_host(self, array: Array) -> Array:
        """Return a copy as a NumPy array; waits for it."""
        ...

    def all_to_host(self, arrays: Sequence[Array]) -> list[Array]:
        """Return copies of arrays of one device as NumPy arrays; waits for all."""
        ...

    def copy(self, array: Array, device: int | None = None) -> Array:
        """Return a C-contiguous copy on ``device``, or on the device where ``array`` is.

        ``array`` may be changed or dropped on return, by work of the stream that is current on its device.
        """
        ...

    def pointer(self, array: Array) -> int:
        """Return the address of the first element."""
        ...

    def is_contiguous(self, array: Array) -> bool:
        """Return whether the elements lie one after the other in C order."""
        ...

    def pinned(self, nbytes: int) -> Array:
        """Return page-locked host memory as an array of uint8.

        The pool behind it rounds up to a power of two. A device that is to read or write it has to be current.
        """
        ...

    def stream(self, device: int, *, is_urgent: bool = False) -> Stream:
        """Return a new stream that waits for no other; an urgent one comes first."""
        ...

    def current_stream(self, device: int) -> Stream:
        """Return the stream that is current on ``device`` in this thread.

        Raises:
            DeviceError: It is CUDA's default stream of each thread.
        """
        ...

    def copy_to_host(self, target: Array, source: Array, stream: Stream) -> None:
        """Copy the bytes of ``source`` into ``target``, a NumPy array over pinned memory; both contiguous."""
        ...

    def copy_to_device(self, target: Array, source: Array, stream: Stream) -> None:
        """Copy the bytes of ``source``, a NumPy array over pinned memory, into ``target``; both contiguous."""
        ...

    def compile(self, source: DType, target: DType, divides: bool) -> None:
        """Compile the kernel of a cast for the current device, before it is needed."""
        ...

    def blank(self, array: Array, stream: Stream) -> None:
        """Make all elements of a contiguous array 0."""
        ...

    def pack(self, sources: Sequence[Array], flat: Array, stream: Stream, starts: Sequence[int] | None = None) -> None:
        """Copy contiguous arrays into ``flat``, cast to its dtype.

        They lie from ``starts`` on, or one after the other.
        """
        ...

    def unpack(
        self,
        flat: Array,
        targets: Sequence[Array],
        divisor: float | None,
        stream: Stream,
        starts: Sequence[int] | None = None,
    ) -> None:
        """Copy ``flat`` into contiguous arrays, the reverse of ``pack``.

        Elements are divided by ``divisor``, if any, and cast.
        """
        ...


_HOST = HostOps()


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
