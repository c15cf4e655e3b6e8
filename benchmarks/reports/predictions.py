"""Predictions as text, CSV, JSON and plots."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from benchmarks.measuring.machine import command_line
from benchmarks.measuring.sizes import MIB, size_text
from benchmarks.predicting.comparing import Compared, summary
from benchmarks.predicting.reductions import Prediction
from benchmarks.predicting.steps import Step
from benchmarks.reports.text import aligned, time_text
from mpidist.collectives.reduce.cost_model import Network
from mpidist.collectives.reduce.registry import network_text
from mpidist.core.text import pip_install

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMAT = 1
_REDUCTIONS = ("nodes", "ranks", "size", "algorithm", "slice", "time", "busbw(GB/s)", "sent(MiB/node)")
_STEPS = ("nodes", "step", "reductions", "not hidden", "efficiency")
_COMPARED = ("nodes", "ranks", "placement", "size", "algorithm", "measured", "predicted", "error", "within", "takes")


class Predictions(NamedTuple):
    """All that a run of ``predict`` has found."""

    network: Network
    reductions: Sequence[Prediction]
    steps: Sequence[tuple[int, Step]]
    """By number of nodes."""
    compared: Sequence[Compared]
    left_out: Sequence[str]
    """What of the measured results was not compared."""


def seconds_text(seconds: float) -> str:
    """Return a time with three digits.

    >>> seconds_text(0.0123), seconds_text(1.076)
    ('12.3 ms', '1.08 s')
    """
    return time_text(1e6 * seconds) if seconds < 1 else f"{seconds:.3g} s"


def text_of(found: Predictions) -> str:
    """Return all of it as text."""
    parts = [f"# {network_text(found.network)}"]
    if found.reductions:
        header = ("nodes", "ranks", "size", "algorithm", "slice", "time", "busbw(GB/s)", "sent(MiB/node)")
        parts += ["", aligned(header, [_cells(each) for each in found.reductions], {"algorithm"})]
    if found.steps:
        header = ("nodes", "step", "reductions", "not hidden", "efficiency")
        parts += ["", aligned(header, [_step_cells(nodes, step) for nodes, step in found.steps], ())]
    if found.compared:
        header = (
            "nodes",
            "ranks",
            "placement",
            "size",
            "algorithm",
            "measured",
            "predicted",
            "error",
            "within",
            "takes",
        )
        lines = [_compared_cells(each) for each in found.compared]
        parts += ["", aligned(header, lines, {"placement", "algorithm", "takes"})]
        parts += [f"# {line}" for line in summary(found.compared)]
    return "\n".join([*parts, *(f"# not compared: {reason}" for reason in found.left_out)])


def _cells(each: Prediction) -> tuple[str, ...]:
    ranks = each.nodes * each.ranks_per_node
    return (
        *(str(each.nodes), str(ranks), size_text(each.nbytes), each.algorithm),
        size_text(each.slice_bytes) if each.slice_bytes else "-",
        seconds_text(each.seconds),
        f"{2 * (ranks - 1) / ranks * each.nbytes / each.seconds / 1e9:.3g}",
        f"{each.sent / MIB:.3g}",
    )


def _step_cells(nodes: int, step: Step) -> tuple[str, ...]:
    times = (step.seconds, step.communication, step.exposed)
    return str(nodes), *(seconds_text(seconds) for seconds in times), f"{step.efficiency:.1%}"


def _compared_cells(each: Compared) -> tuple[str, ...]:
    prediction = each.prediction
    return (
        *(str(prediction.nodes), str(prediction.nodes * prediction.ranks_per_node), each.variant),
        *(size_text(prediction.nbytes), prediction.algorithm),
        *(seconds_text(each.measured), seconds_text(prediction.seconds)),
        *(f"{each.error:+.1%}", "yes" if abs(each.error) <= each.bar else "NO", each.chosen),
    )


def document_of(found: Predictions) -> dict[str, object]:
    """Return all of it for JSON: times in seconds, sizes in bytes."""
    return {
        "format": FORMAT,
        "command": command_line(),
        "network": found.network._asdict(),
        "reductions": [each._asdict() for each in found.reductions],
        "steps": [{"nodes": nodes, **step._asdict()} for nodes, step in found.steps],
        "compared": [
            {
                **each.prediction._asdict(),
                "variant": each.variant,
                "measured": each.measured,
                "error": each.error,
                "bar": each.bar,
                "chosen": each.chosen,
            }
            for each in found.compared
        ],
        "left_out": list(found.left_out),
    }


def save(found: Predictions, folder: Path, name: str) -> list[Path]:
    """Write ``name.json`` (everything) and, of reductions, ``name.csv`` into a folder; return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.json"]
    paths[0].write_text(json.dumps(document_of(found), indent=1) + "\n")
    if found.reductions:
        paths.append(folder / f"{name}.csv")
        with paths[1].open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(Prediction._fields)
            writer.writerows(found.reductions)
    return paths


