"""What a result file says about the machine it comes from."""

from __future__ import annotations

import os
import platform
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mpi4py
import numpy as np

import mpidist
from mpidist.collectives.node.node import Node
from mpidist.topology import world_topology

if TYPE_CHECKING:
    from mpi4py import MPI


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
        "command": " ".join(["python", "-m", "benchmarks", *sys.argv[1:]]),
        "ranks": comm.size,
        "nodes": world_topology().num_nodes,
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()}",
        "mpi": MPI.Get_library_version().splitlines()[0].strip(" \0").split(", package")[0],
        "mpi4py": mpi4py.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "mpidist": mpidist.__version__,
        "torch": gloo_version or None,
        "reads_neighbours": reads_neighbours(comm),
    }


def cpu_model() -> str:
    """Return the name of the CPU as the kernel knows it, else its architecture."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()
