"""Memory of the pretended GPUs as CuPy's pool deals with it, and which GPU an address belongs to.

Each stream has an arena, whose free memory is split for smaller requests and joined again.
"""

from __future__ import annotations

import sys
import threading
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable

import numpy as np

ALIGNMENT = 512
# NaN in every floating-point dtype, -1 in integers.
FRESH = 0xFF


def aligned(nbytes: int) -> np.ndarray:
    """Return new memory whose address is one that a GPU's would have."""
    raw = np.full(nbytes + ALIGNMENT, FRESH, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes]


class Chunk:
    """A part of a block of device memory.

    Args:
        block: All of the block.
        start: Where the chunk begins in it.
        nbytes: How long it is.
    """

    def __init__(self, block: np.ndarray, start: int, nbytes: int) -> None:
        self.block, self.start, self.nbytes = block, start, nbytes
        self.before: Chunk | None = None
        self.after: Chunk | None = None
        self.is_free = False

    @property
    def memory(self) -> np.ndarray:
        """The bytes."""
        return self.block[self.start : self.start + self.nbytes]


class Arena:
    """The free memory of one stream.

    Args:
        ask: Is told of all memory that is asked of the device.
    """

    def __init__(self, ask: Callable[[np.ndarray], None]) -> None:
        self._ask = ask
        self._free: list[Chunk] = []
        self._lock = threading.Lock()
        # A finalizer, which may interrupt anything here, only puts chunks in.
        self._returned: deque[Chunk] = deque()

    def take(self, nbytes: int) -> Chunk:
        """Return the smallest free chunk that is large enough, without what is too much of it, or a new one."""
        rounded = max(ALIGNMENT, -(-nbytes // ALIGNMENT) * ALIGNMENT)
        with self._lock:
            while self._returned:
                self._join(self._returned.popleft())
            # The last one first: it is the likeliest to be still in use.
            fitting = [chunk for chunk in reversed(self._free) if chunk.nbytes >= rounded]
            if not fitting:
                block = aligned(rounded)
                self._ask(block)
                return Chunk(block, 0, rounded)
            chunk = min(fitting, key=lambda chunk: chunk.nbytes)
            self._free.remove(chunk)
            chunk.is_free = False
            if chunk.nbytes > rounded:
                self._split(chunk, rounded)
            return chunk

    def give_back(self, chunk: Chunk) -> None:
        """Let the chunk be taken again."""
        self._returned.append(chunk)

    def release(self) -> int:
        """Give the device back all blocks of which nothing is in use; returns their bytes."""
        with self._lock:
            while self._returned:
                self._join(self._returned.popleft())
            whole = [chunk for chunk in self._free if chunk.before is None and chunk.after is None]
            self._free = [chunk for chunk in self._free if chunk not in whole]
            return sum(chunk.nbytes for chunk in whole)

    def _split(self, chunk: Chunk, nbytes: int) -> None:
        rest = Chunk(chunk.block, chunk.start + nbytes, chunk.nbytes - nbytes)
        chunk.nbytes = nbytes
        rest.before, rest.after, chunk.after = chunk, chunk.after, rest
        if rest.after is not None:
            rest.after.before = rest
        rest.is_free = True
        self._free.append(rest)

    def _join(self, chunk: Chunk) -> None:
        """Make a chunk free, together with its neighbours that are."""
        if chunk.before is not None and chunk.before.is_free:
            self._free.remove(chunk.before)
            chunk = _merged(chunk.before, chunk)
        if chunk.after is not None and chunk.after.is_free:
            self._free.remove(chunk.after)
            chunk = _merged(chunk, chunk.after)
        chunk.is_free = True
        self._free.append(chunk)


def _merged(left: Chunk, right: Chunk) -> Chunk:
    left.nbytes += right.nbytes
    left.after = right.after
    if left.after is not None:
        left.after.before = left
    return left


class Regions:
    """Which GPU each address belongs to."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: list[tuple[int, int, int]] = []
        self._foreign: dict[int, tuple[int, int, int]] = {}

    def add(self, block: np.ndarray, device: int) -> None:
        """Note a block that a device gave; it stays."""
        start = int(block.ctypes.data)
        with self._lock:
            insort(self._blocks, (start, start + block.nbytes, device))

    def add_foreign(self, key: int, start: int, nbytes: int, device: int) -> None:
        """Note memory of another library."""
        self._foreign[key] = (start, start + nbytes, device)

    def drop_foreign(self, key: int) -> None:
        """Forget it."""
        self._foreign.pop(key, None)

    def device_of(self, start: int, nbytes: int) -> int | None:
        """Return the GPU to which all of these bytes belong, or None."""
        with self._lock:
            place = bisect_right(self._blocks, (start, sys.maxsize, 0)) - 1
            near = self._blocks[place : place + 1] if place >= 0 else []
        for first, stop, device in [*near, *list(self._foreign.values())]:
            if first <= start and start + nbytes <= stop:
                return device
        return None
