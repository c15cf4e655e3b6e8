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
