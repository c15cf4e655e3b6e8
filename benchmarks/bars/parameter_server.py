"""What parameter servers and the coordinator must reach, and whether a run reached it."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.bars.comparing import figures_at_most, microseconds_more, times_as_fast
from benchmarks.measuring.rows import MPI, OURS, Figure, Row, Verdict, find_row
from benchmarks.measuring.sizes import KIB, size_text

_SMALL_BAR_US, _LARGE_BAR = 20.0, 0.8
_FIGURE_BARS = (("schedule", "", "", 200.0),)


def verdicts(rows: Sequence[Row], figures: Sequence[Figure]) -> list[Verdict]:
    """Return the verdict of every bar for which there are results."""
    found = []
    for ours in (row for row in rows if row.by == OURS):
        bare = find_row(rows, ours.operation, MPI, size=ours.size)
        what = f"{ours.operation} of {size_text(ours.size)}"
        if ours.size >= 256 * KIB:
            found += times_as_fast(f"{what}: as fast as MPI", bare, ours, _LARGE_BAR)
        else:
            found += microseconds_more(f"{what}: over MPI", ours, bare, _SMALL_BAR_US)
    return found + figures_at_most(figures, _FIGURE_BARS)
