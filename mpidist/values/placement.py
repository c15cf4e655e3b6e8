"""Place: the host, or one device of this process; bringing arrays there."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import numpy as np

from mpidist.arrays.convert import to_array
from mpidist.arrays.device_ops import DeviceOps, is_device_array, ops_for, ops_of
from mpidist.arrays.dtypes import Array, DType
from mpidist.core.text import parse_device

Result = TypeVar("Result")
# Number and size of the pieces by which ranks compare larger arrays. They include both ends.
_PIECES, _PIECE_BYTES = 16, 64 << 10


class Place:
    """The host, or one device.

    Args:
        ops: The operations for arrays of its kind.
        number: Which device; 0 for the host, whose devices are virtual.
    """

    __slots__ = ("number", "ops")

    def __init__(self, ops: DeviceOps, number: int) -> None:
        self.ops = ops
        self.number = number

    @property
    def is_host(self) -> bool:
        """Whether arrays here are NumPy's."""
        return self.ops.kind == "cpu"

    @property
    def device(self) -> str:
        """The device as a string."""
        return f"{self.ops.kind}:{self.number}"

    def current(self) -> AbstractContextManager[object]:
        """Return a block in which this thread computes here; on the host that changes nothing."""
        return self.ops.on(self.number)

    def settle(self) -> None:
        """Let this thread compute here from now on, not on an unused GPU.

        That is GPU 0, in a thread that has chosen none.
        """
        with self.current():
            pass

    def calls(self, fn: Callable[..., Result], *args: object) -> Result:
        """Return ``fn(*args)``, computed here."""
        if self is HOST:
            return fn(*args)
        with self.current():
            return fn(*args)

    def brings(self, array: Array) -> Array:
        """Return ``array`` itself if it lies here, otherwise a copy of it that does."""
        if type(array) is np.ndarray and self is HOST:
            return array
        source = place_of(array)
        if source == self:
            return array
        if source.is_host:
            return self._from_host(array)
        if self.is_host:
            with source.current():
                host: Array = source.ops.to_host(array)
                return host
        return self.ops.copy(array, self.number)

    def copies(self, array: Array) -> Array:
        """Return a copy of ``array`` that lies here, in C order."""
        if self.is_host and not is_device_array(array):
            return np.array(array, order="C")
        brought = self.brings(array)
        with self.current():
            return self.ops.copy(brought) if brought is array else brought

    def casts(self, array: Array, dtype: DType) -> Array:
        """Return ``array``, which lies here, in ``dtype``; itself if it has it."""
        if array.dtype == dtype:
            return array
        with self.current():
            return array.astype(dtype)

    def _from_host(self, array: Array) -> Array:
        with self.current():
            if array.ndim or array.dtype.kind not in "biufc":
                return self.ops.from_host(array, self.number)
            # A number is an argument of the kernel that writes it: no copy, for which the host would wait.
            scalar = self.ops.empty((), array.dtype, self.number)
            scalar.fill(array.item())
            return scalar

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Place) and self.ops.kind == other.ops.kind and self.number == other.number

    def __hash__(self) -> int:
        return hash((self.ops.kind, self.number))

    def __repr__(self) -> str:
        return f"Place({self.device!r})"


HOST = Place(ops_for("cpu"), 0)


def place_of(array: Array) -> Place:
    """Return where ``array`` lies.

    >>> place_of(np.zeros(3)) is HOST
    True
    """
    if not is_device_array(array):
        return HOST
    ops = ops_of(array)
    return Place(ops, ops.device_of(array))


def place_at(device: str) -> Place:
    """Return the place that a device string names; all CPU devices are the host.

    Raises:
        DeviceError: It is a GPU, and there is no usable CuPy.

    >>> place_at("cpu:1") is HOST
    True
    """
    parsed = parse_device(device)
    return HOST if parsed.kind == "cpu" else Place(ops_for(parsed.kind), parsed.number)


def place_of_operands(operands: Iterable[Any]) -> Place:
    """Return where an operation of ``operands`` happens: where the first device array among them lies."""
    for operand in operands:
        if is_device_array(operand):
            return place_of(operand)
    return HOST


def array_of(value: object, what: str = "value") -> Array:
    """Return ``value`` as ``to_array`` does, and lists as arrays too.

    A list becomes an array on the device of the first device array in it.
    """
    if not isinstance(value, (list, tuple)):
        return to_array(value, what)
    place = place_of_operands(value)
    if place.is_host:
        return np.asarray(value)
    with place.current():
        stacked: Array = np.stack([place.brings(to_array(item, what)) for item in value])
        return stacked


def copy_of(array: Array) -> Array:
    """Return a copy of ``array`` where it is, in C order."""
    return array.copy() if type(array) is np.ndarray else place_of(array).copies(array)


def on_host(array: Array) -> Array:
    """Return ``array`` as a NumPy array; itself if it is one."""
    return HOST.brings(array)


def checksum(array: Array) -> int:
    """Return the CRC-32 of the ``content`` of an array.

    >>> checksum(np.arange(3)) == checksum(np.arange(3) + 1)
    False
    """
    return zlib.crc32(content(array))


def content(array: Array) -> bytes:
    """Return the bytes by which ranks compare arrays: all up to 1 MiB, else pieces."""
    if array.nbytes <= _PIECES * _PIECE_BYTES:
        return on_host(array).tobytes()
    flat, size = array.reshape(-1), _PIECE_BYTES // array.dtype.itemsize
    starts = np.linspace(0, flat.size - size, _PIECES, dtype=np.int64).tolist()
    return b"".join(on_host(flat[start : start + size]).tobytes() for start in starts)


class _Placement(threading.local):
    """Where this thread creates variables."""

    on_host = False


_placement = _Placement()


@contextmanager
def variables_on_host() -> Iterator[None]:
    """Create the variables of the block in host memory, such as counters.

    Also under a strategy of devices.

    A copy per replica is kept as everywhere; reading one does not wait for a device.
    """
    before, _placement.on_host = _placement.on_host, True
    try:
        yield
    finally:
        _placement.on_host = before


def placed(devices: Sequence[str]) -> Sequence[str]:
    """Return where this thread creates the copies of a variable of a strategy with ``devices``."""
    return ["cpu:0"] * len(devices) if _placement.on_host else devices
