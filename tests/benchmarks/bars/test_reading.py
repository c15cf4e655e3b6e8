"""The bars of input."""

from __future__ import annotations

import pytest

from benchmarks.bars.reading import verdicts
from benchmarks.measuring.rows import OURS, Figure, make_row

pytestmark = pytest.mark.one_rank


def test_bars() -> None:
    def row(by: str, variant: str, seconds: float, size: int = 64 << 10):
        return make_row("read", variant, by, [seconds], ranks=1, size=size)

    rows = [
        *(row(OURS, "in order", 2.0), row("numpy", "in order", 1.7)),
        *(row("torch", "in order, by row", 9.0), row("torch", "in order, by batch", 3.0)),
        *(row(OURS, "shuffled", 2.0), row("numpy", "shuffled", 1.0), row("torch", "shuffled, by row", 1.0)),
        row(OURS, "in order", 2.0, size=4096),
    ]
    figures = [
        Figure("consumer", "waits with prefetch, 1 MiB", 3.0, "%"),
        Figure("consumer", "waits without prefetch, 1 MiB", 9.0, "%"),
        Figure("large", "own memory of a rank, shuffled", 120.0, "MB"),
    ]
    found = [(verdict.what, round(verdict.figure, 2), verdict.met) for verdict in verdicts(rows, figures)]
    assert found == [
        ("batches of 64 KiB, in order: as fast as NumPy's slice", 0.85, True),
        ("batches of 64 KiB, in order: as fast as torch's DataLoader", 1.5, True),
        ("batches of 64 KiB, shuffled: as fast as torch's DataLoader", 0.5, False),
        ("consumer: waits with prefetch, 1 MiB", 3.0, False),
        ("large: own memory of a rank, shuffled", 120.0, True),
    ]
