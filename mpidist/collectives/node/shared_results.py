"""Results that all ranks of a node share, in slots of shared memory.

A slot is used again when every rank has dropped its array.
"""

from __future__ import annotations

import numpy as np

from mpidist.arrays.dtypes import Array
from mpidist.collectives.mpi.waiting import Steps
from mpidist.collectives.node.memory import is_held
from mpidist.collectives.node.shared_memory import SharedMemory

MAX_SLOTS = 32


class SharedResults:
    """The slots of one node. Every rank has the same slots, and hands them out in the same order.

    Args:
        shared: The shared memory of the node.
    """

    def __init__(self, shared: SharedMemory) -> None:
        self._shared = shared
        self._slots: list[Array] = []

    def held(self) -> int:
        """Return a number whose bits say which slots this rank still holds an array over."""
        mask = 0
        for index in range(len(self._slots)):
            if is_held(self._slots, index):
                mask |= 1 << index
        return mask

    def free(self, nbytes: int, held: list[int]) -> Array | None:
        """Return a slot that no rank holds, or None.

        Args:
            nbytes: Its size.
            held: ``held()`` of every rank.
        """
        for index, slot in enumerate(self._slots):
            if slot.size >= nbytes and not any(bits >> index & 1 for bits in held):
                return self._slots[index][:nbytes]
        return None

    def add(self, nbytes: int) -> Steps[bool]:
        """Make one more slot; return whether there was room, the same on all ranks (collective)."""
        if len(self._slots) == MAX_SLOTS:
            return False
        made = yield from self._shared.common(nbytes)
        if made is not None:
            # By way of a memoryview it is an array of its own, which its views refer to.
            self._slots.append(np.frombuffer(made.data, np.uint8))
        return made is not None

    def close(self) -> None:
        """Let go of the slots; memory that the caller still holds arrays of stays."""
        self._slots.clear()
