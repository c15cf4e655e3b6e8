"""Leaves in flat arrays, one for each dtype.

Each array that JAX hands to the host has a price of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType
from typing import Any, TypeAlias

# An array of JAX, also a traced one, or a flat one of several.
Leaf: TypeAlias = Any


class LeafPacks:
    """Where leaves stand in flat arrays.

    Args:
        leaves: Arrays of JAX, also traced ones.
    """

    def __init__(self, leaves: Sequence[Leaf]) -> None:
        self._shapes = [leaf.shape for leaf in leaves]
        of_dtype: dict[object, list[int]] = {}
        for index, leaf in enumerate(leaves):
            of_dtype.setdefault(leaf.dtype, []).append(index)
        self._groups = list(of_dtype.values())

    def join(self, leaves: Sequence[Leaf], module: ModuleType) -> list[Leaf]:
        """Return the flat arrays; ``module`` is that of the leaves, ``numpy`` or ``jax.numpy``."""
        return [module.concatenate([module.ravel(leaves[index]) for index in group]) for group in self._groups]

    def cut(self, packs: Sequence[Leaf]) -> list[Leaf]:
        """Return the leaves of flat arrays."""
        leaves: list[Leaf] = [None] * len(self._shapes)
        for group, pack in zip(self._groups, packs, strict=True):
            start = 0
            for index in group:
                stop = start + math.prod(self._shapes[index])
                leaves[index] = pack[start:stop].reshape(self._shapes[index])
                start = stop
        return leaves
