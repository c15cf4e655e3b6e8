"""What input must reach, and whether a run reached it."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.bars import KIB, Verdict, size_text
from benchmarks.rows import OURS, Figure, Row

NUMPY, TORCH = "numpy", "torch"
IN_ORDER = "in order"
_LEAST_SIZE = 64 * KIB

# operation, beginning of the name of a figure, the bar (at most).
_FIGURE_BARS = (
    ("consumer", "waits with prefetch", 2.0),
    ("prefetch", "batches beyond its depth", 2.0),
    ("large", "own memory", 300.0),
)


def verdicts(rows: Sequence[Row], figures: Sequence[Figure]) -> list[Verdict]:
    """Return the verdict of every bar for which there are results."""
    found = []
    for ours in (row for row in rows if row.by == OURS and row.size >= _LEAST_SIZE):
        bare = [row for row in rows if row.by == NUMPY and _same(row, ours)]
        torch = [row for row in rows if row.by == TORCH and _same(row, ours)]
        what = f"batches of {size_text(ours.size)}, {ours.variant}: as fast as"
        if bare and ours.variant == IN_ORDER:
            found.append(Verdict(f"{what} NumPy's slice", bare[0].median / ours.median, 0.8, True, "x", "-"))
        if torch:
            fastest = min(row.median for row in torch)
            found.append(Verdict(f"{what} torch's DataLoader", fastest / ours.median, 1.0, True, "x", "-"))
    for operation, beginning, bar in _FIGURE_BARS:
        for figure in figures:
            if figure.operation == operation and figure.name.startswith(beginning):
                found.append(Verdict(f"{operation}: {figure.name}", figure.value, bar, False, figure.unit, "-"))
    return found


def _same(row: Row, ours: Row) -> bool:
    return row.size == ours.size and row.variant.startswith(ours.variant)
