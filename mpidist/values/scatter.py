"""Sparse updates of an array in place, and the checks on what is scattered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from mpidist.arrays.convert import Array
from mpidist.values.indexed_slices import IndexedSlices, check_indices


class ScatterOp(NamedTuple):
    """One scatter method.

    Attributes:
        name: Of the method.
        apply_rows: Changes an array in place, given positions and rows.
        can_aggregate: Whether rows of several replicas can be summed or averaged first.
    """

    name: str
    apply_rows: Callable[[Array, Array, Array], None]
    can_aggregate: bool

    def apply(self, array: Array, slices: IndexedSlices) -> None:
        """Change ``array`` in place."""
        self.apply_rows(array, slices.indices, slices.values)


def _divide(array: Array, indices: Array, rows: Array) -> None:
    if array.dtype.kind not in "iu":
        np.true_divide.at(array, indices, rows)
        return
    for index, row in zip(indices, rows, strict=True):
        old = array[index]
        # Towards zero, as integer division in C has it.
        array[index] = np.sign(old) * np.sign(row) * (np.abs(old) // np.abs(row))


def _update(array: Array, indices: Array, rows: Array) -> None:
    array[indices] = rows


ADD = ScatterOp("scatter_add", np.add.at, True)
SUB = ScatterOp("scatter_sub", np.subtract.at, True)
MUL = ScatterOp("scatter_mul", np.multiply.at, True)
DIV = ScatterOp("scatter_div", _divide, True)
MIN = ScatterOp("scatter_min", np.minimum.at, False)
MAX = ScatterOp("scatter_max", np.maximum.at, False)
UPDATE = ScatterOp("scatter_update", _update, False)


def check_slices(slices: Any, variable: Any) -> IndexedSlices:
    """Return ``slices`` in the variable's dtype, after checking kind, positions and shape of the rows."""
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
    if slices.dtype == variable.dtype:
        return slices
    if not np.can_cast(slices.dtype, variable.dtype, "same_kind"):
        raise TypeError(
            f"rows of dtype {slices.dtype} were scattered into variable {variable.name!r} of dtype {variable.dtype}; "
            f"convert them first: values.astype({variable.dtype.name!r})"
        )
    return IndexedSlices(slices.values.astype(variable.dtype), slices.indices, slices.dense_shape)
