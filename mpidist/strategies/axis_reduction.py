"""Reductions along an axis: in each replica first, and then over the replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpidist.arrays.convert import restorer, to_array
from mpidist.arrays.dtypes import Array, reduction_dtypes
from mpidist.core.options import ReduceOp
from mpidist.strategies.strategy_extended import StrategyExtended
from mpidist.values import PerReplica, ReplicaValues
from mpidist.values.placement import place_of

_ALONG: dict[ReduceOp, Callable[..., Any]] = {
    ReduceOp.SUM: np.sum,
    ReduceOp.MEAN: np.sum,
    ReduceOp.MIN: np.min,
    ReduceOp.MAX: np.max,
    ReduceOp.PROD: np.prod,
    ReduceOp.BAND: np.bitwise_and.reduce,
    ReduceOp.BOR: np.bitwise_or.reduce,
    ReduceOp.BXOR: np.bitwise_xor.reduce,
}


def reduce_over_axis(
    extended: StrategyExtended, op: ReduceOp, leaves: Sequence[object], axis: int | tuple[int, ...], structure: str
) -> list[object]:
    """Reduce ``leaves``, from a ``structure``, along ``axis`` and over the replicas, in one batch (collective)."""
    axes = axis if isinstance(axis, tuple) else (axis,)
    along = f"{structure} along axis {axis}"
    is_mean = op is ReduceOp.MEAN
    sums, counts, samples = [], [], []
    with extended.shared_errors(f"reducing{along}"):
        for leaf in map(extended.distributed, leaves):
            if isinstance(leaf, ReplicaValues):
                parts = [_along(to_array(value), op, axes) for value in leaf.values]
            else:  # a plain value counts on each replica
                parts = [_along(to_array(leaf), op, axes)] * len(extended.local_replica_ids)
            samples.append(leaf.values[0] if isinstance(leaf, ReplicaValues) else leaf)
            sums.append(PerReplica([part for part, _ in parts]))
            counts.append(PerReplica([count for _, count in parts]))
    batch = [*sums, *counts] if is_mean else sums
    totals = extended.reduce_leaves(ReduceOp.SUM if is_mean else op, batch, f"mean of {along}" if is_mean else along)
    results = []
    for index, sample in enumerate(samples):
        total, dtype = to_array(totals[index]), reduction_dtypes(to_array(sample).dtype, op)[1]
        with place_of(total).current(), np.errstate(divide="ignore", invalid="ignore"):
            if is_mean:
                total = to_array(np.true_divide(total, to_array(totals[len(sums) + index])))
            result = total.astype(dtype, copy=False)
        restore = restorer(sample)
        results.append(result[()] if restore is None else restore(result))
    return results


def _along(array: Array, op: ReduceOp, axes: tuple[int, ...]) -> tuple[Array, Array]:
    """Return the reduced array, and the number of elements in each result."""
    for axis in axes:
        if not -array.ndim <= axis < array.ndim:
            raise ValueError(
                f"axis {axis} is out of range for a value of rank {array.ndim} (shape {array.shape}); "
                + (f"expected {-array.ndim} to {array.ndim - 1}" if array.ndim else "expected axis=None for a scalar")
            )
    place, count = place_of(array), int(np.prod([array.shape[axis] for axis in axes]))
    with place.current():
        if op not in (ReduceOp.MIN, ReduceOp.MAX):
            # Rounded to the dtype of the result once, at the end.
            reduced = _ALONG[op](array, axis=axes, dtype=reduction_dtypes(array.dtype, op)[0])
        elif count:
            reduced = _ALONG[op](array, axis=axes)
        else:
            dropped = {axis % array.ndim for axis in axes}
            shape = tuple(size for axis, size in enumerate(array.shape) if axis not in dropped)
            limits: Any = np.iinfo(array.dtype) if array.dtype.kind in "iu" else None
            largest, smallest = (np.inf, -np.inf) if limits is None else (limits.max, limits.min)
            reduced = np.full(shape, largest if op is ReduceOp.MIN else smallest, array.dtype)
    return place.brings(to_array(reduced)), place.brings(np.asarray(count, np.int64))
