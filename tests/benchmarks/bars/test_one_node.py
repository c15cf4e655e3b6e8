"""Bars: which there are for which results, and when they are met."""

from __future__ import annotations

import pytest

from benchmarks.bars.one_node import verdicts
from benchmarks.measuring.models import resnet50, size_of
from benchmarks.measuring.rows import Figure, Row, Verdict
from tests.benchmarks.support import row

pytestmark = pytest.mark.one_rank

KIB, MIB = 1 << 10, 1 << 20


def judge(rows: list[Row], figures: list[Figure] | None = None, ranks: int = 2, readable: bool = True) -> list[Verdict]:
    return verdicts(rows, figures or [], ranks, readable)


def all_reduce(size: int, bare: float, ours: float, variant: str = "out=") -> list[Row]:
    return [
        row("all_reduce", "mpi", "in place" if variant == "in place" else "private", size, bare),
        row("all_reduce", "mpidist", variant, size, ours, algorithm="some"),
    ]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("variant", "size", "bar"),
    [
        ("new", 4, 1.0),
        ("new", KIB, 1.0),
        ("new", 4 * KIB, 1.5),
        ("new", 256 * KIB, 1.5),
        ("out=", MIB, 1.2),
        ("own", 4 * MIB, 2.0),
        ("out=", 16 * MIB, 1.6),
        ("out=", 64 * MIB, 2.6),
        ("own", 64 * MIB, 5.0),
        ("in place", 4, 1.0),
        ("in place", 16 * MIB, 1.0),
        ("in place", 64 * MIB, 2.0),
    ],
)
def test_times_as_fast_as_mpi(variant: str, size: int, bar: float, ranks: int) -> None:
    (slow,) = judge(all_reduce(size, 100 * bar - 1, 100, variant), ranks=ranks)
    assert (slow.bar, slow.at_least, slow.met, slow.algorithm) == (bar, True, False, "some")
    (fast,) = judge(all_reduce(size, 100 * bar + 1, 100, variant), ranks=ranks)
    assert fast.met


def test_no_bars_for_other_buffers_and_numbers_of_ranks() -> None:
    assert judge(all_reduce(MIB, 1, 100, "new")) == []
    assert judge(all_reduce(64 * MIB, 1, 100), ranks=8) == []


@pytest.mark.parametrize(
    ("operation", "variant", "theirs"),
    [
        ("all_gather", "new", "private"),
        ("all_gather", "out=", "private"),
        ("reduce_scatter", "out=", "private"),
        ("broadcast", "new", "in place"),
        ("broadcast", "in place", "in place"),
    ],
)
def test_movement(operation: str, variant: str, theirs: str) -> None:
    def rows(size: int, bare: float) -> list[Row]:
        return [row(operation, "mpi", theirs, size, bare), row(operation, "mpidist", variant, size, 100)]

    assert [v.what for v in judge(rows(64, 1))] == [f"{operation}, {variant}, 64 B: as fast as MPI"]
    assert [v.met for v in judge(rows(64, 149))] == [False]
    assert [v.met for v in judge(rows(64, 151))] == [True]
    assert [v.met for v in judge(rows(64 * MIB, 95))] == [False]
    assert [v.met for v in judge(rows(64 * MIB, 96))] == [True]
    assert judge(rows(MIB, 1), readable=False) == judge(rows(MIB, 1), ranks=4) == judge(rows(4, 1)) == []


def test_gradients_of_resnet50() -> None:
    size = size_of(resnet50())
    rows = [
        row("batch", "mpi", "packed", size, 1.0),
        row("batch", "mpi", "one call per array", size, 500),
        row("batch", "gloo", "25 MiB buckets", size, 1100),
        row("batch", "mpidist", "own", size, 100),
        row("batch", "mpidist", "out=", size, 400),
        row("batch", "mpidist", "new", size, 1.0),
    ]
    found = judge(rows)
    assert [(v.bar, v.met) for v in found] == [(3.3, True), (10.0, True), (1.7, False), (3.0, False)]
    assert [v.bar for v in judge([r for r in rows if r.by != "gloo"])] == [3.3, 1.7]


def test_latency() -> None:
    rows = [
        row("run", "mpidist", "empty function", 0, 5.5),
        row("context_all_reduce", "mpi", "private", 4, 1.0),
        row("context_all_reduce", "mpidist", "new", 4, 1.9),
        row("context_all_reduce", "mpi", "private", KIB, 1.0),
        row("context_all_reduce", "mpidist", "new", KIB, 2.1),
    ]
    assert [(v.met, v.unit) for v in judge(rows)] == [(True, "us"), (False, "us"), (False, "us")]


def test_figures() -> None:
    figures = [
        Figure("memory", "beyond_arrays", 2.1, "buffers"),
        Figure("memory", "growth", 0.0, "MiB"),
        Figure("start", "import", 0.2, "s"),
        Figure("start", "cupy_imported", 1.0, ""),
        Figure("overlap", "share of communication hidden", 0.1, ""),
    ]
    assert [v.met for v in judge([], figures)] == [False, True, True, False]
