"""All benchmarks on a GPU: `python -m benchmarks gpu`, without mpirun; one GPU is enough.

Starts one job on one process (packing, staging, calls of NCCL) and one on two virtual nodes of one rank each.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from benchmarks.cluster_jobs import mpirun
from benchmarks.gpu_bars import verdicts
from benchmarks.gpu_machine import gpu_problem
from benchmarks.report import results_text
from benchmarks.results import Results, load, save

_RESULTS = Path(__file__).with_name("results")
_JOB = Path(__file__).with_name("gpu_job.py")


class _Job(NamedTuple):
    name: str
    ranks: int
    seconds: float


JOBS = (_Job("device", 1, 240.0), _Job("nodes", 2, 300.0))


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m benchmarks gpu", description=__doc__)
    top.add_argument("--models", default="resnet50,bert_base", help="gradients that are packed (resnet50,bert_base)")
    top.add_argument("--staged", default="256M", help="size of the array that is staged (256M)")
    top.add_argument("--sizes", default="16M,64M,256M,1G", help="sizes of the all-reduces (16M,64M,256M,1G)")
    top.add_argument("--seconds", type=float, default=0.5, help="at least 11 repetitions, and so long (0.5)")
    top.add_argument("--out", type=Path, default=_RESULTS, help="folder of gpu.json and gpu.csv (benchmarks/results)")
    top.add_argument("--stand-in", action="store_true", help="try the suite without a GPU; its figures mean nothing")
    return top


def main(arguments: list[str]) -> int:
    """Run both jobs, print and write; the status is 1 if one failed or a result was wrong, 2 without a GPU."""
    options = parser().parse_args(arguments)
    problem = None if options.stand_in else gpu_problem()
    if problem is not None:
        print(f"make bench-gpu: nothing was measured: {problem}", file=sys.stderr)
        return 2
    measures = ["--models", options.models, "--staged", options.staged, "--sizes", options.sizes]
    measures += ["--seconds", str(options.seconds)]
    failed, parts = [], []
    options.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="gpu-") as folder:
        for job in JOBS:
            print(f"# job {job.name}: {job.ranks} rank(s), at most {job.seconds:.0f} s", flush=True)
            problem = _run(job, [*measures, "--out", folder], options.stand_in)
            if problem:
                failed.append(f"job {job.name}: {problem}")
            path = Path(folder, f"{job.name}.json")
            if path.exists():
                parts.append(load(path))
    if not parts:
        raise SystemExit("no job has left results:\n" + "\n".join(failed))
    rows = [row for part in parts for row in part.rows]
    machine = parts[0].machine | {"command": " ".join(["python", "-m", "benchmarks", "gpu", *arguments])}
    skipped = [reason for part in parts for reason in part.skipped]
    results = Results(machine, rows, [], verdicts(rows), [*skipped, *failed])
    paths = save(results, options.out, "gpu")
    print(f"# {machine['gpu']}, CUDA {machine['driver_cuda']}, CuPy {machine['cupy']}, NCCL {machine['nccl']}")
    print(results_text(results))
    print(f"# written: {', '.join(map(str, paths))}")
    print('# next: step 2 of "The first hour on a GPU", docs/gpu.md')
    return int(bool(failed) or any(row.wrong for row in rows))


def _run(job: _Job, measures: list[str], stand_in: bool) -> str:
    """Run one job; returns what went wrong, with what it printed, or nothing."""
    program = ["-m", "tests.support.fake_cupy", "--devices", "1", str(_JOB)] if stand_in else [str(_JOB)]
    command = [*mpirun(), "-n", str(job.ranks), sys.executable, *program, job.name, *measures]
    root = str(_JOB.parents[1])
    paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"MPIDIST_RANKS_PER_NODE": "1", "PYTHONPATH": paths}
    with subprocess.Popen(
        command, cwd=root, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    ) as process:  # fmt: skip
        try:
            printed, _ = process.communicate(timeout=job.seconds)
        except subprocess.TimeoutExpired:
            # mpirun ends its ranks.
            process.terminate()
            printed, _ = process.communicate()
            return f"ended after {job.seconds:g} s\n{printed}"
    return "" if process.returncode == 0 else f"status {process.returncode}\n{printed}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
