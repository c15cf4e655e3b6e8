"""Ranks that wait in MPI_Init for one that never comes say so, and end."""

from __future__ import annotations

import pytest

from tests.elastic.test_run import needs_ulfm
from tests.support.ranks.jobs import run_script

pytestmark = [pytest.mark.jobs, pytest.mark.one_rank]

BEFORE = """
import os, signal, sys
import mpidist
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    {act}
{start}
print("started")
"""
LIMITS = {"MPIDIST_WARN_AFTER": "1", "MPIDIST_TIMEOUT": "2"}


@needs_ulfm
@pytest.mark.parametrize(
    ("act", "start"),
    [
        ("sys.exit()", "mpidist.MultiWorkerMirroredStrategy()"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "from mpi4py import MPI"),
    ],
    ids=["a rank that exits", "a rank that is killed"],
)
def test_a_rank_that_never_starts_mpi(act: str, start: str) -> None:
    # Without fault tolerance mpirun may notice by itself, and end the job.
    job = run_script(BEFORE.format(act=act, start=start), 3, env=LIMITS, flags=("--with-ft", "ulfm"))
    assert "started" not in job.stdout
    for rank in (0, 2):
        assert f"mpidist: rank {rank} of 3 on host " in job.stderr
    for said in ("has waited 1 s for MPI to start: another rank", "has waited 2 s for MPI to start, and ends: another"):
        assert job.stderr.count(said) == 2, job.stderr
    assert "Traceback" not in job.stderr


def test_nothing_is_said_where_all_come() -> None:
    program = "import mpidist\nmpidist.MultiWorkerMirroredStrategy().close()\nimport time; time.sleep(1.5)"
    job = run_script(program, 2, env=LIMITS)
    assert (job.returncode, job.stdout, job.stderr) == (0, "", "")
