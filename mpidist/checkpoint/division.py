"""Divide the writing of a checkpoint among the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

# Tensors of less than twice this are not cut: small parts cost more than they bring.
SMALLEST_PART_BYTES = 1 << 16
# Who writes which elements of each tensor: (rank, start, stop).
Plan = dict[str, list[tuple[int, int, int]]]


@dataclass(frozen=True)
class Extent:
    """The size of a tensor.

    Attributes:
        size: Number of elements.
        itemsize: Bytes of one.
        is_everywhere: Whether every rank has it; otherwise the first rank writes it.
    """

    size: int
    itemsize: int
    is_everywhere: bool

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return self.size * self.itemsize


def plan_parts(extents: Mapping[str, Extent], ranks: int) -> Plan:
    """Return the part of each tensor that each rank writes.

    >>> plan_parts({"w": Extent(30000, 8, True), "b": Extent(10, 8, False)}, 2)
    {'w': [(0, 0, 14995), (1, 14995, 30000)], 'b': [(0, 0, 10)]}
    """
    shared = [(key, extent) for key, extent in extents.items() if extent.is_everywhere]
    total = sum([extent.nbytes for _, extent in shared])
    own = sum([extent.nbytes for extent in extents.values()]) - total
    # The first rank has its own to write, too, and takes so much less of the rest; the others share that evenly.
    first = total if ranks == 1 else min(max(0, (total + own) // ranks - own), total)
    cuts = [0, *[first + (total - first) * i // max(1, ranks - 1) for i in range(ranks)]]
    plan: Plan = {key: [(0, 0, extent.size)] for key, extent in extents.items()}
    begin = 0
    for key, extent in shared:
        # cuts[rank] and cuts[rank + 1] are the borders of what a rank writes.
        local = [_cut_of(extent, cut - begin) for cut in cuts]
        parts = [(rank, start, stop) for rank, (start, stop) in enumerate(pairwise(local)) if stop > start]
        plan[key] = parts or plan[key]
        begin += extent.nbytes
    return plan


def _cut_of(extent: Extent, offset: int) -> int:
    """Return the element at which to cut a tensor, ``offset`` bytes after its begin."""
    if offset <= 0 or extent.nbytes == 0:
        return 0
    if offset >= extent.nbytes:
        return extent.size
    if extent.nbytes < 2 * SMALLEST_PART_BYTES:
        return extent.size if 2 * offset >= extent.nbytes else 0
    return offset // extent.itemsize
