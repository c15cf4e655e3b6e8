"""The collectives at a list of sizes: all_reduce on four kinds of buffers, the others on two.

Calls are made ahead, by ``partial(call, value)``, so that nothing but them is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from benchmarks.measuring.inputs import input_of, sum_of_inputs
from benchmarks.measuring.points import Inputs, Point
from benchmarks.measuring.rows import COPY, GLOO, IN_PLACE, MPI, OURS
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
    from mpi4py.MPI import IN_PLACE as MPI_IN_PLACE

    point = Point(input_of(session.rank, count), sum_of_inputs(session.ranks, count))
    bare, out = session.bare, point.out
    return [
        *(bare_all_reduce(point, variant, comm) for variant, comm in [("private", bare), *session.components.items()]),
        point.case(MPI, "Iallreduce", lambda value: lambda: bare.Iallreduce(value, out).Wait(), point.check_out),
        point.case(MPI, IN_PLACE, partial(partial, bare.Allreduce, MPI_IN_PLACE), point.check_in_place),
        point.case(COPY, "private", lambda value: partial(np.copyto, out, value)),
        *all_reduces_of_ours(session, point),
        point.case(
            OURS,
            IN_PLACE,
            lambda value: partial(session.comm.all_reduce, "SUM", value, out=value),
            point.check_in_place,
            session.last_algorithm,
        ),
        point.case(GLOO, IN_PLACE, partial(partial, session.gloo.all_reduce), point.check_in_place),
    ]


def bare_all_reduce(point: Point, variant: str, comm: Any) -> Case:
    """Return the case of the blocking call of mpi4py on ``comm``, private arrays in and out."""
    return point.case(MPI, variant, lambda value: partial(comm.Allreduce, value, point.out), point.check_out)


def all_reduces_of_ours(session: Session, point: Point) -> list[Case]:
    """Return mpidist's cases of an all-reduce: private arrays in and out, results by mpidist, input of its own."""
    call, algorithm = partial(partial, session.comm.all_reduce, "SUM"), session.last_algorithm
    own = Inputs(point.value, session.comm.empty)
    return [
        point.case(OURS, "out=", lambda value: call(value, out=point.out), point.check_out, algorithm),
        point.case(OURS, "new", call, point.check, algorithm),
        point.case(OURS, "own", call, point.check, algorithm, own),
    ]


def reduce_scatter_cases(session: Session, count: int) -> list[Case]:
    """Return the cases of a reduce-scatter of ``count`` float32 in all."""
    part = count // session.ranks
    expected = sum_of_inputs(session.ranks, count)[session.rank * part : (session.rank + 1) * part]
    point = Point(input_of(session.rank, count), expected)
    bare, gloo, out = session.bare, session.gloo, point.out
    call = partial(partial, session.comm.reduce_scatter, "SUM")
    return [
        point.case(MPI, "private", lambda value: partial(bare.Reduce_scatter_block, value, out), point.check_out),
        point.case(OURS, "out=", lambda value: call(value, out=out), point.check_out),
        point.case(OURS, "new", call, point.check),
        point.case(GLOO, "private", lambda value: partial(gloo.reduce_scatter, out, value), point.check_out),
    ]


def all_gather_cases(session: Session, count: int) -> list[Case]:
    """Return the cases of an all-gather whose result has ``count`` float32."""
    part = count // session.ranks
    expected = np.concatenate([input_of(rank, part) for rank in range(session.ranks)])
    point = Point(input_of(session.rank, part), expected)
    bare, gloo, out = session.bare, session.gloo, point.out
    call = partial(partial, session.comm.all_gather)
    return [
        point.case(MPI, "private", lambda value: partial(bare.Allgather, value, out), point.check_out),
        point.case(OURS, "out=", lambda value: call(value, out=out), point.check_out),
        point.case(OURS, "new", call, point.check),
        point.case(GLOO, "private", lambda value: partial(gloo.all_gather, out, value), point.check_out),
    ]


def broadcast_cases(session: Session, count: int) -> list[Case]:
    """Return the cases of a broadcast of ``count`` float32 from rank 0; MPI's and gloo's are in place."""
    point = Point(input_of(session.rank, count), input_of(0, count))
    call = partial(partial, session.comm.broadcast)
    return [
        point.case(MPI, IN_PLACE, partial(partial, session.bare.Bcast), point.check_in_place),
        point.case(OURS, IN_PLACE, lambda value: call(value, out=value), point.check_in_place),
        point.case(OURS, "new", call, point.check),
        point.case(GLOO, IN_PLACE, partial(partial, session.gloo.broadcast), point.check_in_place),
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
