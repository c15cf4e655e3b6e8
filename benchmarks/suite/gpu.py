"""All benchmarks on a GPU: `python -m benchmarks gpu`, without mpirun; one GPU is enough.

Starts one job on one process (staging, calls of NCCL) and one on two virtual nodes of one rank each.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.bars.gpu import verdicts
from benchmarks.measuring.jobs import ROOT, environment_of_ranks, mpirun, run_job
from benchmarks.measuring.machine import gpu_problem
from benchmarks.reports.files import RESULTS, load, merged
from benchmarks.reports.text import publish, results_text


class _Job(NamedTuple):
    name: str
    ranks: int
    seconds: float


JOBS = (_Job("device", 1, 240.0), _Job("nodes", 2, 300.0))


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m benchmarks gpu", description=__doc__)
    top.add_argument("--staged", default="256M", help="size of the array that is staged (256M)")
    top.add_argument("--sizes", default="16M,64M,256M,1G", help="sizes of the all-reduces (16M,64M,256M,1G)")
    top.add_argument("--seconds", type=float, default=0.5, help="at least 11 repetitions, and so long (0.5)")
    top.add_argument("--out", type=Path, default=RESULTS, help="folder of gpu.json and gpu.csv (out/benchmarks)")
    top.add_argument("--stand-in", action="store_true", help="try the suite without a GPU; its figures mean nothing")
    return top


def main(arguments: list[str]) -> int:
    """Run both jobs, print and write; the status is 1 if one failed or a result was wrong, 2 without a GPU."""
    options = parser().parse_args(arguments)
    problem = None if options.stand_in else gpu_problem()
    if problem is not None:
        print(f"make bench-gpu: nothing was measured: {problem}", file=sys.stderr)
        return 2
    measures = ["--staged", options.staged, "--sizes", options.sizes]
    measures += ["--seconds", str(options.seconds)]
    failed, parts = [], []
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
        for job in JOBS:
            print(f"# job {job.name}: {job.ranks} rank(s), at most {job.seconds:.0f} s", flush=True)
            command = _command(job, [*measures, "--out", folder], options.stand_in)
            problem, _ = run_job(command, job.seconds, environment_of_ranks(MPIDIST_RANKS_PER_NODE="1"))
            if problem:
                failed.append(f"job {job.name}: {problem}")
            path = Path(folder, f"{job.name}.json")
            if path.exists():
                parts.append(load(path))
    results = merged(parts, failed)
    results = replace(results, verdicts=verdicts(results.rows))
    gpu = "# {gpu}, CUDA {driver_cuda}, CuPy {cupy}, NCCL {nccl}".format_map(results.machine)
    status = publish(results, options.out, "gpu", f"{gpu}\n{results_text(results)}")
    print('# next: step 2 of "The first hour on a GPU", docs/gpu.md')
    return int(bool(failed)) | status


def _command(job: _Job, measures: list[str], stand_in: bool) -> list[str]:
    program = [str(ROOT / "benchmarks/__main__.py"), "gpu-job"]
    fake = ["-m", "tests.support.fake_cupy", "--devices", "1"] if stand_in else []
    return [*mpirun(), "-n", str(job.ranks), sys.executable, *fake, *program, job.name, *measures]
