"""Collectives of torch.distributed over mpidist and over gloo, beside the Communicator's own calls and bare mpi4py."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.cases.collectives import ITEM, count_of
from benchmarks.measuring.gloo import GlooBeside
from benchmarks.measuring.inputs import Array, input_of, sum_of_inputs
from benchmarks.measuring.points import Point
from benchmarks.measuring.rows import COMMUNICATOR, GLOO, IN_PLACE, MPI, OURS, TORCH, TORCH_WITH_LOCAL
from benchmarks.measuring.session import Session
from benchmarks.measuring.timing import Case

# Arrays of the full size that all cases of one point hold together, at most.
_ARRAYS_OF_A_POINT = 6
_VARIABLE = "LOCAL_WORLD_SIZE"

# Returns a call of torch.distributed that takes an input; what it returns takes a group, too.
CallOn = Callable[[Array], Callable[..., object]]


def all_reduce_cases(session: Session, gloo: GlooBeside, count: int) -> list[Case]:
    """Return the cases of an all-reduce of ``count`` float32, in place."""
    from mpi4py.MPI import IN_PLACE as MPI_IN_PLACE

    point = Point(input_of(session.rank, count), sum_of_inputs(session.ranks, count))
    check = point.check_in_place
    of_gloo = _over_gloo(point, gloo, _all_reduce_on, check)
    local = os.environ.get(_VARIABLE, str(session.ranks))
    return [
        point.case(MPI, IN_PLACE, partial(partial, session.bare.Allreduce, MPI_IN_PLACE), check),
        point.case(
            OURS,
            COMMUNICATOR,
            lambda value: partial(session.comm.all_reduce, "SUM", value, out=value),
            check,
            session.last_algorithm,
        ),
        point.case(OURS, TORCH, _all_reduce_on, check),
        _with_variable(of_gloo, TORCH, None),
        _with_variable(of_gloo, TORCH_WITH_LOCAL, local),
    ]


def _all_reduce_on(value: Array) -> Callable[..., object]:
    return partial(dist.all_reduce, torch.from_numpy(value))


def _four(
    point: Point, gloo: GlooBeside, mpi: Callable[..., object], ours: Callable[..., object], on: Callable[..., Any]
) -> list[Case]:
    """Return the cases of one collective into ``point.out``: MPI's, the Communicator's, and torch's over both."""
    out, check = point.out, point.check_out
    return [
        point.case(MPI, "private", lambda value: partial(mpi, value, out), check),
        point.case(OURS, COMMUNICATOR, lambda value: partial(ours, value, out=out), check),
        point.case(OURS, TORCH, on, check),
        _over_gloo(point, gloo, on, check),
    ]


def all_gather_cases(session: Session, gloo: GlooBeside, count: int) -> list[Case]:
    """Return the cases of an all-gather whose result has ``count`` float32."""
    part = count // session.ranks
    expected = np.concatenate([input_of(rank, part) for rank in range(session.ranks)])
    point = Point(input_of(session.rank, part), expected)
    bare, comm, out = session.bare, session.comm, point.out

    def on(value: Array) -> Callable[..., object]:
        return partial(dist.all_gather_single, torch.from_numpy(out), torch.from_numpy(value))

    return _four(point, gloo, bare.Allgather, comm.all_gather, on)


def reduce_scatter_cases(session: Session, gloo: GlooBeside, count: int) -> list[Case]:
    """Return the cases of a reduce-scatter of ``count`` float32 in all."""
    part = count // session.ranks
    expected = sum_of_inputs(session.ranks, count)[session.rank * part : (session.rank + 1) * part]
    point = Point(input_of(session.rank, count), expected)
    bare, comm, out = session.bare, session.comm, point.out

    def on(value: Array) -> Callable[..., object]:
        return partial(dist.reduce_scatter_single, torch.from_numpy(out), torch.from_numpy(value))

    return _four(point, gloo, bare.Reduce_scatter_block, partial(comm.reduce_scatter, "SUM"), on)


def all_to_all_cases(session: Session, gloo: GlooBeside, count: int) -> list[Case]:
    """Return the cases of an all-to-all of ``count`` float32 on each rank, in equal parts."""
    part = count // session.ranks
    own = slice(session.rank * part, (session.rank + 1) * part)
    point = Point(
        input_of(session.rank, count), np.concatenate([input_of(rank, count)[own] for rank in range(session.ranks)])
    )
    bare, comm, out = session.bare, session.comm, point.out

    def on(value: Array) -> Callable[..., object]:
        return partial(dist.all_to_all_single, torch.from_numpy(out), torch.from_numpy(value))

    return _four(point, gloo, bare.Alltoall, comm.all_to_all, on)


_CASES: dict[str, Callable[[Session, GlooBeside, int], list[Case]]] = {
    "all_reduce": all_reduce_cases,
    "all_gather": all_gather_cases,
    "reduce_scatter": reduce_scatter_cases,
    "all_to_all": all_to_all_cases,
}
COLLECTIVES = tuple(_CASES)


def run(session: Session, gloo: GlooBeside, operation: str, sizes: list[int], advance: Callable[[str], None]) -> None:
    """Measure one collective at every size (collective).

    Args:
        session: Where results go.
        gloo: The session's, beside mpidist's process group.
        operation: One of ``COLLECTIVES``.
        sizes: Bytes of the larger buffer.
        advance: Called with a name before each point.
    """
    op = "sum" if operation in ("all_reduce", "reduce_scatter") else "none"
    parts = 1 if operation == "all_reduce" else session.ranks
    for count in (count_of(size, parts) for size in sizes):
        size = count * ITEM
        name = f"{operation} {size} B"
        advance(name)
        if session.has_memory_for(_ARRAYS_OF_A_POINT * size, name):
            session.measure(operation, _CASES[operation](session, gloo, count), size=size, count=count, op=op)


def _over_gloo(point: Point, gloo: GlooBeside, call_on: CallOn, check: Callable[[object], int]) -> Case:
    """Return the case of a call over gloo's group, which is there only while its cases are timed."""

    def on_group(value: Array) -> Callable[[], object]:
        call = call_on(value)
        return lambda: call(group=gloo.group)

    return point.case(GLOO, TORCH, on_group, check)


def _with_variable(case: Case, variant: str, value: str | None) -> Case:
    """Return a case that has LOCAL_WORLD_SIZE, by which newer gloo knows that ranks share memory, or has it not."""

    def first(act: Callable[[], object]) -> Callable[[], Any]:
        def acted() -> None:
            if value is None:
                os.environ.pop(_VARIABLE, None)
            else:
                os.environ[_VARIABLE] = value
            act()

        return acted

    return replace(case, variant=variant, prepare=first(case.prepare), rewrite=first(case.rewrite))
