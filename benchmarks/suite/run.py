"""One run of the whole suite: its operations in order, the bars, the tables and the result files."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.bars.one_node import verdicts
from benchmarks.cases import batch, collectives, guard, memory, overlap, start, steps
from benchmarks.measuring.inputs import use_offset
from benchmarks.measuring.machine import describe
from benchmarks.measuring.models import MODELS
from benchmarks.measuring.session import Session
from benchmarks.measuring.sizes import sizes_of_text
from benchmarks.reports.files import RESULTS, Results
from benchmarks.reports.text import osu_text, publish
from mpidist.topology import world_topology

# Memory comes first, while no earlier operation has left freed memory that could be used again unseen.
OPERATIONS = ("memory", "start", *collectives.COLLECTIVES, "batch", "step", "latency", "guard", "overlap")
_SIMPLE = {
    "start": start.run,
    "step": steps.run_training,
    "latency": steps.run_latency,
    "guard": guard.run,
    "overlap": overlap.run,
}


def add_arguments(run: argparse.ArgumentParser) -> None:
    run.add_argument(
        "--operations",
        type=lambda text: _names(text, OPERATIONS),
        default=list(OPERATIONS),
        metavar="A,B",
        help=f"which of {','.join(OPERATIONS)}; all by default",
    )
    run.add_argument(
        "--sizes",
        type=sizes_of_text,
        default=sizes_of_text("4,64,1K,4K,16K,64K,256K,1M,4M,16M,64M"),
        metavar="A,B",
        help="sizes of the collectives, such as 4,256K,64M",
    )
    models = tuple(MODELS)
    run.add_argument(
        "--models",
        type=lambda text: _names(text, models),
        default=list(models),
        metavar="A,B",
        help=f"gradient sets of batch: {','.join(models)}",
    )
    run.add_argument("--seconds", type=float, default=0.5, help="how long to measure one point, about (0.5)")
    run.add_argument("--repeat", type=int, default=1, help="how often to measure everything (1)")
    run.add_argument("--offset", type=int, help="begin arrays at this offset within a page; NumPy's choice by default")
    run.add_argument("--steps", type=int, default=10_000, help="steps of the memory operation (10000)")
    run.add_argument("--algorithm", help="force one algorithm of mpidist by name")
    run.add_argument("--osu", action="store_true", help="print sizes and average times in two columns, as OSU does")
    run.add_argument("--no-gloo", action="store_true", help="leave gloo out also where torch is installed")
    run.add_argument("--no-progress", action="store_true", help="no progress bar")
    run.add_argument("--out", type=Path, default=RESULTS, help="folder of the result files (out/benchmarks)")
    run.add_argument("--name", help="name of the result files (RANKS-ranks)")


def _names(text: str, known: tuple[str, ...]) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in known]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)} is unknown; expected some of {','.join(known)}")
    return names


def run(options: argparse.Namespace) -> int:
    """Measure what ``options`` asks for, print the tables and write the files on rank 0 (collective).

    Returns:
        The exit status: 1 if a result was wrong. A bar that is not met is no failure.
    """
    use_offset(options.offset)
    session = Session(
        world_topology().world,
        seconds=options.seconds,
        algorithm=options.algorithm,
        with_gloo=not options.no_gloo,
        progress=not options.no_progress,
    )
    for _ in range(options.repeat):
        measure(session, options)
    results = summarize(session)
    if session.rank == 0:
        text = osu_text(results) if options.osu else None
        publish(results, options.out, options.name or f"{session.ranks}-ranks", text)
        if results.status:
            wrong = (" ".join(map(str, row.key)) for row in results.rows if row.wrong)
            print(f"# WRONG RESULTS in {', '.join(wrong)}")
    session.close()
    return results.status


def measure(session: Session, options: argparse.Namespace) -> None:
    """Run the operations asked for, in the order of ``OPERATIONS`` (collective)."""
    points = {**dict.fromkeys(OPERATIONS, 1), **dict.fromkeys(collectives.COLLECTIVES, len(options.sizes))}
    points |= dict.fromkeys(collectives.WITHOUT_SIZES, 1)
    points |= {"batch": len(options.models), "latency": 1 + len(steps.SMALL_COUNTS), "guard": 2, "memory": 3}
    operations = [operation for operation in OPERATIONS if operation in options.operations]
    with session.progress_over(sum(points[operation] for operation in operations)) as advance:
        for operation in operations:
            if operation in collectives.COLLECTIVES:
                collectives.run(session, operation, options.sizes, advance)
            elif operation == "batch":
                batch.run(session, options.models, advance)
            elif operation == "memory":
                memory.run(session, options.steps, advance)
            else:
                _SIMPLE[operation](session, advance)


def summarize(session: Session) -> Results:
    """Return the results with the machine and, on one node, the bars (collective)."""
    machine = describe(session.bare, session.gloo.version)
    machine["core_to_core_ns"] = core_to_core(session)
    measured = session.rows_with_times()
    rows, judged = [row for row, _ in measured], []
    if machine["nodes"] == 1:
        judged = verdicts(rows, session.figures, session.ranks, machine["reads_neighbours"])
    times = {row.key: [float(f"{1e6 * seconds:.4g}") for seconds in times] for row, times in measured}
    return Results(machine, rows, session.figures, judged, session.skipped, times)


def core_to_core(session: Session) -> list[int]:
    """Return the tenths of 100 latencies between the cores of neighbours in nanoseconds; [] if unknown (collective)."""
    found = sorted(session.latency() for _ in range(100))
    return found[::11] if session.bare.allreduce(found[0]) else []
