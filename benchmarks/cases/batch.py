"""Gradients of whole models in one call: many arrays, private or of mpidist, beside MPI and gloo in buckets."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np

from benchmarks.cases.collectives import all_reduces_of_ours
from benchmarks.measuring.gloo import GlooBuckets
from benchmarks.measuring.inputs import Array, input_of, sum_of_inputs
from benchmarks.measuring.models import MODELS, Shape, size_of
from benchmarks.measuring.points import Point
from benchmarks.measuring.rows import COPY, GLOO, MPI
from benchmarks.measuring.session import Session
from benchmarks.measuring.timing import Case

# Sets of arrays of the model's size that a rank holds at once, at most: inputs, results, packed buffers, own ones.
_SETS = 12


def _split(flat: Array, shapes: list[Shape]) -> list[Array]:
    """Return views of ``flat``, one of each shape."""
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    return [part.reshape(shape) for part, shape in zip(np.split(flat, ends[:-1]), shapes, strict=True)]


def _bare_cases(session: Session, point: Point) -> list[Case]:
    """Return what one would write with mpi4py alone, and the floor."""
    packed, packed_sums = (np.empty(sum(v.size for v in point.value), np.float32) for _ in range(2))
    packed_values, packed_results = (_split(flat, [v.shape for v in point.value]) for flat in (packed, packed_sums))

    def one_call_per_array(values: list[Array]) -> None:
        for value, out in zip(values, point.out, strict=True):
            session.bare.Allreduce(value, out)

    def packed_into_one_call(values: list[Array]) -> None:
        copy(values, packed_values)
        session.bare.Allreduce(packed, packed_sums)
        copy(packed_results, point.out)

    def copy(values: list[Array], outs: list[Array]) -> None:
        for value, out in zip(values, outs, strict=True):
            np.copyto(out, value)

    return [
        point.case(MPI, "one call per array", partial(partial, one_call_per_array), point.check_out),
        point.case(MPI, "packed", partial(partial, packed_into_one_call), point.check_out),
        point.case(COPY, "private", lambda values: partial(copy, values, point.out)),
    ]


def cases_of(session: Session, shapes: list[Shape]) -> list[Case]:
    """Return the cases of the gradients of a model."""
    count = sum(math.prod(shape) for shape in shapes)
    # Point gives each array memory of its own, as gradients have.
    point = Point(_split(input_of(session.rank, count), shapes), _split(sum_of_inputs(session.ranks, count), shapes))
    cases = _bare_cases(session, point) + all_reduces_of_ours(session, point)
    if session.gloo.available:
        name = "25 MiB buckets"
        cases.append(point.case(GLOO, name, lambda values: GlooBuckets(values, point.out).reduce, point.check_out))
    return cases


def run(session: Session, models: list[str], advance: Callable[[str], None]) -> None:
    """Measure the gradient sets of ``models`` (collective)."""
    for model in models:
        shapes = MODELS[model]()
        count = sum(math.prod(shape) for shape in shapes)
        size = size_of(shapes)
        advance(f"batch {model}")
        session.renew()
        if session.has_memory_for(_SETS * size, f"batch {model}"):
            session.measure("batch", cases_of(session, shapes), size=size, count=count, op="sum")
