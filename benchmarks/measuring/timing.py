"""How calls are timed: in turn in one process, each repetition as long as it took on the slowest rank.

Inputs are written anew before each repetition, and the ranks then meet at a barrier; neither is timed. A call of a few
microseconds would end before the clock and the barrier are out of its way: such calls are timed in groups, each call on
inputs of its own, all of which were written before the group.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py import MPI

LEAST_REPETITIONS = 11
MOST_REPETITIONS = 501
# A call shorter than this is timed in groups.
SHORT_CALL_SECONDS = 100e-6
CALLS_IN_GROUP = 20


@dataclass
class Case:
    """One of the things that are timed beside each other.

    Attributes:
        by: Who does the work.
        variant: See ``Row``.
        call: Does it once.
        check: Returns how many elements of what ``call`` returned are wrong on this rank; None checks nothing.
        algorithm: Says which algorithm the last call took.
        prepare: Makes inputs and results ready, before a call whose result is checked.
        rewrite: Writes the inputs anew, before each repetition.
        group: The calls of a repetition where they are short, each on inputs of its own; ``call`` 20 times if empty.
    """

    by: str
    variant: str
    call: Callable[[], object]
    check: Callable[[object], int] | None = None
    algorithm: Callable[[], str] = field(default=lambda: "-")
    prepare: Callable[[], object] = field(default=lambda: None)
    rewrite: Callable[[], object] = field(default=lambda: None)
    group: Sequence[Callable[[], object]] = ()

    def repetition(self, estimate: float) -> Sequence[Callable[[], object]]:
        """Return the calls of a repetition, if one takes about ``estimate`` seconds."""
        if estimate >= SHORT_CALL_SECONDS:
            return [self.call]
        return self.group or [self.call] * CALLS_IN_GROUP


@dataclass
class Measured:
    """What came out for one case: seconds per call of each repetition, over all ranks, and the rest of a row."""

    case: Case
    times: list[float] = field(default_factory=list)
    calls: int = 1
    wrong: int | None = 0
    algorithm: str = "-"


def measure(
    comm: MPI.Intracomm, cases: Sequence[Case], seconds: float, least: int = LEAST_REPETITIONS
) -> list[Measured]:
    """Time ``cases`` in turn for about ``seconds`` in all, at least ``least`` times each (collective).

    The order is drawn anew in each repetition (alike on all ranks), so that no case always finds the caches as the
    same other case has left them. Results are checked by a call before and a call after the timed ones.
    """
    if not cases:
        return []
    wrong = [_checked(case) for case in cases]
    estimates = [agreed_seconds(comm, case) for case in cases]
    calls = [case.repetition(estimate) for case, estimate in zip(cases, estimates, strict=True)]
    one_round = sum(estimate * len(group) for estimate, group in zip(estimates, calls, strict=True))
    repetitions = min(MOST_REPETITIONS, max(least, math.ceil(seconds / one_round)))
    times: list[list[float]] = [[] for _ in cases]
    order = list(range(len(cases)))
    draw = random.Random(0)
    for _ in range(repetitions):
        draw.shuffle(order)
        for index in order:
            cases[index].rewrite()
            comm.Barrier()
            times[index].append(seconds_per_call(calls[index]))
    measured = []
    for index, case in enumerate(cases):
        wrong[index] += _checked(case)
        slowest = [max(of_ranks) for of_ranks in zip(*comm.allgather(times[index]), strict=True)]
        total = None if case.check is None else comm.allreduce(wrong[index])
        measured.append(Measured(case, slowest, len(calls[index]), total, case.algorithm()))
    return measured


def seconds_per_call(calls: Sequence[Callable[[], object]]) -> float:
    """Return the mean time of one of ``calls``; a result is dropped as soon as it is there."""
    start = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - start) / len(calls)


def _checked(case: Case) -> int:
    case.prepare()
    result = case.call()
    return 0 if case.check is None else case.check(result)


def agreed_seconds(comm: MPI.Intracomm, case: Case) -> float:
    """Return a first idea of what a call takes, the same on all ranks: plans and pages are there by now."""
    from mpi4py import MPI

    comm.Barrier()
    estimate: float = comm.allreduce(seconds_per_call([case.call] * 2), op=MPI.MAX)
    return estimate
