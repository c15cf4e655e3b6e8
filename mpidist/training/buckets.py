"""Buckets: gradients are summed over replicas some at a time, while others are still computed, or applied."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from mpidist.core.context import has_strategy
from mpidist.values import IndexedSlices, Variable

# Large enough for the wire, small enough that there is something left to hide behind (benchmarks: step, overlap).
BUCKET_BYTES = 16 << 20


class Reducer(Protocol):
    """What of a replica context sums gradients."""

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas."""

    def all_reduce(self, reduce_op: str, value: Any) -> Any:
        """See ``ReplicaContext``."""

    def all_reduce_async(self, reduce_op: str, value: Any) -> Any:
        """See ``ReplicaContext``."""


class Buckets:
    """Gradients on their way to their sums.

    Collective: every replica adds gradients of the same variables in the same order. A bucket's all-reduce is started
    as soon as the bucket is full. The labels of the variables travel in its plan, so replicas that add them in another
    order are told so.

    Args:
        context: The replica.
    """

    def __init__(self, context: Reducer) -> None:
        self._context = context
        self._sums_over_replicas = context.num_replicas_in_sync > 1 and has_strategy()
        self._started: list[tuple[Any, list[Variable]]] = []
        self._gradients: dict[str, Any] = {}
        self._variables: list[Variable] = []
        self._nbytes = 0
        self._added = 0

    def add(self, gradient: Any, variable: Variable) -> None:
        """Add a gradient; it must not be changed before the sums are there."""
        self._gradients[f"{self._added:06d} {variable.label}"] = gradient
        self._variables.append(variable)
        self._added += 1
        # Rows of sparse gradients are gathered, which is done at once.
        self._nbytes += 0 if isinstance(gradient, IndexedSlices) else gradient.nbytes
        if self._sums_over_replicas and self._nbytes >= BUCKET_BYTES:
            self._start()

    def _start(self) -> None:
        self._started.append((self._context.all_reduce_async("SUM", self._gradients), self._variables))
        self._gradients, self._variables, self._nbytes = {}, [], 0

    def sums(self) -> Iterator[tuple[list[Any], list[Variable]]]:
        """Return the summed gradients and their variables, a bucket at a time, once all have been added."""
        if self._started and self._gradients:
            self._start()
        last = self._gradients
        if last and self._sums_over_replicas:
            last = self._context.all_reduce("SUM", last)
        return self._in_order(last)

    def _in_order(self, last: dict[str, Any]) -> Iterator[tuple[list[Any], list[Variable]]]:
        for work, variables in self._started:
            yield list(work.wait().values()), variables
        if last:
            yield list(last.values()), self._variables
