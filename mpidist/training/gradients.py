"""Gradients before an optimizer takes them: checks, sums over replicas and batches, buckets, clipping."""

from __future__ import annotations

import operator
import zlib
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from mpidist.arrays.convert import to_array
from mpidist.arrays.dtypes import Array
from mpidist.core.context import ReplicaContextLike, StrategyLike, get_replica_context, get_strategy, has_strategy
from mpidist.core.options import ReduceOp
from mpidist.values import IndexedSlices, Mirrored, ReplicaValues, Variable
from mpidist.values.composite import AnyVariable, CompositeVariable
from mpidist.values.indexed_slices import concatenate
from mpidist.values.placement import array_of, copy_of, on_host, place_of, place_of_operands

if TYPE_CHECKING:
    from mpidist.strategies import Strategy

GradientsAndVariables = Iterable[tuple[object, AnyVariable]]
# A checked gradient and its variable. Gradients that have been summed, and their variables.
Pair = tuple[Any, Variable]
Summed = tuple[list[Any], list[Variable]]
# Large enough for the wire, small enough that there is something left to hide behind (benchmarks: step, overlap).
BUCKET_BYTES = 16 << 20
_UNDER_ONE_STRATEGY = (
    "expected: one strategy for all; create variables and optimizer inside `with strategy.scope():` of the strategy "
    "whose run() uses them"
)


def each_checked(grads_and_vars: GradientsAndVariables) -> Iterator[Pair]:
    """Yield gradients and variables as they come, checked, without the pairs whose gradient is None.

    In the place of a ShardedVariable there are its shards, each with its part of the gradient.

    Raises:
        ValueError: No pairs, only None, or a gradient of another shape than its variable.
        TypeError: Something that is no pair, no variable, or of a dtype that the variable cannot take.
    """
    names, found = [], False
    for pair in grads_and_vars:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not isinstance(pair[1], AnyVariable):
            raise TypeError(
                f"grads_and_vars holds {pair!r}; expected (gradient, variable) pairs, as zip(gradients, variables)"
            )
        gradient, variable = pair
        names.append(variable.name)
        if gradient is not None:
            found = True
            gradient = _checked(gradient, variable)
            if isinstance(variable, CompositeVariable):
                yield from zip(variable.cut(gradient), variable.variables, strict=True)
            else:
                yield gradient, variable
    if not found:
        what = f"only None for the variables {names}" if names else "no gradients"
        raise ValueError(
            f"grads_and_vars holds {what}; expected at least one gradient, as in "
            "apply_gradients(zip(gradients, variables))"
        )


def checksum(gradients: Iterable[object]) -> int:
    """Return the CRC-32 of the bytes of gradients, of distributed values that of the first.

    >>> checksum([np.array([1.0, 2.0])]) == checksum([np.array([1.0, 3.0])])
    False
    """
    found = 0
    for gradient in gradients:
        first = gradient.values[0] if isinstance(gradient, ReplicaValues) else gradient
        arrays = [first.values, first.indices] if isinstance(first, IndexedSlices) else [array_of(first)]
        for array in arrays:
            found = zlib.crc32(np.ascontiguousarray(on_host(array)).reshape(-1).view(np.uint8).data, found)
    return found


def aggregate_gradients(grads_and_vars: GradientsAndVariables) -> list[Pair]:
    """Return the pairs with the gradients summed over all replicas.

    Pairs without a gradient are left out.

    In the place of a ShardedVariable there are its shards, each with its part of the gradient.

    Collective in replica context: call it on every replica, with gradients for the same variables. All gradients
    are reduced in one go. Where nothing is active they are returned as they are. Use it to look at or change the
    sums, then hand them on with ``apply_gradients(..., experimental_aggregate_gradients=False)``.

    Args:
        grads_and_vars: Pairs of gradient and variable; a gradient is an array, IndexedSlices or None.

    Raises:
        ValueError: Only None, or shapes that do not fit the variables.
        TypeError: Dtypes that do not fit the variables, or no pairs.
        RuntimeError: Called in cross-replica context.

    >>> v = Variable(1.0)
    >>> [float(g) for g, _ in aggregate_gradients([(0.5, v)])]
    [0.5]
    """
    pairs = list(each_checked(grads_and_vars))
    context = get_replica_context()
    if context is None:
        raise RuntimeError(
            "gradients of replicas cannot be summed in cross-replica context; call it inside strategy.run(), or "
            "sum them with strategy.reduce('SUM', gradients, axis=None)"
        )
    if context.num_replicas_in_sync > 1 and has_strategy():
        named = labelled([variable for _, variable in pairs], [gradient for gradient, _ in pairs])
        sums = context.all_reduce(ReduceOp.SUM, named).values()
        return [(total, variable) for total, (_, variable) in zip(sums, pairs, strict=True)]
    return pairs


