"""Reducing values along an axis: in each replica first, and then over the replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpidist.arrays.convert import restorer, to_array
from mpidist.arrays.dtypes import Array, DType, reduction_dtypes
from mpidist.core.options import ReduceOp
from mpidist.strategies.strategy_extended import StrategyExtended
from mpidist.values import Mirrored, PerReplica, ReplicaValues
from mpidist.values.placement import Place, place_of

_ALONG: dict[ReduceOp, Callable[..., object]] = {
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
    with extended.shared_errors(f"reducing{along}"):
        leaves = [extended.distributed(leaf) for leaf in leaves]
        parts = [_per_component(leaf, lambda array: _along(array, op, axes)) for leaf in leaves]
        counts = [_per_component(leaf, lambda array: _count(array, axes)) for leaf in leaves]
        samples = [leaf.values[0] if isinstance(leaf, ReplicaValues) else leaf for leaf in leaves]
    is_mean = op is ReduceOp.MEAN
    batch = _as_contributions(extended, [*parts, *counts] if is_mean else parts)
    totals = extended.reduce_leaves(ReduceOp.SUM if is_mean else op, batch, f"mean of {along}" if is_mean else along)
    results = []
    for index, sample in enumerate(samples):
        total, dtype = to_array(totals[index]), reduction_dtypes(to_array(sample).dtype, op)[1]
        with place_of(total).current(), np.errstate(divide="ignore", invalid="ignore"):
            if is_mean:
                total = to_array(np.true_divide(total, to_array(totals[len(leaves) + index])))
            result = total.astype(dtype, copy=False)
        restore = restorer(sample)
        results.append(result[()] if restore is None else restore(result))
    return results


def _as_contributions(extended: StrategyExtended, parts: Sequence[object]) -> list[object]:
    """Return the contributions: values that are equal on all replicas count on each."""
    contributions = []
    for part in parts:
        if isinstance(part, Mirrored):
            part = PerReplica(part.values, part.replica_ids)
        elif extended.num_replicas_in_sync > 1 and not isinstance(part, ReplicaValues):
            part = PerReplica((part,) * len(extended.local_replica_ids), extended.local_replica_ids)
        contributions.append(part)
    return contributions


def _per_component(leaf: object, fn: Callable[[Array], Array]) -> object:
    if isinstance(leaf, ReplicaValues):
        return type(leaf)([fn(to_array(component)) for component in leaf.values], leaf.replica_ids)
    return fn(to_array(leaf))


def _check_axes(array: Array, axes: tuple[int, ...]) -> None:
    for axis in axes:
        if not -array.ndim <= axis < array.ndim:
            raise ValueError(
                f"axis {axis} is out of range for a value of rank {array.ndim} (shape {array.shape}); "
                + (f"expected {-array.ndim} to {array.ndim - 1}" if array.ndim else "expected axis=None for a scalar")
            )


def _along(array: Array, op: ReduceOp, axes: tuple[int, ...]) -> Array:
    _check_axes(array, axes)
    wire = reduction_dtypes(array.dtype, op)[0]
    place = place_of(array)
    with place.current():
        if op in (ReduceOp.MIN, ReduceOp.MAX):
            return _extreme(array, op, axes, place)
        # Rounded to the dtype of the result once, at the end.
        return to_array(_ALONG[op](array, axis=axes, dtype=wire))


def _extreme(array: Array, op: ReduceOp, axes: tuple[int, ...], place: Place) -> Array:
    """Return the minimum or maximum along ``axes``, neutral where there are no rows."""
    if all(array.shape[axis] for axis in axes):
        return to_array(_ALONG[op](array, axis=axes))
    dropped = {axis % array.ndim for axis in axes}
    shape = tuple(size for axis, size in enumerate(array.shape) if axis not in dropped)
    neutral = place.ops.empty(shape, array.dtype, place.number)
    neutral.fill(_neutral(array.dtype, op))
    return neutral


def _neutral(dtype: DType, op: ReduceOp) -> Any:
    """Return the neutral element of a minimum or maximum."""
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return limits.max if op is ReduceOp.MIN else limits.min
    return dtype.type(np.inf if op is ReduceOp.MIN else -np.inf)


def _count(array: Array, axes: tuple[int, ...]) -> Array:
    """Return the number of elements along ``axes``, where ``array`` is: it travels with the sums."""
    return place_of(array).brings(np.asarray(np.prod([array.shape[axis] for axis in axes], dtype=np.int64)))
