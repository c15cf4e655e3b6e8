"""Suspended jobs: deadlines do not count the time, while a rank that is stopped alone is found in time."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.support.ranks.jobs import ROOT, child_environment, mpirun_command, run_script
from tests.support.speed import deadlines, scaled

pytestmark = [pytest.mark.one_rank, pytest.mark.jobs]

TIMEOUT_SECONDS = scaled(4.0)
# Rank 0 waits most of the time, in collectives of each kind.
COLLECTIVES = """
import os, time
import numpy as np
import mpidist

comm = mpidist.Communicator()
agreement = comm.step_agreement()
print("rank", comm.rank, "pid", os.getpid(), flush=True)
values = np.ones(200_000, "f4")
for step in range(30):
    if comm.rank:
        time.sleep(0.1)
        if step == 2:
            # Rank 0 has been waiting for a while.
            print("started", flush=True)
            time.sleep(0.1)
    comm.all_reduce("SUM", 1.0)
    comm.all_reduce_async("SUM", values).wait()
    agreement.step_done()
    other = (comm.rank + 1) % comm.size
    if comm.rank:
        comm.send(values, 0)
    elif comm.size == 2:
        comm.recv(values, 1)
print("finished", flush=True)
"""
ONE_RANK_LATE = """
import os, time
import mpidist

comm = mpidist.Communicator()
print("rank", comm.rank, "pid", os.getpid(), flush=True)
comm.barrier()
if comm.rank == comm.size - 1:
    print("started", flush=True)
    time.sleep(600)
comm.all_reduce("SUM", 1.0)
"""


@contextmanager
def started(program: str, ranks: int, timeout: float) -> Iterator[tuple[subprocess.Popen[str], dict[int, int]]]:
    """Start a job; yield its launcher and, once it has started, the process of each rank."""
    job = subprocess.Popen(
        [*mpirun_command(), "-n", str(ranks), sys.executable, "-c", program],
        cwd=ROOT,
        env=child_environment({"MPIDIST_TIMEOUT": str(timeout)}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    pids: dict[int, int] = {}
    try:
        assert job.stdout is not None
        starts = 0
        while len(pids) < ranks or not starts:
            line = job.stdout.readline()
            assert line, "the job ended early"
            pids |= {int(rank): int(pid) for rank, pid in re.findall(r"rank (\d+) pid (\d+)", line)}
            starts += line.count("started")
        yield job, pids
    finally:
        for pid in pids.values():
            if os.path.exists(f"/proc/{pid}"):
                os.kill(pid, signal.SIGKILL)
        job.kill()
        job.communicate()


def test_a_suspended_job_is_resumed() -> None:
    with started(COLLECTIVES, 2, TIMEOUT_SECONDS) as (job, pids):
        for pid in pids.values():
            os.kill(pid, signal.SIGSTOP)
        time.sleep(2 * TIMEOUT_SECONDS)
        for pid in pids.values():
            os.kill(pid, signal.SIGCONT)
            # Rank 0 looks at its deadline while rank 1 is still stopped.
            time.sleep(1.0)
        printed, _ = job.communicate(timeout=scaled(60))
        assert printed.count("finished") == 2, printed
        assert job.returncode == 0


@pytest.mark.parametrize(("ranks", "limit"), [(2, TIMEOUT_SECONDS + 2), pytest.param(32, 60, marks=pytest.mark.long)])
def test_a_rank_that_is_stopped_alone_is_found(ranks: int, limit: float) -> None:
    timeout = TIMEOUT_SECONDS if ranks == 2 else limit / 3
    with started(ONE_RANK_LATE, ranks, timeout) as (job, pids):
        os.kill(pids[ranks - 1], signal.SIGSTOP)
        begin = time.monotonic()
        assert job.stdout is not None
        for line in job.stdout:
            if "CollectiveTimeoutError" in line:
                break
        assert time.monotonic() - begin < limit


ENDING = """
import atexit, os, time
import mpidist

def stop_at_the_end():
    if comm.rank:
        print("started", flush=True)
        time.sleep(600)

# Called last, after mpidist has told the other ranks that this program has ended.
atexit.register(stop_at_the_end)
import mpidist.collectives
comm = mpidist.Communicator()
print("rank", comm.rank, "pid", os.getpid(), flush=True)
comm.barrier()
"""


def test_a_closed_communicator_sets_no_deadline() -> None:
    program = """
    import time, mpidist
    comm = mpidist.Communicator()
    rank = comm.rank
    comm.close()
    if rank == 0:
        time.sleep(4)
        print("evaluated")
    """
    job = run_script(program, 2, env=deadlines(2))
    assert (job.returncode, job.stdout.split()) == (0, ["evaluated"]), job.stderr


def test_finalize_has_a_deadline() -> None:
    with started(ENDING, 2, TIMEOUT_SECONDS) as (job, pids):
        os.kill(pids[1], signal.SIGSTOP)
        begin = time.monotonic()
        assert job.stdout is not None
        printed = ""
        while "MPI_Finalize" not in printed and (line := job.stdout.readline()):
            printed += line
        text = r"rank 0 of 2 ended its program [\d.]+ s ago and has not finished MPI_Finalize; it exits now"
        assert re.search(text, printed)
        assert time.monotonic() - begin < TIMEOUT_SECONDS + 3