def labelled(variables: Iterable[Variable], gradients: Iterable[object], first: int = 0) -> dict[str, Any]:
    """Return gradients by keys that ranks compare, to find another order of the variables."""
    names = (f"{i:06d} {variable.label}" for i, variable in enumerate(variables, first))
    return dict(zip(names, gradients, strict=True))


def in_buckets(context: ReplicaContextLike, pairs: Iterable[Pair]) -> Iterator[Summed]:
    """Read all pairs, and return the summed gradients and their variables by buckets.

    Collective: every replica passes gradients of the same variables in the same order. The all-reduce of a full bucket
    is in flight while the next pairs are computed. Do not change a gradient before its sum is there.
    """
    if context.num_replicas_in_sync == 1 or not has_strategy():
        gradients, variables = zip(*pairs, strict=True)
        return iter([(list(gradients), list(variables))])
    started: list[tuple[Any, list[Variable]]] = []
    bucket: list[Pair] = []
    count = nbytes = 0

    def start(is_last: bool = False) -> None:
        nonlocal count, nbytes
        variables = [variable for _, variable in bucket]
        named = labelled(variables, [gradient for gradient, _ in bucket], count)
        # Nothing is left to compute during the only bucket.
        is_only = is_last and not started
        sums = context.all_reduce(ReduceOp.SUM, named) if is_only else context.all_reduce_async(ReduceOp.SUM, named)
        started.append((sums, variables))
        count, nbytes = count + len(bucket), 0
        bucket.clear()

    for gradient, variable in pairs:
        bucket.append((gradient, variable))
        # Rows of sparse gradients are gathered at once.
        nbytes += 0 if isinstance(gradient, IndexedSlices) else gradient.nbytes
        if nbytes >= BUCKET_BYTES:
            start()
    if bucket:
        start(is_last=True)
    return ((list((s if isinstance(s, dict) else s.wait()).values()), variables) for s, variables in started)


def clip_by_global_norm(gradients: Iterable[object], clip_norm: float) -> tuple[list[Any], Any]:
    """Scale gradients down together so that their common norm is at most ``clip_norm`` (tf.clip_by_global_norm).

    Inside ``strategy.run`` clip the sums of ``aggregate_gradients``: clipping each replica's own gradients gives
    numbers that depend on how the batch was dealt.

    Args:
        gradients: Arrays, IndexedSlices (whose repeated rows count as their sum) and None, which stays None.
        clip_norm: The largest norm allowed, more than 0.

    Returns:
        The gradients, new arrays of the same dtypes (all NaN if the norm is not finite), and the norm before
        clipping, a float64 scalar; on a device for gradients there, which nothing waits for.

    Raises:
        ValueError: ``clip_norm`` is not a positive number.

    >>> clipped, norm = clip_by_global_norm([np.array([3.0, 4.0]), None], 1.0)
    >>> clipped[0], float(norm)
    (array([0.6, 0.8]), 5.0)
    """
    if not clip_norm > 0:
        raise ValueError(f"clip_norm is {clip_norm!r}; expected a number of more than 0")
    dense = [None if g is None else _coalesced(g) for g in gradients]
    parts = [g.values if isinstance(g, IndexedSlices) else g for g in dense if g is not None]
    place = place_of_operands(parts)
    with place.current():
        norm = np.sqrt(sum((place.brings(to_array(_square_sum(part))) for part in parts), np.float64(0.0)))
        scale = to_array(np.where(np.isfinite(norm), clip_norm / np.maximum(norm, clip_norm), np.nan))
    return [None if g is None else _scaled(g, scale) for g in dense], norm[()]


def check_is_float(variable: AnyVariable) -> None:
    """Raise TypeError unless a variable holds numbers that can change by fractions."""
    if variable.dtype.kind != "f" and variable.dtype.name != "bfloat16":
        raise TypeError(
            f"variable {variable.name!r} has dtype {variable.dtype}; an optimizer expects floating-point variables, "
            "for example mpidist.Variable(np.zeros(2)) or mpidist.Variable(0.0)"
        )


