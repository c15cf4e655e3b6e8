"""Workers and servers that stop, leave or die: the others get the error that says so, or go on, and the job ends."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.elastic.test_run import needs_ulfm
from tests.support.ranks.jobs import ROOT, child_environment, mpirun_command, run_script
from tests.support.speed import deadlines, scaled

pytestmark = [pytest.mark.jobs, pytest.mark.one_rank, pytest.mark.timeout(240)]

ULFM = ("--with-ft", "ulfm")

# Ranks 0 and 1 are servers, the others workers; "a" is on the first server and "b" on the second.
BEGINNING = """
import contextlib, os, signal, sys, threading, time
import numpy as np
import mpidist
from mpidist.cluster_resolver import MPIClusterResolver
from mpi4py import MPI
resolver = MPIClusterResolver(jobs={"ps": 2, "worker": MPI.COMM_WORLD.size - 2})
me = f"{resolver.task_type}{resolver.task_id}"
pids = MPI.COMM_WORLD.allgather(os.getpid())
def say(*what): print(me, *what, flush=True)
def die_while_all_train():
    while len(os.listdir(os.environ["READY"])) < MPI.COMM_WORLD.size - 2:
        time.sleep(0.01)
    time.sleep(0.3)  # in the middle of many a request
    os.kill(os.getpid(), signal.SIGKILL)
if me == "ps0" and len(sys.argv) > 1 and sys.argv[1] == "ps0":
    threading.Thread(target=die_while_all_train).start()
if resolver.task_type == "ps":
    mpidist.Server(resolver).join()
    say("served", threading.active_count())
    sys.exit()
strategy = mpidist.v1.experimental.ParameterServerStrategy(resolver)
with strategy.scope():
    a, b = mpidist.Variable(np.zeros(4), name="a"), mpidist.Variable(np.zeros(4), name="b")
"""

LOSING = (
    BEGINNING
    + """
def die(how):
    if how == "raise": raise KeyError("a bug")
    if how == "exit": sys.exit(3)
    # In the middle of many a request.
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start()

open(os.path.join(os.environ["READY"], me), "w").close()
if me == sys.argv[1]: die(sys.argv[2])
began = time.monotonic()
# As many as it takes for the one that dies to be gone; the others' steps go on after it.
with contextlib.ExitStack() as stack:
    try:
        while time.monotonic() - began < 2:
            a.assign_add(np.ones(4))
            b.assign_add(np.ones(4))
    except mpidist.PeerError as error:
        say(type(error).__name__, error)
        try: a.assign_add(np.ones(4))
        except mpidist.PeerError as again: say("again", type(again).__name__)
say("b", b.numpy()[0] > 0)
"""
)


def losing(who: str, how: str = "kill", ranks: int = 5, flags: Sequence[str] = ()) -> subprocess.CompletedProcess[str]:
    # Whoever waited for what was lost would be killed at this limit.
    with tempfile.TemporaryDirectory() as ready:
        return run_script(LOSING, ranks, who, how, flags=flags, timeout=60, env={"READY": ready})


@needs_ulfm
def test_a_worker_is_killed_and_the_others_go_on() -> None:
    job = losing("worker1", flags=ULFM)
    assert job.returncode == 0, job.stderr
    assert job.stderr.count("worker 1 (rank 3) was lost; this server ") == 2
    for line in ("worker0 b True", "worker2 b True", "ps0 served 1", "ps1 served 1"):
        assert line in job.stdout
    assert "RankLostError" not in job.stdout


@needs_ulfm
def test_a_server_is_killed_and_its_workers_are_told() -> None:
    job = losing("ps0", flags=ULFM)
    for worker in ("worker0", "worker1", "worker2"):
        assert f"{worker} RankLostError ps 0 (rank 0) was lost while this process waited for it in" in job.stdout
        assert f"{worker} again RankLostError" in job.stdout
        assert f"{worker} b True" in job.stdout
    assert "ps1 served 1" in job.stdout


@pytest.mark.parametrize("who", ["worker1", pytest.param("ps0", marks=pytest.mark.long)])
def test_without_fault_tolerance_the_launcher_ends_the_job(who: str) -> None:
    job = losing(who, ranks=4)
    assert job.returncode != 0
    assert "served" not in job.stdout
    assert "signal 9" in job.stderr or "KILLED" in job.stderr


def test_a_worker_that_raises_ends_the_job() -> None:
    job = losing("worker1", "raise", ranks=4)
    assert job.returncode != 0
    assert "rank 3 of 4" in job.stderr
    assert "KeyError: 'a bug'" in job.stderr


@pytest.mark.long
def test_a_worker_that_ends_early_leaves_the_others_their_servers() -> None:
    job = losing("worker1", "exit", ranks=4)
    assert job.returncode == 3, job.stderr
    for line in ("worker0 b True", "ps0 served 1", "ps1 served 1"):
        assert line in job.stdout


# Stopped processes --------------------------------------------------------------------------------------------------

STOPPING = (
    BEGINNING
    + """
with strategy.scope():
    big = mpidist.Variable(np.zeros(8 << 20), name="big")
    with strategy.extended.colocate_vars_with(big):
        small, rounds = mpidist.Variable(0, name="small"), mpidist.Variable(0, name="rounds")
