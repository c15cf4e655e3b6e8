"""Reducing the values of one rank's replicas, in replica order, in the dtype in which the sum is formed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mpidist.arrays.convert import Array, to_array
from mpidist.arrays.dtypes import reduction_dtypes
from mpidist.collectives.mpi.mpi_types import numpy_op
from mpidist.core.enums import ReduceOp
from mpidist.values.placement import place_of

AccumulationFn = Callable[[Sequence[Array]], Array]


def check_alike(arrays: Sequence[Array]) -> None:
    """Raise ValueError unless all arrays have one shape and one dtype."""
    kinds = [(array.shape, array.dtype) for array in arrays]
    if any(kind != kinds[0] for kind in kinds):
        shown = ", ".join(f"{dtype}{shape}" for shape, dtype in kinds)
        raise ValueError(
            f"the values of the replicas differ in shape or dtype: {shown}; expected the same on every replica "
            "(strategy.reduce(..., axis=0) combines replicas with different numbers of rows)"
        )


def formed(array: Array, op: ReduceOp) -> Array:
    """Return ``array`` in the dtype in which ``op`` is formed."""
    return place_of(array).casts(array, reduction_dtypes(array.dtype, op)[0])


def accumulate(arrays: Sequence[Array], op: ReduceOp) -> Array:
    """Combine arrays of one shape and dtype where the first is, first to last; the sum where ``op`` is MEAN.

    >>> import numpy as np
    >>> accumulate([np.array([1, 2]), np.array([10, 20])], ReduceOp.SUM)
    array([11, 22])
    """
    combine = numpy_op(op)
    if len(arrays) == 1:
        return arrays[0]
    place = place_of(arrays[0])
    with place.current():
        total = to_array(combine(arrays[0], place.brings(arrays[1])))
        for array in arrays[2:]:
            combine(total, place.brings(array), out=total)
    return total


def divided(total: Array, divisor: int) -> Array:
    """Return ``total / divisor``, where ``total`` is."""
    with place_of(total).current():
        return to_array(total / divisor)
