"""What mpidist must reach on a GPU, and whether a run reached it."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.bars import Verdict, size_text
from benchmarks.rows import ALONE, COPY, OURS, Row

_SHARE, _OVERHEAD_US, _SLOWEST_STAGE = 0.85, 10.0, 1.15
# From here on the parts of the pipeline are long enough to hide behind one another.
LEAST_BYTES = 16 << 20


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """Return the verdict of every bar for which there are results."""
    return [*_packing(rows), *_staging(rows), *_nccl_call(rows), *_between_nodes(rows)]


def _packing(rows: Sequence[Row]) -> list[Verdict]:
    found = []
    copies = {_model(row): row for row in rows if row.operation == "gpu_pack" and row.by == COPY}
    for row in rows:
        if row.operation == "gpu_pack" and row.by == OURS and _model(row) in copies:
            share = _speed(row) / _speed(copies[_model(row)])
            found.append(Verdict(f"{row.variant}: of the GPU's copy bandwidth", share, _SHARE, True, "", "-"))
    return found


def _model(row: Row) -> str:
    return row.variant.partition(",")[0]


def _speed(row: Row) -> float:
    return row.size / row.median


def _staging(rows: Sequence[Row]) -> list[Verdict]:
    found = []
    whole = {row.variant: row for row in rows if row.operation == "gpu_staging" and row.by == COPY}
    for row in rows:
        if row.operation == "gpu_staging" and row.by == OURS and row.variant in whole:
            share = _speed(row) / _speed(whole[row.variant])
            found.append(Verdict(f"staging, {row.variant}: of the host link", share, _SHARE, True, "", "-"))
    return found


def _nccl_call(rows: Sequence[Row]) -> list[Verdict]:
    times = {row.by: row.median for row in rows if row.operation == "gpu_nccl_call"}
    if OURS not in times or ALONE not in times:
        return []
    return [Verdict("a call of NCCL: over CuPy's own", times[OURS] - times[ALONE], _OVERHEAD_US, False, "us", "nccl")]


def _between_nodes(rows: Sequence[Row]) -> list[Verdict]:
    found = []
    for row in rows:
        if row.operation == "gpu_all_reduce" and row.by == OURS and row.size >= LEAST_BYTES:
            same = [r for r in rows if (r.operation, r.size, r.by) == (row.operation, row.size, ALONE)]
            slowest = max(same, key=lambda stage: stage.median, default=None)
            if slowest is not None:
                what = f"all_reduce between nodes, {size_text(row.size)}: time of its slowest stage, {slowest.variant}"
                found.append(Verdict(what, row.median / slowest.median, _SLOWEST_STAGE, False, "x", row.algorithm))
    return found
