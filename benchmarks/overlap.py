"""How much of an all-reduce hides behind single-threaded matrix products: (Tcomm + Tcomp - Tboth) / Tcomm."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from benchmarks.inputs import count_wrong, input_of, sum_of_inputs
from benchmarks.rows import ALONE, OURS, Figure
from benchmarks.session import Session
from benchmarks.timing import Case, agreed_seconds

COUNT = 4 << 20
MATRIX = 256


def run(session: Session, advance: Callable[[str], None]) -> None:
    """Measure an all-reduce of 16 MiB, products that take at least as long, and both at once (collective)."""
    advance("overlap")
    value, expected = input_of(session.rank, COUNT), sum_of_inputs(session.ranks, COUNT)
    left, right, product = (np.ones((MATRIX, MATRIX), np.float32) for _ in range(3))

    def check(result: object) -> int:
        return count_wrong(result, expected)

    def communicate() -> object:
        return session.comm.all_reduce("SUM", value)

    communication = Case(OURS, "communication", communicate, check, session.last_algorithm)
    # The first products start the linear algebra library up.
    for _ in range(20):
        np.matmul(left, right, out=product)
    one = agreed_seconds(session.bare, Case(ALONE, "one product", lambda: np.matmul(left, right, out=product)))
    communicate()
    products = math.ceil(1.2 * agreed_seconds(session.bare, communication) / one)

    def compute() -> None:
        for _ in range(products):
            np.matmul(left, right, out=product)

    def both() -> object:
        work = session.comm.all_reduce_async("SUM", value)
        compute()
        return work.wait()

    cases = [
        communication,
        Case(ALONE, "computation", compute),
        Case(OURS, "both", both, check, session.last_algorithm),
    ]
    session.measure("overlap", cases, size=value.nbytes, count=COUNT, op="sum")
    t_comm, t_comp, t_both = (row.median for row in session.rows[-3:])
    hidden = (t_comm + t_comp - t_both) / t_comm
    session.figures.append(Figure("overlap", "share of communication hidden", hidden, "", session.rows[-1].algorithm))
