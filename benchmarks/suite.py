"""One run of the whole suite: its operations in order, the bars, the tables and the result files."""

from __future__ import annotations

import argparse

from benchmarks import batch, collectives, guard, latency, memory, overlap, start, step
from benchmarks.bars import verdicts
from benchmarks.machine import describe
from benchmarks.report import results_text
from benchmarks.results import Results, save
from benchmarks.session import Session
from mpidist.topology import world_topology

# Memory comes first, while no earlier operation has left freed memory that could be used again unseen.
OPERATIONS = ("memory", "start", *collectives.COLLECTIVES, "batch", "step", "latency", "guard", "overlap")


def run(options: argparse.Namespace) -> int:
    """Measure what ``options`` asks for, print the tables and write the files on rank 0 (collective).

    Returns:
        The exit status: 1 if a result was wrong. A bar that is not met is no failure.
    """
    session = Session(
        world_topology().world,
        seconds=options.seconds,
        algorithm=options.algorithm,
        with_gloo=not options.no_gloo,
        progress=not options.no_progress,
    )
    measure(session, options)
    results = summarize(session, options.algorithm is not None)
    if session.rank == 0:
        paths = save(results, options.out, options.name or f"{session.ranks}-ranks")
        print(results_text(results))
        print(f"# written: {', '.join(str(path) for path in paths)}")
    session.close()
    wrong = [row for row in results.rows if row.wrong]
    if wrong and session.rank == 0:
        print(f"# WRONG RESULTS in {', '.join(' '.join(map(str, row.key)) for row in wrong)}")
    return int(bool(wrong))


def measure(session: Session, options: argparse.Namespace) -> None:
    """Run the operations asked for, in the order of ``OPERATIONS`` (collective)."""
    points = {**dict.fromkeys(OPERATIONS, 1), **dict.fromkeys(collectives.COLLECTIVES, len(options.sizes))}
    points |= {"batch": len(options.models), "latency": 2, "guard": 2, "memory": 3}
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


_SIMPLE = {"start": start.run, "step": step.run, "latency": latency.run, "guard": guard.run, "overlap": overlap.run}


def summarize(session: Session, algorithm_is_forced: bool) -> Results:
    """Return the results with the machine and, on one node, the bars (collective)."""
    machine = describe(session.bare, session.gloo.version)
    free_choice = machine["reads_neighbours"] and not algorithm_is_forced
    judged = verdicts(session.rows, session.figures, session.ranks, free_choice) if machine["nodes"] == 1 else []
    return Results(machine, session.rows, session.figures, judged, session.skipped)
