"""Sparse updates of an array in place, and the checks of their rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mpidist.arrays.convert import to_array
from mpidist.arrays.device_ops import is_device_array
from mpidist.arrays.dtypes import Array
from mpidist.values.indexed_slices import Combine, IndexedSlices, check_indices, combined, last_of_each


class ScatterOp(NamedTuple):
    """One scatter method.

    Attributes:
        name: Of the method.
        apply_rows: Changes a NumPy array in place, given positions and rows.
        can_aggregate: Whether rows of several replicas can be summed or averaged first.
        combine: Makes one of two rows for the same position; None takes the last of them.
        apply_once: Returns the new element, given the old one and its row.
    """

    name: str
    apply_rows: Callable[[Array, Array, Array], None]
    can_aggregate: bool
    combine: Combine | None
    apply_once: Callable[[Array, Array], Array]

    def apply(self, array: Array, slices: IndexedSlices) -> None:
        """Change ``array`` in place; its device is current."""
        if not is_device_array(array):
            self.apply_rows(array, slices.indices, slices.values)
            return
        if self.combine is None:
            rows, positions = last_of_each(slices.values, slices.indices)
        else:
            rows, positions = combined(slices.values, slices.indices, self.combine)
        array[positions] = self.apply_once(array[positions], rows)


def _divide(array: Array, indices: Array, rows: Array) -> None:
    if array.dtype.kind not in "iu":
        np.true_divide.at(array, indices, rows)
        return
    for index, row in zip(indices, rows, strict=True):
        array[index] = _quotient(array[index], row)


def _quotient(array: Array, rows: Array) -> Array:
    if array.dtype.kind not in "iu":
        return to_array(np.true_divide(array, rows))
    # Towards zero, as integer division in C has it.
    return to_array(np.sign(array) * np.sign(rows) * (np.abs(array) // np.abs(rows)))


def _update(array: Array, indices: Array, rows: Array) -> None:
    array[indices] = rows


ADD = ScatterOp("scatter_add", np.add.at, True, np.add, np.add)
SUB = ScatterOp("scatter_sub", np.subtract.at, True, np.add, np.subtract)
MUL = ScatterOp("scatter_mul", np.multiply.at, True, np.multiply, np.multiply)
DIV = ScatterOp("scatter_div", _divide, True, np.multiply, _quotient)
MIN = ScatterOp("scatter_min", np.minimum.at, False, np.minimum, np.minimum)
MAX = ScatterOp("scatter_max", np.maximum.at, False, np.maximum, np.maximum)
UPDATE = ScatterOp("scatter_update", _update, False, None, lambda _, rows: rows)


def check_slices(slices: object, variable: Any) -> IndexedSlices:
    """Return ``slices`` in the variable's dtype and place, after checking its rows."""
    if not isinstance(slices, IndexedSlices):
        raise TypeError(
            f"a {type(slices).__name__} was scattered into variable {variable.name!r}; "
            "expected mpidist.IndexedSlices(values, indices)"
        )
    if variable.ndim == 0 or slices.values.shape[1:] != variable.shape[1:]:
        raise ValueError(
            f"rows of shape {slices.values.shape[1:]} were scattered into variable {variable.name!r} of shape "
            f"{variable.shape}; expected rows of shape {variable.shape[1:]}"
        )
    check_indices(slices.indices, variable.shape[0])
    place = variable.local_place()
    values = place.brings(slices.values)
    if slices.dtype == variable.dtype:
        return slices if values is slices.values else IndexedSlices(values, slices.indices, slices.dense_shape)
    if not np.can_cast(slices.dtype, variable.dtype, "same_kind"):
        raise TypeError(
            f"rows of dtype {slices.dtype} were scattered into variable {variable.name!r} of dtype {variable.dtype}; "
            f"convert them first: values.astype({variable.dtype.name!r})"
        )
    return IndexedSlices(place.casts(values, variable.dtype), slices.indices, slices.dense_shape)
