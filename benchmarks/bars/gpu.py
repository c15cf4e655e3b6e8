"""What mpidist must reach on a GPU, and whether a run reached it."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.bars.comparing import share_of_time
from benchmarks.measuring.rows import ALONE, COPY, OURS, Row, Verdict
from benchmarks.measuring.sizes import size_text

_SHARE, _OVERHEAD_US, _SLOWEST_STAGE = 0.85, 10.0, 1.15
# From here on the parts of the pipeline are long enough to hide behind one another.
LEAST_BYTES = 16 << 20


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """Return the verdict of every bar for which there are results."""
    return [*_staging(rows), *_nccl_call(rows), *_between_nodes(rows)]


def _staging(rows: Sequence[Row]) -> list[Verdict]:
    """Compare the bandwidth of staging with the bandwidth of a plain copy."""
    staged = [row for row in rows if row.operation == "gpu_staging"]
    copies = {row.variant: row.size / row.median for row in staged if row.by == COPY}
    return [
        Verdict(
            f"staging, {row.variant}: of the host link",
            row.size / row.median / copies[row.variant],
            _SHARE,
            True,
            "",
            "-",
        )
        for row in staged
        if row.by == OURS and row.variant in copies
    ]


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
                found += share_of_time(what, row, slowest, _SLOWEST_STAGE)
    return found
