"""Padding: the elements of one batch brought to one shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpidist.core import nest
from mpidist.input.element_spec import ArraySpec, map_spec
from mpidist.input.elements import as_element


class _Given:
    """Hides what was given for one leaf, which may look like structure, from what walks through nests."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Padding:
    """How elements are made one shape: which one, and what is put behind the values that they have.

    Args:
        shapes: For each array its shape, a tuple or list; None or -1 in it for the longest one of the batch. None: that
            on all axes.
        values: For each array what it is padded with, or one number or text for all. None: 0, or an empty text.

    >>> Padding(None, -1).stack([[1, 2], [3]])
    array([[ 1,  2],
           [ 3, -1]])
    """

    def __init__(self, shapes: Any, values: Any) -> None:
        self.shapes = shapes
        self.values = values

    def __str__(self) -> str:
        return f"padded_shapes={self.shapes!r}, padding_values={self.values!r}"

    def stack(self, elements: Sequence[Any]) -> Any:
        """Return one element whose leaves are those of ``elements``, padded and stacked.

        Raises:
            TypeError: A value that the dtype does not hold.
            ValueError: Different structures or numbers of axes; an array larger than its shape; shapes or values of
                another structure.
        """
        converted = [as_element(element) for element in elements]
        first = converted[0]
        for other in converted[1:]:
            nest.assert_same_structure(first, other)
        columns = [list(map(np.asarray, column)) for column in zip(*map(nest.flatten, converted), strict=True)]
        shapes, values = self._for_leaves(first)
        padded = (
            _padded(arrays, shape.value, value.value)
            for arrays, shape, value in zip(columns, nest.flatten(shapes), nest.flatten(values), strict=True)
        )
        return nest.pack_like(first, padded)

    def spec(self, spec: Any) -> Any:
        """Return what an element of ``spec`` looks like in a batch; sizes that are not given are unknown."""
        leaves = map_spec(_Given, spec)
        shapes, _ = self._for_leaves(leaves)

        def pad(leaf: _Given, shape: _Given) -> ArraySpec:
            sizes = shape.value or [-1] * len(leaf.value.shape)
            return ArraySpec(tuple(None if size == -1 else size for size in sizes), leaf.value.dtype)

        return nest.map_structure(pad, leaves, shapes)

    def _for_leaves(self, element: Any) -> tuple[Any, Any]:
        """Return nests like ``element`` of what was given as shape and as value, None where nothing was."""
        nothing = nest.map_structure(lambda _: _Given(None), element)
        shapes = nothing if self.shapes is None else _below(element, self.shapes, "padded_shapes")
        shapes = nest.map_structure(lambda given: _Given(_checked_shape(given.value)), shapes)
        if isinstance(self.values, (tuple, Mapping)):
            return shapes, _below(element, self.values, "padding_values")
        return shapes, nest.map_structure(lambda _: _Given(self.values), element)


def _below(structure: Any, given: Any, name: str) -> Any:
    """Return a nest like ``structure`` of what ``given`` has in the places of its leaves."""
    if not nest.is_nest(structure):
        return _Given(given)
    if isinstance(structure, dict) and isinstance(given, Mapping) and set(given) == set(structure):
        return {key: _below(child, given[key], name) for key, child in structure.items()}
    if isinstance(structure, tuple) and isinstance(given, (tuple, list)) and len(given) == len(structure):
        children = [_below(child, part, name) for child, part in zip(structure, given, strict=True)]
        return type(structure)(*children) if hasattr(structure, "_fields") else tuple(children)
    raise ValueError(
        f"{name} has {given!r} for elements of {nest.describe(structure)}; expected one for each array, in the same "
        "structure of tuples and dicts"
    )


def _checked_shape(shape: Any) -> list[int] | None:
    if shape is None:
        return None
    sizes = [-1 if size is None else size for size in shape] if isinstance(shape, (tuple, list)) else None
    if sizes is None or not all(isinstance(size, (int, np.integer)) and size >= -1 for size in sizes):
        raise ValueError(f"padded_shapes has {shape!r} for an array; expected its sizes, such as [None, 3]")
    return [int(size) for size in sizes]


def _padded(arrays: list[np.ndarray[Any, Any]], shape: list[int] | None, value: Any) -> np.ndarray[Any, Any]:
    dims = {array.ndim for array in arrays}
    if len(dims) > 1 or (shape is not None and dims != {len(shape)}):
        raise ValueError(
            f"the elements of a padded batch have {sorted(dims)} axes, and padded_shapes is {shape}; expected the same "
            "number of axes in all of them"
        )
    longest = [max(sizes) for sizes in zip(*(array.shape for array in arrays), strict=True)]
    target = [most if size == -1 else size for size, most in zip(shape or [-1] * len(longest), longest, strict=True)]
    if any(most > size for most, size in zip(longest, target, strict=True)):
        raise ValueError(
            f"an element of a padded batch has sizes up to {longest}, and padded_shapes is {shape}; expected no larger "
            "ones: give None for the longest of each batch, or cut them before"
        )
    dtype = np.result_type(*{array.dtype for array in arrays})
    fill = _fill(value, dtype)
    padded = np.full((len(arrays), *target), fill, np.result_type(dtype, np.asarray(fill).dtype))
    for row, array in zip(padded, arrays, strict=True) if longest else ():
        row[tuple(map(slice, array.shape))] = array
    return padded if longest else np.stack(arrays)


def _fill(value: Any, dtype: np.dtype[Any]) -> Any:
    if value is None:
        return np.zeros((), dtype)[()]
    given = np.asarray(value)
    with np.errstate(all="ignore"):
        fill = given.astype(dtype) if given.dtype.kind in "biufc" and dtype.kind in "biufc" else given
    same = fill == given or (fill != fill and given != given)  # NaN is unlike itself
    if given.ndim or (fill.dtype.kind in "US") != (dtype.kind in "US") or not same:
        raise TypeError(f"padding_values has {value!r} for an array of {dtype}; expected a value of that dtype")
    return fill[()]
