"""An error on one rank never leaves another waiting."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from tests.support.ranks.jobs import ROOT, child_environment, run_alone
from tests.support.speed import scaled

pytestmark = [pytest.mark.jobs, pytest.mark.one_rank]


def late(_: Any = None) -> str:
    """Rank 0 waits for a rank that never comes, with a deadline."""
    from mpi4py import MPI

    import mpidist

    strategy = mpidist.MultiWorkerMirroredStrategy(
        communication_options=mpidist.experimental.CommunicationOptions(timeout_seconds=0.5)
    )
    if MPI.COMM_WORLD.rank == 1:
        MPI.COMM_WORLD.recv(source=0)
        return "did not come"
    try:
        strategy.run(lambda: mpidist.get_replica_context().all_reduce("SUM", 1.0))
    except mpidist.CollectiveTimeoutError as error:
        MPI.COMM_WORLD.send(None, 1)
        return f"{isinstance(error, TimeoutError)} {error}"
    return "no error"


def test_the_deadline_of_a_collective() -> None:
    text, other = run_alone(late, 2, timeout=30)
    assert other == "did not come"
    assert text.startswith("True")
    assert "all_reduce" in text
    assert "timeout" in text.lower()


def test_ranks_that_each_believe_they_are_alone() -> None:
    """The launcher says four ranks, COMM_WORLD has one: an error that names both, before any training."""
    environment = child_environment({"SLURM_NTASKS": "4", "SLURM_PROCID": "1", "SLURM_STEP_ID": "0"})
    environment.update({"SLURM_STEP_NUM_TASKS": "4", "SLURM_JOB_ID": "7"})
    program = "import mpidist; mpidist.MultiWorkerMirroredStrategy()"
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=scaled(60), cwd=ROOT
    )
    assert done.returncode != 0, done.stdout
    assert "LaunchError" in done.stderr
    assert "4" in done.stderr
    assert "1" in done.stderr
