"""The collectives at a list of sizes: all_reduce on three kinds of buffers, reduce_scatter, all_gather, broadcast."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from benchmarks.measuring.inputs import Array, Target, count_wrong, input_of, sum_of_inputs
from benchmarks.measuring.rows import COPY, GLOO, MPI, OURS
from benchmarks.measuring.session import Session
from benchmarks.measuring.timing import Case

ITEM = np.dtype(np.float32).itemsize
# Arrays of the full size that all cases of one point hold together, at most.
_ARRAYS_OF_A_POINT = 10


def count_of(size: int, parts: int) -> int:
    """Return how many float32 make up ``size`` bytes, rounded down to a number of equal parts, at least 1 in each.

    >>> count_of(4, 3), count_of(1024, 3)
    (3, 255)
    """
    return max(1, size // ITEM // parts) * parts


def all_reduce_cases(session: Session, count: int) -> list[Case]:
    """Return the cases of an all-reduce of ``count`` float32."""
    value, expected = input_of(session.rank, count), sum_of_inputs(session.ranks, count)
    bare, out = Target(expected), Target(expected)
    bare_out, copied = bare.array, np.full(count, np.nan, np.float32)
    own = session.comm.empty(count)
    own[...] = value

    def check(result: object) -> int:
        return count_wrong(result, expected)

    cases = [
        Case(MPI, "private", lambda: session.bare.Allreduce(value, bare_out), bare.check, prepare=bare.prepare),
        Case(COPY, "private", lambda: np.copyto(copied, value)),
        *all_reduces_of_ours(session, value, own, out.array, out, check),
    ]
    if session.gloo.available:
        place = Target(expected, inputs=[value])
        buffer = place.array
        call = Case(GLOO, "in place", lambda: session.gloo.all_reduce(buffer), place.check, prepare=place.prepare)
        cases.append(call)
    return cases


def all_reduces_of_ours(
    session: Session, value: Any, own: Any, out: Any, target: Target, check: Callable[[object], int]
) -> list[Case]:
    """Return mpidist's cases of an all-reduce: private arrays in and out, results by mpidist, input of its own.

    Args:
        session: Whose communicator.
        value, own: The input in private arrays and in mpidist's.
        out: Where results of the first case go.
        target: Has ``out``.
        check: Checks results that the others return.
    """
    return [
        Case(
            OURS,
            "out=",
            lambda: session.comm.all_reduce("SUM", value, out=out),
            target.check,
            session.last_algorithm,
            target.prepare,
        ),
        Case(OURS, "new", lambda: session.comm.all_reduce("SUM", value), check, session.last_algorithm),
        Case(OURS, "own", lambda: session.comm.all_reduce("SUM", own), check, session.last_algorithm),
    ]


def reduce_scatter_cases(session: Session, count: int) -> list[Case]:
    """Return the cases of a reduce-scatter of ``count`` float32 in all."""
    value = input_of(session.rank, count)
    part = count // session.ranks
    expected = sum_of_inputs(session.ranks, count)[session.rank * part : (session.rank + 1) * part]
    return _beside_each_other(
        session,
        expected,
        "private",
        lambda out: lambda: session.bare.Reduce_scatter_block(value, out),
        lambda out: lambda: session.gloo.reduce_scatter(out, value),
        lambda: session.comm.reduce_scatter("SUM", value),
    )


def all_gather_cases(session: Session, count: int) -> list[Case]:
    """Return the cases of an all-gather whose result has ``count`` float32."""
    value = input_of(session.rank, count // session.ranks)
    return _beside_each_other(
        session,
        np.concatenate([input_of(rank, value.size) for rank in range(session.ranks)]),
        "private",
        lambda out: lambda: session.bare.Allgather(value, out),
        lambda out: lambda: session.gloo.all_gather(out, value),
        lambda: session.comm.all_gather(value),
    )


def broadcast_cases(session: Session, count: int) -> list[Case]:
    """Return the cases of a broadcast of ``count`` float32 from rank 0; MPI's and gloo's are in place."""
    value = input_of(session.rank, count)
    return _beside_each_other(
        session,
        input_of(0, count),
        "in place",
        lambda buffer: lambda: session.bare.Bcast(buffer),
        lambda buffer: lambda: session.gloo.broadcast(buffer),
        lambda: session.comm.broadcast(value),
        [value],
    )


def _beside_each_other(
    session: Session,
    expected: Array,
    variant: str,
    bare: Callable[[Array], Callable[[], object]],
    gloo: Callable[[Array], Callable[[], object]],
    ours: Callable[[], object],
    inputs: Sequence[Array] = (),
) -> list[Case]:
    """Return the cases of one collective: by MPI, by mpidist, and by gloo if it is there.

    MPI's and gloo's calls are made for the array of the result, which holds ``inputs`` before.
    """

    def into_array(by: str, call_into: Callable[[Array], Callable[[], object]]) -> Case:
        target = Target(expected, inputs=inputs)
        return Case(by, variant, call_into(target.array), target.check, prepare=target.prepare)

    return [
        into_array(MPI, bare),
        Case(OURS, "new", ours, lambda result: count_wrong(result, expected)),
        *([into_array(GLOO, gloo)] if session.gloo.available else []),
    ]


_CASES: dict[str, Callable[[Session, int], list[Case]]] = {
    "all_reduce": all_reduce_cases,
    "reduce_scatter": reduce_scatter_cases,
    "all_gather": all_gather_cases,
    "broadcast": broadcast_cases,
}
COLLECTIVES = tuple(_CASES)


def run(session: Session, operation: str, sizes: list[int], advance: Callable[[str], None]) -> None:
    """Measure one collective at every size (collective).

    Args:
        session: Where results go.
        operation: One of ``COLLECTIVES``.
        sizes: Bytes of the larger buffer.
        advance: Called with a name before each point.
    """
    reduces = operation in ("all_reduce", "reduce_scatter")
    session.renew()
    parts = session.ranks if operation in ("reduce_scatter", "all_gather") else 1
    for count in (count_of(size, parts) for size in sizes):
        size = count * ITEM
        name = f"{operation} {size} B"
        advance(name)
        if session.has_memory_for(_ARRAYS_OF_A_POINT * size, name):
            cases = _CASES[operation](session, count)
            session.measure(operation, cases, size=size, count=count, op="sum" if reduces else "none")
