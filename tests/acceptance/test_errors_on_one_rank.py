"""An error on one rank never leaves another waiting."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from tests.support.ranks.jobs import ROOT, child_environment, run_alone, run_script
from tests.support.ranks.pool import run
from tests.support.speed import scaled

pytestmark = [pytest.mark.jobs, pytest.mark.one_rank]

CALLS = (
    "reduce along a bad axis",
    "all_reduce of a bad dtype",
    "all_gather of a scalar",
    "assignment of a bad shape",
)


def fail_on_rank_0_then_go_on(which: str, local: int) -> tuple[str, str, str]:
    """Return the type and text of the error that this rank got, and what the next reduce gives."""
    import numpy as np
    from mpi4py import MPI

    import mpidist

    first = MPI.COMM_WORLD.rank == 0
    # The deadline only keeps this test short: nobody should come to wait.
    options = mpidist.experimental.CommunicationOptions(timeout_seconds=1.5)
    devices = [f"cpu:{k}" for k in range(local)]
    strategy = mpidist.MultiWorkerMirroredStrategy(communication_options=options, devices=devices)
    with strategy.scope():
        variable = mpidist.Variable(np.zeros(2), aggregation=mpidist.VariableAggregation.SUM)
    context = mpidist.get_replica_context
    calls = {
        "reduce along a bad axis": lambda: strategy.reduce(
            "SUM",
            strategy.experimental_distribute_values_from_function(lambda _: np.zeros(2)),
            axis=5 if first else 0,
        ),
        "all_reduce of a bad dtype": lambda: strategy.run(
            lambda: context().all_reduce("SUM", np.zeros(1, object if first else float))
        ),
        "all_gather of a scalar": lambda: strategy.run(
            lambda: context().all_gather(np.zeros(() if first else 1), axis=0)
        ),
        "assignment of a bad shape": lambda: strategy.run(lambda: variable.assign(np.zeros(3 if first else 2))),
    }
    try:
        calls[which]()
        name, text = "nothing", ""
    except Exception as error:
        name, text = type(error).__name__, str(error)
    try:
        after = str(strategy.reduce("SUM", strategy.run(lambda: 1), axis=None))
    except Exception as error:
        after = f"{type(error).__name__}: {error}"
    strategy.close()
    return name, text, after


@pytest.mark.parametrize("which", CALLS)
def test_an_error_in_the_data_of_one_rank_reaches_all_and_the_strategy_goes_on(which: str) -> None:
    own, told = run(fail_on_rank_0_then_go_on, 2, which, 1, timeout=20.0)
    assert own[0] in ("ValueError", "TypeError")
    assert told[0] == "PeerError"
    assert own[0] in told[1]
    assert "rank 0" in told[1]
    assert (own[2], told[2]) == ("2", "2")


def test_an_uncaught_exception_prints_its_rank_and_ends_the_job() -> None:
    done = run_script(
        """
        import mpidist
        strategy = mpidist.MultiWorkerMirroredStrategy()
        def step():
            context = mpidist.get_replica_context()
            if context.replica_id_in_sync_group == 1:
                raise ZeroDivisionError("only here")
            return context.all_reduce("SUM", 1.0)
        strategy.run(step)
        """,
        2,
        timeout=scaled(30),
    )
    assert done.returncode != 0
    assert "rank 1" in done.stderr
    assert "ZeroDivisionError: only here" in done.stderr


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
