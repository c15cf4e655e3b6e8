"""What mpidist must reach between nodes, and whether a run reached it."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.bars.comparing import share_of_time, times_as_fast
from benchmarks.cases.between_nodes import OVERLAP_SIZE
from benchmarks.measuring.rows import ALONE, MPI, OURS, Figure, Row, Verdict
from benchmarks.measuring.sizes import MIB, size_text
from benchmarks.measuring.wire import floor_seconds, least_bytes, sent_name

SIZE = 64 * MIB
HAN_OFF = "block, HAN off"
# Placement -> at least how many times as fast as the MPI's own call.
_SPEEDUPS = {"block": 2.5, HAN_OFF: 1.35, "round-robin": 2.5}
_PLACEMENTS = ("block", "round-robin", "uneven")
# Up to here no slower than the MPI's own call.
_SMALL = 64 << 10
_FLOOR, _LEAST, _HALF_WIRE, _HIDDEN = 1.08, 1.02, 0.6, 0.9


def verdicts(rows: Sequence[Row], figures: Sequence[Figure], nodes: int, rate: float | None) -> list[Verdict]:
    """Return the verdict of every bar for which there are results; the bars were set for 64 MiB on 4 nodes.

    Args:
        rows, figures: The results.
        nodes: How many nodes the all-reduces ran on.
        rate: Bits per second of each node's link; without, nothing is compared to the floor.
    """
    found = []
    times = {(row.by, row.variant): row for row in rows if row.operation == "all_reduce" and row.size == SIZE}
    sent = {figure.name: figure for figure in figures if figure.operation == "sent"}
    text = size_text(SIZE)
    for placement in _PLACEMENTS:
        ours = times.get((OURS, placement))
        if ours is not None and rate is not None and nodes > 1:
            floor = ours.median / 1e6 / floor_seconds(nodes, SIZE, rate)
            found.append(Verdict(f"{text}, {placement}: time of the floor", floor, _FLOOR, False, "x", ours.algorithm))
        figure = sent.get(sent_name(OURS, placement, SIZE))
        if figure is not None and nodes > 1:
            share = figure.value * MIB / least_bytes(nodes, SIZE)
            what = f"{text}, {placement}: data sent by a node, of the least possible"
            found.append(Verdict(what, share, _LEAST, False, "x", figure.algorithm))
    for placement, bar in _SPEEDUPS.items():
        bare, ours = times.get((MPI, placement)), times.get((OURS, placement))
        found += times_as_fast(f"{text}, {placement}: as fast as MPI", bare, ours, bar)
    for dtype in ("bfloat16", "float16"):
        half, full = times.get((OURS, f"block, wire_dtype={dtype}")), times.get((OURS, "block"))
        found += share_of_time(f"{text}, block, {dtype} on the wire: time of float32", half, full, _HALF_WIRE)
    return found + _small(rows) + _overlap(rows, figures)


def _small(rows: Sequence[Row]) -> list[Verdict]:
    """Return the verdicts on small messages."""
    times = {(row.by, row.size): row for row in rows if row.operation == "all_reduce" and row.variant == "block"}
    sizes = sorted({size for _, size in times if size <= _SMALL})
    return [
        verdict
        for size in sizes
        for verdict in times_as_fast(
            f"{size_text(size)}, block: as fast as MPI", times.get((MPI, size)), times.get((OURS, size)), 1.0
        )
    ]


def _overlap(rows: Sequence[Row], figures: Sequence[Figure]) -> list[Verdict]:
    """Return the verdicts on overlap, where the products took at least as long as the all-reduce."""
    medians = {(row.by, row.variant): row.median for row in rows if row.operation == "overlap"}
    found = []
    for figure in figures:
        if figure.operation == "overlap":
            placement = figure.name.partition(",")[0]
            communication = medians[OURS, f"{placement}, communication"]
            if medians[ALONE, f"{placement}, computation"] >= communication:
                what = f"{size_text(OVERLAP_SIZE)}, {placement}: share hidden behind matrix products"
                found.append(Verdict(what, figure.value, _HIDDEN, True, "", figure.algorithm))
    return found