strategy.barrier()
if me == "worker1":
    while rounds.numpy() < 5:
        # 64 MiB on their way each time that this process is stopped, there or back.
        big.assign(np.full(8 << 20, 1.0))
        assert big.numpy()[-1] == 1.0
        small.assign_add(0)
    sys.exit()
for number in range(5):
    time.sleep(0.02 * number)
    os.kill(pids[3], signal.SIGSTOP)
    for _ in range(100):
        small.assign_add(1)
    time.sleep(0.1)
    assert big.numpy().shape == (8 << 20,)
    os.kill(pids[3], signal.SIGCONT)
    rounds.assign_add(1)
strategy.barrier()  # until the other has left
say("small", int(small.numpy()))

# A server that is stopped: a report, the deadline, and the request is carried out all the same, once.
@contextlib.contextmanager
def server_stopped():
    os.kill(pids[0], signal.SIGSTOP)
    try: yield
    finally: os.kill(pids[0], signal.SIGCONT)

with server_stopped():
    try: a.assign_add(np.ones(4))
    except mpidist.CollectiveTimeoutError as error: say(type(error).__name__, error)
    try: strategy.extended.read_all([a, b])
    except mpidist.CollectiveTimeoutError as error: say("second", type(error).__name__)
say("a", a.numpy()[0], b.numpy()[0])

# What breaks into a wait for a reply, of 64 MiB as well.
class Alarm(Exception): pass
def ring(*_): raise Alarm
signal.signal(signal.SIGALRM, ring)
with server_stopped():
    for call in (lambda: a.assign_add(np.ones(4)), big.numpy, lambda: strategy.extended.read_all([a, b, big])):
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        try: call()
        except Alarm: say("alarm")
say("a", *strategy.extended.read_all([a, b])[0], big.numpy().sum())
assert threading.active_count() == 1, threading.enumerate()
# Ends without strategy.close().
"""
)


@pytest.mark.long
def test_stopped_workers_and_servers() -> None:
    job = run_script(STOPPING, 4, env=deadlines(4, 1), timeout=120)
    assert job.returncode == 0, job.stderr
    lines = [line for line in job.stdout.splitlines() if line.startswith("worker0")]
    assert lines[0] == "worker0 small 500"
    assert lines[1].startswith("worker0 RequestTimeoutError rank 2 waited 4.")
    assert "s for ps 0 (rank 0) in assign_add() of variable 'a', at " in lines[1]
    assert lines[2:4] == ["worker0 second RequestTimeoutError", "worker0 a 1.0 0.0"]
    assert lines[4:7] == ["worker0 alarm"] * 3
    assert lines[7] == f"worker0 a 2.0 2.0 2.0 2.0 {float(8 << 20)}"
    assert re.search(r"rank 2 has waited \d+ s for ps 0 \(rank 0\) in assign_add\(\) of variable 'a', at ", job.stderr)
    assert job.stdout.count("served 1") == 2


NEVER_ANSWERS = (
    BEGINNING
    + """
os.kill(pids[1], signal.SIGSTOP)
try: b.assign_add(np.ones(4))
except mpidist.CollectiveTimeoutError: say("gave up")
"""
)


@pytest.mark.long
def test_a_server_that_never_comes_back_does_not_keep_the_job() -> None:
    job = run_script(NEVER_ANSWERS, 3, env=deadlines(2, 1), timeout=60)
    assert job.returncode != 0
    assert "worker0 gave up" in job.stdout
    assert "rank 2 ends the job: it could not take leave of ps 1 (rank 1)" in job.stderr


def test_a_worker_that_never_comes() -> None:
    script = """
    import time, mpidist
    from mpidist.cluster_resolver import MPIClusterResolver
    resolver = MPIClusterResolver(jobs={"ps": 1, "worker": 2})
    try:
        if resolver.task_type == "ps": mpidist.Server(resolver).join()
        elif resolver.task_id == 0: mpidist.v1.experimental.ParameterServerStrategy(resolver)
        else:
            deadline = time.monotonic() + 60
            while time.monotonic() < deadline: time.sleep(0.1)
    except mpidist.CollectiveTimeoutError as error:
        print(resolver.task_type, error, flush=True)
        raise
    """
    job = run_script(script, 3, env=deadlines(2, 1), timeout=50)
    assert job.returncode != 0
    assert re.search(r"has waited \d+ s for the other ranks in", job.stderr)
    assert re.search(r"(ps rank 0|worker rank 1) waited [\d.]+ s", job.stdout)


# Ctrl-C -------------------------------------------------------------------------------------------------------------

ENDLESS = (
    BEGINNING
    + """
open(sys.argv[1] + me, "w").close()
while True: a.assign_add(np.ones(4))
"""
)


def test_ctrl_c_ends_everything(tmp_path: Path) -> None:
    script = tmp_path / "endless.py"
    script.write_text(ENDLESS)
    command = [*mpirun_command(), "-n", "4", sys.executable, str(script), str(tmp_path) + "/"]
    with subprocess.Popen(command, cwd=ROOT, env=child_environment(), start_new_session=True) as job:
        try:
            deadline = time.monotonic() + 60
            while len(list(tmp_path.glob("worker*"))) < 2:
                assert time.monotonic() < deadline, "the workers did not begin"
                time.sleep(0.05)
            os.killpg(job.pid, signal.SIGINT)
            assert job.wait(scaled(10)) != 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
