"""The results between nodes as text."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.measuring.rows import MPI, OURS, Row
from benchmarks.measuring.sizes import MIB, size_text
from benchmarks.measuring.wire import busy_name, floor_seconds, least_bytes, sent_name
from benchmarks.reports.files import Results
from benchmarks.reports.text import aligned, end_of_report

_HEADER = (
    *("size", "placement", "by", "median(ms)", "min", "max", "x floor"),
    *("sent(MiB)", "x least", "x mpi", "busy(%)", "wrong", "algorithm"),
)
_LEFT = {"placement", "by", "algorithm"}


def results_text(results: Results, rate: float | None) -> str:
    """Return all that a run has to say; ``rate`` in bits per second, None if it is unknown."""
    machine, nodes = results.machine, results.machine["nodes"]
    parts = [
        f"# {machine['ranks']} ranks on {nodes} nodes; {machine['mpi']}; mpidist {machine['mpidist']}; "
        f"{machine['date']}",
        "# times: the slowest rank of each repetition; sent: data of the node that sent most, without headers;",
        "# busy: of the processors of the first rank's machine, where the network is to be measured well below 100",
        "",
    ]
    if any(row.operation == "all_reduce" for row in results.rows):
        parts.append(aligned(_HEADER, _lines(results, nodes, rate), _LEFT))
    parts += [
        f"overlap: {row.variant}: {row.median / 1000:.0f} ms, {row.algorithm}"
        for row in results.rows
        if row.operation == "overlap"
    ]
    parts += [f"overlap: {f.name}: {f.value:.3f}" for f in results.figures if f.operation == "overlap"]
    return "\n".join([*parts, *end_of_report(results)])


def _lines(results: Results, nodes: int, rate: float | None) -> list[tuple[str, ...]]:
    sent = {figure.name: figure.value for figure in results.figures if figure.operation == "sent"}
    busy = {figure.name: figure.value for figure in results.figures if figure.operation == "busy"}
    lines = []
    for row in sorted((row for row in results.rows if row.operation == "all_reduce"), key=lambda row: row.size):
        floor = None if rate is None or nodes < 2 else floor_seconds(nodes, row.size, rate)
        cores = busy.get(busy_name(row.by, row.variant, row.size))
        mib = sent.get(sent_name(row.by, row.variant, row.size))
        lines.append(
            (
                *(size_text(row.size), row.variant, row.by),
                *(f"{time / 1000:.2f}" for time in (row.median, row.min, row.max)),
                "-" if floor is None else f"{row.median / 1e6 / floor:.3f}",
                "-" if mib is None else f"{mib:.1f}",
                "-" if mib is None or nodes < 2 else f"{mib * MIB / least_bytes(nodes, row.size):.3f}",
                _over_mpi(results.rows, row),
                "-" if cores is None else f"{cores:.0f}",
                "-" if row.wrong is None else str(row.wrong),
                row.algorithm,
            )
        )
    return lines


def _over_mpi(rows: Sequence[Row], row: Row) -> str:
    """Return how many times as fast as the bare call of the same job a row of mpidist is."""
    placement = row.variant.split(", algorithm=")[0].split(", wire_dtype=")[0]
    bare = next((r for r in rows if (r.by, r.variant, r.size) == (MPI, placement, row.size)), None)
    return "" if bare is None or row.by != OURS else f"{bare.median / row.median:.2f}"
