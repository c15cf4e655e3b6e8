"""Closed communicators raise on use, may be closed twice, and keep the arrays that they returned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist import Communicator
from tests.support.ranks.jobs import run_script

pytestmark = [pytest.mark.nodes, pytest.mark.counts]

CALLS: dict[str, Callable[[Communicator], Any]] = {
    "all_reduce": lambda c: c.all_reduce("SUM", 1.0),
    "all_reduce_async": lambda c: c.all_reduce_async("SUM", np.ones(1000)),
    "reduce": lambda c: c.reduce("SUM", 1.0),
    "reduce_scatter": lambda c: c.reduce_scatter("SUM", np.ones(1000)),
    "all_gather": lambda c: c.all_gather(np.ones(3)),
    "broadcast": lambda c: c.broadcast(1.0),
    "barrier": lambda c: c.barrier(),
    "barrier_async": lambda c: c.barrier_async(),
    "all_gather_object": lambda c: c.all_gather_object(1),
    "broadcast_object": lambda c: c.broadcast_object(1),
    "empty": lambda c: c.empty(3),
    "split": lambda c: c.split(0),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_closed_communicator_says_so(call: str) -> None:
    comm = Communicator()
    comm.close()
    comm.close()
    with pytest.raises(RuntimeError, match="this Communicator can no longer be used: it has been closed"):
        CALLS[call](comm)
    assert "closed" in repr(comm)


def test_errors_keep_the_fast_path_closed() -> None:
    comm, value = Communicator(), np.ones(3)
    for _ in range(3):
        comm.all_reduce("SUM", value)
    comm.close()
    for _ in range(2):
        for call in (comm.barrier, lambda: comm.all_reduce("SUM", value)):
            with pytest.raises(RuntimeError, match="it has been closed"):
                call()


@pytest.mark.min_ranks(2)
def test_a_message_that_nobody_receives(capfd: pytest.CaptureFixture[str]) -> None:
    """Otherwise the next communicator, to which Open MPI gives the same number, receives it, and then hangs."""
    for _ in range(5):
        comm = Communicator()
        if comm.rank == 1:
            comm.send(np.ones(3), dest=0, tag=7)
            comm.send(np.ones(3), dest=0, tag=8)
        if comm.rank == 0:
            comm.recv(np.empty(3), source=1, tag=8)
        comm.close()
        with Communicator() as after, mpidist.MultiWorkerMirroredStrategy() as strategy:
            assert after.all_reduce("SUM", 1) == after.size
            assert strategy.reduce("SUM", 1.0, axis=None) == after.size
            told = capfd.readouterr().err
            if after.rank == 0:
                assert "without receiving 1 message(s), the first from rank 1 with tag 7. Call recv() for" in told


@pytest.mark.min_ranks(2)
def test_late_messages_of_service_threads() -> None:
    for _ in range(20):
        with Communicator() as comm:
            agreement = comm.step_agreement()
            if comm.rank == comm.size - 1:
                agreement.ask_for("an act")
            agreement.close()
            agreement = comm.step_agreement()
            if comm.rank == 0:
                agreement.ask_for("another")
            steps = 0
            while not agreement.step_done():
                steps += 1
                comm.barrier()
            assert len(set(comm.all_gather_object(steps))) == 1
            agreement.close()


def test_what_a_communicator_has_given_stays() -> None:
    comm = Communicator()
    own = comm.empty(100_000)
    own[:] = 1.0
    total = comm.all_reduce("SUM", own)
    done, under_way = comm.all_reduce_async("SUM", 1.0), comm.all_reduce_async("SUM", np.ones(100_000))
    assert done.wait() == comm.size
    size = comm.size
    comm.close()
    assert under_way.done()
    np.testing.assert_array_equal(under_way.wait(), size)
    np.testing.assert_array_equal(total, size)
    np.testing.assert_array_equal(own, 1.0)


def test_communicators_are_closed_in_any_order() -> None:
    first, second = Communicator(), Communicator()
    part = first.split(0)
    assert part is not None
    first.close()
    assert part.all_reduce("SUM", 1) == part.size
    third = Communicator()
    second.close()
    part.close()
    assert third.all_reduce("SUM", 1) == third.size
    third.close()


@pytest.mark.jobs
@pytest.mark.one_rank
def test_a_program_may_finalize_mpi() -> None:
    program = """
    import sys, time, mpidist
    from mpi4py import MPI
    comm = mpidist.Communicator()
    work = comm.all_reduce_async("SUM", 1.0)
    if comm.rank == 1:
        MPI.Finalize()
        try:
            comm.barrier()
        except Exception as error:
            print(type(error).__name__, error, flush=True)
        sys.exit()
    print(work.wait(), flush=True)
    try:
        comm.barrier()
    except mpidist.PeerError as error:
        print(error, flush=True)
    MPI.Finalize()
    """
    job = run_script(program, 2)
    assert job.returncode == 0, job.stderr
    assert "Traceback" not in job.stderr
    assert "2.0\nrank 0 was in barrier" in job.stdout
    assert "when rank 1 has left the program" in job.stdout
    assert "RuntimeError Collective called during shutdown" in job.stdout
