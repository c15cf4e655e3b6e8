"""Memory that is used again, for results and packed input.

So no step waits for the kernel to hand out pages.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import numpy as np

from mpidist.arrays.dtypes import Array, DType

# Below this the allocator keeps memory anyway.
SMALLEST = 64 << 10
_PAGE = 4096
# What has not been needed in so many requests is idle.
_IDLE_REQUESTS = 64


def _references(holder: Sequence[object], index: int) -> int:
    return sys.getrefcount(holder[index])


# What the same expression says of an object that only a list knows; it differs between versions of Python.
_IDLE_REFERENCES = _references([object()], 0)


def is_held(holder: Sequence[object], index: int) -> bool:
    """Return whether anything but the list ``holder`` refers to its element.

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


class _Shelf:
    """Blocks of one size, of which the first that nobody holds is given out."""

    __slots__ = ("_highest", "_requests", "blocks", "last_request")

    def __init__(self) -> None:
        self.blocks: list[Array] = []
        self.last_request = 0
        self._requests = 0
        self._highest = 0

    def free_block(self) -> int | None:
        """Return the index of a block that nobody holds, or None."""
        blocks = self.blocks
        for i in range(len(blocks)):
            if not is_held(blocks, i):
                return i
        return None

    def note(self, index: int) -> None:
        """Count a request that got the block at ``index``; now and then drop idle blocks."""
        self._highest = max(self._highest, index)
        self._requests += 1
        if self._requests > max(_IDLE_REQUESTS, 2 * len(self.blocks)):
            for i in reversed(range(self._highest + 1, len(self.blocks))):
                if not is_held(self.blocks, i):
                    del self.blocks[i]
            self._requests = self._highest = 0


class Pool:
    """A pool of blocks of memory, over which it gives out arrays.

    A block is used again once the caller has dropped all arrays over it. Blocks that were needed at one time and
    not again go back to the system as more of their size are asked for; those of a size that nobody asks for when there
    are new ones to be made.
    """

    def __init__(self) -> None:
        self._shelves: dict[int, _Shelf] = {}
        self._requests = 0

    def take(self, shape: int | tuple[int, ...], dtype: DType) -> Array:
        """Return an uninitialized array."""
        nbytes: int = (shape if isinstance(shape, int) else math.prod(shape)) * dtype.itemsize
        if nbytes < SMALLEST:
            return np.empty(shape, dtype)
        self._requests += 1
        size = _rounded(nbytes)
        shelf = self._shelves.get(size)
        if shelf is None:
            shelf = self._shelves[size] = _Shelf()
        shelf.last_request = self._requests
        index = shelf.free_block()
        if index is None:
            self._drop_idle()
            index = len(shelf.blocks)
            block = np.empty(size, np.uint8)
            # Touch each page here. Otherwise a peer's first write would allocate it on the peer's NUMA node.
            block[::_PAGE] = 0
            shelf.blocks.append(block)
        array: Array = np.ndarray(shape, dtype, shelf.blocks[index])
        shelf.note(index)
        return array

    def _drop_idle(self) -> None:
        for size, shelf in list(self._shelves.items()):
            if shelf.last_request <= self._requests - _IDLE_REQUESTS:
                del self._shelves[size]


def _rounded(nbytes: int) -> int:
    """Return the size of the block for a request.

    It is at most an eighth more, so that similar sizes share blocks.
    """
    step = max(SMALLEST, 1 << max(0, nbytes.bit_length() - 4))
    return -(-nbytes // step) * step
