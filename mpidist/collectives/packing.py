"""Flat buffers: which arrays travel together, and how they get into one buffer and out again."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from mpidist.arrays.convert import Array
from mpidist.arrays.dtypes import DType
from mpidist.collectives.memory import Pool

# A result that small is copied out of the buffer, so that keeping it does not keep all of the buffer.
_SMALL_BYTES = 4 << 10


def group_by_size(sizes: Sequence[int], bytes_per_pack: int) -> list[list[int]]:
    """Return indices grouped into packs: a pack is closed once its size exceeds ``bytes_per_pack``.

    So every pack but the last is larger than ``bytes_per_pack``; 0 makes a single pack.

    Args:
        sizes: Bytes of each array.
        bytes_per_pack: See ``CommunicationOptions``.

    >>> group_by_size([16, 16, 16, 16], 16)
    [[0, 1], [2, 3]]
    """
    if bytes_per_pack == 0:
        return [list(range(len(sizes)))] if sizes else []
    packs: list[list[int]] = []
    room = -1
    for index, size in enumerate(sizes):
        if room < 0:
            packs.append([])
            room = bytes_per_pack
        packs[-1].append(index)
        room -= size
    return packs


def divided(flat: Array, divisor: int | None) -> Array:
    """Divide ``flat`` in place, unless ``divisor`` is None, and return it."""
    if divisor is not None:
        np.true_divide(flat, divisor, out=flat)
    return flat


def copies_of_overlapping(arrays: Sequence[Array], out: Sequence[Array]) -> list[Array]:
    """Return ``arrays`` with copies of those that may share memory with one of ``out``.

    >>> whole = np.zeros(4)
    >>> start, end = whole[:2], whole[1:]
    >>> first, second = copies_of_overlapping([start, end], [whole[2:]])
    >>> first is start, second is end
    (True, False)
    """
    if len(arrays) == len(out) == 1:
        return [arrays[0].copy() if np.may_share_memory(arrays[0], out[0]) else arrays[0]]
    targets = sorted(_bounds(target) for target in out if target.size)
    starts = [start for start, _ in targets]
    # The furthest end of all targets up to each: they may contain one another.
    ends = list(accumulate((end for _, end in targets), max))
    result = []
    for array in arrays:
        low, high = _bounds(array) if array.size else (0, 0)
        before = bisect_left(starts, high)
        result.append(array.copy() if before and ends[before - 1] > low else array)
    return result


def _bounds(array: Array) -> tuple[int, int]:
    """Return the addresses of the first byte of an array and behind its last."""
    low: int = array.__array_interface__["data"][0]
    high = low + array.itemsize
    for count, stride in zip(array.shape, array.strides, strict=True):
        if stride < 0:
            low += (count - 1) * stride
        else:
            high += (count - 1) * stride
    return low, high


class Pack:
    """Arrays of one dtype that travel in one flat buffer.

    Args:
        indices: Which arrays of the call, in the order they have in the buffer.
        shapes: Shapes of all arrays of the call.
        dtype: Dtype of the buffer, in which the reduction is formed.
        source_dtype: Dtype of the arrays.
    """

    def __init__(
        self, indices: Sequence[int], shapes: Sequence[tuple[int, ...]], dtype: DType, source_dtype: DType
    ) -> None:
        self.indices = tuple(indices)
        self.dtype = dtype
        self._casts = dtype != source_dtype
        self._shapes = [shapes[i] for i in self.indices]
        counts = [int(np.prod(shape)) for shape in self._shapes]
        self._stops = np.cumsum(counts).tolist()
        self._starts = [stop - count for stop, count in zip(self._stops, counts, strict=True)]
        self.count: int = self._stops[-1]
        self.nbytes = self.count * dtype.itemsize

    def fill(self, arrays: Sequence[Array], pool: Pool) -> Array:
        """Return the flat input buffer; a lone contiguous array of the right dtype is its own buffer."""
        if len(self.indices) == 1 and not self._casts:
            array = arrays[self.indices[0]]
            if array.flags.c_contiguous:
                return array.reshape(-1)
        buffer = pool.take(self.count, self.dtype)
        for index, start, stop, shape in self._slots():
            np.copyto(buffer[start:stop].reshape(shape), arrays[index])
        return buffer

    def parts(self, arrays: Sequence[Array], most: int, pool: Pool) -> list[Array]:
        """Return flat arrays that one after the other are the input: the callers' own memory where possible.

        Args:
            arrays: All arrays of the call.
            most: Into how many parts it may come.
            pool: Where a buffer comes from if it takes one.
        """
        if self._casts or len(self.indices) > most:
            return [self.fill(arrays, pool)]
        return [np.ascontiguousarray(arrays[index]).reshape(-1) for index in self.indices]

    def result_buffer(self, out: Sequence[Array] | None, pool: Pool) -> Array:
        """Return the flat buffer for the result: the caller's own array where it can be used as it is."""
        if out is not None and len(self.indices) == 1:
            array = out[self.indices[0]]
            if array.dtype == self.dtype and array.flags.c_contiguous:
                return array.reshape(-1)
        return pool.take(self.count, self.dtype)

    def unpack(self, flat: Array, dtype: DType, results: list[Array], out: Sequence[Array] | None) -> None:
        """Put the parts of ``flat`` into ``results``, as views, or cast to ``dtype``, or copied to ``out``."""
        if flat.dtype != dtype:
            flat = flat.astype(dtype)
        if out is None and len(self.indices) == 1:
            results[self.indices[0]] = flat.reshape(self._shapes[0])
            return
        for index, start, stop, shape in self._slots():
            part = flat[start:stop].reshape(shape)
            if part.nbytes <= _SMALL_BYTES and out is None:
                part = part.copy()
            if out is not None:
                if not np.may_share_memory(part, out[index]):
                    np.copyto(out[index], part)
                part = out[index]
            results[index] = part

    def _slots(self) -> zip[tuple[int, int, int, tuple[int, ...]]]:
        return zip(self.indices, self._starts, self._stops, self._shapes, strict=True)
