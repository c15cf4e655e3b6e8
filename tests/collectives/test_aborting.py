"""A communicator that one rank leaves without the others."""

from __future__ import annotations

import pytest

from tests.support.ranks.jobs import run_script

pytestmark = [pytest.mark.one_rank, pytest.mark.jobs]

START = """
import threading, time, numpy, mpidist
from mpidist.errors import PeerError
from tests.support.speed import scaled
comm, others = mpidist.Communicator(), mpidist.Communicator()
rank = comm.rank

def ends(call):
    began = time.monotonic()
    try:
        call()
    except (PeerError, RuntimeError) as error:
        assert "abort" in str(error), error
        assert time.monotonic() - began < scaled(5)
        return
    raise AssertionError("it has come to its end")
"""


def run(program: str) -> None:
    job = run_script(START + program + "\nprint('end')", 2)
    assert (job.returncode, job.stdout.split()) == (0, ["end", "end"]), job.stderr


def test_works_and_messages_on_their_way_end() -> None:
    run(
        """
if rank == 0:
    works = [comm.all_reduce_async("SUM", numpy.ones(3)) for _ in range(3)]
    works += [comm.recv_async(numpy.empty(3), 1), comm.send_async(numpy.ones(10_000_000), 1)]
    comm.abort()
    assert all(work.is_done for work in works)
    for work in works:
        ends(work.wait)
    for call in (comm.barrier, lambda: comm.send(numpy.ones(3), 1), lambda: comm.recv(numpy.empty(3))):
        ends(call)
    comm.abort()
    comm.close()
others.barrier()
"""
    )


@pytest.mark.parametrize("call", ["comm.barrier()", 'comm.all_reduce_async("SUM", 1.0).wait()', "comm.recv(out)"])
def test_another_thread_that_waits_is_let_go(call: str) -> None:
    run(
        f"""
out = numpy.empty(3)
if rank == 0:
    threading.Timer(0.3, comm.abort).start()
    ends(lambda: {call})
others.barrier()
"""
    )


def test_the_thread_that_waits_may_abort() -> None:
    """A signal handler must not wait for other ranks."""
    run(
        """
import os, signal
from mpi4py import MPI
if rank == 0:
    signal.signal(signal.SIGUSR1, lambda *_: comm.abort())
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGUSR1)).start()
    ends(comm.barrier)
    MPI.COMM_WORLD.send("aborted", 1)
else:
    # Not in the barrier of the others, or it would be a deadlock.
    MPI.COMM_WORLD.recv(source=0)
others.barrier()
"""
    )


def test_ranks_that_have_come_get_their_results() -> None:
    run(
        """
work = comm.all_reduce_async("SUM", 1.0) if rank == 0 else None
others.barrier()
if rank == 0:
    comm.abort()
    ends(work.wait)
else:
    assert comm.all_reduce("SUM", 1.0) == 2
"""
    )


def test_aborting_a_call_alone_ends_the_job() -> None:
    program = """
work = comm.all_reduce_async("SUM", 1.0) if rank == 0 else None
others.barrier()
if rank == 0:
    comm.abort()
else:
    time.sleep(20)
"""
    job = run_script(START + program, 2)
    assert job.returncode != 0
    assert "rank 0 ends the job: this rank has aborted it" in job.stderr
