"""Gradients of whole models in one call: many arrays, private or of mpidist, beside MPI and gloo in buckets."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from benchmarks.cases.collectives import all_reduces_of_ours
from benchmarks.measuring.gloo import GlooBuckets
from benchmarks.measuring.inputs import Array, Target, count_wrong_in, input_of, sum_of_inputs
from benchmarks.measuring.models import MODELS, Shape, size_of
from benchmarks.measuring.rows import COPY, GLOO, MPI
from benchmarks.measuring.session import Session
from benchmarks.measuring.timing import Case

# Sets of arrays of the model's size that a rank holds at once, at most: inputs, results, packed buffers, own ones.
_SETS = 12


def _split(flat: Array, shapes: list[Shape]) -> list[Array]:
    """Return views of ``flat``, one of each shape."""
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    return [part.reshape(shape) for part, shape in zip(np.split(flat, ends[:-1]), shapes, strict=True)]


def _bare_cases(session: Session, values: list[Array], outs: Target) -> list[Case]:
    """Return what one would write with mpi4py alone, and the floor."""
    packed, packed_sums = (np.empty(sum(v.size for v in values), np.float32) for _ in range(2))
    packed_values = _split(packed, [v.shape for v in values])
    packed_results = _split(packed_sums, [v.shape for v in values])

    def one_call_per_array() -> None:
        for value, out in zip(values, outs.arrays, strict=True):
            session.bare.Allreduce(value, out)

    def packed_into_one_call() -> None:
        for value, view in zip(values, packed_values, strict=True):
            np.copyto(view, value)
        session.bare.Allreduce(packed, packed_sums)
        for view, out in zip(packed_results, outs.arrays, strict=True):
            np.copyto(out, view)

    def copy() -> None:
        for value, out in zip(values, outs.arrays, strict=True):
            np.copyto(out, value)

    return [
        Case(MPI, "one call per array", one_call_per_array, outs.check, prepare=outs.prepare),
        Case(MPI, "packed", packed_into_one_call, outs.check, prepare=outs.prepare),
        Case(COPY, "private", copy),
    ]


def cases_of(session: Session, shapes: list[Shape]) -> list[Case]:
    """Return the cases of the gradients of a model."""
    count = sum(math.prod(shape) for shape in shapes)
    # Each array has memory of its own, as gradients have.
    values = [part.copy() for part in _split(input_of(session.rank, count), shapes)]
    expected = _split(sum_of_inputs(session.ranks, count), shapes)
    own = [session.comm.empty(value.shape) for value in values]
    for array, value in zip(own, values, strict=True):
        array[...] = value
    out = Target(*expected)
    cases = _bare_cases(session, values, Target(*expected))
    cases += all_reduces_of_ours(session, values, own, out.arrays, out, lambda found: count_wrong_in(found, expected))
    if session.gloo.available:
        outs = Target(*expected)
        buckets = GlooBuckets(values, outs.arrays)
        cases.append(Case(GLOO, "25 MiB buckets", buckets.reduce, outs.check, prepare=outs.prepare))
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
