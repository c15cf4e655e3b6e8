"""The report of ``MPIDIST_REPORT``: totals of the collectives of all ranks."""

from __future__ import annotations

import threading
from collections import Counter

from mpidist.collectives.reduce.registry import size_text
from mpidist.core.text import ranks_text

Totals = dict[str, Counter[str]]
"""By operation: calls, nbytes, and nanoseconds: time, for_others, works and waited."""


class CallTotals:
    """The totals of this rank."""

    def __init__(self) -> None:
        self.by_operation: Totals = {}
        self._lock = threading.Lock()

    def add(self, operation: str, **counts: int) -> None:
        """Add to the totals of an operation."""
        with self._lock:
            self.by_operation.setdefault(operation, Counter()).update(counts)


def report_text(by_rank: dict[int, Totals], ranks: int, seconds: float) -> str:
    """Return the report of the ranks that sent their totals, in ``seconds`` of the program."""
    of_ranks = f"{ranks} rank{'s' if ranks > 1 else ''}"
    missing = sorted(set(range(ranks)) - set(by_rank))
    if missing:
        of_ranks = f"{len(by_rank)} of {of_ranks} (without {ranks_text(missing)})"
    by_operation: dict[str, dict[int, Counter[str]]] = {}
    for rank, totals in by_rank.items():
        for operation, counts in totals.items():
            by_operation.setdefault(operation, {})[rank] = counts
    longest_first = sorted(by_operation.items(), key=lambda item: -max(each["time"] for each in item[1].values()))
    rows: list[tuple[str, ...]] = [("operation", "calls", "bytes", "time", "for others", "hidden", "slowest rank")]
    rows += [_row(operation, found) for operation, found in longest_first]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [f"collectives of {of_ranks}, means over ranks, in {seconds:.1f} s"]
    for first, *middle, last in rows:
        cells = [text.rjust(width) for text, width in zip(middle, widths[1:-1], strict=True)]
        lines.append("  ".join(["", first.ljust(widths[0]), *cells, last]))
    return "\n".join(lines)


def _row(operation: str, by_rank: dict[int, Counter[str]]) -> tuple[str, ...]:
    total: Counter[str] = Counter()
    for counts in by_rank.values():
        total.update(counts)
    ranks = len(by_rank)
    return (
        operation,
        f"{total['calls'] / ranks:.10g}",
        size_text(round(total["nbytes"] / ranks)),
        _time_text(total["time"] / ranks),
        _time_text(total["for_others"] / ranks),
        f"{max(0.0, 1 - total['waited'] / total['works']):.0%}" if total["works"] else "-",
        _slowest(by_rank),
    )


def _slowest(by_rank: dict[int, Counter[str]]) -> str:
    """Return the rank that arrived last, because it waited least."""
    waits = {rank: counts["for_others"] for rank, counts in by_rank.items()}
    slowest = min(waits, key=lambda rank: waits[rank])
    least = waits.pop(slowest)
    longer = sum(waits.values()) / len(waits) - least if waits else 0
    return f"{slowest} (waited for {_time_text(longer)})" if longer else "-"


def _time_text(nanoseconds: float) -> str:
    """Return a time as text.

    >>> _time_text(1234567), _time_text(0)
    ('1.23 ms', '0 us')
    """
    for unit, size in (("s", 1e9), ("ms", 1e6)):
        if nanoseconds >= size:
            return f"{nanoseconds / size:.3g} {unit}"
    return f"{nanoseconds / 1e3:.3g} us"
