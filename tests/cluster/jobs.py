"""Starts a program of tests/cluster/programs on the ranks of a lab, by mpirun or srun, in a placement."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.cluster.lab import Lab
from tests.support.ranks.jobs import child_environment, mpirun_command

PROGRAMS = Path(__file__).with_name("programs")


class Placement(NamedTuple):
    """Where ranks go.

    Attributes:
        hosts: The host number of every rank.
        mpirun, srun: The options that put them there.
    """

    hosts: tuple[int, ...]
    mpirun: tuple[str, ...]
    srun: tuple[str, ...]

    def node_of_rank(self) -> list[int]:
        """Return the node number of every rank as mpidist counts them: nodes in the order of their lowest rank."""
        order = list(dict.fromkeys(self.hosts))
        return [order.index(host) for host in self.hosts]


# "nooversubscribe" takes back what child_environment allows, where Open MPI would put all ranks on the first host.
PLACEMENTS = {
    "block": Placement((0, 0, 1, 1, 2, 2, 3, 3), ("--map-by", "slot:nooversubscribe"), ("--distribution=block",)),
    "round-robin": Placement(
        (0, 1, 2, 3, 0, 1, 2, 3), ("--map-by", "node:nooversubscribe"), ("--distribution=cyclic",)
    ),
    "uneven": Placement(
        (0, 0, 1, 2, 2, 3),
        ("--map-by", "slot:nooversubscribe", "--host", "node0:2,node1:1,node2:2,node3:1"),
        ("--distribution=arbitrary", "--ntasks=6"),
    ),
}


# The PMIx of the wheel has no munge component and would say so on every rank. Slurm's other barriers let ranks out of
# MPI_Init before those of other hosts are through, and Open MPI crashes at times.
SRUN_SETTINGS = {"PMIX_MCA_psec": "native", "SLURM_PMIX_FENCE": "ring"}


class JobError(RuntimeError):
    """A job ended with a status, or ranks of it left no result."""


def launch(
    lab: Lab, program: str, *arguments: object, by: str = "mpirun", placement: str = "block", timeout: float = 90.0
) -> list[Any]:
    """Run ``programs/PROGRAM.py`` with two ranks per host, or as the placement has it; returns its results by rank.

    Args:
        lab: Where; four hosts.
        program: Its name. It leaves a JSON file per rank: see ``programs/result.py``.
        arguments: What the program gets.
        by: "mpirun", inside an allocation made by salloc, or "srun".
        placement: A name of ``PLACEMENTS``.
        timeout: Seconds until the job is ended.

    Raises:
        JobError: See there; with all that the job printed.
        TimeoutError: It did not end in time; with stacks.
    """
    ranks = len(PLACEMENTS[placement].hosts)
    with tempfile.TemporaryDirectory(dir=lab.scratch) as folder:
        done = start(lab, Path(folder), program, *arguments, by=by, placement=placement, timeout=timeout)
        results = results_in(Path(folder))
    if done.returncode != 0 or len(results) != ranks:
        raise JobError(
            f"{program} by {by}: status {done.returncode}, results of ranks {sorted(results)} of {ranks}\n"
            f"{done.stdout}\n{done.stderr}"
        )
    return [results[rank] for rank in range(ranks)]


def start(
    lab: Lab,
    folder: Path,
    program: str | Path,
    *arguments: object,
    by: str = "mpirun",
    flags: Sequence[str] = (),
    placement: str = "block",
    env: Mapping[str, str] | None = None,
    timeout: float = 90.0,
) -> subprocess.CompletedProcess[str]:
    """Run a program as ``launch`` does, with its results in ``folder``; returns what it printed, whatever its status.

    Args:
        folder: An empty one that all hosts see.
        program: Its name, or that of a file that all hosts see.
        flags: More of mpirun's options.
        env: Environment variables to add.

    Raises:
        TimeoutError: It did not end in time; with stacks.
    """
    places = PLACEMENTS[placement]
    # The hosts' virtual CPUs are the same few real ones; the ranks cannot see that there are too few.
    full = child_environment({"OMPI_MCA_mpi_yield_when_idle": "1", "RESULTS": str(folder), **(env or {})})
    allocation = [f"--nodes={lab.settings.hosts}", "--ntasks-per-node=2"]
    file = program if isinstance(program, Path) else PROGRAMS / f"{program}.py"
    command = [sys.executable, str(file), *map(str, arguments)]
    if by == "mpirun":
        command = ["salloc", "--quiet", *allocation, *mpirun_command(), *flags, *places.mpirun, *command]
    else:
        full |= SRUN_SETTINGS
        if "--distribution=arbitrary" in places.srun:
            hostfile = folder / "hosts"
            hostfile.write_text("".join(f"node{host}\n" for host in places.hosts))
            full["SLURM_HOSTFILE"] = str(hostfile)
            allocation = []
        command = ["srun", "--mpi=pmix", *allocation, *places.srun, *command]
    return lab.run("login", command, env=full, timeout=timeout)


def results_in(folder: Path) -> dict[int, Any]:
    """Return the results that ranks have left so far."""
    return {int(path.stem): json.loads(path.read_text()) for path in folder.glob("*.json")}
