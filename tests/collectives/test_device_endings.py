"""Jobs on GPUs whose end is the question: they end, in time, and say why.

On stand-ins for CuPy and NCCL (see tests/support/fake_cupy).
"""

from __future__ import annotations

import pytest

from tests.support.ranks.jobs import run_script
from tests.support.speed import deadlines, scaled

pytestmark = [pytest.mark.jobs, pytest.mark.one_rank]

BEGIN = """
import sys, time
from tests.support import fake_cupy
cupy = fake_cupy.install(devices=2)
import mpidist
from mpidist.collectives.gpu.nccl import NcclComm
from mpidist.experimental import CommunicationOptions
from tests.support.fake_cupy import nccl
comm = mpidist.Communicator()
cupy.cuda.Device(comm.rank).use()
"""

# A kernel of rank 1 reads where it may not, while the ranks reduce.
FAILING_KERNEL = """
options = CommunicationOptions(algorithm=sys.argv[1])
array = cupy.ones(100_000, "f4")
comm.all_reduce("SUM", array, options=options).get()
def fail(_):
    time.sleep(0.5)
    raise cupy.cuda.runtime.CUDARuntimeError(700)
if comm.rank == 1:
    cupy.cuda.get_current_stream().launch_host_func(fail, None)
comm.all_reduce("SUM", array, options=options).get()
print("rank", comm.rank, "has a result", flush=True)
"""

# The GPU of rank 1 does not take part, as that of a rank that was killed.
ABSENT = """
comm.all_reduce("SUM", cupy.ones(3)).get()
if comm.rank == 1:
    NcclComm.all_reduce = lambda *_: None
result = comm.all_reduce("SUM", cupy.ones(3), options=CommunicationOptions(timeout_seconds=2))
if comm.rank == 1:
    time.sleep(50)
result.get()
print("rank", comm.rank, "has a result", flush=True)
"""

BLOCKING_ABORT = "nccl.abort_waits = True\n"

FAILING_ABORT = """
def abort(self):
    raise nccl.NcclError(1)
nccl.NcclCommunicator.abort = abort
"""

SLOW_KERNELS = """
comm.all_reduce("SUM", cupy.ones(3)).get()
array = cupy.full(1000, comm.rank + 1, "f4")
cupy.cuda.get_current_stream().launch_host_func(time.sleep, float(sys.argv[1]))
result = comm.all_reduce("SUM", array)
assert result.get().tolist() == [3] * 1000
comm.close()
"""

FINALIZING = """
from mpi4py import MPI
comm.all_reduce("SUM", cupy.ones(1000)).get()
MPI.Finalize()
print("rank", comm.rank, "ends", flush=True)
"""


@pytest.mark.parametrize("algorithm", ["nccl", pytest.param("staged", marks=pytest.mark.long), "hierarchical"])
def test_a_kernel_that_fails_ends_the_job(algorithm: str) -> None:
    per_node = 1 if algorithm == "hierarchical" else None
    done = run_script(BEGIN + FAILING_KERNEL, 2, algorithm, env=deadlines(6), ranks_per_node=per_node)
    assert done.returncode != 0
    assert "cudaErrorIllegalAddress" in done.stderr
    assert "has a result" not in done.stdout


@pytest.mark.parametrize(
    "hardship",
    ["", BLOCKING_ABORT, pytest.param(FAILING_ABORT, marks=pytest.mark.long)],
    ids=["", "abort blocks", "abort fails"],
)
def test_the_deadline_of_a_call_ends_the_job_whatever_nccl_does(hardship: str) -> None:
    done = run_script(BEGIN + hardship + ABSENT, 2)
    assert done.returncode != 0
    assert "mpidist: rank 0 ends the job: a collective on its GPU did not end within 2 s" in done.stderr
    assert "has a result" not in done.stdout


def test_kernels_of_the_program_take_as_long_as_they_like() -> None:
    # The deadline covers the start of MPI, which takes longer while the machine does other work.
    done = run_script(BEGIN + SLOW_KERNELS, 2, str(scaled(4)), env=deadlines(3))
    assert done.returncode == 0, done.stderr


def test_a_program_may_finalize_mpi_itself() -> None:
    done = run_script(BEGIN + FINALIZING, 2)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split("\n"))[-2:] == ["rank 0 ends", "rank 1 ends"]
    assert "Traceback" not in done.stderr
