"""Handles of collectives that were started: order, results, errors, time limits."""

from __future__ import annotations

import time

import numpy as np
import pytest

from mpidist import Communicator, MismatchError


def test_works_are_done_in_order_and_waited_for_in_any(comm: Communicator) -> None:
    works = [comm.all_reduce_async("SUM", np.full(100 * k, k + 1.0)) for k in range(5)]
    for k in (3, 0, 4, 1, 2):
        np.testing.assert_array_equal(works[k].wait(), np.full(100 * k, (k + 1.0) * comm.size))
        assert works[k].done()


def test_the_bits_are_those_of_the_blocking_call(comm: Communicator) -> None:
    values = [np.random.default_rng([comm.rank, k]).standard_normal(n) for k, n in enumerate((3, 1000))]
    for value in values:
        assert comm.all_reduce_async("MEAN", value).wait().tobytes() == comm.all_reduce("MEAN", value).tobytes()


def test_a_blocking_call_finishes_earlier_works_first(comm: Communicator) -> None:
    work = comm.all_reduce_async("SUM", [1.0, np.ones(3)])
    assert comm.all_reduce("SUM", 2.0) == 2 * comm.size
    assert work.done()
    number, array = work.wait()
    assert number == comm.size
    np.testing.assert_array_equal(array, comm.size)


def test_done_makes_progress(comm: Communicator) -> None:
    work = comm.all_reduce_async("SUM", np.ones(10_000))
    give_up = time.monotonic() + 30
    while not work.done():
        assert time.monotonic() < give_up
    np.testing.assert_array_equal(work.wait(), comm.size)


@pytest.mark.min_ranks(2)
def test_a_wait_that_ends_early_leaves_the_work_going(comm: Communicator) -> None:
    if comm.rank == 0:
        work = comm.all_reduce_async("SUM", np.ones(100))
        with pytest.raises(TimeoutError, match="not done after 0.2 s; it goes on"):
            work.wait(timeout=0.2)
    else:
        time.sleep(0.5)  # this rank is the late one that the test is about
        work = comm.all_reduce_async("SUM", np.ones(100))
    np.testing.assert_array_equal(work.wait(timeout=30), comm.size)


@pytest.mark.min_ranks(2)
def test_a_mismatch_is_raised_by_wait_on_every_rank(comm: Communicator) -> None:
    works = [comm.all_reduce_async("SUM", np.ones(3 + comm.rank)), comm.all_reduce_async("SUM", 1.0)]
    with pytest.raises(MismatchError, match=r"float64\(3,\)[\s\S]*test_work.py"):
        works[0].wait()
    assert works[1].wait() == comm.size
