"""Benchmarks of input: `python -m benchmarks input`, without mpirun, about a minute; `--large 5` reads 5 GB on 4 ranks.

A file is written into a temporary folder, and removed afterwards.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks import reading_cases, reading_consumer, reading_large
from benchmarks.cluster_jobs import mpirun
from benchmarks.inputs import Array
from benchmarks.machine import describe
from benchmarks.reading_bars import verdicts
from benchmarks.report import results_text
from benchmarks.results import Results, load, save
from benchmarks.session import Session
from benchmarks.sizes import sizes_of_text

_RESULTS = Path(__file__).with_name("results")
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
    top.add_argument("--out", type=Path, default=_RESULTS, help="folder of the result files (benchmarks/results)")
    return top


def main(arguments: list[str]) -> int:
    """Measure, print and write; the status is 1 if a result was wrong or a job failed."""
    options = parser().parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="input-", dir=options.folder) as folder:
        if options.large:
            return _large(int(options.large * 1e9), Path(folder), options.out)
        path = Path(folder, "rows.bin")
        reading_cases.write(path, options.file[0])
        session = _measure(path, options)
    results = _results(session, [])
    print(results_text(results))
    print(f"# written: {', '.join(map(str, save(results, options.out, 'input')))}")
    session.close()
    return int(any(row.wrong for row in results.rows))


def _measure(path: Path, options: argparse.Namespace) -> Session:
    """Run what needs one process."""
    from mpi4py import MPI

    session = Session(MPI.COMM_SELF, seconds=options.seconds, with_gloo=False, progress=False)
    session.skipped.clear()
    data: Array = np.memmap(path, np.uint8, "r")
    reading_consumer.memory(session, data)
    for size in options.sizes:
        reading_cases.run(session, data, size, not options.no_torch)
    reading_consumer.run(session, data, options.batches)
    return session


def _results(session: Session, skipped: Sequence[str]) -> Results:
    machine = describe(session.bare, "")
    return Results(
        machine, session.rows, session.figures, verdicts(session.rows, session.figures), [*session.skipped, *skipped]
    )


def _large(nbytes: int, folder: Path, out: Path) -> int:
    """Read a large file on several ranks, in a job of its own."""
    problem = reading_large.no_room(nbytes, folder)
    if problem:
        print(f"# nothing was measured: {problem}", file=sys.stderr)
        return 2
    path = folder / "large.bin"
    print(f"# writing {nbytes / 1e9:g} GB to {path}", flush=True)
    reading_large.write(path, nbytes)
    root = str(Path(__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))}
    job = [sys.executable, "-m", "benchmarks.reading_large", str(path), str(out)]
    command = [*mpirun(), "-n", str(_LARGE_RANKS), *job]
    done = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, timeout=_LARGE_SECONDS, check=False)
    if done.returncode == 0:
        print(results_text(load(out / f"{reading_large.NAME}.json")))
    return done.returncode
