"""The collectives at a list of sizes: all_reduce on three kinds of buffers, reduce_scatter, all_gather, broadcast."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from benchmarks.inputs import Array, count_wrong, input_of, spoil, sum_of_inputs
from benchmarks.rows import COPY, GLOO, MPI, OURS
from benchmarks.session import Session
from benchmarks.timing import Case

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
    bare_out, copied, out = (np.full(count, np.nan, np.float32) for _ in range(3))
    own = session.comm.empty(count)
    own[...] = value

    def check(result: object) -> int:
        return count_wrong(result, expected)

    def check_out(_: object) -> int:
        return count_wrong(out, expected)

    cases = [
        Case(
            MPI,
            "private",
            lambda: session.bare.Allreduce(value, bare_out),
            lambda _: count_wrong(bare_out, expected),
            prepare=lambda: spoil(bare_out),
        ),
        Case(COPY, "private", lambda: np.copyto(copied, value)),
        Case(
            OURS,
            "out=",
            lambda: session.comm.all_reduce("SUM", value, out=out),
            check_out,
            session.last_algorithm,
            lambda: spoil(out),
        ),
        Case(OURS, "new", lambda: session.comm.all_reduce("SUM", value), check, session.last_algorithm),
        Case(OURS, "own", lambda: session.comm.all_reduce("SUM", own), check, session.last_algorithm),
    ]
    if session.gloo.available:
        in_place = value.copy()
        cases.append(
            Case(
                GLOO,
                "in place",
                lambda: session.gloo.all_reduce(in_place),
                lambda _: count_wrong(in_place, expected),
                prepare=lambda: np.copyto(in_place, value),
            )
        )
    return cases


def reduce_scatter_cases(session: Session, count: int) -> list[Case]:
    """Return the cases of a reduce-scatter of ``count`` float32 in all."""
    value = input_of(session.rank, count)
    part = count // session.ranks
    expected = sum_of_inputs(session.ranks, count)[session.rank * part : (session.rank + 1) * part]
    bare_out, gloo_out = np.empty(part, np.float32), np.empty(part, np.float32)
    return _beside_each_other(
        session,
        expected,
        "private",
        _Into(lambda: session.bare.Reduce_scatter_block(value, bare_out), bare_out, lambda: spoil(bare_out)),
        _Into(lambda: session.gloo.reduce_scatter(gloo_out, value), gloo_out, lambda: spoil(gloo_out)),
        lambda: session.comm.reduce_scatter("SUM", value),
    )


def all_gather_cases(session: Session, count: int) -> list[Case]:
    """Return the cases of an all-gather whose result has ``count`` float32."""
    value = input_of(session.rank, count // session.ranks)
    expected = np.concatenate([input_of(rank, value.size) for rank in range(session.ranks)])
    bare_out, gloo_out = np.empty(count, np.float32), np.empty(count, np.float32)
    return _beside_each_other(
        session,
        expected,
        "private",
        _Into(lambda: session.bare.Allgather(value, bare_out), bare_out, lambda: spoil(bare_out)),
        _Into(lambda: session.gloo.all_gather(gloo_out, value), gloo_out, lambda: spoil(gloo_out)),
        lambda: session.comm.all_gather(value),
    )


def broadcast_cases(session: Session, count: int) -> list[Case]:
    """Return the cases of a broadcast of ``count`` float32 from rank 0; MPI's and gloo's are in place."""
    value, expected = input_of(session.rank, count), input_of(0, count)
    bare_buffer, gloo_buffer = value.copy(), value.copy()
    return _beside_each_other(
        session,
        expected,
        "in place",
        _Into(lambda: session.bare.Bcast(bare_buffer), bare_buffer, lambda: np.copyto(bare_buffer, value)),
        _Into(lambda: session.gloo.broadcast(gloo_buffer), gloo_buffer, lambda: np.copyto(gloo_buffer, value)),
        lambda: session.comm.broadcast(value),
    )


class _Into(NamedTuple):
    """A call that leaves its result in an array, and what makes the array ready for it."""

    call: Callable[[], object]
    target: Array
    prepare: Callable[[], object]


def _beside_each_other(
    session: Session, expected: Array, variant: str, bare: _Into, gloo: _Into, ours: Callable[[], object]
) -> list[Case]:
    """Return the cases of one collective: by MPI, by mpidist, and by gloo if it is there."""
    others = [(MPI, bare), *([(GLOO, gloo)] if session.gloo.available else [])]
    cases = [
        Case(by, variant, into.call, partial(_count_wrong_in, into.target, expected), prepare=into.prepare)
        for by, into in others
    ]
    cases.insert(1, Case(OURS, "new", ours, lambda result: count_wrong(result, expected)))
    return cases


def _count_wrong_in(target: Array, expected: Array, _: object) -> int:
    return count_wrong(target, expected)


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
