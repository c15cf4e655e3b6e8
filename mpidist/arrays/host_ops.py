"""The operations on arrays; those on NumPy arrays are the base of a device's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate
from typing import TypeAlias

import numpy as np

from mpidist.arrays.dtypes import Array, DType, is_half
from mpidist.arrays.streams import Stream

# Where arrays begin in a flat buffer; None: one after the other.
Starts: TypeAlias = "Sequence[int] | None"


class DeviceOps:
    """The operations on arrays of one kind.

    These are for NumPy arrays: one device, one stream, nothing asynchronous. A buffer must live until the last event of
    a stream that uses it: nothing here keeps it.
    """

    kind: str = "cpu"  # or "gpu"

    def device_of(self, array: Array) -> int:
        """Return the number of the device on which ``array`` lies; 0 for the CPU."""
        return 0

    def on(self, device: int) -> AbstractContextManager[None]:
        """Return a block in which ``device`` is current in this thread.

        To be entered once. The device before is current again afterwards, unless this process does not use it.
        """
        return nullcontext()

    def empty(self, shape: tuple[int, ...], dtype: DType, device: int) -> Array:
        """Return an array with any content."""
        return np.empty(shape, dtype)

    def zeros(self, shape: tuple[int, ...], dtype: DType, device: int) -> Array:
        """Return an array of zeros."""
        return np.zeros(shape, dtype)

    def from_host(self, array: Array, device: int) -> Array:
        """Return a copy of a NumPy array, C-contiguous; ``array`` may be changed on return."""
        return np.array(array, order="C")

    def to_host(self, array: Array) -> Array:
        """Return a copy as a NumPy array; waits for it."""
        return np.array(array, order="C")

    def all_to_host(self, arrays: Sequence[Array]) -> list[Array]:
        """Return copies of arrays of one device as NumPy arrays; waits for all."""
        return [self.to_host(array) for array in arrays]

    def copy(self, array: Array, device: int | None = None) -> Array:
        """Return a C-contiguous copy on ``device``, or on the device where ``array`` is.

        ``array`` may be changed or dropped on return, by work of the stream that is current on its device.
        """
        return np.array(array, order="C")

    def pointer(self, array: Array) -> int:
        """Return the address of the first element."""
        return int(array.ctypes.data)

    def is_contiguous(self, array: Array) -> bool:
        """Return whether the elements lie one after the other in C order."""
        return bool(array.flags.c_contiguous)

    def pinned(self, nbytes: int) -> Array:
        """Return page-locked host memory as an array of uint8.

        The pool behind it rounds up to a power of two. A device that is to read or write it has to be current.
        """
        return np.empty(nbytes, np.uint8)

    def stream(self, device: int, *, is_urgent: bool = False) -> Stream:
        """Return a new stream that waits for no other; an urgent one comes first."""
        return _STREAM

    def current_stream(self, device: int) -> Stream:
        """Return the stream that is current on ``device`` in this thread.

        Raises:
            DeviceError: It is CUDA's default stream of each thread.
        """
        return _STREAM

    def stream_of_others(self, device: int, handle: int) -> Stream:
        """Return a stream that another library has made, by its number (cudaStream_t)."""
        return _STREAM

    def copy_to_host(self, target: Array, source: Array, stream: Stream) -> None:
        """Copy the bytes of ``source`` into ``target``, a NumPy array over pinned memory; both contiguous."""
        check_copy(target, source)
        if source.nbytes:
            np.copyto(_bytes(target), _bytes(source))

    def copy_to_device(self, target: Array, source: Array, stream: Stream) -> None:
        """Copy the bytes of ``source``, a NumPy array over pinned memory, into ``target``; both contiguous."""
        self.copy_to_host(target, source, stream)

    def compile(self, source: DType, target: DType, divides: bool) -> None:
        """Compile the kernel of a cast for the current device, before it is needed."""

    def blank(self, array: Array, stream: Stream) -> None:
        """Make all elements of a contiguous array 0."""
        array[...] = 0

    def pack(self, sources: Sequence[Array], flat: Array, stream: Stream, starts: Starts = None) -> None:
        """Copy contiguous arrays into ``flat``, cast to its dtype.

        They lie from ``starts`` on, or one after the other.
        """
        for source, piece in pieces(sources, flat, starts):
            np.copyto(piece, source.reshape(-1), casting="unsafe")

    def unpack(
        self, flat: Array, targets: Sequence[Array], divisor: float | None, stream: Stream, starts: Starts = None
    ) -> None:
        """Copy ``flat`` into contiguous arrays, the reverse of ``pack``.

        Elements are divided by ``divisor``, if any, and cast.
        """
        for target, piece in pieces(targets, flat, starts):
            if divisor is not None:
                # Halves are divided in float32, as on a GPU: one rounding, at the cast.
                wide = piece.astype(np.float32) if is_half(piece.dtype) else piece
                piece = np.true_divide(wide, wide.dtype.type(divisor))
            np.copyto(target.reshape(-1), piece, casting="unsafe")


_STREAM = Stream()


def pieces(arrays: Sequence[Array], flat: Array, starts: Starts = None) -> Iterator[tuple[Array, Array]]:
    """Yield each array with its part of ``flat``.

    The parts lie one after the other, or from ``starts`` on.

    Raises:
        ValueError: Together they have more elements than ``flat``, or one is not contiguous.
    """
    for array, start in zip(arrays, starts_of(arrays) if starts is None else starts, strict=True):
        if not array.flags.c_contiguous:
            raise ValueError(f"an array of shape {array.shape} to pack is not contiguous; expected C order")
        end = start + array.size
        if end > flat.size:
            raise ValueError(f"the arrays to pack have {end} elements or more; the buffer has room for {flat.size}")
        yield array, flat[start:end]


def starts_of(arrays: Sequence[Array]) -> list[int]:
    """Return the offset of each array in a flat buffer, one after the other.

    >>> starts_of([np.zeros(3), np.zeros((2, 2)), np.zeros(1)])
    [0, 3, 7]
    """
    return list(accumulate((array.size for array in arrays[:-1]), initial=0)) if arrays else []


def check_copy(target: Array, source: Array) -> None:
    """Raise ValueError unless both arrays are contiguous and have the same number of bytes."""
    if target.nbytes != source.nbytes:
        raise ValueError(f"cannot copy {source.nbytes} bytes into {target.nbytes}; expected arrays of one size")
    if not (target.flags.c_contiguous and source.flags.c_contiguous):
        raise ValueError("an array to copy as bytes is not contiguous; expected both in C order")


def _bytes(array: Array) -> Array:
    return array.reshape(-1).view(np.uint8)
