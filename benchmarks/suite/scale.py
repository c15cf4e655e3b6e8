"""What grows with the number of ranks: `mpirun -n 16 python -m benchmarks scale`; `... scale --plot A.json B.json`.

MPIDIST_RANKS_PER_NODE=1 or 2 makes virtual nodes of the ranks of one machine.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.cases import made_up, messages, scale
from benchmarks.measuring.machine import describe
from benchmarks.measuring.rows import MPI, OURS
from benchmarks.measuring.sizes import size_text, sizes_of_text
from benchmarks.reports.files import RESULTS, Results, load
from benchmarks.reports.text import publish
from mpidist.core.text import pip_install

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Of the picture: the parts, the unit, and the beginnings of the figures' names in them.
_PARTS = (
    ("memory of a rank", "MiB", ("most memory",)),
    ("file descriptors and connections of a rank", "", ("most descriptors", "most TCP")),
    ("/dev/shm for a rank", "MiB", ("/dev/shm",)),
    ("start", "s", ("start ", "one more communicator: time")),
)

# Powers of two and not.
_NODES = (2, 3, 4, 6, 8, 12, 16, 24, 33, 48, 64, 96, 128)
_COUNTED = ("messages that a rank sends", "rounds", "connections of a rank")


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m benchmarks scale", description=__doc__)
    top.add_argument("--sizes", type=sizes_of_text, default=sizes_of_text("8,4K,64K,1M,16M"), help="bytes of sums")
    top.add_argument("--seconds", type=float, default=1.0, help="about how long one size is measured (1)")
    top.add_argument("--out", type=Path, default=RESULTS, help="folder of the files (out/benchmarks)")
    top.add_argument(
        "--made-up", type=int, metavar="RANKS", help="print what so many ranks hold and tell, on one process"
    )
    top.add_argument("--plot", type=Path, nargs="+", metavar="JSON", help="draw these files in place of measuring")
    return top


def main(arguments: list[str]) -> int:
    """Measure (collective), or draw; the status is 1 if a result was wrong."""
    options = parser().parse_args(arguments)
    if options.plot:
        print(f"# written: {draw([load(path) for path in options.plot], options.out)}")
        return 0
    if options.made_up:
        for figure in made_up.run(options.made_up):
            print(f"{figure.name:<60} {figure.value:>10.5g} {figure.unit}")
        return 0
    return _measure(options)


def _measure(options: argparse.Namespace) -> int:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    rows, figures = scale.run(world, options.sizes, options.seconds)
    machine = describe(world, "")
    results = Results(machine, rows, figures, [])
    if world.rank:
        return 0
    return publish(results, options.out, f"scale-{machine['ranks']}-ranks-{machine['nodes']}-nodes")


def draw(runs: Sequence[Results], folder: Path) -> Path:
    """Draw all figures, and the sums, against the number of ranks into ``scale.png``, and messages against nodes.

    Raises:
        SystemExit: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure as Picture
    except ImportError as error:
        raise SystemExit(f"plots need matplotlib ({error}); type: {pip_install('bench')}") from None
    runs = sorted(runs, key=lambda run: int(run.machine["ranks"]))
    picture = Picture(figsize=(13, 12), layout="constrained")
    *places, sums, small, sent, rounds, peers = picture.subplots(3, 3).flat
    for axes, (title, unit, names) in zip(places, _PARTS, strict=True):
        _draw_figures(axes, runs, names)
        axes.set(title=title, ylabel=unit, ylim=(0, None))
    _draw_sums(sums, runs)
    _draw_figures(small, runs, ("handshake", "mismatch: time"))
    small.set(title="handshake (us), mismatch (ms)", yscale="log")
    for axes in (*places, sums, small):
        _finish(axes, "ranks", [int(run.machine["ranks"]) for run in runs])
    _draw_messages((sent, rounds, peers))
    machine = runs[0].machine
    picture.suptitle(f"{machine['cpu']}, {machine['cores']} cores, {machine['mpi']}", fontsize=10)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "scale.png"
    picture.savefig(path, dpi=110)
    return path


def _finish(axes: Axes, what: str, numbers: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(numbers, [str(number) for number in numbers])
    axes.minorticks_off()
    axes.set_xlabel(what)
    axes.grid(alpha=0.3)
    if axes.lines:
        axes.legend(fontsize=6, framealpha=0.5)


def _draw_messages(places: Sequence[Axes]) -> None:
    """Draw what is counted of each kind of message, which needs no run."""
    for number, (name, count) in enumerate(messages.kinds().items()):
        counted = zip(*(count(nodes) for nodes in _NODES), strict=True)
        for axes, values in zip(places, counted, strict=True):
            axes.plot(_NODES, values, "v^<>sDoxP"[number] + "-", markersize=3, label=name)
    for axes, title in zip(places, _COUNTED, strict=True):
        axes.set(title=title, yscale="log")
        _finish(axes, "nodes, one rank on each", [nodes for nodes in _NODES if nodes & (nodes - 1) == 0])


def _draw_figures(axes: Axes, runs: Sequence[Results], names: tuple[str, ...]) -> None:
    for name in dict.fromkeys(figure.name for run in runs for figure in run.figures if figure.name.startswith(names)):
        found = [(run.machine["ranks"], figure.value) for run in runs for figure in run.figures if figure.name == name]
        axes.plot([ranks for ranks, _ in found], [value for _, value in found], "o-", markersize=3, label=name)


def _draw_sums(axes: Axes, runs: Sequence[Results]) -> None:
    sizes = sorted({row.size for run in runs for row in run.rows})
    for number, size in enumerate(sizes):
        for by, style in ((OURS, "o-"), (MPI, "o--")):
            rows = [row for run in runs for row in run.rows if (row.size, row.by) == (size, by)]
            label = f"{by}, {size_text(size)}"
            axes.plot(
                [row.ranks for row in rows],
                [row.median / 1000 for row in rows],
                style,
                markersize=3,
                color=f"C{number}",
                label=label,
            )
    axes.set(title="all_reduce", ylabel="ms", yscale="log")
