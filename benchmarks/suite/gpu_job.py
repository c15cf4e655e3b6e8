"""One job of the benchmarks on GPUs: `python -m benchmarks gpu-job device` or `mpirun -n 2 ... nodes`.

`python -m benchmarks gpu` starts both on one GPU; `nodes` measures on any ranks of any nodes.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.bars.gpu import verdicts
from benchmarks.cases import gpu
from benchmarks.measuring.machine import describe, describe_gpu, gpu_problem
from benchmarks.measuring.session import Session
from benchmarks.measuring.sizes import size_text, sizes_of_text
from benchmarks.reports.files import Results
from benchmarks.reports.text import publish
from mpidist.topology import world_topology

# Arrays of one all-reduce between nodes, in the GPU's memory.
_ARRAYS_BETWEEN_NODES = 3


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="python -m benchmarks gpu-job", description=__doc__)
    top.add_argument("job", choices=["device", "nodes"])
    top.add_argument("--staged", type=sizes_of_text, default=sizes_of_text("256M"), help="size of the staged array")
    top.add_argument("--sizes", type=sizes_of_text, default=sizes_of_text("16M,64M,256M,1G"), help="of the all-reduces")
    top.add_argument("--seconds", type=float, default=0.5, help="at least 11 repetitions, and so long (0.5)")
    top.add_argument("--out", type=Path, required=True, help="folder of NAME.json")
    return top


def main(arguments: list[str]) -> int:
    """Measure on every rank and write on rank 0 (collective); the status is 1 if a result was wrong."""
    options = parser().parse_args(arguments)
    problem = gpu_problem()
    if problem is not None:
        raise SystemExit(problem)
    from mpidist.arrays.streams import require_cupy

    cupy: Any = require_cupy()
    session = Session.without_gloo(world_topology().world, options.seconds)
    # Ranks that see the same GPUs share them in turn, or the one there is.
    cupy.cuda.Device(session.rank % cupy.cuda.runtime.getDeviceCount()).use()
    if options.job == "device":
        for nbytes in options.staged:
            gpu.run_staging(session, nbytes)
        gpu.run_nccl_call(session)
    else:
        for nbytes in options.sizes:
            what = f"all_reduce of {size_text(nbytes)}"
            if _fits(session, _ARRAYS_BETWEEN_NODES * nbytes, what) and session.has_memory_for(3 * nbytes, what):
                gpu.run_between_nodes(session, nbytes)
    machine = describe(session.bare, "") | describe_gpu()
    results = Results(machine, session.rows, session.figures, verdicts(session.rows), session.skipped)
    if session.rank == 0:
        publish(results, options.out, options.job)
    session.close()
    return results.status


def _fits(session: Session, nbytes: int, what: str) -> bool:
    """Whether the GPU has ``nbytes`` for every rank that shares it; where not, notes that ``what`` was skipped."""
    from mpi4py import MPI

    from mpidist.arrays.streams import require_cupy

    cupy: Any = require_cupy()
    cupy.get_default_memory_pool().free_all_blocks()
    session.bare.Barrier()
    free, _ = cupy.cuda.runtime.memGetInfo()
    fits: bool = session.bare.allreduce(nbytes * session.ranks < free, op=MPI.LAND)
    if not fits:
        session.skipped.append(f"{what}: {nbytes >> 20} MiB per rank are more than the GPU has free")
    return fits
