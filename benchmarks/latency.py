"""Latency of what happens at every step: an empty ``strategy.run``, and a replica's all-reduce of one number."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import mpidist
from benchmarks.inputs import count_wrong
from benchmarks.rows import MPI, OURS
from benchmarks.session import Session, algorithm_in
from benchmarks.timing import Case

RUN, SCALAR = "run", "scalar_all_reduce"


def run(session: Session, advance: Callable[[str], None]) -> None:
    """Measure both through a MultiWorkerMirroredStrategy (collective)."""
    strategy = mpidist.MultiWorkerMirroredStrategy(communication_options=session.options, communicator=session.bare)

    def nothing() -> None:
        return None

    advance(RUN)
    session.measure(RUN, [Case(OURS, "empty function", lambda: strategy.run(nothing))])
    advance(SCALAR)

    def measure_inside() -> None:
        context = mpidist.get_replica_context()
        assert context is not None
        send, receive = np.ones(()), np.empty(())
        expected = np.asarray(float(session.ranks))
        cases = [
            Case(
                MPI,
                "private",
                lambda: session.bare.Allreduce(send, receive),
                lambda _: count_wrong(receive, expected),
                prepare=lambda: receive.fill(np.nan),
            ),
            Case(
                OURS,
                "replica context",
                lambda: context.all_reduce("SUM", send),
                lambda result: count_wrong(result, expected),
                lambda: algorithm_in(strategy),
            ),
        ]
        session.measure(SCALAR, cases, size=send.nbytes, count=1, dtype="float64", op="sum")

    strategy.run(measure_inside)
    strategy.close()
