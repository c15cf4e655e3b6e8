"""Gradients of one replica in flat buckets, which are summed while backward computes.

A bucket also sums a mark for each gradient: the number of replicas that have one. A replica without rows, or one that
did not use a parameter, contributes zeros. If no replica has a gradient, it is None, as in one process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

import torch

from mpidist.core.context import StrategyLike, get_replica_context
from mpidist.core.options import ReduceOp
from mpidist.topology import cores_are_short
from mpidist.torch.tensors import array_of
from mpidist.torch.works import BRIEF_WAIT_SECONDS, LARGE_BYTES

if TYPE_CHECKING:
    from torch import Tensor

    from mpidist.strategies import ReplicaContext

BUCKET_BYTES = 25 << 20
# Small, so that a transfer starts soon after backward.
_FIRST_BUCKET_BYTES = 1 << 20
# Number of optimizers that sum gradients under each strategy. Not the number of those that are alive: garbage is
# collected at other times on each rank, and all ranks must have the same number.
_optimizers: WeakKeyDictionary[StrategyLike, int] = WeakKeyDictionary()


def count_optimizers(strategy: StrategyLike, change: int) -> None:
    """Record that a strategy has more optimizers, or fewer."""
    _optimizers[strategy] = _optimizers.get(strategy, 0) + change


def changes_of(tensor: Tensor) -> int:
    """Return how often torch has changed a tensor. Collectives are not counted."""
    count: int = tensor._version
    return count


def _changed() -> RuntimeError:
    return RuntimeError(
        "Gradients were changed before their sum over the replicas was complete, so the change would be lost. Call "
        "optimizer.synchronize() first: loss.backward(); optimizer.synchronize(); "
        "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0); optimizer.step()"
    )


class Bucket:
    """Gradients of one dtype that are summed together. ``parameters`` are in the order of backward."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        ends = [0, *accumulate(parameter.numel() for parameter in parameters)]
        self.parameters = parameters
        self.flat = torch.zeros(ends[-1] + len(parameters), dtype=parameters[0].dtype)
        self.views = [
            _like(self.flat[start:end], parameter)
            for parameter, start, end in zip(parameters, ends, ends[1:], strict=False)
        ]
        # Positions of the gradients that are in their views in this step.
        self.added: set[int] = set()
        self.is_started = False
        self._marks = self.flat[ends[-1] :]
        self._array = array_of(self.flat)
        # Of the memory, when backward last changed it.
        self._version: int | None = None
        self._work: Any = None

    @property
    def is_full(self) -> bool:
        """Whether all gradients are in their views."""
        return len(self.added) == len(self.views)

    def add(self, position: int) -> None:
        """Move a gradient into its view."""
        parameter, view = self.parameters[position], self.views[position]
        gradient = parameter.grad
        if gradient is not view:
            if gradient.layout is not torch.strided:
                raise TypeError(
                    f"A gradient is {gradient.layout}. Use dense ones: torch.nn.Embedding(..., sparse=False)"
                )
            view.copy_(gradient.detach())
            parameter.grad = view
        self.added.add(position)

    def start(self, context: ReplicaContext, waits: bool) -> None:
        """Start the sum over the replicas. With ``waits``, wait for it briefly: no core is left for progress."""
        if self.is_full:
            self._marks.fill_(1)
        else:
            self._marks.copy_(torch.tensor([position in self.added for position in range(len(self.views))]))
        self.is_started = True
        self.note()
        self._work = context.all_reduce_async(ReduceOp.SUM, self._array, out=self._array)
        if waits and self._array.nbytes >= LARGE_BYTES:
            with contextlib.suppress(TimeoutError):
                self._end(BRIEF_WAIT_SECONDS)

    def note(self) -> None:
        """Record the version of the memory, to detect changes."""
        self._version = changes_of(self.flat)

    def check(self) -> None:
        """Raise RuntimeError if gradients have changed since backward."""
        if self._version is not None and changes_of(self.flat) != self._version:
            raise _changed()

    def _end(self, seconds: float | None = None) -> None:
        if self._work is not None:
            self._work.wait(seconds)
            self._work = None

    def finish(self) -> None:
        """Wait for the sums, which become the gradients of the parameters."""
        self._end()
        self.check()
        if any(self.parameters[position].grad is not self.views[position] for position in self.added):
            raise _changed()
        for parameter, view, replicas in zip(self.parameters, self.views, self._marks.tolist(), strict=True):
            gradient = view if replicas else None
            if parameter.grad is not gradient:
                parameter.grad = gradient

    def reset(self) -> None:
        """Prepare for the gradients of the next step."""
        self._end()
        self.is_started, self._version = False, None
        self.added.clear()


def _like(part: Tensor, parameter: Tensor) -> Tensor:
    """Return a part of a bucket with a parameter's shape and, if possible, strides."""
    sizes, strides = parameter.shape, parameter.stride()
    span = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    return part.as_strided(sizes, strides) if parameter.numel() == span else part.view(sizes)