# Plots ----------------------------------------------------------------------------------------------------------------


def plot(found: Predictions, folder: Path, name: str) -> Path:
    """Write ``name.png``: a panel for each of what there is.

    Raises:
        SystemExit: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise SystemExit(f"plots need matplotlib ({error}); type: {pip_install('bench')}") from None
    every: list[tuple[Callable[..., None], Sequence[object]]] = [
        (_draw_reductions, found.reductions),
        (_draw_steps, found.steps),
        (_draw_compared, found.compared),
    ]
    panels = [(draw, given) for draw, given in every if given]
    figure = Figure(figsize=(5.5 * len(panels), 4.5), layout="constrained")
    for axes, (draw, given) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        draw(axes, given)
        axes.grid(alpha=0.3)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.png"
    figure.savefig(path, dpi=110)
    return path


def _draw_reductions(axes: Axes, reductions: Sequence[Prediction]) -> None:
    """Draw times over nodes, a line for each size; a mark shows the algorithm."""
    names = sorted({each.algorithm for each in reductions})
    for index, nbytes in enumerate(dict.fromkeys(each.nbytes for each in reductions)):
        line = [each for each in reductions if each.nbytes == nbytes]
        axes.plot([each.nodes for each in line], [1e3 * each.seconds for each in line], color=f"C{index}")
        at = (line[0].nodes, 1e3 * line[0].seconds)
        axes.annotate(size_text(nbytes), at, (0, 6), textcoords="offset points", fontsize=8, color=f"C{index}")
    for name, marker in zip(names, "o^svDP*X", strict=False):
        of_name = [each for each in reductions if each.algorithm == name]
        nodes, times = [each.nodes for each in of_name], [1e3 * each.seconds for each in of_name]
        axes.plot(nodes, times, linestyle="", marker=marker, markersize=4, color="black", label=name)
    axes.set(xscale="log", yscale="log", ylabel="time of an all-reduce (ms)")
    _show_nodes(axes, sorted({each.nodes for each in reductions}))
    axes.legend(fontsize=8)


def _show_nodes(axes: Axes, nodes: Sequence[int]) -> None:
    axes.set_xlabel("nodes")
    axes.set_xticks(nodes, list(map(str, nodes)), rotation=60, fontsize=8)
    axes.tick_params(axis="x", which="minor", bottom=False)


def _draw_steps(axes: Axes, steps: Sequence[tuple[int, Step]]) -> None:
    """Draw the efficiency of a training step over nodes."""
    nodes = [nodes for nodes, _ in steps]
    axes.plot(nodes, [100 * step.efficiency for _, step in steps], marker="o", markersize=4)
    axes.set(xscale="log", ylim=(0, 105), ylabel="efficiency of a step (%)")
    _show_nodes(axes, nodes)


def _draw_compared(axes: Axes, compared: Sequence[Compared]) -> None:
    """Draw measured times as marks and predicted ones as lines, over sizes."""
    for index, nodes in enumerate(sorted({each.prediction.nodes for each in compared})):
        line = [each for each in compared if each.prediction.nodes == nodes]
        line.sort(key=lambda each: each.prediction.nbytes)
        sizes = [each.prediction.nbytes for each in line]
        times = [1e3 * each.prediction.seconds for each in line]
        axes.plot(sizes, times, color=f"C{index}", label=f"{nodes} nodes")
        axes.plot(sizes, [1e3 * each.measured for each in line], color=f"C{index}", linestyle="", marker="o")
    axes.set(xscale="log", yscale="log", ylabel="ms: predicted (lines), measured (dots)")
    sizes = sorted({each.prediction.nbytes for each in compared})
    axes.set_xticks(sizes, [size_text(size) for size in sizes], rotation=60, fontsize=8)
    axes.tick_params(axis="x", which="minor", bottom=False)
    axes.legend(fontsize=8)
