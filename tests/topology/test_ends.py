"""How a job ends when one rank fails or is interrupted: soon, with one traceback that names the rank, not with 0."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.ranks.jobs import child_environment, mpirun_command, run_script
from tests.support.speed import scaled

pytestmark = [pytest.mark.jobs, pytest.mark.one_rank]

# From the moment when the rank fails to the end of mpirun.
LIMIT_SECONDS = scaled(5.0)

BEGIN = """
import atexit, os, signal, sys, threading, time
import numpy as np
import mpidist
from mpi4py import MPI
comm = mpidist.Communicator()
def now():
    print("at", time.monotonic(), flush=True)
"""
FAILURES = {
    "between calls": """
def fails():
    now()
    raise ArithmeticError("only here")
""",
    "in run": """
strategy = mpidist.MultiWorkerMirroredStrategy()
def step():
    if comm.rank == 1:
        now()
        raise ArithmeticError("only here")
    return mpidist.get_replica_context().all_reduce("SUM", 1.0)
def fails():
    try:
        strategy.run(step)
    finally:
        time.sleep(1)       # the others have their PeerError meanwhile
""",
    "in a collective": """
def fails():
    def handler(*_):
        now()
        raise ArithmeticError("only here")
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    other = mpidist.Communicator()
    other.all_reduce("SUM", np.ones(1000))
""",
    "in a thread": """
def fails():
    def read():
        now()
        raise ArithmeticError("only here")
    thread = threading.Thread(target=read, name="reader")
    thread.start()
    thread.join()
    time.sleep(60)
""",
}
BYSTANDERS = {
    "in a collective": """
    if sys.argv[1] == "in run":
        strategy.run(step)
    if sys.argv[1] == "in a collective":
        other = mpidist.Communicator()
    comm.all_reduce("SUM", 1.0)
""",
    "in MPI": """
    MPI.COMM_WORLD.Recv(np.empty(1), source=1)
""",
    "computing": """
    while True:
        np.ones(1000).sum()
""",
}


PAIRS = [*((failure, "in a collective") for failure in FAILURES), ("between calls", "in MPI"), ("in run", "computing")]


@pytest.mark.parametrize(("failure", "doing"), PAIRS)
def test_one_traceback_and_the_end(failure: str, doing: str) -> None:
    program = BEGIN + FAILURES[failure] + "if comm.rank == 1:\n    fails()\nelse:" + BYSTANDERS[doing]
    job = run_script(program, 3, failure)
    ended = time.monotonic()
    assert job.returncode not in (0, None)
    failed = next(float(line.split()[1]) for line in job.stdout.splitlines() if line.startswith("at "))
    assert ended - failed < LIMIT_SECONDS
    assert "rank 1 of 3 on host " in job.stderr
    assert job.stderr.count("ArithmeticError: only here") == 1
    assert job.stderr.count("Traceback") == 1
    assert "most recent call first" not in job.stderr
    assert "rank 0 of 3" not in job.stderr
    assert "rank 2 of 3" not in job.stderr


def test_a_rank_that_exits_with_a_code() -> None:
    program = BEGIN + "if comm.rank == 1:\n    now()\n    sys.exit(3)\ncomm.barrier()\n"
    job = run_script(program, 3)
    ended = time.monotonic()
    assert job.returncode not in (0, None)
    assert ended - float(job.stdout.split()[1]) < LIMIT_SECONDS
    assert "rank 0 was in barrier" in job.stderr
    assert "when rank 1 has left the program" in job.stderr
    assert "Traceback" not in job.stderr


def test_the_code_of_a_rank_that_exits_when_nobody_waits_for_it() -> None:
    program = BEGIN + "if comm.rank == 1:\n    sys.exit(3)\ntime.sleep(0.5)\nprint('work is done')\n"
    job = run_script(program, 3)
    assert job.returncode == 3
    assert job.stdout.split("\n").count("work is done") == 2


def test_what_python_ignores_is_printed_with_the_rank() -> None:
    program = (
        BEGIN
        + """
class Broken:
    def __del__(self):
        raise ArithmeticError("in del")
def at_the_end():
    raise ArithmeticError("at the end")
if comm.rank == 1:
    Broken()
    atexit.register(at_the_end)
    stopped = threading.Thread(target=sys.exit)
    stopped.start()
    stopped.join()
comm.barrier()
print("work is done")
"""
    )
    job = run_script(program, 2)
    assert job.returncode == 0, job.stderr
    assert job.stdout.split("\n").count("work is done") == 2
    assert job.stderr.count("rank 1 of 2 on host ") == 2
    assert "ArithmeticError: in del" in job.stderr
    assert "ArithmeticError: at the end" in job.stderr


def test_turned_off_a_thread_may_fail() -> None:
    program = BEGIN + FAILURES["in a thread"].replace("time.sleep(60)", "") + "fails()\nprint('work is done')"
    job = run_script(program, 2, env={"MPIDIST_ABORT_ON_EXCEPTION": "0"})
    assert job.returncode == 0, job.stderr
    assert job.stdout.count("work is done") == 2


READY = (
    BEGIN
    + """
open(f"{sys.argv[1]}/{comm.rank}", "w").write(str(os.getpid()))
if comm.rank == 0:
    comm.barrier()
while True:
    time.sleep(1)
"""
)


@pytest.mark.parametrize("whom", ["mpirun", "the terminal", "a rank"])
def test_an_interrupt_ends_the_job(tmp_path: Path, whom: str) -> None:
    """Ctrl-C goes to the launcher; of the whole process group where a shell script has started it."""
    program = tmp_path / "program.py"
    program.write_text(READY)
    job = subprocess.Popen(
        [*mpirun_command(), "-n", "3", sys.executable, str(program), str(tmp_path)],
        env=child_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        pids = [_read(tmp_path / str(rank)) for rank in range(3)]
        start = time.monotonic()
        if whom == "mpirun":
            job.send_signal(signal.SIGINT)
        elif whom == "the terminal":
            os.killpg(job.pid, signal.SIGINT)
        else:
            os.kill(pids[1], signal.SIGINT)
        _, stderr = job.communicate(timeout=scaled(30))
        assert time.monotonic() - start < LIMIT_SECONDS
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
    assert job.returncode != 0
    assert "most recent call first" not in stderr
    assert stderr.count("Traceback") <= 1
    if whom == "a rank":
        assert "rank 1 of 3 on host " in stderr
        assert "KeyboardInterrupt" in stderr


def _read(path: Path) -> int:
    give_up = time.monotonic() + scaled(30)
    while not path.exists() or not path.read_text():
        assert time.monotonic() < give_up, f"the ranks did not write {path}"
        time.sleep(0.05)
    return int(path.read_text())
