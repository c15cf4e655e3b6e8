"""What a row says about its times, and the doctests of the suite."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import benchmarks
from benchmarks.measuring.rows import make_row

pytestmark = pytest.mark.one_rank

MODULES = [module.name for module in pkgutil.walk_packages(benchmarks.__path__, "benchmarks.")]


def test_statistics_are_microseconds() -> None:
    times = [index * 1e-6 for index in range(1, 201)]
    row = make_row("all_reduce", "new", "mpidist", times, ranks=2, size=4)
    assert (row.min, row.max, row.median, row.avg) == pytest.approx((1, 200, 100.5, 100.5))
    assert row.p99 == pytest.approx(198)
    assert row.repetitions == 200


@pytest.mark.parametrize(
    ("operation", "ranks", "factor"),
    [
        ("all_reduce", 2, 1.0),
        ("all_reduce", 4, 1.5),
        ("batch", 4, 1.5),
        ("reduce_scatter", 4, 0.75),
        ("all_gather", 4, 0.75),
        ("broadcast", 4, 1.0),
    ],
)
def test_bandwidths_are_those_of_nccl_tests(operation: str, ranks: int, factor: float) -> None:
    row = make_row(operation, "new", "mpidist", [1e-3] * 11, ranks=ranks, size=10**6)
    assert row.algbw == pytest.approx(1.0)
    assert row.busbw == pytest.approx(factor)


def test_what_moves_nothing_has_no_bandwidth() -> None:
    row = make_row("step", "SGD", "mpidist", [1e-3], ranks=2, size=10**6)
    assert row.algbw == row.busbw == 0
    copy = make_row("all_reduce", "private", "copy", [1e-3], ranks=2, size=10**6)
    assert copy.busbw == 0 < copy.algbw


@pytest.mark.parametrize("name", MODULES)
def test_doctests(name: str) -> None:
    # Cases of torch import it as they are imported themselves.
    if name.rpartition(".")[2].startswith("torch_"):
        pytest.importorskip("torch", reason="PyTorch is not installed")
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0
