"""Memory that is used again, for results and packed input, so that no step waits for the kernel to hand out pages."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np

from mpidist.arrays.convert import Array
from mpidist.arrays.dtypes import DType

# Below this the allocator keeps memory anyway.
SMALLEST = 64 << 10
# Blocks of a size that nobody has asked for in so many requests go back to the system.
_IDLE_REQUESTS = 64


def _references(holder: list[Any], index: int) -> int:
    return sys.getrefcount(holder[index])


# What the same expression says of an object that only a list knows; it differs between versions of Python.
_IDLE_REFERENCES = _references([object()], 0)


def is_held(holder: list[Any], index: int) -> bool:
    """Whether anything but the list ``holder`` refers to its element.

    NumPy arrays that are views refer to the array that owns the memory, or was first made over it, however they were
    made. So an array that is not held is one whose memory nobody can see.

    >>> arrays = [np.zeros(4)]
    >>> is_held(arrays, 0)
    False
    >>> view = arrays[0][1:].reshape(3, 1)[::2]
    >>> is_held(arrays, 0)
    True
    """
    return _references(holder, index) > _IDLE_REFERENCES


class Pool:
    """Gives out arrays over blocks of memory; a block is used again once the caller has dropped all arrays over it."""

    def __init__(self) -> None:
        self._blocks: dict[int, list[Array]] = {}
        self._last_requests: dict[int, int] = {}
        self._requests = 0

    def take(self, shape: int | tuple[int, ...], dtype: DType) -> Array:
        """Return an uninitialized array."""
        nbytes: int = (shape if isinstance(shape, int) else math.prod(shape)) * dtype.itemsize
        if nbytes < SMALLEST:
            return np.empty(shape, dtype)
        self._requests += 1
        size = _rounded(nbytes)
        self._last_requests[size] = self._requests
        blocks = self._blocks.setdefault(size, [])
        for i in range(len(blocks)):
            if not is_held(blocks, i):
                break
        else:
            self._drop_idle()
            blocks.append(np.empty(size, np.uint8))
            i = -1
        array: Array = np.ndarray(shape, dtype, blocks[i])
        return array

    def _drop_idle(self) -> None:
        for size, last_request in list(self._last_requests.items()):
            if last_request <= self._requests - _IDLE_REQUESTS:
                del self._blocks[size], self._last_requests[size]


def _rounded(nbytes: int) -> int:
    """Return the size of the block for a request: at most an eighth more, so that similar sizes share blocks."""
    step = max(SMALLEST, 1 << max(0, nbytes.bit_length() - 4))
    return -(-nbytes // step) * step
