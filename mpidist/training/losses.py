"""How per-example losses become a loss whose gradients may be summed over replicas.

The rule: every replica divides the sum of its losses by the size G of the *global* batch, and gradients are summed
over replicas. A plain mean over the local batch, summed over n replicas, is n times too large.
"""

from __future__ import annotations

import operator
from collections.abc import Sized
from contextlib import AbstractContextManager
from typing import Any, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from mpidist.arrays.convert import arithmetic_of
from mpidist.arrays.dtypes import Array, DType
from mpidist.core.context import get_replica_context, get_strategy, has_strategy, in_cross_replica_context
from mpidist.values.placement import array_of, place_of

Floating = TypeVar("Floating", bound="np.floating[Any]")


@overload
def compute_average_loss(
    per_example_loss: NDArray[Floating], sample_weight: Any = None, global_batch_size: int | None = None
) -> Floating: ...


@overload
def compute_average_loss(
    per_example_loss: Any, sample_weight: Any = None, global_batch_size: int | None = None
) -> Any: ...


def compute_average_loss(
    per_example_loss: object, sample_weight: object = None, global_batch_size: int | None = None
) -> Any:
    """Return the sum of the losses divided by the global batch size (tf.nn.compute_average_loss).

    Summed over replicas the results are the mean over the global batch. Weighted losses are still divided by the
    number of examples, not by the sum of the weights. An empty batch gives 0.

    Args:
        per_example_loss: Array of shape (batch, ...), one or more losses per example.
        sample_weight: A number, or an array that broadcasts against the losses; one of shape (batch,) weighs
            examples whose losses have one more axis. Weighting is computed in float32 at least (TensorFlow: in
            float32 always).
        global_batch_size: Number of examples on all replicas together, 0 or more. By default the local number
            times the number of replicas, which is wrong where their batches differ: pass
            ``global_count(images)`` or the size itself for a last, uneven batch.

    Returns:
        A NumPy scalar of the dtype of the losses, a 0-d array for losses on a device, which nothing waits for;
        integer losses give float64. Losses of PyTorch and JAX give a 0-d tensor or array of theirs, with gradients.

    Raises:
        ValueError: A loss without axes, weights that do not broadcast, or a negative batch size.
        TypeError: A batch size that is no whole number.
        RuntimeError: No ``global_batch_size`` in cross-replica context.

    >>> compute_average_loss([2.0, 3.0], global_batch_size=4)
    np.float64(1.25)
    """
    arithmetic = arithmetic_of(per_example_loss, sample_weight) or PlainArithmetic()
    losses = arithmetic.array(per_example_loss, what="per_example_loss")
    if losses.ndim == 0:
        raise ValueError(
            f"per_example_loss is {per_example_loss!r}, a scalar; expected an array of shape (batch, ...) with a loss "
            "for each example: do not average over the local batch first"
        )
    examples = losses.shape[0]
    dtype = arithmetic.result_dtype(losses)
    if global_batch_size is None:
        if has_strategy() and in_cross_replica_context():
            raise RuntimeError(
                "compute_average_loss() was called without global_batch_size in cross-replica context, where no "
                "local batch is meant; call it inside strategy.run(), or pass global_batch_size=..."
            )
        global_batch_size = examples * get_strategy().num_replicas_in_sync
    count = _batch_size(global_batch_size)
    with arithmetic.current(losses):
        wide = arithmetic.cast(losses, arithmetic.wide_dtype(dtype))
        if sample_weight is not None:
            wide = wide * _aligned(arithmetic.array(sample_weight, losses, "sample_weight"), losses)
        # The sum of no elements is 0 and has gradients, whatever the losses are.
        total = (wide if count else wide.reshape(-1)[:0]).sum()
        return arithmetic.cast(total / max(count, 1), dtype)


