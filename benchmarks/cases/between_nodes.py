"""All-reduces between nodes: beside the bare MPI call, with the bytes that each node sends; and behind products."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from benchmarks.cases import overlap
from benchmarks.cases.collectives import bare_all_reduce
from benchmarks.measuring.cores import Ticks
from benchmarks.measuring.inputs import Array, input_of, sum_of_inputs
from benchmarks.measuring.points import Point
from benchmarks.measuring.rows import OURS, Figure
from benchmarks.measuring.session import Session
from benchmarks.measuring.sizes import MIB, size_text
from benchmarks.measuring.timing import UNKNOWN, Case, Measured, Sample, seconds_per_call
from benchmarks.measuring.wire import Sent, busy_name, is_counted, sent_name
from mpidist.core.options import CommunicationOptions
from mpidist.topology import Topology

OVERLAP_SIZE = 64 * MIB
_PRODUCTS = 50
LEAST_REPETITIONS, MOST_REPETITIONS = 5, 51
# Of less the share is not told: half a second on two cores.
_LEAST_TICKS = 100
_NO_TICKS = Ticks(0, 0)
# Arrays of the full size that a rank holds: value, input, result, expected, room of the library.
_ARRAYS = 7
# Spacing of neighbouring numbers between 1 and 2.
_EPSILON = {"bfloat16": 2.0**-7, "float16": 2.0**-10}


@dataclass
class Counted(Measured):
    """What came out for a case, with the bytes of data in each repetition, those of the node that sent most.

    ``busy`` is what this machine's processors did in all repetitions.
    """

    sent: list[int] = field(default_factory=list)
    busy: Ticks = _NO_TICKS


class WireCounter:
    """Counts what this node's interface sends; only the first rank of a node does (collective).

    Args:
        session: Its ranks.
        interface: Such as eth0; on a node that does not have it nothing is counted anywhere.
    """

    def __init__(self, session: Session, interface: str) -> None:
        self._interface = interface
        topology = Topology(session.bare)
        self.nodes = topology.num_nodes
        self.counts = all(session.bare.allgather(is_counted(interface)))
        self._here = self.counts and topology.local_rank == 0
        topology.close()
        if not self.counts:
            session.skipped.append(f"bytes sent: not every node has {interface}; type --interface NAME (see: ip link)")

    def read(self) -> Sent:
        """Return the counters on the first rank of a node, zeros on the others."""
        return Sent.by(self._interface) if self._here else Sent(0, 0)


def cases_at(session: Session, size: int, forced: Sequence[str], wire_dtypes: Sequence[str]) -> list[Case]:
    """Return the cases of an all-reduce of ``size`` bytes of float32, private arrays in and out (collective).

    Args:
        session: Whose communicators.
        size: Bytes.
        forced: Algorithms of mpidist to force, beside its own choice.
        wire_dtypes: 16-bit dtypes to send; one that is not offered is noted as skipped.
    """
    if not session.has_memory_for(_ARRAYS * size, f"all_reduce of {size_text(size)}"):
        return []
    count = max(1, size // 4)
    point = Point(input_of(session.rank, count), sum_of_inputs(session.ranks, count))

    def ours(variant: str, check: Callable[[object], int] = point.check_out, **chosen: str) -> Case:
        def call_on(value: Array) -> Callable[[], object]:
            options = CommunicationOptions(**chosen) if chosen else None
            return partial(session.comm.all_reduce, "SUM", value, out=point.out, options=options)

        return point.case(OURS, variant, call_on, check, session.last_algorithm)

    cases = [
        bare_all_reduce(point, "", session.bare),
        ours(""),
        *(ours(f"algorithm={name}", algorithm=name) for name in forced),
    ]
    for dtype in wire_dtypes:
        # Inputs are not negative, so that no partial sum is larger than the sum.
        error_of_sum = (session.ranks + 1) * _EPSILON[dtype] / 2 * point.expected

        def check_rounded(_: object, tolerance: Array = error_of_sum) -> int:
            return int(np.count_nonzero(~(np.abs(point.out - point.expected) <= tolerance)))

        cases.append(ours(f"wire_dtype={dtype}", check_rounded, wire_dtype=dtype))
    return [case for case in cases if _is_offered(session, case)]


def _is_offered(session: Session, case: Case) -> bool:
    """Call a case once; whether there is such an algorithm or wire dtype (all ranks see alike)."""
    try:
        case.call()
    except NotImplementedError as error:
        session.skipped.append(f"{case.variant}: not offered ({error})")
        return False
    return True


def run(session: Session, counter: WireCounter, cases: Sequence[Case], placement: str, size: int) -> None:
    """Time ``cases`` in turn and count bytes; adds rows and figures to the session (collective)."""
    for measured in measure_cases(session, counter, cases):
        variant = ", ".join(filter(None, (placement, measured.case.variant)))
        session.add_row("all_reduce", variant, measured, size=size, count=max(1, size // 4), op="sum")
        if counter.counts and size >= MIB:
            sent = statistics.median(measured.sent) / MIB
            name = sent_name(measured.case.by, variant, size)
            session.figures.append(Figure("sent", name, sent, "MiB", measured.algorithm))
        if measured.busy.total >= _LEAST_TICKS:
            name = busy_name(measured.case.by, variant, size)
            session.figures.append(Figure("busy", name, 100 * measured.busy.share, "%", measured.algorithm))


def run_overlap(session: Session, placement: str) -> None:
    """Measure an all-reduce, products of one thread that take a little longer, and both at once (collective)."""
    multiply = overlap.product()
    cases = overlap.cases_of(session, OVERLAP_SIZE // 4, multiply, lambda case: _products_for(session, case, multiply))
    medians = []
    for measured in measure_cases(session, None, cases):
        medians.append(statistics.median(measured.times))
        variant = f"{placement}, {measured.case.variant}"
        session.add_row("overlap", variant, measured, size=OVERLAP_SIZE, count=OVERLAP_SIZE // 4, op="sum")
    t_comm, t_comp, _ = medians
    if t_comp < t_comm:
        session.skipped.append(f"bar of overlap: the products took {t_comp:.2f} s, the all-reduce alone {t_comm:.2f} s")
    name, hidden = f"{placement}, share of communication hidden", overlap.hidden_share(*medians)
    session.figures.append(Figure("overlap", name, hidden, "", session.last_algorithm()))


def _products_for(session: Session, communication: Case, multiply: Callable[[], object]) -> int:
    """Return how many products take as long as they must, the same on every rank (collective)."""
    from mpi4py import MPI

    for _ in range(2):
        session.bare.Barrier()
        seconds: float = session.bare.allreduce(seconds_per_call([communication.call]), op=MPI.MAX)
    seconds_per_call([multiply] * overlap.WARM_UP_CALLS)
    session.bare.Barrier()
    # The fastest rank must have enough to do, too.
    one: float = session.bare.allreduce(seconds_per_call([multiply] * _PRODUCTS), op=MPI.MIN)
    return math.ceil(overlap.LONGER * seconds / one)


def measure_cases(session: Session, counter: WireCounter | None, cases: Sequence[Case]) -> list[Counted]:
    """Time ``cases`` in turn, at least 5 times each; their results are checked before and at the end (collective).

    The order is drawn anew in each repetition, alike on all ranks.
    """
    from mpi4py import MPI

    if not cases:
        return []
    noted = [Counted(case) for case in cases]
    for one in noted:
        _once(session, counter, one, checked=True)
    longest = session.bare.allreduce(max(one.times[0] for one in noted), op=MPI.MAX)
    for one in noted:
        # The first call makes plans and touches memory.
        one.samples.clear()
        one.sent.clear()
        one.busy = _NO_TICKS
    repetitions = min(MOST_REPETITIONS, max(LEAST_REPETITIONS, math.ceil(session.seconds / longest)))
    draw, order = random.Random(0), list(range(len(cases)))
    for repetition in range(repetitions):
        draw.shuffle(order)
        for index in order:
            _once(session, counter, noted[index], checked=repetition == repetitions - 1)
    for one in noted:
        times, sent, wrong = zip(*session.bare.allgather((one.times, one.sent, one.wrong or 0)), strict=True)
        one.samples = [Sample(max(of_ranks), UNKNOWN) for of_ranks in zip(*times, strict=True)]
        one.sent = [max(of_ranks) for of_ranks in zip(*sent, strict=True)]
        one.wrong = None if one.case.check is None else sum(wrong)
    return noted


def _once(session: Session, counter: WireCounter | None, noted: Counted, checked: bool) -> None:
    """Call a case once; the messages of the barriers, some hundred bytes, are counted with its own."""
    case = noted.case
    if checked:
        case.prepare()
    else:
        case.rewrite()
    session.bare.Barrier()
    before = Sent(0, 0) if counter is None else counter.read()
    session.bare.Barrier()
    ticks = Ticks.now()
    start = time.perf_counter()
    result = case.call()
    noted.samples.append(Sample(time.perf_counter() - start, UNKNOWN))
    noted.busy = noted.busy.and_also(Ticks.now().since(ticks))
    noted.algorithm = case.algorithm()
    if counter is not None:
        session.bare.Barrier()
        noted.sent.append(counter.read().data_since(before))
    if checked and case.check is not None:
        noted.wrong = (noted.wrong or 0) + case.check(result)
