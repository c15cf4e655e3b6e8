"""Gradients of one replica in flat buckets, which are summed while backward still computes.

A bucket has a mark for each gradient, which is summed, too: how many replicas had one. A replica without rows, or one
that did not use a parameter, takes part with zeros; where no replica had a gradient it is None, as in one process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch

from mpidist.core.context import ReplicaContextLike, StrategyLike, get_replica_context
from mpidist.core.options import ReduceOp
from mpidist.topology import cores_are_short
from mpidist.torch.foreign import Foreign
from mpidist.torch.tensors import array_of
from mpidist.torch.works import LARGE_BYTES, LONGEST_START_SECONDS

if TYPE_CHECKING:
    from torch import Tensor

BUCKET_BYTES = 25 << 20
# So that something is on its way soon after backward has begun.
_FIRST_BUCKET_BYTES = 1 << 20


class Slot:
    """The place of a gradient in a bucket.

    Attributes:
        parameter: Whose gradient it is.
        view: The part of the bucket.
        bucket: The bucket.
        is_added: Whether the gradient of this step is in its place.
    """

    def __init__(self, parameter: Tensor, view: Tensor, bucket: Bucket) -> None:
        self.parameter, self.view, self.bucket = parameter, view, bucket
        self.is_added = False


class Bucket:
    """Gradients of one dtype that travel together.

    Args:
        parameters: In the order in which backward comes to them.
    """

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        ends = [0, *accumulate(parameter.numel() for parameter in parameters)]
        self.flat = torch.zeros(ends[-1] + len(parameters), dtype=parameters[0].dtype)
        self._marks = self.flat[ends[-1] :]
        self._array = array_of(self.flat)
        self.slots = [
            Slot(parameter, _like(self.flat[start:end], parameter), self)
            for parameter, start, end in zip(parameters, ends, ends[1:], strict=False)
        ]
        self.missing = len(self.slots)
        self.is_started = False
        # Of its memory, when it was last known to hold gradients as backward has left them.
        self._version: int | None = None
        self._work: Foreign = None

    def start(self, context: ReplicaContextLike, waits: bool) -> None:
        """Start the sum over the replicas.

        Args:
            context: The replica.
            waits: Whether the progress thread could only take the core from the program.
        """
        if self.missing:
            self._marks.copy_(torch.tensor([slot.is_added for slot in self.slots]))
        else:
            self._marks.fill_(1)
        self.is_started = True
        self.note()
        context_: Foreign = context
        self._work = context_.all_reduce_async(ReduceOp.SUM, self._array, out=self._array)
        if waits and self._array.nbytes >= LARGE_BYTES:
            # It goes on in the background if another rank is late.
            with contextlib.suppress(TimeoutError):
                self._end(LONGEST_START_SECONDS)

    def note(self) -> None:
        """Remember its memory as it is now, so that changes show."""
        self._version = changes_of(self.flat)

    def check(self) -> None:
        """Raise RuntimeError if gradients have changed since they were taken up."""
        if self._version is not None and changes_of(self.flat) != self._version:
            raise _changed()

    def _end(self, seconds: float | None = None) -> None:
        if self._work is not None:
            self._work.wait(seconds)
            self._work = None

    def finish(self) -> None:
        """Wait for the sums, and make them the gradients of the parameters."""
        self._end()
        self.check()
        if any(slot.is_added and slot.parameter.grad is not slot.view for slot in self.slots):
            raise _changed()
        for slot, replicas in zip(self.slots, self._marks.tolist(), strict=True):
            gradient = slot.view if replicas else None
            if slot.parameter.grad is not gradient:
                slot.parameter.grad = gradient

    def reset(self) -> None:
        """Be ready for the gradients of the next step."""
        self._end()
        self.is_started, self.missing, self._version = False, len(self.slots), None
        for slot in self.slots:
            slot.is_added = False


def _changed() -> RuntimeError:
    return RuntimeError(
        "gradients were changed between backward() and the end of their sum over the replicas, which would be lost; "
        "call optimizer.synchronize() first, as in: loss.backward(); optimizer.synchronize(); "
        "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0); optimizer.step()"
    )


def changes_of(tensor: Tensor) -> int:
    """Return how often torch has changed a tensor; collectives are not counted."""
    count: int = tensor._version
    return count


def _like(part: Tensor, parameter: Tensor) -> Tensor:
    """Return a part of a bucket in the shape of a parameter.

    It has the order in memory of a parameter without gaps.
    """
    sizes, strides = parameter.shape, parameter.stride()
    span = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    if parameter.numel() == span:
        return part.as_strided(sizes, strides)
    return part.view(sizes)


def packed(parameters: Sequence[Tensor], bucket_bytes: int) -> list[Bucket]:
    """Return buckets for parameters, those of the last layers first.

    Args:
        parameters: In the order of the module.
        bucket_bytes: About how large a bucket is.
    """
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


# How many optimizers sum gradients under each strategy. Not those that are alive: garbage is collected at another time
# on each rank, and all have to count alike.
_optimizers: WeakKeyDictionary[StrategyLike, int] = WeakKeyDictionary()


def count_optimizers(strategy: StrategyLike, change: int) -> None:
    """Note that a strategy has more optimizers, or fewer.

    Args:
        strategy: Of the optimizers.
        change: 1 for one that was made, -1 for one that sums no more.
    """
    _optimizers[strategy] = _optimizers.get(strategy, 0) + change


class SummedGradients:
    """The gradients of one replica and their sums.

    Hooks of the parameters add each gradient as backward has computed it. Buckets are started in one order on all
    replicas, whatever the order in which they fill. Where the strategy has several optimizers backward starts none: it
    comes to their parameters in an order that the rows of a replica decide, and calls of ``step`` are in that of the
    program.

    Args:
        strategy: The strategy of the replica.
        parameters: Of its module, those that have gradients.
        bucket_bytes: About how large a bucket is.

    Attributes:
        accumulates: Whether gradients stay where they are for now.
        are_summed: Whether they are the sums over all replicas, which no step has taken yet.
    """

    def __init__(self, strategy: StrategyLike, parameters: Sequence[Tensor], bucket_bytes: int) -> None:
        self._strategy = strategy
        self._buckets = packed(parameters, bucket_bytes)
        self._started = 0
        self._is_short_of_cores = cores_are_short(2)
        self.accumulates = False
        self.are_summed = False
        # Whether the buckets have sums, of a step that may have been taken.
        self._holds_sums = False
        self._handles = [
            slot.parameter.register_post_accumulate_grad_hook(partial(self._add, slot))
            for bucket in self._buckets
            for slot in bucket.slots
        ]

    def _add(self, slot: Slot, parameter: Tensor) -> None:
        """Take up a gradient that backward has computed."""
        if self.accumulates:
            return
        context = get_replica_context()
        if context is None or context.strategy is not self._strategy:
            # Gradients of this rank alone, which nobody sums.
            return
        bucket, overlaps = slot.bucket, self._overlaps()
        if bucket.is_started:
            raise RuntimeError(
                "backward() came to a gradient whose sum over the replicas is on its way already; to add up several "
                "batches have all but the last inside `with optimizer.no_sync():`, and call optimizer.zero_grad() "
                "before each first one"
            )
        if not slot.is_added:
            if not overlaps and self._holds_sums and not self.are_summed and parameter.grad is slot.view:
                # The loss of another optimizer, as a GAN's generator sends through its discriminator after the
                # discriminator's step. It is an error only if a step takes it: start_all() finds it.
                return
            self._put(slot)
            bucket.missing -= 1
            if not bucket.missing and overlaps:
                self._start(context, all_of_them=False)
        elif not overlaps and parameter.grad is not slot.view:
            # The model has dropped that of another optimizer's loss.
            self._put(slot)
        if not bucket.is_started:
            bucket.note()

    def _overlaps(self) -> bool:
        return _optimizers.get(self._strategy, 0) < 2

    def _put(self, slot: Slot) -> None:
        """Bring the gradient of a parameter into its place, and let it be there."""
        gradient: Foreign = slot.parameter.grad
        if gradient is slot.view:
            if self._holds_sums:
                raise RuntimeError(
                    "a gradient still has the sum over all replicas of the step before in it; call "
                    "optimizer.zero_grad() before backward()"
                )
        else:
            if gradient.layout is not torch.strided:
                raise TypeError(
                    f"a gradient is {gradient.layout}; expected a dense one: torch.nn.Embedding(..., sparse=False)"
                )
            slot.view.copy_(gradient.detach())
            slot.parameter.grad = slot.view
        slot.is_added = True

    def _start(self, context: ReplicaContextLike, all_of_them: bool) -> None:
        """Start the buckets that are full, or all, in their order."""
        while self._started < len(self._buckets) and (all_of_them or not self._buckets[self._started].missing):
            self._buckets[self._started].start(context, self._is_short_of_cores)
            self._started += 1

    def start_all(self, context: ReplicaContextLike) -> None:
        """Start the buckets that backward did not fill, with zeros for missing gradients."""
        overlaps = self._overlaps()
        for bucket in self._buckets[self._started :]:
            bucket.check()
            for slot in bucket.slots:
                if slot.is_added and slot.parameter.grad is not slot.view and not overlaps:
                    # Dropped or replaced before anything was sent.
                    slot.is_added = False
                    bucket.missing += 1
                if not slot.is_added and slot.parameter.grad is not None:
                    self._put(slot)
                    bucket.missing -= 1
                elif not slot.is_added:
                    slot.view.zero_()
        self._start(context, all_of_them=True)

    def finish(self) -> None:
        """Wait for the sums, which are the gradients then."""
        for bucket in self._buckets:
            bucket.finish()
        self.reset()
        self.are_summed = self._holds_sums = True

    def reset(self) -> None:
        """Be ready for the next step; sums on their way are waited for."""
        for bucket in self._buckets:
            bucket.reset()
        self._started = 0
        self.are_summed = self._holds_sums = False

    def detach(self) -> None:
        """Take no more gradients."""
        for handle in self._handles:
            handle.remove()
