"""Training steps: how much of the reductions of a step's gradients hides behind its backward pass.

A gradient is ready when backward has computed it, last layers first; each takes as much of backward as it has bytes. A
bucket is reduced as soon as its last gradient is ready and the one before has arrived, as mpidist's buckets are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple


class Work(NamedTuple):
    """The work of one rank in one step."""

    gradients: Sequence[int]
    """Bytes of each gradient, first layers first."""
    forward_seconds: float
    """The time before backward."""
    backward_seconds: float
    """The time in which gradients become ready."""

    @property
    def seconds(self) -> float:
        """The time of a step without communication."""
        return self.forward_seconds + self.backward_seconds


class Step(NamedTuple):
    """One step with its reductions."""

    seconds: float
    """How long it takes."""
    communication: float
    """How long its reductions take together."""
    exposed: float
    """How much of that does not hide behind computation."""
    efficiency: float
    """The time without communication, over the time with it."""


def work_of(gradients: Sequence[int], compute_seconds: float, backward: float = 2 / 3) -> Work:
    """Return the work of a step, given its time without communication.

    Args:
        gradients: Bytes of each gradient, first layers first.
        compute_seconds: The time of forward and backward.
        backward: The share of it that backward has: two thirds where each layer computes two products there, of its
            weights and of its inputs, and one in forward.
    """
    return Work(gradients, (1 - backward) * compute_seconds, backward * compute_seconds)


def buckets_of(gradients: Sequence[int], bucket_bytes: int, first_bytes: int | None = None) -> list[list[int]]:
    """Return the gradients, last layers first, cut into buckets: each is closed once it has so many bytes.

    Args:
        gradients: Bytes of each, first layers first.
        bucket_bytes: Of a bucket.
        first_bytes: Of the first, if that is another size.

    >>> buckets_of([5, 4, 3, 2, 1], 6, 3)
    [[1, 2], [3, 4], [5]]
    """
    buckets: list[list[int]] = []
    waiting: list[int] = []
    for nbytes in reversed(gradients):
        waiting.append(nbytes)
        if sum(waiting) >= (first_bytes if first_bytes is not None and not buckets else bucket_bytes):
            buckets.append(waiting)
            waiting = []
    return [*buckets, *([waiting] if waiting else [])]


def step_of(work: Work, buckets: Sequence[Sequence[int]], reduction_seconds: Callable[[int], float]) -> Step:
    """Return how long a step takes with its reductions.

    Args:
        work: What a rank computes.
        buckets: Its gradients as they travel; see :func:`buckets_of`.
        reduction_seconds: Returns the time of an all-reduce of so many bytes.

    >>> step_of(Work([4, 4], 1.0, 2.0), [[4], [4]], lambda nbytes: 0.5)
    Step(seconds=3.5, communication=1.0, exposed=0.5, efficiency=0.8571428571428571)
    """
    sizes = [sum(bucket) for bucket in buckets]
    times = [reduction_seconds(size) for size in sizes]
    end, total = 0.0, sum(sizes)
    for computed, seconds in zip(accumulate(sizes), times, strict=True):
        ready = work.forward_seconds + work.backward_seconds * computed / total
        end = max(ready, end) + seconds
    exposed = max(0.0, end - work.seconds)
    return Step(work.seconds + exposed, sum(times), exposed, work.seconds / (work.seconds + exposed))
