"""All-gather, broadcast, barrier, objects, split and the life of a Communicator."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import mpidist
from mpidist import Communicator
from mpidist.collectives.mpi import mpi_types
from mpidist.collectives.node import node as node_module
from mpidist.collectives.node.core import Core
from tests.support.ranks.cores import needs_core

pytestmark = [pytest.mark.nodes, pytest.mark.counts, pytest.mark.powers]


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("limit", [7, 2**31 - 1])
@pytest.mark.parametrize("dtype", ["f8", "i2", "?", "c8", ml_dtypes.bfloat16])
def test_all_gather_of_uneven_lengths(comm: Communicator, monkeypatch: Any, axis: int, limit: int, dtype: Any) -> None:
    monkeypatch.setattr(mpi_types, "MAX_COUNT", limit)

    def part(rank: int) -> np.ndarray:
        shape = (rank, 3) if axis == 0 else (3, rank)
        return (np.arange(3 * rank).reshape(shape) % 2 + rank).astype(dtype)

    got = comm.all_gather(part(comm.rank), axis=axis)
    np.testing.assert_array_equal(got, np.concatenate([part(r) for r in range(comm.size)], axis))
    assert got.dtype == np.dtype(dtype)


def test_all_gather_of_a_list(comm: Communicator) -> None:
    a, b = comm.all_gather([np.full(1, comm.rank), np.full((2, 1), comm.rank, "f4")])
    assert a.tolist() == list(range(comm.size))
    assert b.shape == (2 * comm.size, 1)


@pytest.mark.parametrize(
    ("value", "axis", "message"), [(1.0, 0, "scalar"), (np.ones(3), 1, "rank 1 has no axis 1.*-1 to 0")]
)
def test_all_gather_refuses(comm: Communicator, value: Any, axis: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        comm.all_gather(value, axis=axis)


@pytest.mark.parametrize("root", [0, -1])
def test_broadcast_gives_new_arrays(comm: Communicator, monkeypatch: Any, root: int) -> None:
    monkeypatch.setattr(mpi_types, "MAX_COUNT", 10)
    root %= comm.size
    mine = np.full((3, 4), comm.rank, "f4").T
    number, array = comm.broadcast([comm.rank, mine], root=root)
    assert number == root
    np.testing.assert_array_equal(array, np.full((4, 3), root))
    assert not np.shares_memory(array, mine)
    assert (mine == comm.rank).all()


def test_a_root_out_of_range(comm: Communicator) -> None:
    with pytest.raises(ValueError, match=f"root is {comm.size}; expected"):
        comm.broadcast(1.0, root=comm.size)


def test_objects(comm: Communicator) -> None:
    assert comm.all_gather_object({"rank": comm.rank}) == [{"rank": r} for r in range(comm.size)]
    assert comm.broadcast_object("x" * 1000 * comm.rank, root=comm.size - 1) == "x" * 1000 * (comm.size - 1)
    comm.barrier()


def test_split_into_groups(comm: Communicator) -> None:
    group = comm.split(comm.rank % 2, key=-comm.rank)
    assert group is not None
    with group:
        members = [r for r in range(comm.size) if r % 2 == comm.rank % 2][::-1]
        assert group.all_gather_object(comm.rank) == members
    nobody = comm.split(None)
    assert nobody is None


def test_completion_shows_what_a_program_calls(comm: Communicator) -> None:
    names = {name for name in dir(comm) if not name.startswith("_")}
    assert {"rank", "size", "all_reduce", "barrier", "split", "close", "last_algorithm"} <= names
    assert names.isdisjoint({"announce", "meet", "reduce_arrays", "gather_arrays", "shared_errors", "fast"})


def test_rank_and_size_are_those_of_all_ranks(comm: Communicator) -> None:
    assert (mpidist.rank(), mpidist.size()) == (comm.rank, comm.size)


def test_empty_makes_arrays(comm: Communicator) -> None:
    array = comm.empty((3, 2), "i4")
    assert (array.shape, array.dtype) == ((3, 2), np.dtype("i4"))


def test_a_communicator_cannot_be_copied(comm: Communicator) -> None:
    with pytest.raises(ValueError, match="cannot be copied"):
        copy.deepcopy(comm)


@pytest.mark.parametrize("reads", ["1", "0"])
def test_calls_do_not_overwrite_shared_slots(monkeypatch: Any, reads: str) -> None:
    monkeypatch.setenv("MPIDIST_READ_NEIGHBOURS", reads)
    random = np.random.default_rng(5)
    # More than a slot, just what fits into one, and little; in any order, and without a meeting in between.
    fits = node_module._SMALL_BYTES // 8
    sizes = [1, 12, 13, 1000, 4096, 4097, fits, fits + 1, 50_000, 200_000, 600_000]
    with Communicator() as comm:
        for step in range(60):
            first, second = random.choice(sizes, 2)
            kind, root = random.integers(5), int(random.integers(comm.size))
            a, b = np.full(first, step + comm.rank, "f8"), np.full((2, second), step - comm.rank, "i8")
            if kind == 0:
                whole, other = comm.all_gather([a, b], axis=-1)
                np.testing.assert_array_equal(whole, np.repeat(step + np.arange(comm.size), first))
                np.testing.assert_array_equal(other, [np.repeat(step - np.arange(comm.size), second)] * 2)
            elif kind == 1:
                whole, other = comm.broadcast([a, b], root=root)
                assert (whole == step + root).all()
                assert (other == step - root).all()
            elif kind == 2:
                rows = comm.reduce_scatter("SUM", a)
                assert (rows == comm.size * step + comm.size * (comm.size - 1) // 2).all()
            elif kind == 3:
                assert (comm.all_reduce("MAX", a) == step + comm.size - 1).all()
            else:
                with pytest.raises(mpidist.MismatchError) if comm.size > 1 else contextlib.nullcontext():
                    comm.broadcast(a if comm.rank else a[:0])
            # Whatever was shown may be written at once.
            a[:], b[:] = -1, -1


@needs_core
@pytest.mark.min_ranks(2)
def test_one_rank_can_forbid_reading_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pids: list[list[int] | None] = []

    class Seen(Core):
        def __init__(self, functions: Any, comm: Any, memory: Any, may_read: list[int] | None, *others: Any) -> None:
            pids.append(may_read)
            super().__init__(functions, comm, memory, may_read, *others)

    monkeypatch.setattr(node_module, "Core", Seen)
    with Communicator() as comm:
        given = comm._channel.node.reads_neighbours
    for forbidding in (0, mpidist.size() - 1):
        monkeypatch.setenv("MPIDIST_READ_NEIGHBOURS", "0" if mpidist.rank() == forbidding else "1")
        with Communicator() as comm:
            assert not comm._channel.node.reads_neighbours
            found = comm.all_gather(np.full(100_000, comm.rank))
            np.testing.assert_array_equal(found, np.repeat(np.arange(comm.size), 100_000))
    assert [found is not None for found in pids] == [given, False, False]


def test_an_empty_axis_keeps_its_length(comm: Communicator) -> None:
    assert comm.all_gather(np.ones((0, 2)), axis=1).shape == (0, 2 * comm.size)
    assert comm.all_gather(np.ones((3, 0))).shape == (3 * comm.size, 0)
