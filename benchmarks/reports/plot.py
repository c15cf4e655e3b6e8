"""Plots of a result file (PNG): time and bus bandwidth of the all-reduce over its size, and the gradient sets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.measuring.models import name_of
from benchmarks.measuring.rows import COPY, OURS, Row, states_of
from benchmarks.measuring.sizes import size_text
from benchmarks.measuring.timing import NEAR, UNKNOWN
from benchmarks.reports.files import Results
from mpidist.core.text import pip_install

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLE = {"mpidist": "-", "mpi": "--", "gloo": ":", "copy": "-."}


def plot(results: Results, folder: Path, name: str) -> list[Path]:
    """Write ``name-all_reduce.png`` and ``name-batch.png`` into ``folder``, as far as there are results.

    If the results have rows for several states of the cores, only the rows of near cores are drawn.

    Raises:
        SystemExit: matplotlib is not installed, or there is nothing to plot.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SystemExit(f"plots need matplotlib ({error}); type: {pip_install('bench')}") from None
    paths = []
    for operation, draw in (("all_reduce", _draw_sizes), ("batch", _draw_models)):
        states = states_of(row for row in results.rows if row.operation == operation)
        state = NEAR if NEAR in states else next(iter(states))
        rows = states[state]
        if rows:
            figure = Figure(figsize=(11, 4.5), layout="constrained")
            draw(figure, rows)
            machine = results.machine
            cores = "" if state == UNKNOWN else f", {state} cores"
            title = f"{operation}: {machine['ranks']} ranks{cores}, {machine['cpu']}, {machine['mpi']}"
            figure.suptitle(title, fontsize=10)
            folder.mkdir(parents=True, exist_ok=True)
            paths.append(folder / f"{name}-{operation}.png")
            figure.savefig(paths[-1], dpi=110)
    if not paths:
        raise SystemExit("there is nothing to plot: the file has neither all_reduce nor batch")
    return paths


def _label(row: Row) -> str:
    return row.by if row.by == COPY else f"{row.by}, {row.variant}"


def _draw_sizes(figure: Figure, rows: Sequence[Row]) -> None:
    """Draw time and bus bandwidth over size."""
    times, speeds = figure.subplots(1, 2)
    for index, label in enumerate(dict.fromkeys(_label(row) for row in rows)):
        line = sorted((row for row in rows if _label(row) == label), key=lambda row: row.size)
        style: dict[str, Any] = {"linestyle": _STYLE[line[0].by], "marker": "o", "markersize": 3}
        style |= {"label": label, "color": f"C{index}"}
        times.loglog([row.size for row in line], [row.median for row in line], base=10, **style)
        if line[0].by != COPY:
            speeds.semilogx([row.size for row in line], [row.busbw for row in line], base=10, **style)
    times.set_ylabel("time (us), median")
    speeds.set_ylabel("bus bandwidth (GB/s)")
    for axes in (times, speeds):
        sizes = sorted({row.size for row in rows})
        axes.set_xticks(sizes, [size_text(size) for size in sizes], rotation=60, fontsize=8)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    times.legend(fontsize=8)


def _draw_models(figure: Figure, rows: Sequence[Row]) -> None:
    """Draw the time of each gradient set as bars."""
    sizes = sorted({row.size for row in rows})
    for axes, size in zip(figure.subplots(1, len(sizes), squeeze=False)[0], sizes, strict=True):
        bars = [row for row in rows if row.size == size]
        colors = ["tab:blue" if row.by == OURS else "tab:gray" for row in bars]
        axes.barh([_label(row) for row in bars], [row.median / 1000 for row in bars], color=colors)
        axes.invert_yaxis()
        axes.set_xlabel("time (ms), median")
        axes.set_title(name_of(size), fontsize=10)
        axes.tick_params(labelsize=8)
