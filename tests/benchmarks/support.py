"""Made-up results for tests of what is done with results."""

from __future__ import annotations

from typing import Any

from benchmarks.measuring.rows import Figure, Row, make_row
from benchmarks.reports.files import Results

MACHINE: dict[str, Any] = {
    "date": "2026-01-01T00:00:00+00:00",
    "command": "python -m benchmarks",
    "ranks": 2,
    "nodes": 1,
    "cpu": "some CPU",
    "cores": 2,
    "system": "Linux",
    "mpi": "some MPI",
    "mpi4py": "4",
    "numpy": "2",
    "python": "3",
    "mpidist": "0",
    "torch": None,
    "reads_neighbours": True,
}


def row(operation: str, by: str, variant: str, size: int, microseconds: float, **more: Any) -> Row:
    described: dict[str, Any] = {"ranks": 2, "size": size, "count": size // 4, "op": "sum", **more}
    return make_row(operation, variant, by, [microseconds * 1e-6] * 11, **described)


def results(rows: list[Row], figures: list[Figure] | None = None, **machine: Any) -> Results:
    return Results({**MACHINE, **machine}, rows, figures or [], [])
