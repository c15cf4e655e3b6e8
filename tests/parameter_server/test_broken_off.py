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


def test_what_breaks_in_between_receives_ends_the_connection() -> None:
    job = after(
        """
from mpidist.parameter_server import transport
with strategy.scope():
    v = mpidist.Variable(np.zeros((1 << 16, 2)), name="v")
real = transport.MessagePipe._receives
def interrupted(*arguments):
    real(*arguments)
    raise KeyboardInterrupt
transport.MessagePipe._receives = interrupted
try: strategy.extended.link.agree(("k",), b"x" * 100_000, "a test")
except KeyboardInterrupt: print("interrupted", flush=True)
transport.MessagePipe._receives = real
try: v.numpy()
except RuntimeError as error: print(error, flush=True)
"""
    )
    assert job.returncode != 0
    expected = "ps 0 (rank 0) can no longer be asked: the reply to a test was interrupted by KeyboardInterrupt"
    assert job.stdout.startswith(f"interrupted\n{expected}")
    assert "could not take leave of ps 0" in job.stderr