def packed(parameters: Sequence[Tensor], bucket_bytes: int) -> list[Bucket]:
    """Return buckets of about ``bucket_bytes``, last layers first, for parameters in module order."""
    buckets: list[Bucket] = []
    of_dtype: dict[torch.dtype, list[Tensor]] = {}
    limit = min(_FIRST_BUCKET_BYTES, bucket_bytes)
    for parameter in reversed(parameters):
        waiting = of_dtype.setdefault(parameter.dtype, [])
        waiting.append(parameter)
        if sum(each.numel() * each.element_size() for each in waiting) >= limit:
            buckets.append(Bucket(waiting))
            of_dtype[parameter.dtype] = []
            limit = bucket_bytes
    return [*buckets, *(Bucket(waiting) for waiting in of_dtype.values() if waiting)]


class SummedGradients:
    """The gradients of one replica and their sums.

    Hooks move each gradient into its bucket when backward has computed it. Buckets start in one order on all replicas,
    whatever the order in which they fill. If the strategy has several optimizers, backward starts none: the rows of a
    replica decide in which order backward reaches their parameters, but the program decides the order of ``step``.

    Attributes:
        accumulates: Whether gradients stay on the replica for now.
        are_summed: Whether they are sums over all replicas that no step has used yet.
    """

    def __init__(self, strategy: StrategyLike, parameters: Sequence[Tensor], bucket_bytes: int) -> None:
        self._strategy = strategy
        self._buckets = packed(parameters, bucket_bytes)
        self._started = 0
        self._is_short_of_cores = cores_are_short(2)
        self.accumulates = self.are_summed = False
        # Whether the buckets have the sums of a step, which zero_grad() has not dropped yet.
        self._holds_sums = False
        self._handles = [
            parameter.register_post_accumulate_grad_hook(partial(self._add, bucket, position))
            for bucket in self._buckets
            for position, parameter in enumerate(bucket.parameters)
        ]

    def _add(self, bucket: Bucket, position: int, parameter: Tensor) -> None:
        """Move a gradient that backward has computed into its bucket."""
        context = get_replica_context()
        if self.accumulates or context is None or context.strategy is not self._strategy:
            # Outside of run(), gradients are this rank's alone.
            return
        if bucket.is_started:
            raise RuntimeError(
                "backward() computed a gradient again while its sum over the replicas is in flight. To add up several "
                "batches, call backward() for all but the last inside `with optimizer.no_sync():`. Call "
                "optimizer.zero_grad() before the first."
            )
        is_in_view, overlaps = parameter.grad is bucket.views[position], self._overlaps()
        if position not in bucket.added or not is_in_view:
            if is_in_view and self._holds_sums and not overlaps and not self.are_summed:
                # The loss of another optimizer, such as the generator's of a GAN through its discriminator after the
                # discriminator's step. It is an error only if a step uses it: start_all() detects that.
                return
            self._move(bucket, position)
        bucket.note()
        if overlaps and bucket.is_full:
            self._start(cast("ReplicaContext", context), all_of_them=False)

    def _overlaps(self) -> bool:
        return _optimizers.get(self._strategy, 0) < 2

    def _move(self, bucket: Bucket, position: int) -> None:
        if self._holds_sums and bucket.parameters[position].grad is bucket.views[position]:
            raise RuntimeError(
                "A gradient still has the sum over all replicas of the step before in it. You must "
                "call optimizer.zero_grad() before backward()."
            )
        bucket.add(position)

    def _start(self, context: ReplicaContext, all_of_them: bool) -> None:
        """Start all buckets, or the full ones, in their order."""
        while self._started < len(self._buckets) and (all_of_them or self._buckets[self._started].is_full):
            self._buckets[self._started].start(context, self._is_short_of_cores)
            self._started += 1

    def start_all(self, context: ReplicaContext) -> None:
        """Start the buckets that backward has not started, with zeros for missing gradients."""
        overlaps = self._overlaps()
        for bucket in self._buckets[self._started :]:
            bucket.check()
            for position, (parameter, view) in enumerate(zip(bucket.parameters, bucket.views, strict=True)):
                if not overlaps and parameter.grad is not view:
                    # Dropped or replaced before anything was sent.
                    bucket.added.discard(position)
                if position not in bucket.added:
                    if parameter.grad is None:
                        view.zero_()
                    else:
                        self._move(bucket, position)
        self._start(context, all_of_them=True)

    def finish(self) -> None:
        """Wait for the sums, which become the gradients."""
        for bucket in self._buckets:
            bucket.finish()
        self.reset()
        self.are_summed = self._holds_sums = True

    def reset(self) -> None:
        """Prepare for the next step. Waits for sums in flight."""
        for bucket in self._buckets:
            bucket.reset()
        self._started = 0
        self.are_summed = self._holds_sums = False

    def detach(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()


class OwnGradients:
    """The gradients of the only replica. Changes before ``synchronize`` are errors, as with several replicas."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._versions: dict[Tensor, tuple[Tensor, int]] = {}
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._note)

    def _note(self, parameter: Tensor) -> None:
        self._versions[parameter] = (parameter.grad, changes_of(parameter.grad))

    def check(self) -> None:
        """Raise RuntimeError if a gradient was changed since backward. The next changes are allowed."""
        for parameter, (gradient, version) in self._versions.items():
            if parameter.grad is gradient and changes_of(gradient) != version:
                raise _changed()
        self.reset()

    def reset(self) -> None:
        """Forget the gradients so far."""
        self._versions.clear()
