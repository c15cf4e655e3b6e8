"""Arrays that mpidist allocated: reduced in place of shared memory, into a result that the ranks share."""

from __future__ import annotations

import gc
import os

import numpy as np
import pytest

from mpidist import Communicator
from mpidist.collectives.node import memory
from mpidist.collectives.node.memory import Pool
from mpidist.core.settings import RANKS_PER_NODE
from tests.support.ranks.cores import needs_core

pytestmark = [
    pytest.mark.counts,
    pytest.mark.powers,
    needs_core,
    pytest.mark.skipif(RANKS_PER_NODE.read() is not None, reason="arrays are shared on one node only"),
]

# Results of 2 MiB and more are shared.
COUNT = 300_000


def filled(comm: Communicator, value: float, count: int = COUNT) -> np.ndarray:
    array = comm.empty(count, "f8")
    array[:] = np.arange(count) + value + comm.rank
    return array


def total(comm: Communicator, value: float, count: int = COUNT) -> np.ndarray:
    return comm.size * (np.arange(count) + value) + sum(range(comm.size))


@pytest.mark.min_ranks(2)
def test_shared_results_are_read_only(comm: Communicator) -> None:
    result = comm.all_reduce("SUM", filled(comm, 1.0))
    np.testing.assert_array_equal(result, total(comm, 1.0))
    assert not result.flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        result += 1


def test_every_operation_on_several_arrays(comm: Communicator) -> None:
    arrays = [filled(comm, k, COUNT + k) for k in range(3)]
    for op, function in (("MEAN", lambda t: t / comm.size), ("SUM", lambda t: t)):
        for k, result in enumerate(comm.all_reduce(op, arrays)):
            np.testing.assert_allclose(result, function(total(comm, k, COUNT + k)), rtol=1e-15)
    low = comm.all_reduce("MIN", arrays[0])
    np.testing.assert_array_equal(low, np.arange(COUNT))


def test_results_that_are_held_keep_their_values(comm: Communicator) -> None:
    array = filled(comm, 0.0)
    held = []
    for step in range(5):
        array[:] = step
        held.append(comm.all_reduce("SUM", array)[10:20])
    for step, part in enumerate(held):
        np.testing.assert_array_equal(part, step * comm.size)


def test_one_rank_may_hold_a_result(comm: Communicator) -> None:
    array = filled(comm, 0.0)
    first = comm.all_reduce("SUM", array)
    expected = first.copy()
    if comm.rank != 0:
        del first
        gc.collect()
    for step in range(4):
        array[:] = step
        np.testing.assert_array_equal(comm.all_reduce("SUM", array), step * comm.size)
    if comm.rank == 0:
        np.testing.assert_array_equal(first, expected)


def test_slots_are_used_again(comm: Communicator) -> None:
    array = filled(comm, 0.0)
    for _ in range(200):
        comm.all_reduce("SUM", array)
    if comm.size > 1:
        assert len(comm._channel.node.results._slots) <= 2


def test_some_arrays_own_and_some_private(comm: Communicator) -> None:
    for own_rank in range(comm.size):
        mine = filled(comm, 2.0)
        value = mine if comm.rank == own_rank else mine.copy()
        np.testing.assert_array_equal(comm.all_reduce("SUM", value), total(comm, 2.0))
    mixed = [filled(comm, 3.0), filled(comm, 4.0).copy()]
    for k, result in enumerate(comm.all_reduce("SUM", mixed)):
        np.testing.assert_array_equal(result, total(comm, 3.0 + k))


def test_more_arrays_after_a_result(comm: Communicator) -> None:
    first = filled(comm, 1.0)
    comm.all_reduce("SUM", first)
    second = filled(comm, 2.0)
    np.testing.assert_array_equal(comm.all_reduce("SUM", second), total(comm, 2.0))
    np.testing.assert_array_equal(comm.all_reduce("SUM", first), total(comm, 1.0))


def test_out_gives_an_array_of_the_callers_own(comm: Communicator) -> None:
    out = np.empty(COUNT)
    comm.all_reduce("SUM", filled(comm, 5.0), out=out)
    np.testing.assert_array_equal(out, total(comm, 5.0))
    own_out = comm.empty(COUNT, "f8")
    comm.all_reduce("SUM", filled(comm, 5.0), out=own_out)
    np.testing.assert_array_equal(own_out, total(comm, 5.0))


def test_arrays_outlive_the_communicator() -> None:
    comm = Communicator()
    array = filled(comm, 1.0)
    result = comm.all_reduce("SUM", array)
    expected = total(comm, 1.0)
    comm.close()
    array[:] = 7
    np.testing.assert_array_equal(result, expected)
    np.testing.assert_array_equal(array, 7)


def test_without_room_in_shared_memory(comm: Communicator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_bytes", lambda: 1 << 20)
    array = filled(comm, 1.0)
    result = comm.all_reduce("SUM", array)
    np.testing.assert_array_equal(result, total(comm, 1.0))


def test_a_pool_reuses_free_memory() -> None:
    pool = Pool()
    first = pool.take(COUNT, np.dtype("f8"))
    view = first.reshape(2, -1)[:, ::2]
    address = first.ctypes.data
    del first
    assert pool.take(COUNT, np.dtype("f8")).ctypes.data != address
    del view
    assert address in {pool.take(COUNT, np.dtype("f8")).ctypes.data for _ in range(2)}


def test_a_pool_frees_blocks_used_once() -> None:
    pool, kept = Pool(), []

    def blocks() -> int:
        return sum(len(shelf.blocks) for shelf in pool._shelves.values())

    def use(count: int, times: int) -> None:
        for _ in range(times):
            kept.extend(pool.take(COUNT, np.dtype("f8")) for _ in range(count))
            kept.clear()

    use(100, 5)
    # What every step needs stays, however much that is.
    assert blocks() == 100
    use(2, 200)
    assert blocks() == 2
    held = pool.take(COUNT, np.dtype("f8"))
    use(1, 200)
    held[:] = 3.0
    use(1, 200)
    assert (held == 3.0).all()
    assert blocks() == 2


@pytest.mark.min_ranks(2)
def test_small_arrays_beside_large_own_ones(comm: Communicator) -> None:
    arrays = [filled(comm, 1.0), np.full(10, comm.rank), filled(comm, 2.0, 3000)]
    results = comm.all_reduce("SUM", [array.astype("f8") if array.size == 10 else array for array in arrays])
    np.testing.assert_array_equal(results[0], total(comm, 1.0))
    np.testing.assert_array_equal(results[1], sum(range(comm.size)))
    np.testing.assert_array_equal(results[2], total(comm, 2.0, 3000))
    assert not results[0].flags.writeable


@pytest.mark.min_ranks(2)
def test_many_arrays_take_few_file_descriptors(comm: Communicator) -> None:
    before = len(os.listdir("/proc/self/fd"))
    arrays = [comm.empty(200_000, "f8") for _ in range(40)]
    assert len(os.listdir("/proc/self/fd")) - before < 15
    for index, array in enumerate(arrays):
        array[:] = index + comm.rank
    for index, result in enumerate(comm.all_reduce("SUM", arrays)):
        np.testing.assert_array_equal(result, index * comm.size + sum(range(comm.size)))
