"""Leaves in flat arrays, because each array that JAX passes to the host costs time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jax import Array


class LeafPacks:
    """Positions of leaves in flat arrays."""

    def __init__(self, leaves: Sequence[Array]) -> None:
        self._shapes = [leaf.shape for leaf in leaves]
        of_dtype: dict[object, list[int]] = {}
        for index, leaf in enumerate(leaves):
            of_dtype.setdefault(leaf.dtype, []).append(index)
        self._groups = list(of_dtype.values())

    def join(self, leaves: Sequence[Array], module: ModuleType) -> list[Array]:
        """Return the flat arrays. ``module`` is ``numpy`` or ``jax.numpy``, like the leaves."""
        return [module.concatenate([module.ravel(leaves[index]) for index in group]) for group in self._groups]

    def cut(self, packs: Sequence[Array]) -> list[Array]:
        """Return the leaves of flat arrays."""
        leaves: list[Array] = [None] * len(self._shapes)
        for group, pack in zip(self._groups, packs, strict=True):
            start = 0
            for index in group:
                stop = start + math.prod(self._shapes[index])
                leaves[index] = pack[start:stop].reshape(self._shapes[index])
                start = stop
        return leaves
