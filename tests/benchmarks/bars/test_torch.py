"""The bars of torch.distributed, and the table that shows what each way adds."""

from __future__ import annotations

import pytest

from benchmarks.bars.torch import verdicts
from benchmarks.measuring.rows import COMMUNICATOR, DDP, GLOO, OF_GLOO, OURS, OVER_DDP, TORCH, TORCH_WITH_LOCAL, Figure
from benchmarks.measuring.sizes import KIB, MIB
from benchmarks.reports.torch import results_text
from tests.benchmarks.support import results, row

pytestmark = pytest.mark.one_rank

ROWS = [
    row("all_reduce", "mpi", "in place", 16 * KIB, 8.0),
    row("all_reduce", OURS, COMMUNICATOR, 16 * KIB, 4.0),
    row("all_reduce", OURS, TORCH, 16 * KIB, 8.5),
    row("all_reduce", GLOO, TORCH, 16 * KIB, 300.0),
    row("all_reduce", GLOO, TORCH_WITH_LOCAL, 16 * KIB, 17.0),
    row("all_reduce", OURS, COMMUNICATOR, 4 * MIB, 500.0),
    row("all_reduce", OURS, TORCH, 4 * MIB, 600.0),
    row("all_reduce", GLOO, TORCH, 4 * MIB, 2400.0),
    row("all_gather", OURS, TORCH, KIB, 50.0),
    row("all_gather", GLOO, TORCH, KIB, 40.0),
]
FIGURES = [
    Figure(DDP, f"small: {OF_GLOO}", 0.4, "x"),
    Figure(DDP, "small: communication of a step, gloo", 400.0, "us"),
]


def test_inside_a_node() -> None:
    found = [(verdict.what, round(verdict.figure, 2), verdict.met) for verdict in verdicts(ROWS, FIGURES, 1)]
    assert found == [
        # The faster of gloo's ways counts.
        ("all_reduce, 16 KiB: as fast as gloo", 2.0, False),
        ("all_reduce, 16 KiB: over the Communicator's call", 4.5, True),
        ("all_reduce, 4 MiB: as fast as gloo", 4.0, True),
        ("all_gather, 1 KiB: as fast as gloo", 0.8, False),
        ("small: communication of a step, of gloo's", 0.4, True),
    ]


def test_a_step_under_a_strategy_beside_that_of_ddp() -> None:
    figures = [
        Figure(DDP, f"small: communication of a step, {OURS}", 400.0, "us"),
        Figure(DDP, f"small: {OVER_DDP}", 90.0, "us"),
        Figure(DDP, f"resnet50: communication of a step, {OURS}", 60000.0, "us"),
        Figure(DDP, f"resnet50: {OVER_DDP}", 6100.0, "us"),
    ]
    assert [(verdict.bar, verdict.met) for verdict in verdicts([], figures, 1)] == [(100.0, True), (6000.0, False)]


def test_between_nodes() -> None:
    found = [(verdict.what, verdict.bar) for verdict in verdicts(ROWS, FIGURES, 4, 1e9)]
    assert found == [
        ("all_reduce, 16 KiB: as fast as gloo", 1.0),
        ("all_reduce, 4 MiB: as fast as gloo", 1.0),
        ("all_reduce, 4 MiB: time of the floor", 1.1),
    ]


def test_small_ones_are_a_table_of_their_own() -> None:
    text = results_text(results(ROWS, FIGURES, torch="2.13.0"))
    first = next(line for line in text.splitlines() if line.startswith("all_reduce"))
    assert first.split() == [
        *("all_reduce", "16", "KiB", "8.00", "4.00", "8.50", "4.50", "0.94"),
        *("300.00", "35.29", "17.00", "2.00", "0"),
    ]
    head, own = text.split("# all_reduce of 10 KiB to 100 KiB")
    assert head.count("all_reduce") == 2
    assert own.count("16 KiB") == 1
    assert "4 MiB" not in own
