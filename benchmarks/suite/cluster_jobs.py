"""All benchmarks between nodes: `salloc -N4 --ntasks-per-node=2 python -m benchmarks cluster-jobs`; a job for each.

They need 4 nodes and Open MPI's mpirun, whose options place the ranks and switch a component off.
"""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from benchmarks.bars.between_nodes import HAN_OFF, verdicts
from benchmarks.measuring.jobs import mpirun, run_job
from benchmarks.measuring.wire import bits_per_second
from benchmarks.reports.between_nodes import results_text
from benchmarks.reports.files import RESULTS, load, merged
from benchmarks.reports.text import publish

NODES, RANKS_PER_NODE = 4, 2
# Where more ranks than slots are allowed, Open MPI puts them all on the first host unless it is told otherwise.
_IN_BLOCKS, _ROUND_ROBIN = ("--map-by", "slot:nooversubscribe"), ("--map-by", "node:nooversubscribe")


class Job(NamedTuple):
    """One mpirun: how it places its ranks, and what they measure."""

    placement: str
    ranks: tuple[int, ...]
    launcher: tuple[str, ...]
    measures: tuple[str, ...]


_EACH_HOST = Job("each host", (1,) * NODES, _IN_BLOCKS, ())
# Begins the line of a host that does not see the folder.
_BLIND = "cannot-see"


def jobs(sizes: str, algorithms: str) -> list[Job]:
    """Return all jobs.

    Args:
        sizes: Sizes beside 64 MiB for the table of ranks in blocks, such as 4K,1M; may be empty.
        algorithms: Names to force at all these sizes, such as mpi,hierarchical; may be empty.
    """
    full = (RANKS_PER_NODE,) * NODES
    found = [
        Job("block", full, _IN_BLOCKS, ("--sizes", "64M", "--wire", "bfloat16,float16")),
        Job(HAN_OFF, full, (*_IN_BLOCKS, "--mca", "coll", "^han"), ("--sizes", "64M")),
        Job("round-robin", full, _ROUND_ROBIN, ("--sizes", "64M")),
        Job("uneven", (2, 1) * (NODES // 2), _IN_BLOCKS, ("--sizes", "64M")),
        Job("2x1", (1, 1), _IN_BLOCKS, ("--overlap",)),
    ]
    if sizes:
        found.append(Job("block", full, _IN_BLOCKS, ("--sizes", sizes, "--algorithms", algorithms, "--seconds", "1")))
    return found


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m benchmarks cluster-jobs", description=__doc__)
    top.add_argument("--hosts", help="four host names, such as a,b,c,d (those of the Slurm allocation)")
    top.add_argument("--sizes", default="4,64,4K,16K,64K,256K,1M,4M,16M", help="sizes beside 64M; may be empty")
    top.add_argument("--algorithms", default="", help="algorithms of mpidist to force at these sizes")
    top.add_argument("--rate", help="speed of each node's link, such as 1gbit, for the floor")
    top.add_argument("--interface", default="eth0", help="whose bytes are counted (eth0)")
    top.add_argument("--seconds", type=float, default=150.0, help="how long one job may take (150)")
    top.add_argument("--out", type=Path, default=RESULTS, help="folder of cluster.json, cluster.csv")
    return top


def main(arguments: list[str]) -> int:
    """Run all jobs, print the tables and write the files; the status is 1 if a job failed or a result was wrong."""
    options = parser().parse_args(arguments)
    hosts = options.hosts.split(",") if options.hosts else _hosts_of_allocation()
    if len(hosts) < NODES:
        raise SystemExit(f"hosts are {', '.join(hosts)}; expected {NODES}: salloc -N{NODES} ..., or --hosts a,b,c,d")
    common = ["--interface", options.interface, *(["--rate", options.rate] if options.rate else [])]
    failed, parts = [], []
    options.out.mkdir(parents=True, exist_ok=True)
    # Every node sees the folder of the results; a temporary one of the system may be another on each.
    with tempfile.TemporaryDirectory(prefix="cluster-", dir=options.out.resolve()) as folder:
        _check_seen(folder, hosts, options.seconds)
        for number, job in enumerate(jobs(options.sizes, options.algorithms)):
            print(f"# job {number}: {job.placement} {' '.join(job.measures)}", flush=True)
            measures = [*job.measures, *common, "--placement", job.placement, "--out", folder, "--name", str(number)]
            program = [sys.executable, "-m", "benchmarks", "cluster", *measures]
            problem, _ = _launch(job, hosts, program, options.seconds)
            path = Path(folder, f"{number}.json")
            part = load(path) if path.exists() else None
            if part is not None and part.machine["nodes"] == len(job.ranks):
                parts.append(part)
            else:
                problem = problem or f"it ran on {part.machine['nodes'] if part else 0} nodes"
                failed.append(f"{job.placement} {' '.join(job.measures)}: {problem}")
    results = merged(parts, failed)
    rate = None if options.rate is None else bits_per_second(options.rate)
    results = replace(results, verdicts=verdicts(results.rows, results.figures, NODES, rate))
    return int(bool(failed)) | publish(results, options.out, "cluster", results_text(results, rate))


def _check_seen(folder: str, hosts: list[str], seconds: float) -> None:
    """End the program if a host does not see the folder that jobs put their results into."""
    look = f"test -d {shlex.quote(folder)} || echo {_BLIND} $(uname -n)"
    problem, printed = _launch(_EACH_HOST, hosts, ["sh", "-c", look], seconds)
    blind = sorted(line.removeprefix(_BLIND).strip() for line in printed.splitlines() if line.startswith(_BLIND))
    if problem:
        raise SystemExit(f"no program starts on {', '.join(hosts[:NODES])}: {problem}")
    if blind:
        raise SystemExit(
            f"{', '.join(blind)} cannot see {Path(folder).parent}, where results go: expected a folder that all hosts "
            "share; type: make bench-cluster BENCH_OUT=DIR with one in the checkout (virtual hosts have a /tmp each)"
        )


def _launch(job: Job, hosts: list[str], program: list[str], seconds: float) -> tuple[str, str]:
    """Run a program where a job's ranks are; returns what went wrong, or nothing, and what it printed."""
    places = ",".join(f"{host}:{ranks}" for host, ranks in zip(hosts, job.ranks, strict=False))
    return run_job([*mpirun(), "--host", places, "-n", str(sum(job.ranks)), *job.launcher, *program], seconds)


def _hosts_of_allocation() -> list[str]:
    nodes = os.environ.get("SLURM_JOB_NODELIST")
    if nodes is None:
        raise SystemExit(f"this is no Slurm allocation; type: salloc -N{NODES} ..., or --hosts a,b,c,d")
    listed = subprocess.run(["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True)
    return listed.stdout.split()
