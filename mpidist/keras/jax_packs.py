"""Values of JAX in flat arrays for the ranks to add up, and their means.

Each array that JAX hands to NumPy has a price of its own, and a large one that is packed another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from mpidist.arrays.dtypes import Array, is_half
from mpidist.keras.untyped import Tensors

_MOST_SMALL_ELEMENTS = 16 << 10
# Of arrays that JAX on a CPU reads where they lie.
_ALIGNMENT = 64


def pack(tensors: Sequence[Tensors], factors: Sequence[int]) -> list[jax.Array]:
    """Return tensors, each times its factor, as flat ones.

    Small ones of a dtype are together, large ones alone. Those of 16 bits become float32, which has room for
    such products.
    """
    return [
        jnp.concatenate([_times(tensors[place], factors[place]).ravel() for place in places])
        for places in _places(tensors)
    ]


def unpack(sums: Sequence[Array], count: Array, like: Sequence[Tensors]) -> list[jax.Array]:
    """Return the means of tensors that were packed.

    Args:
        sums: Of their packs.
        count: By which the sums are divided.
        like: Of the shapes and dtypes of those tensors.
    """
    tensors: list[jax.Array] = [jnp.array(())] * len(like)
    for flat, places in zip(sums, _places(like), strict=True):
        mean, start = jnp.divide(flat, count.astype(flat.dtype)), 0
        for place in places:
            end = start + math.prod(like[place].shape)
            tensors[place] = mean[start:end].reshape(like[place].shape).astype(like[place].dtype)
            start = end
    return tensors


def room_for(arrays: Sequence[Array]) -> list[Array]:
    """Return arrays of the same sizes, which JAX on a CPU does not copy."""
    found = []
    for array in arrays:
        room = np.empty(array.nbytes + _ALIGNMENT, np.uint8)
        start = -room.ctypes.data % _ALIGNMENT
        found.append(room[start : start + array.nbytes].view(array.dtype))
    return found


def _times(tensor: Tensors, factor: int) -> jax.Array:
    wide: jax.Array = tensor.astype("float32") if is_half(tensor.dtype) else tensor
    # Not by 1, which would be a copy.
    return wide if factor == 1 else wide * float(factor)


def _places(tensors: Sequence[Tensors]) -> list[list[int]]:
    """Return which tensors travel in each pack."""
    places: dict[object, list[int]] = {}
    for place, tensor in enumerate(tensors):
        is_large = math.prod(tensor.shape) > _MOST_SMALL_ELEMENTS
        places.setdefault(place if is_large else tensor.dtype, []).append(place)
    return list(places.values())
