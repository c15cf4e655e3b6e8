"""``python -m mpidist launch``, and the launch check, in the shell of ``srun --pty``, where an mpirun would hang."""

from __future__ import annotations

import sys

import pytest

from tests.cluster.jobs import SRUN_SETTINGS
from tests.cluster.lab import Lab
from tests.support.ranks.jobs import child_environment

pytestmark = pytest.mark.cluster

SIZE = "import mpidist; world = mpidist.Communicator(); print('a world of', world.size); world.close()"


def test_a_shell_of_srun(lab: Lab) -> None:
    script = lab.scratch / "shell.sh"
    script.write_text(
        f"{sys.executable} -m mpidist launch -n 4 train.py\n"
        f'{sys.executable} -c "{SIZE}"\n'
        f'srun --mpi=pmix --overlap -n 4 {sys.executable} -c "{SIZE}"\n'
    )
    env = child_environment({"OMPI_MCA_mpi_yield_when_idle": "1", **SRUN_SETTINGS})
    terminal = ["script", "--quiet", "--command", f"srun --nodes=2 --ntasks-per-node=2 --pty sh {script}", "/dev/null"]
    said = lab.run("login", terminal, env=env).stdout
    assert "this is a shell that srun --pty started. It holds the resources that mpirun would wait for." in said
    assert "srun started 4 ranks (SLURM_STEP_NUM_TASKS=4)" in said
    assert "Type: srun --mpi=pmix --overlap -n 4 python ..." in said
    assert said.count("a world of 4") == 4


HOSTS = """
import os, socket, mpidist
with mpidist.Communicator() as comm:
    told = comm.all_gather_object((socket.gethostname(), os.environ["MPIDIST_REPORT"], os.environ["OMP_NUM_THREADS"]))
    if comm.rank == 0:
        print(told)
"""


def test_a_hostfile_without_slurm(lab: Lab) -> None:
    # In place of ssh. mpirun must not detect the job of Slurm.
    agent = lab.scratch / "agent.sh"
    agent.write_text('#!/bin/sh\nhost=$1; shift\nexec srun --jobid=$JOB --overlap -n1 -N1 -w $host sh -c "$*"\n')
    agent.chmod(0o755)
    (lab.scratch / "hosts").write_text("node0 slots=2\nnode1 slots=2\n")
    (lab.scratch / "hosts.py").write_text(HOSTS)
    script = lab.scratch / "launch.sh"
    script.write_text(
        "export JOB=$SLURM_JOB_ID MPIDIST_REPORT=0\n"
        "unset $(env | grep -o '^SLURM_[A-Z_]*') OMP_NUM_THREADS PRTE_MCA_rmaps_default_mapping_policy\n"
        f"cd {lab.scratch}\n"
        f"exec {sys.executable} -m mpidist launch --hostfile hosts --mca plm_ssh_agent {agent} hosts.py\n"
    )
    env = child_environment({"OMPI_MCA_mpi_yield_when_idle": "1"})
    start = ["salloc", "--quiet", "--nodelist=node0,node1", "--nodes=2", "--ntasks-per-node=2", "sh", str(script)]
    done = lab.run("login", start, env=env)
    assert done.stdout.strip() == str([(host, "0", "1") for host in ("node0", "node0", "node1", "node1")]), done.stderr