def scale_regularization_loss(regularization_loss: object) -> Any:
    """Return the sum of the losses divided by the number of replicas (tf.nn.scale_regularization_loss).

    For losses that do not depend on the data and that every replica adds: summed over replicas they count once.

    Args:
        regularization_loss: A number, an array, or a list of numbers.

    Returns:
        As :func:`compute_average_loss`.

    Raises:
        RuntimeError: Called in cross-replica context.

    >>> scale_regularization_loss([1.0, 2.0, 3.0])
    np.float64(6.0)
    """
    if has_strategy() and in_cross_replica_context():
        raise RuntimeError(
            "scale_regularization_loss() was called in cross-replica context; call it inside strategy.run(), "
            "where every replica adds the result to its loss"
        )
    arithmetic = arithmetic_of(regularization_loss) or PlainArithmetic()
    losses = arithmetic.array(regularization_loss, what="regularization_loss")
    dtype = arithmetic.result_dtype(losses)
    with arithmetic.current(losses):
        total = arithmetic.cast(losses, arithmetic.wide_dtype(dtype)).sum()
        return arithmetic.cast(total / get_strategy().num_replicas_in_sync, dtype)


def global_count(batch: Sized) -> int:
    """Return how many examples the batches of all replicas hold together. Extension.

    Collective in replica context: call it on every replica. It is the right ``global_batch_size`` for batches that
    are not dealt evenly, as the last one of an epoch.

    Args:
        batch: This replica's batch: anything with a length.

    Raises:
        RuntimeError: Called in cross-replica context.
        TypeError: ``batch`` has no length.

    >>> global_count([[0.0, 1.0], [2.0, 3.0]])
    2
    """
    context = get_replica_context()
    if context is None:
        raise RuntimeError("global_count() was called in cross-replica context; call it inside strategy.run()")
    return int(context.all_reduce("SUM", np.int64(len(batch))))


class PlainArithmetic:
    """The arithmetic of NumPy and CuPy; see ``mpidist.arrays.convert`` for other libraries."""

    def array(self, value: object, like: Array | None = None, what: str = "value") -> Array:
        """Return ``value`` as an array where it is, or where ``like`` is.

        Messages call it ``what``.
        """
        array = array_of(value, what)
        return array if like is None else place_of(like).brings(array)

    def result_dtype(self, array: Array) -> DType:
        """Return the dtype of an average of ``array``: its own, or float64 for whole numbers."""
        return array.dtype if array.dtype.kind not in "iub" else np.dtype(np.float64)

    def wide_dtype(self, dtype: DType) -> DType:
        """Return the dtype in which values of ``dtype`` are added: float32 at least."""
        return np.dtype(np.float32) if dtype.itemsize < 4 else dtype

    def cast(self, array: Array, dtype: DType) -> Any:
        """Return ``array`` in ``dtype``."""
        return array.astype(dtype, copy=False) if array.ndim else array.astype(dtype)[()]

    def current(self, array: Array) -> AbstractContextManager[object]:
        """Return a block in which ``array`` can be computed with."""
        return place_of(array).current()


def _aligned(weights: Any, losses: Any) -> Any:
    """Return the weights without a superfluous last axis, or with the one that they miss."""
    given = tuple(weights.shape)
    if weights.ndim == losses.ndim + 1 and weights.shape[-1] == 1:
        weights = weights[..., 0]
    elif 0 < weights.ndim == losses.ndim - 1:
        weights = weights[..., None]
    shape = tuple(losses.shape)
    try:
        np.broadcast_shapes(tuple(weights.shape), shape)
    except ValueError:
        raise ValueError(
            f"sample_weight of shape {given} does not broadcast against per_example_loss of shape "
            f"{shape}; expected a number, shape {shape[:1]} or shape {shape}"
        ) from None
    return weights


def _batch_size(value: object) -> int:
    array = np.asarray(value)
    if array.ndim:
        raise ValueError(f"global_batch_size has shape {array.shape}; expected one whole number")
    if array.dtype.kind not in "iu":
        raise TypeError(f"global_batch_size is {value!r}; expected a whole number, such as global_batch_size=64")
    count = operator.index(array[()])
    if count < 0:
        raise ValueError(f"global_batch_size is {count}; expected 0 or more")
    return count