def strategy_of(variables: Iterable[Variable]) -> Strategy:
    """Return the strategy that all ``variables`` belong to.

    Raises:
        ValueError: They belong to several, or to another one than the current one.
    """
    firsts: dict[Strategy, Variable] = {}
    for variable in variables:
        firsts.setdefault(cast("Strategy", variable.distribute_strategy), variable)
    (strategy, first), *others = firsts.items()
    if others:
        other, odd = others[0]
        raise ValueError(
            f"the variables belong to different strategies: {first.name!r} to {_strategy_name(strategy)}, and "
            f"{odd.name!r} to {_strategy_name(other, strategy)}; {_UNDER_ONE_STRATEGY}"
        )
    current = cast("Strategy", get_strategy())
    if has_strategy() and current is not strategy:
        raise ValueError(
            f"variable {first.name!r} belongs to {_strategy_name(strategy)}, and "
            f"{_strategy_name(current, strategy)} is current; {_UNDER_ONE_STRATEGY}"
        )
    return strategy


def _strategy_name(strategy: Strategy, beside: Strategy | None = None) -> str:
    """Return the name of a strategy for a message that has named ``beside`` before."""
    kind = type(strategy).__name__
    if kind == "DefaultStrategy":
        return "DefaultStrategy (it was created outside of strategy.scope())"
    return f"another {kind}" if kind == type(beside).__name__ else kind


def _checked(gradient: object, variable: AnyVariable) -> Any:
    if isinstance(gradient, ReplicaValues):
        if not isinstance(gradient, Mirrored):
            raise ValueError(
                f"the gradient of variable {variable.name!r} is a {type(gradient).__name__}, which differs between "
                "replicas; call apply_gradients() inside strategy.run(), or sum it first with "
                "strategy.reduce('SUM', gradient, axis=None)"
            )
        return Mirrored([_checked(part, variable) for part in gradient.values], gradient.replica_ids)
    if isinstance(gradient, IndexedSlices):
        shape: tuple[int, ...] = (*variable.shape[:1], *gradient.values.shape[1:])
        checked: Array | IndexedSlices = IndexedSlices(_of_dtype(gradient.values, variable), gradient.indices, shape)
    else:
        checked = _of_dtype(gradient, variable)
        shape = checked.shape
    if shape != variable.shape:
        raise ValueError(
            f"a gradient of shape {shape} was given for variable {variable.name!r} of shape {variable.shape}; "
            "expected the shape of the variable"
        )
    return checked


def _of_dtype(gradient: object, variable: AnyVariable) -> Array:
    if isinstance(gradient, (int, float, list, tuple)) and not isinstance(gradient, np.generic):
        gradient = array_of(gradient).astype(variable.dtype)
    # Where the variable is, so that the replicas' gradients meet there whatever each of them computed with.
    array = variable.local_place().brings(to_array(gradient, f"gradient of variable {variable.name!r}"))
    if array.dtype == variable.dtype:
        return array
    # A wider gradient would be rounded without anybody noticing; most often it is float64 by accident.
    if array.dtype.kind not in "iuf" or not np.can_cast(array.dtype, variable.dtype, "safe"):
        check_is_float(variable)
        raise TypeError(
            f"a gradient of dtype {array.dtype} was given for variable {variable.name!r} of dtype {variable.dtype}; "
            f"convert it first: gradient.astype({variable.dtype.name!r})"
        )
    return place_of(array).casts(array, variable.dtype)


def _coalesced(gradient: object) -> Array | IndexedSlices:
    return gradient.coalesce() if isinstance(gradient, IndexedSlices) else to_array(gradient, "gradient")


def _square_sum(array: Array) -> Any:
    # NumPy's own sum, not a BLAS dot product: ranks must get the same bits, whatever the alignment of the array.
    with place_of(array).current():
        return np.sum(np.square(np.abs(array), dtype=np.float64))


def _scaled(gradient: Any, scale: Array) -> Any:
    if isinstance(gradient, IndexedSlices):
        return IndexedSlices(_scaled(gradient.values, scale), gradient.indices, gradient.dense_shape)
    place = place_of(gradient)
    with place.current():
        factor = place.brings(scale).astype(gradient.dtype)
        return to_array(gradient * factor).astype(gradient.dtype, copy=False)


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
