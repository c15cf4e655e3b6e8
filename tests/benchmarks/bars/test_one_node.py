"""Bars: which there are for which results, and when they are met."""

from __future__ import annotations

import pytest

from benchmarks.bars.one_node import verdicts
from benchmarks.measuring.models import resnet50, size_of
from benchmarks.measuring.rows import Figure, Row, Verdict
from benchmarks.measuring.sizes import size_text
from tests.benchmarks.support import row

pytestmark = pytest.mark.one_rank

KIB, MIB = 1 << 10, 1 << 20


def judge(rows: list[Row], figures: list[Figure] | None = None, ranks: int = 2, readable: bool = True) -> list[Verdict]:
    return verdicts(rows, figures or [], ranks, readable)


def all_reduce(size: int, bare: float, ours: float, variant: str = "out=") -> list[Row]:
    return [
        row("all_reduce", "mpi", "private", size, bare),
        row("all_reduce", "mpidist", variant, size, ours, algorithm="some"),
    ]


@pytest.mark.parametrize(
    ("size", "ranks", "readable", "bar"),
    [
        (64 * MIB, 2, True, 3.0),
        (16 * MIB, 2, True, 1.5),
        (64 * MIB, 4, True, 3.0),
        (16 * MIB, 4, True, 1.3),
        (64 * MIB, 2, False, 2.3),
        (16 * MIB, 4, False, 1.3),
    ],
)
def test_private_arrays(size: int, ranks: int, readable: bool, bar: float) -> None:
    slow, _ = judge(all_reduce(size, 100 * bar - 1, 100), ranks=ranks, readable=readable)
    assert (slow.bar, slow.at_least, slow.met, slow.algorithm) == (bar, True, False, "some")
    fast, _ = judge(all_reduce(size, 100 * bar + 1, 100), ranks=ranks, readable=readable)
    assert fast.met


def test_never_slower_than_mpi() -> None:
    assert [v.met for v in judge(all_reduce(256 * KIB, 100, 101))] == [False]
    assert [v.met for v in judge(all_reduce(256 * KIB, 100, 99))] == [True]
    assert [(v.met, v.unit) for v in judge(all_reduce(64 * KIB, 20, 29))] == [(True, "us")]
    assert [v.met for v in judge(all_reduce(4, 1, 12))] == [False]


def test_one_copy_is_the_measure() -> None:
    copy = row("all_reduce", "copy", "private", 64 * MIB, 100)
    private = [*all_reduce(64 * MIB, 1000, 151), copy]
    assert [v.met for v in judge(private) if "copy" in v.what] == [False]
    own = [*all_reduce(64 * MIB, 1000, 99, "own"), copy]
    assert [v.met for v in judge(own)] == [True, True]
    own = [*all_reduce(64 * MIB, 400, 101, "own"), copy]
    assert [v.met for v in judge(own)] == [False, False]


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
    assert [(v.bar, v.met) for v in found] == [(5.0, True), (10.0, True), (1.5, False), (3.0, False)]
    assert [v.bar for v in judge([r for r in rows if r.by != "gloo"])] == [5.0, 1.5]


def test_latency() -> None:
    rows = [
        row("run", "mpidist", "empty function", 0, 5.5),
        row("scalar_all_reduce", "mpi", "private", 8, 1.0),
        row("scalar_all_reduce", "mpidist", "replica context", 8, 10.5),
    ]
    assert [v.met for v in judge(rows)] == [False, True]


def test_figures() -> None:
    figures = [
        Figure("memory", "beyond_arrays", 2.1, "buffers"),
        Figure("memory", "growth", 0.0, "MiB"),
        Figure("start", "import", 0.2, "s"),
        Figure("start", "cupy_imported", 1.0, ""),
        Figure("overlap", "share of communication hidden", 0.1, ""),
    ]
    assert [v.met for v in judge([], figures)] == [False, True, True, False]


def test_one_rank_has_no_collectives_to_judge() -> None:
    assert judge(all_reduce(64 * MIB, 1, 100), ranks=1) == []


def test_nothing_measured_nothing_judged() -> None:
    assert judge([]) == []


def test_sizes_as_text() -> None:
    assert [size_text(size) for size in (4, 16 * KIB, 64 * MIB, 0)] == ["4 B", "16 KiB", "64 MiB", "0 B"]
