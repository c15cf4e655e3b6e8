"""Report: what the collectives of a program came to, operation by operation, over all ranks."""

from __future__ import annotations

from dataclasses import dataclass, fields

from mpidist.core.wording import ranks_text

Tallies = dict[str, "Tally"]


@dataclass
class Tally:
    """What one operation came to on one rank; times in nanoseconds.

    Attributes:
        calls: How many.
        nbytes: Of the values that this rank passed in.
        time: From the first to the last step of each.
        for_others: Of that, in wait for other ranks to make the same call.
        works: Of ``time``, that of works (the ``_async`` forms).
        waited: How long the program waited for works.
    """

    calls: int = 0
    nbytes: int = 0
    time: int = 0
    for_others: int = 0
    works: int = 0
    waited: int = 0

    def add(self, other: Tally) -> None:
        """Add another."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))


def report_text(by_rank: dict[int, Tallies], ranks: int, seconds: float) -> str:
    """Return the report.

    Args:
        by_rank: What the operations came to, on those of the ranks that told.
        ranks: Number of ranks of the job.
        seconds: How long the program ran with a communicator.
    """
    told = f"{ranks} rank{'s' if ranks > 1 else ''}"
    missing = sorted(set(range(ranks)) - set(by_rank))
    if missing:
        told = f"{len(by_rank)} of {told} (without {ranks_text(missing)})"
    lines = [f"collectives of {told}, means over ranks, in {seconds:.1f} s"]
    rows: list[tuple[str, ...]] = [("operation", "calls", "bytes", "time", "for others", "hidden", "slowest rank")]
    by_operation: dict[str, dict[int, Tally]] = {}
    for rank, tallies in by_rank.items():
        for operation, tally in tallies.items():
            by_operation.setdefault(operation, {})[rank] = tally
    rows.extend(_row(operation, found) for operation, found in sorted(by_operation.items(), key=_longest_first))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for first, *middle, last in rows:
        cells = [text.rjust(width) for text, width in zip(middle, widths[1:-1], strict=True)]
        lines.append("  ".join(["", first.ljust(widths[0]), *cells, last]))
    return "\n".join(lines)


def _longest_first(item: tuple[str, dict[int, Tally]]) -> int:
    return -max(tally.time for tally in item[1].values())


def _row(operation: str, by_rank: dict[int, Tally]) -> tuple[str, ...]:
    total = Tally()
    for tally in by_rank.values():
        total.add(tally)
    number = len(by_rank)
    hidden = "-"
    if total.works:
        hidden = f"{max(0.0, 1 - total.waited / total.works):.0%}"
    return (
        operation,
        f"{total.calls / number:.10g}",
        _bytes_text(total.nbytes / number),
        _seconds_text(total.time / number),
        _seconds_text(total.for_others / number),
        hidden,
        _slowest(by_rank),
    )


def _slowest(by_rank: dict[int, Tally]) -> str:
    """Return the rank that arrived last: the others waited, and it did not."""
    if len(by_rank) == 1:
        return "-"
    slowest = min(by_rank, key=lambda rank: by_rank[rank].for_others)
    others = [tally.for_others for rank, tally in by_rank.items() if rank != slowest]
    longer = sum(others) / len(others) - by_rank[slowest].for_others
    if longer == 0:
        return "-"
    return f"{slowest} (waited for {_seconds_text(longer)})"


def _bytes_text(number: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if number < 1024:
            return f"{number:.4g} {unit}"
        number /= 1024
    return f"{number:.4g} TiB"


def _seconds_text(nanoseconds: float) -> str:
    """Return a time as text.

    >>> _seconds_text(1234567), _seconds_text(0)
    ('1.23 ms', '0 us')
    """
    for unit, size in (("s", 1e9), ("ms", 1e6)):
        if nanoseconds >= size:
            return f"{nanoseconds / size:.3g} {unit}"
    return f"{nanoseconds / 1e3:.3g} us"
