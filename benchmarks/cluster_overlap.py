"""How much of an all-reduce between nodes hides behind matrix products: (Tcomm + Tcomp - Tboth) / Tcomm."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import numpy as np

from benchmarks.cluster_cases import measure_cases
from benchmarks.inputs import count_wrong, input_of, sum_of_inputs
from benchmarks.rows import ALONE, OURS, Figure, make_row
from benchmarks.session import Session
from benchmarks.timing import Case, seconds_per_call

SIZE = 64 << 20
_MATRIX = 256
_WARM_UP_CALLS, _CALLS = 20, 50
# The products take so many times as long as the all-reduce; it must not be less than once.
_LONGER = 1.2


def run(session: Session, placement: str) -> None:
    """Measure an all-reduce, products of one thread that take a little longer, and both at once (collective)."""
    count = SIZE // 4
    value, expected = input_of(session.rank, count), sum_of_inputs(session.ranks, count)
    left, right, product = (np.ones((_MATRIX, _MATRIX), np.float32) for _ in range(3))

    def multiply() -> None:
        np.matmul(left, right, out=product)

    def communicate() -> object:
        return session.comm.all_reduce("SUM", value)

    products = _products_for(session, communicate, multiply)

    def compute() -> None:
        for _ in range(products):
            multiply()

    def both() -> object:
        work = session.comm.all_reduce_async("SUM", value)
        compute()
        return work.wait()

    def check(result: object) -> int:
        return count_wrong(result, expected)

    cases = [
        Case(OURS, "communication", communicate, check, session.last_algorithm),
        Case(ALONE, "computation", compute),
        Case(OURS, "both", both, check, session.last_algorithm),
    ]
    medians = []
    for case, measured in zip(cases, measure_cases(session, None, cases), strict=True):
        medians.append(statistics.median(measured.times))
        session.rows.append(
            make_row(
                "overlap",
                f"{placement}, {case.variant}",
                case.by,
                measured.times,
                ranks=session.ranks,
                size=SIZE,
                count=count,
                op="sum",
                wrong=measured.wrong,
                algorithm=measured.algorithm,
            )
        )
    t_comm, t_comp, t_both = medians
    hidden = (t_comm + t_comp - t_both) / t_comm
    if t_comp < t_comm:
        session.skipped.append(f"bar of overlap: the products took {t_comp:.2f} s, the all-reduce alone {t_comm:.2f} s")
    name = f"{placement}, share of communication hidden"
    session.figures.append(Figure("overlap", name, hidden, "", session.last_algorithm()))


def _products_for(session: Session, communicate: Callable[[], object], multiply: Callable[[], object]) -> int:
    """Return how many products take as long as they must, the same on every rank (collective)."""
    from mpi4py import MPI

    for _ in range(2):
        session.bare.Barrier()
        communication: float = session.bare.allreduce(seconds_per_call(communicate, 1), op=MPI.MAX)
    # The first products start the linear algebra library; the fastest rank must have enough to do, too.
    seconds_per_call(multiply, _WARM_UP_CALLS)
    session.bare.Barrier()
    one: float = session.bare.allreduce(seconds_per_call(multiply, _CALLS), op=MPI.MIN)
    return math.ceil(_LONGER * communication / one)
