"""The fast path between Python and the core: memory, threads, signals, and calls that must not use it."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpidist
from mpidist import Communicator
from mpidist.collectives import Observer
from mpidist.core.settings import RANKS_PER_NODE
from tests.support.ranks.cores import needs_core
from tests.support.ranks.jobs import run_script
from tests.support.speed import deadlines

pytestmark = [
    needs_core,
    pytest.mark.skipif(RANKS_PER_NODE.read() is not None, reason="the fast path needs one node"),
]


def known(comm: Communicator, count: int) -> np.ndarray:
    """Return an array whose all-reduce has been before."""
    array = np.ones(count)
    comm.all_reduce("SUM", array)
    return array


def test_a_communicator_is_freed() -> None:
    comm = Communicator()
    known(comm, 1000)
    comm.all_reduce("SUM", np.ones(1000))
    gone = weakref.ref(comm)
    comm.close()
    del comm
    gc.collect()
    assert gone() is None


def test_one_rank_uses_the_fast_path_and_copies() -> None:
    with Communicator(MPI.COMM_SELF) as comm:
        given = np.arange(3, dtype=np.int32)
        for out in (None, np.zeros(3, np.int32), given):
            before = comm.all_reduce("MAX", given)
            count = comm._channel.executor.fast.count
            result = comm.all_reduce("MAX", given, out=out)
            assert comm._channel.executor.fast.count == count + 1
            assert comm.last_algorithm == "alone"
            assert result is not before
            assert result is out or not np.shares_memory(result, given)
            np.testing.assert_array_equal(result, [0, 1, 2])
        assert comm.all_reduce("MEAN", given).dtype == np.float64


def test_a_wrong_root_raises_again() -> None:
    with Communicator() as comm:
        for _ in range(2):
            comm.broadcast(np.ones(3), 0)
        with pytest.raises(ValueError, match="expected a rank from 0"):
            comm.broadcast(np.ones(3), 1 << 32)


def test_what_was_learnt_is_what_the_call_took() -> None:
    """Works are waited for in another order on each rank, and only one of the sizes goes through the core."""
    options = mpidist.experimental.CommunicationOptions(algorithm="mpi")
    with Communicator() as comm, Communicator(options=options) as by_mpi:
        works = [comm.all_reduce_async("SUM", np.ones(10)), by_mpi.all_reduce_async("SUM", np.ones(10))]
        for work in works if comm.rank % 2 else reversed(works):
            work.wait()
        for _ in range(3):
            np.testing.assert_array_equal(by_mpi.all_reduce("SUM", np.ones(10)), comm.size)
            assert by_mpi.last_algorithm == "mpi"


@pytest.mark.min_ranks(2)
def test_arrays_in_nests_are_other_calls() -> None:
    """Whose ids the calls of one array must not have: ranks with other numbers of rows have not learnt them."""
    with Communicator() as comm:
        rows = np.ones(3 + comm.rank)
        for _ in range(2):
            comm.all_gather({"rows": rows})
        assert comm.all_gather(rows[: 3 + comm.rank // 2]).size == sum(3 + rank // 2 for rank in range(comm.size))
        assert comm.all_gather(np.ones(3)).size == 3 * comm.size


class _Looks(Observer):
    def ended(self, operation: Any) -> None:
        """Look on."""


@pytest.mark.min_ranks(2)
def test_two_threads_never_mix_results() -> None:
    with Communicator() as comm:
        large, small = known(comm, 30_000), known(comm, 10)
        wrong: list[object] = []

        def other() -> None:
            observer = _Looks()
            comm.add_observer(observer)
            comm.remove_observer(observer)
            try:
                wrong.append(comm.all_reduce("SUM", small))
            except RuntimeError as error:
                if "Two threads" not in str(error):
                    wrong.append(error)

        if comm.rank == 0:
            thread = threading.Timer(0.1, other)
            thread.start()
            found = comm.all_reduce("SUM", large)
            thread.join()
        else:
            time.sleep(0.4)
            found = comm.all_reduce("SUM", large)
        np.testing.assert_array_equal(found, comm.size)
        assert not wrong


@pytest.mark.one_rank
@pytest.mark.min_ranks(1)
@pytest.mark.jobs
def test_an_interrupted_call_is_the_last() -> None:
    program = """
    import signal, time, numpy, mpidist
    class Alarm(Exception): pass
    def handler(*_): raise Alarm
    signal.signal(signal.SIGALRM, handler)
    comm = mpidist.Communicator()
    x = numpy.ones(100_000)
    for _ in range(3):
        comm.all_reduce("SUM", x)
    if comm.rank == 0:
        signal.setitimer(signal.ITIMER_REAL, 0.001)  # while the core waits, before Python does
        try:
            comm.all_reduce("SUM", x)
        except Alarm:
            try:
                comm.all_reduce("SUM", x)
            except RuntimeError as error:
                print("refused:", error, flush=True)
    else:
        time.sleep(2)
    """
    job = run_script(program, 2, env=deadlines(10))
    assert "was interrupted by" in job.stdout
