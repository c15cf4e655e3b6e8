"""Handles of collectives that were started: order, results, errors, time limits."""

from __future__ import annotations

import time
import weakref

import numpy as np
import pytest

from mpidist import Communicator, MismatchError
from mpidist.collectives import Observer, Operation
from mpidist.collectives.channel.executor import move_works
from mpidist.collectives.channel.progress import progress

pytestmark = [pytest.mark.nodes, pytest.mark.counts]


def test_works_may_be_waited_for_in_any_order(comm: Communicator) -> None:
    works = [comm.all_reduce_async("SUM", np.full(100 * k, k + 1.0)) for k in range(5)]
    for k in (3, 0, 4, 1, 2):
        np.testing.assert_array_equal(works[k].wait(), np.full(100 * k, (k + 1.0) * comm.size))
        assert works[k].done()


def test_the_bits_are_those_of_the_blocking_call(comm: Communicator) -> None:
    values = [np.random.default_rng([comm.rank, k]).standard_normal(n) for k, n in enumerate((3, 1000))]
    for value in values:
        assert comm.all_reduce_async("MEAN", value).wait().tobytes() == comm.all_reduce("MEAN", value).tobytes()


@pytest.mark.parametrize("count", [4, 50_000])
def test_results_go_to_out(comm: Communicator, count: int) -> None:
    value = {"b": np.full(count, 1.0), "a": [np.arange(count) + comm.rank]}
    out = {"b": np.zeros(count), "a": [value["a"][0]]}
    works = [comm.all_reduce_async("SUM", value, out=out), comm.all_reduce_async("SUM", 1.0)]
    assert works[1].wait() == comm.size
    got = works[0].wait()
    assert got["b"] is out["b"]
    assert got["a"][0] is out["a"][0]
    np.testing.assert_array_equal(out["b"], comm.size)
    np.testing.assert_array_equal(out["a"][0], comm.size * np.arange(count) + sum(range(comm.size)))
    with pytest.raises(ValueError, match=r"out has float64\(3,\); expected float64\(4,\)"):
        comm.all_reduce_async("SUM", np.ones(4), out=np.ones(3))
    gather = comm.all_gather_async(np.ones(3), out=np.zeros(1))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"out has float64\(1,\)"):
            gather.wait()


def test_a_blocking_call_finishes_earlier_works(comm: Communicator) -> None:
    work = comm.all_reduce_async("SUM", [1.0, np.ones(3)])
    assert comm.all_reduce("SUM", 2.0) == 2 * comm.size
    assert work.done()
    number, array = work.wait()
    assert number == comm.size
    np.testing.assert_array_equal(array, comm.size)


def test_finished_works_free_inputs() -> None:
    with Communicator() as comm:
        for _ in range(3):
            value = np.ones(5)
            work, is_alive = comm.all_reduce_async("SUM", value), weakref.ref(value)
            del value
            give_up = time.monotonic() + 30
            while not work.done():
                assert time.monotonic() < give_up
            np.testing.assert_array_equal(work.wait(), comm.size)
            assert is_alive() is None


def test_a_late_observer_sees_pending_works() -> None:
    class Ends(Observer):
        def __init__(self) -> None:
            self.texts: list[str] = []

        def ended(self, operation: Operation) -> None:
            self.texts.append(operation.text)

    with Communicator() as comm:
        seen = Ends()
        if comm.rank:
            comm.barrier()
        works = [comm.all_reduce_async("SUM", np.ones(size)) for size in (3, 4)] if comm.rank else []
        comm.add_observer(seen)
        if not comm.rank:
            comm.barrier()
            works = [comm.all_reduce_async("SUM", np.ones(size)) for size in (3, 4)]
        for work in works:
            work.wait()
        comm.remove_observer(seen)
        assert [text for text in seen.texts if "(4,)" in text] == ["all_reduce SUM of float64(4,)"]


@pytest.mark.min_ranks(2)
def test_a_wait_with_a_limit_keeps_the_work(comm: Communicator) -> None:
    if comm.rank == 0:
        work = comm.all_reduce_async("SUM", np.ones(100))
        with pytest.raises(TimeoutError, match="not done after 0.2 s. It continues"):
            work.wait(timeout=0.2)
    else:
        time.sleep(0.5)  # this rank is the late one that the test is about
        work = comm.all_reduce_async("SUM", np.ones(100))
    np.testing.assert_array_equal(work.wait(timeout=30), comm.size)


