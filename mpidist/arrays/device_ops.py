"""What arrays on the CPU and on a GPU have in common: the protocols, and the way from an array to its operations.

Every other room works with arrays of either kind through ``DeviceOps`` and never imports CuPy. What is asynchronous
takes a stream; what takes none happens on the current stream of the array's device.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mpidist.arrays.cupy_module import require_cupy
from mpidist.arrays.host_ops import HostOps

if TYPE_CHECKING:
    from mpidist.arrays.convert import Array
    from mpidist.arrays.dtypes import DType


class Event(Protocol):
    """A point in a stream."""

    @property
    def is_done(self) -> bool:
        """Whether everything before the point has happened; never waits. Raises where the device has failed."""
        ...

    def synchronize(self) -> None:
        """Block the calling thread until everything before the point has happened."""
        ...


class Stream(Protocol):
    """Work of one device that happens in the order in which it was given; ``with stream:`` makes it current.

    Attributes:
        device: The number of the device.
    """

    device: int

    @property
    def handle(self) -> int:
        """The number by which NCCL knows the stream."""
        ...

    @property
    def is_capturing(self) -> bool:
        """Whether what it is given is recorded as a CUDA graph, and not done."""
        ...

    def record(self, *, blocks: bool = False) -> Event:
        """Return an event after everything that was given so far; one that ``blocks`` is waited for asleep."""
        ...

    def wait(self, event: Any) -> None:
        """Let what is given from now on wait for ``event``, of a stream on any device; the caller does not wait."""
        ...

    def synchronize(self) -> None:
        """Block the calling thread until everything has happened."""
        ...

    def __enter__(self) -> Any:
        """Make the stream and its device current in this thread."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Return to the stream and device that were current before."""
        ...


class DeviceOps(Protocol):
    """What mpidist does with arrays of one kind.

    A buffer must live until the last event of a stream that uses it: nothing here keeps it.
    """

    kind: str  # "cpu" or "gpu"

    def device_of(self, array: Array) -> int:
        """Return the number of the device on which ``array`` lies; 0 for the CPU."""
        ...

    def on(self, device: int) -> AbstractContextManager[None]:
        """Return a block in which ``device`` is current in this thread, to be entered once.

        What was current before is so again afterwards, but for a device that this process does not use.
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
        """Whether the elements lie one after the other in C order."""
        ...

    def pinned(self, nbytes: int) -> Array:
        """Return host memory as an array of uint8, page-locked; the pool behind it rounds up to a power of two.

        A device that is to read or write it has to be current.
        """
        ...

    def stream(self, device: int, *, is_urgent: bool = False) -> Stream:
        """Return a new stream, which waits for no other one; what an urgent one has to do comes before others'."""
        ...

    def current_stream(self, device: int) -> Stream:
        """Return the stream that is current on ``device`` in this thread.

        Raises:
            DeviceError: It is CUDA's default stream of each thread.
        """
        ...

    def copy_to_host(self, target: Array, source: Array, stream: Any) -> None:
        """Copy the bytes of ``source`` into ``target``, a NumPy array over pinned memory; both contiguous."""
        ...

    def copy_to_device(self, target: Array, source: Array, stream: Any) -> None:
        """Copy the bytes of ``source``, a NumPy array over pinned memory, into ``target``; both contiguous."""
        ...

    def compile(self, source: DType, target: DType, divides: bool) -> None:
        """Compile for the current device what ``pack`` and ``unpack`` need for a cast; they do not have to any more."""
        ...

    def blank(self, array: Array, stream: Any) -> None:
        """Make all elements of a contiguous array 0."""
        ...

    def pack(self, sources: Sequence[Array], flat: Array, stream: Any, starts: Sequence[int] | None = None) -> None:
        """Cast contiguous arrays to the dtype of ``flat`` and put them into it: from ``starts`` on, else in a row."""
        ...

    def unpack(
        self,
        flat: Array,
        targets: Sequence[Array],
        divisor: float | None,
        stream: Any,
        starts: Sequence[int] | None = None,
    ) -> None:
        """Fill contiguous arrays from ``flat``, as ``pack`` put them there: divide by ``divisor`` unless None, cast."""
        ...


_HOST = HostOps()


def is_device_array(value: object) -> bool:
    """Whether ``value`` is an array on a GPU. Imports nothing: where nobody has imported CuPy there is none.

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
