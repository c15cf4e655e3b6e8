"""Results that all ranks of a node share: slots of shared memory, used again when every rank has dropped its array."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mpidist.arrays.convert import Array
from mpidist.collectives.memory import is_held

if TYPE_CHECKING:
    from mpidist.collectives.node import Node

MAX_SLOTS = 32


class SharedResults:
    """The slots of one node. Every rank has the same slots, and hands them out in the same order.

    Args:
        node: The node.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._slots: list[Array] = []

    def held(self) -> list[int]:
        """Return, for each possible slot, 1 where this rank still holds an array over it."""
        held = [int(is_held(self._slots, i)) for i in range(len(self._slots))]
        return held + [0] * (MAX_SLOTS - len(held))

    def take(self, nbytes: int, held_by_rank: list[list[int]]) -> Array | None:
        """Return a slot that no rank holds, None on all ranks where there is none and no memory for one (collective).

        Args:
            nbytes: Its size.
            held_by_rank: What ``held()`` said on every rank, before the last barrier.
        """
        for index, slot in enumerate(self._slots):
            if slot.size >= nbytes and not any(held[index] for held in held_by_rank):
                return self._slots[index][:nbytes]
        if len(self._slots) == MAX_SLOTS:
            return None
        window = self._node.shared.make_window([nbytes] + [0] * (self._node.size - 1))
        if window is None:
            return None
        # By way of a memoryview it is an array of its own, which its views refer to, and not a view of the segment.
        self._slots.append(np.frombuffer(self._node.shared.segment(window, 0).data, np.uint8))
        return self._slots[-1][:nbytes]

    def close(self) -> None:
        """Let go of the slots; memory that the caller still holds arrays of stays."""
        self._slots.clear()
