"""GradientAccumulator: several small batches, one reduction over replicas."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from typing import Any

import numpy as np

from mpidist.arrays.convert import to_array
from mpidist.core.context import get_replica_context, has_strategy
from mpidist.core.protocols import StrategyLike
from mpidist.values import IndexedSlices, Variable
from mpidist.values.indexed_slices import concatenate
from mpidist.values.placement import copy_of, place_of


class _Sums:
    """The sums of one replica."""

    def __init__(self, length: int) -> None:
        self.count = 0
        self.sums: list[Any] = [None] * length


class GradientAccumulator:
    """Adds up gradients of ``steps`` batches on each replica before they are reduced. Extension.

    Call it inside ``strategy.run``, once per step on every replica; nothing is communicated. Because sums are
    formed per replica and then over replicas, the numbers do not depend on how replicas are laid out over ranks.
    Gradients are summed, not averaged: divide the losses by the size of everything that is added up
    (``global_batch_size=steps * batch_size``). A checkpoint does not hold unfinished sums: save where
    ``add`` has just returned a sum.

    Args:
        steps: How many batches make one update, 1 or more.

    Raises:
        ValueError: ``steps`` is below 1.

    >>> accumulator = GradientAccumulator(steps=2)
    >>> accumulator.add([np.array([1.0])]) is None
    True
    >>> accumulator.add([np.array([2.0])])
    [array([3.])]
    """

    def __init__(self, steps: int) -> None:
        self.steps = operator.index(steps)
        if self.steps < 1:
            raise ValueError(f"steps is {steps}; expected 1 or more")
        self._replicas: dict[tuple[StrategyLike | None, int], _Sums] = {}

    def add(self, gradients: Iterable[object]) -> list[Any] | None:
        """Add the gradients of one batch of this replica.

        Args:
            gradients: Arrays, IndexedSlices or None (which adds nothing), in the same order at each call.

        Returns:
            At every ``steps``-th call the sums, which start anew; otherwise None. All replicas get sums at the
            same call, so ``if sums is not None: optimizer.apply_gradients(zip(sums, variables))`` is safe.

        Raises:
            ValueError: Another number of gradients, or other shapes, than before.
            RuntimeError: Called in cross-replica context.
        """
        given = list(gradients)
        replica = self._replicas.setdefault(_replica_key(), _Sums(len(given)))
        if len(given) != len(replica.sums):
            raise ValueError(f"add() was given {len(given)} gradients; expected {len(replica.sums)}, as before")
        replica.sums = [
            _plus(total, gradient, i) for i, (total, gradient) in enumerate(zip(replica.sums, given, strict=True))
        ]
        replica.count += 1
        return self.flush() if replica.count == self.steps else None

    def flush(self) -> list[Any] | None:
        """Return the sums since the last ones, or None, and start anew.

        For the end of an epoch that is no multiple of ``steps`` batches. Call it on every replica.

        Raises:
            RuntimeError: Called in cross-replica context.
        """
        replica = self._replicas.pop(_replica_key(), None)
        if replica is None:
            return None
        return [concatenate(total) if isinstance(total, list) else total for total in replica.sums]

    def apply_gradients(self, optimizer: Any, grads_and_vars: Iterable[tuple[object, Variable]]) -> bool:
        """Add gradients and, at every ``steps``-th call, hand the sums to ``optimizer.apply_gradients``.

        Collective at that call: call it on every replica.

        Returns:
            Whether the variables were updated.
        """
        pairs = list(grads_and_vars)
        sums = self.add(gradient for gradient, _ in pairs)
        if sums is None:
            return False
        optimizer.apply_gradients(zip(sums, (variable for _, variable in pairs), strict=True))
        return True


def _replica_key() -> tuple[StrategyLike | None, int]:
    context = get_replica_context()
    if context is None:
        raise RuntimeError(
            "GradientAccumulator was used in cross-replica context; call it inside strategy.run(), where every "
            "replica adds up its own gradients"
        )
    return (context.strategy if has_strategy() else None), context.local_replica_id


def _plus(total: Any, gradient: object, position: int) -> Any:
    """Return the sum with ``gradient``.

    Sparse gradients are kept in a list, to be put together once.
    """
    if gradient is None:
        return total
    if isinstance(gradient, IndexedSlices):
        # The caller may use its arrays again for the next batch.
        kept = IndexedSlices(copy_of(gradient.values), copy_of(gradient.indices), gradient.dense_shape)
        if total is None:
            return [kept]
        if isinstance(total, list):
            return [*total, kept]
    else:
        array = to_array(gradient, "gradient")
        if total is None:
            return copy_of(array)
        if not isinstance(total, list) and (total.shape, total.dtype) == (array.shape, array.dtype):
            # In place: the sum belongs to the accumulator until it is handed out.
            place = place_of(total)
            with place.current():
                return np.add(total, place.brings(array), out=total)
    raise ValueError(
        f"gradient {position} is {_kind(gradient)} and was {_kind(total)} before; expected the same kind, shape and "
        "dtype at each call"
    )


def _kind(gradient: object) -> str:
    if isinstance(gradient, (list, IndexedSlices)):
        return "IndexedSlices"
    array = to_array(gradient)
    return f"an array of shape {array.shape} and dtype {array.dtype}"