@pytest.mark.min_ranks(2)
def test_wait_raises_a_mismatch_on_every_rank(comm: Communicator) -> None:
    works = [comm.all_reduce_async("SUM", np.ones(3 + comm.rank)), comm.all_reduce_async("SUM", 1.0)]
    with pytest.raises(MismatchError, match=r"float64\(3,\)[\s\S]*test_work.py"):
        works[0].wait()
    assert works[1].wait() == comm.size


def test_every_collective_can_be_started(comm: Communicator) -> None:
    rows = np.arange(4.0 * comm.size).reshape(-1, 2) + comm.rank
    works = {
        "all_reduce": comm.all_reduce_async("SUM", rows),
        "reduce": comm.reduce_async("SUM", rows, root=comm.size - 1),
        "reduce_scatter": comm.reduce_scatter_async("SUM", rows),
        "all_gather": comm.all_gather_async([rows, np.full((1, comm.rank), 1)], axis=1),
        "broadcast": comm.broadcast_async(rows, root=comm.size - 1),
        "barrier": comm.barrier_async(),
    }
    total = comm.size * np.arange(4.0 * comm.size).reshape(-1, 2) + sum(range(comm.size))
    np.testing.assert_array_equal(works["all_reduce"].wait(), total)
    if comm.rank == comm.size - 1:
        np.testing.assert_array_equal(works["reduce"].wait(), total)
    else:
        assert works["reduce"].wait() is None
    np.testing.assert_array_equal(works["reduce_scatter"].wait(), np.array_split(total, comm.size)[comm.rank])
    gathered, ones = works["all_gather"].wait()
    assert gathered.shape == (2 * comm.size, 2 * comm.size)
    assert ones.shape == (1, sum(range(comm.size)))
    np.testing.assert_array_equal(works["broadcast"].wait(), rows - comm.rank + comm.size - 1)
    assert works["barrier"].wait() is None


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("nbytes", [4, 400, 4_000_000])
def test_works_move_on_while_nobody_waits(comm: Communicator, nbytes: int) -> None:
    work = comm.all_reduce_async("SUM", np.ones(nbytes // 4, "f4"))
    give_up = time.monotonic() + 30
    while not work.is_done:  # unlike done() it moves nothing
        assert time.monotonic() < give_up
        time.sleep(0.001)
    np.testing.assert_array_equal(work.wait(), comm.size)


@pytest.mark.min_ranks(2)
def test_several_communicators_at_once(comm: Communicator) -> None:
    with Communicator() as other:
        mine = np.random.default_rng(comm.rank).standard_normal(300_000)
        expected = comm.all_reduce("SUM", mine)
        order = [comm, other] if comm.rank % 2 else [other, comm]
        works = {id(one): one.all_reduce_async("SUM", mine) for one in order}
        for one in (comm, other):
            np.testing.assert_array_equal(works[id(one)].wait(), expected)


@pytest.mark.min_ranks(2)
def test_wait_raises_earlier_errors(comm: Communicator) -> None:
    work = comm.all_reduce_async("SUM", np.ones(3 + comm.rank))
    give_up = time.monotonic() + 30
    while not work.is_done:
        assert time.monotonic() < give_up
        time.sleep(0.001)
    with pytest.raises(MismatchError, match=r"float64\(3,\)[\s\S]*test_work.py"):
        work.wait()
    assert comm.all_reduce("SUM", 1) == comm.size


@pytest.mark.min_ranks(2)
def test_works_of_two_communicators_in_any_order(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "watch", lambda _: None)
    with Communicator() as other:
        works = [one.all_reduce_async("SUM", np.ones(100_000)) for one in (comm, other)]
        for work in works if comm.rank == 0 else works[::-1]:
            np.testing.assert_array_equal(work.wait(), comm.size)


@pytest.mark.min_ranks(2)
def test_interruptions_of_another_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interruption(Exception):
        pass

    def interrupted() -> None:
        raise Interruption

    monkeypatch.setattr(progress, "watch", lambda _: None)
    other = Communicator()
    other.all_reduce_async("SUM", np.ones(100_000))
    with monkeypatch.context() as patch:
        patch.setattr(other._channel.executor, "_step_oldest", interrupted)
        with pytest.raises(Interruption):
            move_works()
    other.close()
