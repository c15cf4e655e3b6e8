"""Verdicts on two rows, and on figures; none where one of them was not measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from benchmarks.measuring.rows import Figure, Row, Verdict


def times_as_fast(what: str, theirs: Row | None, ours: Row | None, bar: float) -> list[Verdict]:
    """Judge whether ours is at least ``bar`` times as fast as theirs."""
    if theirs is None or ours is None:
        return []
    return [Verdict(what, theirs.median / ours.median, bar, True, "x", ours.algorithm)]


def share_of_time(what: str, ours: Row | None, theirs: Row | None, bar: float) -> list[Verdict]:
    """Judge whether ours takes at most ``bar`` times as long as theirs."""
    if theirs is None or ours is None:
        return []
    return [Verdict(what, ours.median / theirs.median, bar, False, "x", ours.algorithm)]


def microseconds_more(what: str, ours: Row | None, theirs: Row | None, bar: float) -> list[Verdict]:
    """Judge whether ours takes at most ``bar`` microseconds more than theirs."""
    if theirs is None or ours is None:
        return []
    return [Verdict(what, ours.median - theirs.median, bar, False, "us", ours.algorithm)]


def figures_at_most(figures: Sequence[Figure], bars: Iterable[tuple[str, str, str, float]]) -> list[Verdict]:
    """Judge figures.

    Args:
        figures: All there are.
        bars: Operation, beginning of the name, what is told (operation and name if empty) and the bar.
    """
    return [
        Verdict(what or f"{operation}: {f.name}", f.value, bar, False, f.unit, f.algorithm)
        for operation, beginning, what, bar in bars
        for f in figures
        if f.operation == operation and f.name.startswith(beginning)
    ]
