"""One job of the benchmarks between nodes: `mpirun ... python -m benchmarks.cluster`, in any placement of its ranks.

`python -m benchmarks.cluster_jobs` starts all of them, inside an allocation of 4 nodes.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

# One thread per rank, as the ranks are the parallelism; the linear algebra libraries look once, when NumPy comes.
for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

from benchmarks import cluster_cases, cluster_overlap  # noqa: E402
from benchmarks.cluster_bars import verdicts  # noqa: E402
from benchmarks.cluster_report import results_text  # noqa: E402
from benchmarks.cluster_wire import bits_per_second  # noqa: E402
from benchmarks.machine import describe  # noqa: E402
from benchmarks.results import Results, save  # noqa: E402
from benchmarks.session import Session  # noqa: E402
from benchmarks.sizes import sizes_of_text  # noqa: E402
from mpidist.topology import world_topology  # noqa: E402


def _list(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m benchmarks.cluster", description=__doc__)
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
    session = Session(world_topology().world, seconds=options.seconds, with_gloo=False, progress=False)
    session.skipped.clear()
    if options.overlap:
        cluster_overlap.run(session, options.placement)
    else:
        counter = cluster_cases.WireCounter(session, options.interface)
        for size in options.sizes:
            cases = cluster_cases.cases_at(session, size, options.algorithms, options.wire)
            cluster_cases.measure(session, counter, cases, options.placement, size)
    machine = describe(session.bare, "") | {"rate": options.rate}
    machine["command"] = " ".join(["python", "-m", "benchmarks.cluster", *arguments])
    rate = None if options.rate is None else bits_per_second(options.rate)
    judged = verdicts(session.rows, session.figures, machine["nodes"], rate)
    results = Results(machine, session.rows, session.figures, judged, session.skipped)
    if session.rank == 0:
        print(results_text(results, rate), flush=True)
        if options.out is not None:
            save(results, options.out, options.name)
    session.close()
    return int(any(row.wrong for row in results.rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
