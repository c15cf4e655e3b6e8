"""What input must reach, and whether a run reached it."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.bars.comparing import figures_at_most, times_as_fast
from benchmarks.cases.reading import IN_ORDER, NUMPY, TORCH
from benchmarks.measuring.rows import OURS, Figure, Row, Verdict
from benchmarks.measuring.sizes import KIB, size_text

_LEAST_SIZE = 64 * KIB
_FIGURE_BARS = (
    ("consumer", "waits with prefetch", "", 2.0),
    ("prefetch", "batches beyond its depth", "", 2.0),
    ("large", "own memory", "", 300.0),
)


def verdicts(rows: Sequence[Row], figures: Sequence[Figure]) -> list[Verdict]:
    """Return the verdict of every bar for which there are results."""
    found = []
    for ours in (row for row in rows if row.by == OURS and row.size >= _LEAST_SIZE):
        same = [row for row in rows if row.size == ours.size and row.variant.startswith(ours.variant)]
        bare = next((row for row in same if row.by == NUMPY and ours.variant == IN_ORDER), None)
        torch = min((row for row in same if row.by == TORCH), key=lambda row: row.median, default=None)
        what = f"batches of {size_text(ours.size)}, {ours.variant}: as fast as"
        found += times_as_fast(f"{what} NumPy's slice", bare, ours, 0.8)
        found += times_as_fast(f"{what} torch's DataLoader", torch, ours, 1.0)
    return found + figures_at_most(figures, _FIGURE_BARS)
