"""Benchmarks of input: `python -m benchmarks input`, without mpirun, about a minute; `--large 5` reads 5 GB on 4 ranks.

A file is written into a temporary folder, and removed afterwards.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.bars.reading import verdicts
from benchmarks.cases import reading
from benchmarks.measuring.inputs import Array
from benchmarks.measuring.jobs import environment_of_ranks, mpirun, run_job
from benchmarks.measuring.machine import describe
from benchmarks.measuring.session import Session
from benchmarks.measuring.sizes import sizes_of_text
from benchmarks.reports.files import RESULTS, Results, load
from benchmarks.reports.text import publish, results_text
from benchmarks.suite import large_file

_LARGE_RANKS = 4
_LARGE_SECONDS = 1800.0


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m benchmarks input", description=__doc__)
    top.add_argument("--sizes", type=sizes_of_text, default=sizes_of_text("64K,256K,1M,16M"), help="bytes of a batch")
    top.add_argument("--file", type=sizes_of_text, default=sizes_of_text("256M"), help="bytes of the file (256M)")
    top.add_argument("--seconds", type=float, default=1.0, help="about how long one size is measured (1)")
    top.add_argument("--batches", type=int, default=440, help="batches of the consumer that computes (440)")
    top.add_argument("--large", type=float, default=0.0, metavar="GB", help="an epoch over so many GB, and only that")
    top.add_argument("--no-torch", action="store_true", help="leave torch's DataLoader out where torch is installed")
    top.add_argument("--folder", type=Path, help="where files are written (the system's temporary folder)")
    top.add_argument("--out", type=Path, default=RESULTS, help="folder of the result files (out/benchmarks)")
    return top


def main(arguments: list[str]) -> int:
    """Measure, print and write; the status is 1 if a result was wrong or a job failed."""
    options = parser().parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="input-", dir=options.folder) as folder:
        if options.large:
            return _large(int(options.large * 1e9), Path(folder), options.out)
        path = Path(folder, "rows.bin")
        reading.write(path, options.file[0])
        session = _measure(path, options)
    machine, judged = describe(session.bare, ""), verdicts(session.rows, session.figures)
    status = publish(Results(machine, session.rows, session.figures, judged, session.skipped), options.out, "input")
    session.close()
    return status


def _measure(path: Path, options: argparse.Namespace) -> Session:
    """Run what needs one process."""
    from mpi4py import MPI

    session = Session.without_gloo(MPI.COMM_SELF, options.seconds)
    data: Array = np.memmap(path, np.uint8, "r")
    reading.run_memory(session, data)
    for size in options.sizes:
        reading.run_batches(session, data, size, not options.no_torch)
    reading.run_consumer(session, data, options.batches)
    return session


def _large(nbytes: int, folder: Path, out: Path) -> int:
    """Read a large file on several ranks, in a job of its own."""
    problem = large_file.no_room(nbytes, folder)
    if problem:
        print(f"# nothing was measured: {problem}", file=sys.stderr)
        return 2
    path = folder / "large.bin"
    print(f"# writing {nbytes / 1e9:g} GB to {path}", flush=True)
    large_file.write(path, nbytes)
    job = [sys.executable, "-m", "benchmarks.suite.large_file", str(path), str(out)]
    problem, _ = run_job([*mpirun(), "-n", str(_LARGE_RANKS), *job], _LARGE_SECONDS, environment_of_ranks())
    if problem:
        print(problem, file=sys.stderr)
        return 1
    print(results_text(load(out / f"{large_file.NAME}.json")))
    return 0
