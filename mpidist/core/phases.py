"""Phases: time of input and checkpoints, and counts of steps and rows."""

from __future__ import annotations

import time
from contextlib import ContextDecorator
from types import TracebackType


class Phase(ContextDecorator):
    """Time that the program spends in one phase of its steps. A context manager and a decorator; blocks may nest."""

    def __init__(self) -> None:
        self._nanoseconds = self._depth = self._began = 0

    @property
    def nanoseconds(self) -> int:
        """The time so far, with a block that is still running."""
        began, depth = self._began, self._depth
        return self._nanoseconds + (time.perf_counter_ns() - began if depth else 0)

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self._began = time.perf_counter_ns()

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._nanoseconds += time.perf_counter_ns() - self._began


class Counts:
    """Counts of this process: ``steps`` are calls of ``strategy.run``, or else steps of torch optimizers."""

    steps = rows = 0
    has_runs = False

    def add_run(self) -> None:
        """Count a call of ``strategy.run``."""
        self.steps += 1
        self.has_runs = True

    def add_optimizer_step(self, *_: object) -> None:
        """Count a step of an optimizer, unless the program calls ``strategy.run``."""
        self.steps += not self.has_runs


INPUT, CHECKPOINT = Phase(), Phase()
counts = Counts()
