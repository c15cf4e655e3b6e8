"""``python -m mpidist tune``: measures the algorithms, and saves the table in a file."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from mpidist.cli.json_output import add_json_argument, json_text, seconds, time_text
from mpidist.collectives.reduce.registry import network_text, size_text, table_text, table_to_json
from mpidist.collectives.tuning import SIZES, Timing, Tuned
from mpidist.collectives.tuning import run as measure
from mpidist.core.errors import LaunchError
from mpidist.core.settings import SETTINGS, TUNING_FILE
from mpidist.topology import world_topology
from mpidist.topology.exit import status_of_failure

HELP = "measure which algorithm is fastest at which size on this cluster; start it under mpirun or srun"
_USAGE_ERROR = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--out", metavar="FILE", help=f"file to add the table to; {TUNING_FILE.name} by default")
    parser.add_argument(
        "--seconds", type=seconds, metavar="SECONDS", default=10.0, help="about how long to measure (10)"
    )
    parser.add_argument(
        "--device", metavar="DEVICE", default="cpu", help="device of the arrays: cpu, gpu or gpu:1 and so on (cpu)"
    )
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure on all ranks (collective). Rank 0 prints the result."""
    try:
        for setting in SETTINGS.values():
            setting.read()
        world = world_topology()
    except (LaunchError, ValueError) as error:
        # Every rank prints its error, because environments may differ.
        print(f"python -m mpidist tune: {error}", file=sys.stderr)
        return status_of_failure(_USAGE_ERROR)
    is_first = world.rank == 0
    if world.size == 1:
        print(
            "python -m mpidist tune: one rank has nothing to compare. Start it on the ranks of your job: mpirun -n 4 "
            "python -m mpidist tune",
            file=sys.stderr,
        )
        return _USAGE_ERROR

    def progress(text: str) -> None:
        print(f"tune: {text}", file=sys.stderr, flush=True)

    try:
        tuned = measure(arguments.out, arguments.seconds, progress, device=arguments.device)
    except ValueError as error:
        if is_first:
            print(f"python -m mpidist tune: {error}", file=sys.stderr)
        return _USAGE_ERROR
    if is_first:
        print(json_text(facts_of_tuning(tuned)) if arguments.json else report(tuned))
    return 0


def facts_of_tuning(tuned: Tuned) -> dict[str, object]:
    """Return the result of tuning as JSON types."""
    return {
        "host": tuned.setup.host,
        "mpi": tuned.setup.mpi,
        "layout": tuned.setup.layout,
        "place": tuned.place,
        "table": table_to_json(tuned.table),
        "timings": [{"nbytes": timing.nbytes, "seconds": timing.seconds} for timing in tuned.timings],
        "path": tuned.path,
    }


def report(tuned: Tuned) -> str:
    """Return the result of tuning as text."""
    lines = [f"all-reduce on {tuned.setup.layout}, {tuned.setup.host}, {tuned.setup.mpi}", ""]
    lines += timings_table(tuned.timings)
    if tuned.timings[-1].nbytes < SIZES[-1]:
        largest, wanted = size_text(tuned.timings[-1].nbytes), size_text(SIZES[-1])
        lines.append(f"measured up to {largest} of {wanted}; use a larger --seconds for more")
    lines += ["", f"table: {table_text(tuned.table, tuned.place)}"]
    if not tuned.place.startswith("one_node"):
        lines.append(f"costs between nodes: {network_text(tuned.table.between_nodes)}")
    if tuned.path is None:
        lines.append("not saved; to save it name a file: python -m mpidist tune --out FILE")
    else:
        lines.append(f"written to {tuned.path}; to use it type: export {TUNING_FILE.name}={tuned.path}")
    return "\n".join(lines)


def timings_table(timings: Sequence[Timing]) -> list[str]:
    """Return a table of timings. A star marks the fastest, a dash a missing one.

    >>> print(*timings_table([Timing(1024, {"a": 1e-5, "b": 2e-5}), Timing(4096, {"b": 5e-5})]), sep="\\n")
          size          a          b
         1 KiB     10 us*     20 us
         4 KiB         -      50 us*
    """
    names = list(timings[0].seconds)
    widths = [max(len(name), 9) + 2 for name in names]
    lines = ["".join(["      size", *(f"{name:>{width}}" for name, width in zip(names, widths, strict=True))])]
    for nbytes, by_name in timings:
        fastest = min(by_name.values())
        times = {name: f"{time_text(found)}{'*' if found == fastest else ' '}" for name, found in by_name.items()}
        cells = [times.get(name, "- ") for name in names]
        line = [f"{size_text(nbytes):>10}", *(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))]
        lines.append("".join(line).rstrip())
    return lines
