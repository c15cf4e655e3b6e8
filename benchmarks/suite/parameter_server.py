"""Benchmarks of parameter servers: `mpirun -n 2 python -m benchmarks parameter-server`, -n 3 with a coordinator.

Rank 0 is the server, rank 1 a worker. Pulls and pushes through the strategy, and the same requests and replies written
with bare mpi4py, are measured in turn, some rounds of each. With a third rank, rank 0 then coordinates functions that
rank 2 carries out.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.bars.parameter_server import verdicts
from benchmarks.cases.parameter_server import figures_of, pulls_and_pushes, scheduling
from benchmarks.measuring.machine import describe
from benchmarks.measuring.rows import make_row
from benchmarks.measuring.sizes import sizes_of_text
from benchmarks.reports.files import RESULTS, Results
from benchmarks.reports.text import publish


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m benchmarks parameter-server", description=__doc__)
    top.add_argument("--sizes", type=sizes_of_text, default=sizes_of_text("1K,16K,64K,256K,1M,16M,64M"))
    top.add_argument("--rounds", type=int, default=11, help="how often both ways are measured (11)")
    top.add_argument("--functions", type=int, default=2000, help="functions that are scheduled in a round (2000)")
    top.add_argument("--out", type=Path, default=RESULTS, help="folder of the result files (out/benchmarks)")
    return top


def main(arguments: list[str]) -> int:
    """Measure and, on rank 0, print and write; the status is 2 where there are not enough ranks."""
    import mpi4py.MPI

    options = parser().parse_args(arguments)
    comm = mpi4py.MPI.COMM_WORLD.Dup()
    if comm.size not in (2, 3):
        print("python -m benchmarks parameter-server: expected 2 or 3 ranks; type: mpirun -n 2 ...", file=sys.stderr)
        return 2
    of_worker = pulls_and_pushes(comm, options.sizes, options.rounds)
    of_coordinator = scheduling(comm, options.rounds, options.functions) if comm.size == 3 else []
    times, scheduled = comm.bcast(of_worker, 1), comm.bcast(of_coordinator, 0)
    rows = [
        make_row(what, "-", by, seconds, ranks=2, size=size, count=size // 4)
        for (what, by, size), seconds in times.items()
    ]
    figures = figures_of(times, scheduled)
    results = Results(describe(comm, ""), rows, figures, verdicts(rows, figures))
    if comm.rank == 0:
        publish(results, options.out, "parameter_server")
    return 0
