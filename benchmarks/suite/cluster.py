"""One job of the benchmarks between nodes: `mpirun ... python -m benchmarks cluster`, in any placement of its ranks.

`python -m benchmarks cluster-jobs` starts all of them, inside an allocation of 4 nodes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.bars.between_nodes import verdicts
from benchmarks.cases import between_nodes
from benchmarks.measuring.machine import describe
from benchmarks.measuring.session import Session
from benchmarks.measuring.sizes import sizes_of_text
from benchmarks.measuring.wire import bits_per_second
from benchmarks.reports.between_nodes import results_text
from benchmarks.reports.files import Results, save
from mpidist.topology import world_topology


def _list(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m benchmarks cluster", description=__doc__)
    top.add_argument("--placement", default="block", help="how the ranks were placed, for the tables (block)")
    top.add_argument(
        "--sizes", type=sizes_of_text, default=[64 << 20], metavar="A,B", help="sizes of the all-reduce (64M)"
    )
    top.add_argument("--algorithms", type=_list, default=[], metavar="A,B", help="algorithms of mpidist to force")
    top.add_argument("--wire", type=_list, default=[], metavar="A,B", help="of bfloat16,float16")
    top.add_argument("--overlap", action="store_true", help="measure overlap with computation instead")
    top.add_argument("--seconds", type=float, default=0.5, help="at least 5 repetitions, and so long (0.5)")
    top.add_argument("--rate", help="speed of each node's link, such as 1gbit, for the floor")
    top.add_argument("--interface", default="eth0", help="whose bytes are counted (eth0)")
    top.add_argument("--out", type=Path, help="folder for NAME.json and NAME.csv; none are written without")
    top.add_argument("--name", default="cluster", help="name of the result files (cluster)")
    return top


def main(arguments: list[str]) -> int:
    """Measure on every rank, print and write on rank 0 (collective); the status is 1 if a result was wrong."""
    options = parser().parse_args(arguments)
    session = Session.without_gloo(world_topology().world, options.seconds)
    if options.overlap:
        between_nodes.run_overlap(session, options.placement)
    else:
        counter = between_nodes.WireCounter(session, options.interface)
        for size in options.sizes:
            cases = between_nodes.cases_at(session, size, options.algorithms, options.wire)
            between_nodes.run(session, counter, cases, options.placement, size)
    machine = describe(session.bare, "") | {"rate": options.rate}
    rate = None if options.rate is None else bits_per_second(options.rate)
    judged = verdicts(session.rows, session.figures, machine["nodes"], rate)
    results = Results(machine, session.rows, session.figures, judged, session.skipped)
    if session.rank == 0:
        print(results_text(results, rate), flush=True)
        if options.out is not None:
            save(results, options.out, options.name)
    session.close()
    return results.status
