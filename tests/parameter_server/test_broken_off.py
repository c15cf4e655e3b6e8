"""Requests that are given up: their arrays are the caller's again, late errors are said, both sides stay in step."""

from __future__ import annotations

import subprocess

import pytest

from tests.support.ranks.jobs import run_script
from tests.support.speed import deadlines

pytestmark = [pytest.mark.jobs, pytest.mark.one_rank, pytest.mark.timeout(120)]

BEGINNING = """
import contextlib, os, signal, sys
import numpy as np
import mpidist
from mpidist.cluster_resolver import MPIClusterResolver
from mpi4py import MPI
resolver = MPIClusterResolver(jobs={"ps": 1, "worker": 1})
pids = MPI.COMM_WORLD.allgather(os.getpid())
if resolver.task_type == "ps":
    mpidist.Server(resolver).join()
    sys.exit()
strategy = mpidist.v1.experimental.ParameterServerStrategy(resolver)

@contextlib.contextmanager
def server_stopped():
    os.kill(pids[0], signal.SIGSTOP)
    try: yield
    finally: os.kill(pids[0], signal.SIGCONT)

def give_up(call):
    try: call()
    except mpidist.CollectiveTimeoutError: print("gave up", flush=True)
"""


def after(script: str) -> subprocess.CompletedProcess[str]:
    return run_script(BEGINNING + script, 2, env=deadlines(2), timeout=60)


def test_arrays_of_a_request_that_was_given_up_may_change() -> None:
    job = after(
        """
with strategy.scope():
    v, small = mpidist.Variable(np.zeros(1 << 22), name="v"), mpidist.Variable(0, name="small")
mine = np.ones(1 << 22)
with server_stopped():
    give_up(lambda: v.assign_add(mine))
    mine[:] = 2.0
print("unchanged", np.unique(v.numpy()), flush=True)
v.assign_add(mine)
small.assign_add(1)
print("as always", np.unique(v.numpy()), small.numpy(), flush=True)
with server_stopped():
    give_up(v.numpy)
v.assign_add(mine)
print("and again", np.unique(v.numpy()), flush=True)
"""
    )
    assert job.returncode == 0, job.stderr
    assert job.stdout.splitlines() == [
        "gave up", "unchanged [0.]", "as always [2.] 1", "gave up", "and again [4.]",
    ]  # fmt: skip
    assert "not waited for" not in job.stderr


def test_changes_right_after_an_interrupt_are_not_sent() -> None:
    job = after(
        """
from mpidist.parameter_server import transport
with strategy.scope():
    v = mpidist.Variable(np.zeros(1 << 20), name="v")
zeros, real, seen = np.zeros(1 << 20), transport.MessagePipe.has_come, set()
def interrupted(pipe):
    global polls
    polls -= 1
    if polls < 0: raise KeyboardInterrupt
    return real(pipe)
for polls in range(0, 300, 3):
    mine = np.ones(1 << 20)
    transport.MessagePipe.has_come = interrupted
    try: v.assign_add(mine)
    except KeyboardInterrupt: mine[:] = 1000.0
    transport.MessagePipe.has_come = real
    seen.update(np.unique(v.numpy()))
    v.assign(zeros)
print(max(seen) <= 1.0, flush=True)
"""
    )
    assert job.returncode == 0, job.stderr
    assert job.stdout.splitlines() == ["True"]


def test_a_late_error_is_said() -> None:
    job = after(
        """
with strategy.scope():
    v = mpidist.Variable(np.zeros(3, bool), name="v")
with server_stopped():
    give_up(lambda: v.assign_sub(np.ones(3, bool)))
print("value", v.numpy(), flush=True)
"""
    )
    assert job.returncode == 0, job.stderr
    assert job.stdout.splitlines() == ["gave up", "value [False False False]"]
    said = "mpidist: a request that was not waited for: assign_sub() of variable 'v' failed at ps 0 (rank 0): "
    assert job.stderr.count(said) == 1


def test_interrupted_receives_keep_the_connection() -> None:
    job = after(
        """
from mpidist.parameter_server import transport
with strategy.scope():
    v = mpidist.Variable(np.ones((1 << 16, 2)), name="v")
real = transport.MessagePipe._start
def interrupted(*arguments):
    transport.MessagePipe._start = real
    real(*arguments)
    raise KeyboardInterrupt
for ask in (lambda: strategy.extended.link.agree(("k",), b"x" * 100_000, "a test"), v.numpy):
    transport.MessagePipe._start = interrupted
    try: ask()
    except KeyboardInterrupt: print("interrupted", v.numpy().sum(), len(ask()), flush=True)
"""
    )
    assert job.returncode == 0, job.stderr
    assert job.stdout.splitlines() == ["interrupted 131072.0 100000", "interrupted 131072.0 65536"]


def test_failed_receives_end_the_connection() -> None:
    job = after(
        """
class Failing:
    def __init__(self, comm): self.comm = comm
    def __getattr__(self, name): return getattr(self.comm, name)
    def Irecv(self, *_): raise MPI.Exception(MPI.ERR_OTHER)
with strategy.scope():
    v = mpidist.Variable(np.zeros((1 << 16, 2)), name="v")
pipe = strategy.extended.link.connections[0]._pipe
pipe._comm = Failing(pipe._comm)
try: v.numpy()
except MPI.Exception: print("failed", flush=True)
try: v.numpy()
except RuntimeError as error: print(error, flush=True)
"""
    )
    assert job.returncode != 0
    expected = "ps 0 (rank 0) can no longer be asked: the reply to reading variable 'v' was interrupted by Exception"
    assert job.stdout.startswith(f"failed\n{expected}")
    assert "could not take leave of ps 0" in job.stderr
