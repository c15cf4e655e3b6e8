"""What a result file says about the machine it comes from, and whether that has a GPU."""

from __future__ import annotations

import platform
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mpi4py
import numpy as np

import mpidist
from benchmarks.measuring.inputs import offset_of_large_arrays
from mpidist.arrays.streams import find_cupy, gpus_may_be_present, require_cupy
from mpidist.collectives.gpu.nccl import nccl_problem
from mpidist.collectives.node import native
from mpidist.collectives.node.node import Node
from mpidist.core.settings import NATIVE
from mpidist.core.text import ranks_text
from mpidist.native.build_library import has_platform
from mpidist.topology import allowed_cores, world_topology

if TYPE_CHECKING:
    from mpi4py import MPI


def require_native_core() -> None:
    """Exit if this machine could have a native core, this mpidist has none, and nobody turned it off.

    Raises:
        SystemExit: It has none. Ranks exit before MPI starts, so none waits for another.
    """
    reason = native.why_not()
    if reason is not None and has_platform() and NATIVE.read():
        raise SystemExit(
            f"python -m benchmarks: mpidist has no native core: {reason}. Ranks of a node would be measured up to 100 "
            f"times too slow. Build it: {native.build_command()}. To measure without it, set {NATIVE.name}=0."
        )


def reads_neighbours(comm: MPI.Intracomm) -> bool:
    """Return whether the ranks of each node may read each other's memory (collective)."""
    node = Node(comm)
    readable = node.reads_neighbours
    node.close()
    return readable


def describe(comm: MPI.Intracomm, gloo_version: str) -> dict[str, Any]:
    """Return the machine, the versions and how the run was started (collective).

    Nodes are those that mpidist sees, so virtual ones (MPIDIST_RANKS_PER_NODE) count.
    """
    from mpi4py import MPI

    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": command_line(),
        "ranks": comm.size,
        "nodes": world_topology().num_nodes,
        "cpu": cpu_model(),
        "cores": len(allowed_cores()),
        "binding": comm.allgather(ranks_text(allowed_cores())),
        "array_offset": offset_of_large_arrays(),
        "native_core": all(comm.allgather(native.why_not() is None)),
        "system": f"{platform.system()} {platform.release()}",
        "mpi": MPI.Get_library_version().splitlines()[0].strip(" \0").split(", package")[0],
        "mpi4py": mpi4py.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "mpidist": mpidist.__version__,
        "torch": gloo_version or None,
        "reads_neighbours": reads_neighbours(comm),
    }


def command_line() -> str:
    """Return what was typed."""
    return " ".join(["python", "-m", "benchmarks", *sys.argv[1:]])


def cpu_model() -> str:
    """Return the name of the CPU as the kernel knows it, else its architecture."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def gpu_problem() -> str | None:
    """Return why nothing can run on a GPU here, None where it can."""
    if not gpus_may_be_present():
        return "needs a GPU, and this machine shows no NVIDIA driver"
    return find_cupy().problem or None


def describe_gpu() -> dict[str, Any]:
    """Return the first GPU of this process and the versions of what drives it."""
    cupy: Any = require_cupy()
    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(0)
    return {
        "gpu": properties["name"].decode(),
        "gpus": runtime.getDeviceCount(),
        "compute_capability": f"{properties['major']}.{properties['minor']}",
        "gpu_memory_gib": round(properties["totalGlobalMem"] / 2**30, 1),
        "driver_cuda": runtime.driverGetVersion(),
        "runtime_cuda": runtime.runtimeGetVersion(),
        "cupy": cupy.__version__,
        "nccl": nccl_problem() or cupy.cuda.nccl.get_version(),
    }
