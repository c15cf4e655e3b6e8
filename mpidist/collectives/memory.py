"""Memory that is used again: flat blocks for results, so that no step waits for the kernel to hand out pages."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import numpy as np

from mpidist.arrays.convert import Array
from mpidist.arrays.dtypes import DType

# Below this the allocator keeps memory anyway.
SMALLEST = 64 << 10
# A block that nobody has asked for in so many requests goes back to the system.
_IDLE_REQUESTS = 64
# References to an idle block: the entry's own, and the argument of getrefcount.
_IDLE_REFERENCES = 2


@dataclass
class _Entry:
    block: Array
    last_request: int


class ResultPool:
    """Gives out arrays over blocks of memory; a block is used again once the caller has dropped all arrays over it.

    NumPy arrays that are views refer to the array that owns the memory, however they were made. So a block without
    references from outside is one that nobody can see.
    """

    def __init__(self) -> None:
        self._entries: dict[int, list[_Entry]] = {}
        self._requests = 0

    def take(self, count: int, dtype: DType) -> Array:
        """Return an uninitialized flat array."""
        nbytes = count * dtype.itemsize
        if nbytes < SMALLEST:
            return np.empty(count, dtype)
        self._requests += 1
        size = _rounded(nbytes)
        entries = self._entries.setdefault(size, [])
        for entry in entries:
            if sys.getrefcount(entry.block) == _IDLE_REFERENCES:
                break
        else:
            self._drop_idle()
            entry = _Entry(np.empty(size, np.uint8), 0)
            entries.append(entry)
        entry.last_request = self._requests
        return entry.block[:nbytes].view(dtype)

    def _drop_idle(self) -> None:
        oldest = self._requests - _IDLE_REQUESTS
        for entries in self._entries.values():
            entries[:] = [
                entry
                for entry in entries
                if entry.last_request > oldest or sys.getrefcount(entry.block) > _IDLE_REFERENCES
            ]


def _rounded(nbytes: int) -> int:
    """Return the size of the block for a request: at most an eighth more, so that similar sizes share blocks."""
    step = max(SMALLEST, 1 << max(0, nbytes.bit_length() - 4))
    return -(-nbytes // step) * step
