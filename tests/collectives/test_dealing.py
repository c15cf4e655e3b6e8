"""Rows that move between ranks: gather, scatter, all_to_all, unequal parts, and out."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from mpidist import Communicator, MismatchError

pytestmark = [pytest.mark.counts, pytest.mark.nodes]
RANK, SIZE = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
# Around the data on a page, small slots, what is read at once, and chunks.
ROWS = (0, 1, 7, 700, 9000, 150_000, 700_000)


@pytest.fixture(scope="module")
def comm() -> Any:
    with Communicator() as communicator:
        yield communicator


def rows_of(rank: int, count: int, dtype: object = "f4", width: int = 1) -> np.ndarray:
    """Return the input of a rank. It differs between ranks."""
    return ((np.arange(count * width) * 7 + 13 * rank) % 101).astype(dtype).reshape(count, width)


def borders_of(count: int) -> list[int]:
    return list(accumulate((len(part) for part in np.array_split(np.arange(count), SIZE)), initial=0))


@pytest.mark.parametrize("count", ROWS)
def test_equal_parts(comm: Communicator, count: int) -> None:
    mine, borders = rows_of(RANK, count), borders_of(count)
    start, stop = borders[RANK : RANK + 2]
    root = SIZE - 1
    everything = np.concatenate([rows_of(rank, count) for rank in range(SIZE)])
    dealt = np.concatenate([rows_of(rank, count)[start:stop] for rank in range(SIZE)])
    for _ in range(2):
        gathered = comm.gather(mine, root)
        assert (gathered is None) == (root != RANK)
        if gathered is not None:
            np.testing.assert_array_equal(gathered, everything)
        given = mine if root == RANK else mine[:0]
        np.testing.assert_array_equal(comm.scatter(given, root), rows_of(root, count)[start:stop])
        np.testing.assert_array_equal(comm.all_to_all(mine), dealt)
        np.testing.assert_array_equal(comm.all_to_all_async(mine).wait(), dealt)


@pytest.mark.parametrize("dtype", ["?", "i1", "u2", "i8", "f2", "f4", "g", "c8", "c16"])
def test_unequal_parts_of_every_kind(comm: Communicator, dtype: str) -> None:
    counts = [(rank + RANK) % 3 for rank in range(SIZE)]
    mine = rows_of(RANK, sum(counts), dtype, 5)
    parts = []
    for rank in range(SIZE):
        theirs = list(accumulate([(other + rank) % 3 for other in range(SIZE)], initial=0))
        parts.append(rows_of(rank, theirs[-1], dtype, 5)[theirs[RANK] : theirs[RANK + 1]])
    result = comm.all_to_all(mine, counts=counts)
    assert result.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(result, np.concatenate(parts))


@pytest.mark.parametrize("width", [0, 1, 3000, 200_000])
def test_unequal_parts(comm: Communicator, width: int) -> None:
    counts = [2 * (rank % 2) + (rank == SIZE - 1) for rank in range(SIZE)]
    total = sum(counts)
    start = sum(counts[:RANK])
    whole = rows_of(0, total, "i4", width)
    np.testing.assert_array_equal(comm.scatter(whole, counts=counts), whole[start : start + counts[RANK]])
    for _ in range(2):
        kept = comm.reduce_scatter("SUM", whole * (RANK + 1), counts=counts)
        np.testing.assert_array_equal(kept, whole[start : start + counts[RANK]] * sum(range(1, SIZE + 1)))
    mean = comm.reduce_scatter("MEAN", whole, counts=counts)
    np.testing.assert_array_equal(mean, whole[start : start + counts[RANK]].astype("f8"))


@pytest.mark.parametrize("width", [0, 1, 3000, 200_000])
def test_results_where_they_are_wanted(comm: Communicator, width: int) -> None:
    mine = rows_of(RANK, SIZE, "f8", width)
    everything = np.concatenate([rows_of(rank, SIZE, "f8", width) for rank in range(SIZE)])
    dealt = everything[RANK::SIZE]
    into, whole = np.empty((SIZE, width)), np.empty((SIZE * SIZE, width))
    assert comm.all_to_all(mine, out=into) is into
    np.testing.assert_array_equal(into, dealt)
    assert comm.all_gather(mine, out=whole) is whole
    np.testing.assert_array_equal(whole, everything)
    own = np.zeros_like(whole)
    own[SIZE * RANK : SIZE * (RANK + 1)] = mine
    comm.all_gather(own[SIZE * RANK : SIZE * (RANK + 1)], out=own)
    np.testing.assert_array_equal(own, everything)
    row = np.empty((1, width))
    assert comm.scatter(mine, 0, out=row) is row
    np.testing.assert_array_equal(row, rows_of(0, SIZE, "f8", width)[RANK : RANK + 1])
    assert comm.reduce_scatter("MAX", mine, out=row) is row
    np.testing.assert_array_equal(row[0], np.max(dealt, axis=0))
    copy = mine.copy()
    assert comm.broadcast(copy, SIZE - 1, out=copy) is copy
    np.testing.assert_array_equal(copy, rows_of(SIZE - 1, SIZE, "f8", width))
    # Results over what is given, and between other numbers.
    comm.all_to_all(mine, out=mine)
    np.testing.assert_array_equal(mine, dealt)
    between = np.zeros((SIZE, 2 * width))
    comm.all_to_all(rows_of(RANK, SIZE, "f8", width), out=between[:, ::2])
    np.testing.assert_array_equal(between[:, ::2], dealt)
    assert not between[:, 1::2].any()


def test_nests_travel_together(comm: Communicator) -> None:
    value = {"ids": np.full(SIZE, RANK), "rows": [rows_of(RANK, 2 * SIZE, "f4", 3)]}
    result = comm.all_to_all(value)
    np.testing.assert_array_equal(result["ids"], np.arange(SIZE))
    assert result["rows"][0].shape == (2 * SIZE, 3)
    gathered = comm.gather(value, 0)
    assert gathered is None or gathered["ids"].shape == (SIZE * SIZE,)
    assert comm.all_to_all([]) == []


def test_wrong_arguments_raise_at_once(comm: Communicator) -> None:
    with pytest.raises(ValueError, match=f"how many of 3 rows each of {SIZE} ranks gets"):
        comm.all_to_all(np.ones(3), counts=[1] * (SIZE + 5))
    with pytest.raises(ValueError, match=f"how many rows each of {SIZE} ranks gives this one"):
        comm.all_to_all(np.ones(SIZE), expected=[1] * (SIZE + 1))
    with pytest.raises(ValueError, match=rf"out has float64\({SIZE},\); expected {2 * SIZE} rows"):
        comm.all_to_all(np.ones(SIZE), expected=[2] * SIZE, out=np.ones(SIZE))
    with pytest.raises(ValueError, match="not a scalar"):
        comm.all_to_all(np.float32(1))
    with pytest.raises(ValueError, match="expected a rank from 0"):
        comm.gather(np.ones(3), SIZE)
    with pytest.raises(ValueError, match="out has"):
        comm.all_to_all(np.ones(SIZE), out=np.ones(SIZE + 1))
    comm.barrier()


@pytest.mark.parametrize("width", [0, 1, 3000])
def test_what_comes_is_what_was_expected(comm: Communicator, width: int) -> None:
    counts = [(2 * rank + RANK) % 3 for rank in range(SIZE)]
    expected = [(2 * RANK + rank) % 3 for rank in range(SIZE)]
    value = {"a": rows_of(RANK, sum(counts), width=width), "b": rows_of(RANK, sum(counts), "i8", 2)}
    out = {"a": np.empty((sum(expected), width), "f4"), "b": np.empty((sum(expected), 2), "i8")}
    without = comm.all_to_all(value, counts=counts)
    comm.all_to_all(value, counts=counts, expected=expected, out=out)
    started = comm.all_to_all_async(value, counts=counts, expected=expected).wait()
    for name in "ab":
        np.testing.assert_array_equal(out[name], without[name])
        np.testing.assert_array_equal(started[name], without[name])


def test_counts_of_numpy(comm: Communicator) -> None:
    counts = np.full(SIZE, 100, np.uint8)
    out = np.empty((100 * SIZE, 2))
    comm.all_to_all(np.ones((100 * SIZE, 2)), counts=counts, expected=counts, out=out)
    np.testing.assert_array_equal(out, 1)


@pytest.mark.min_ranks(2)
def test_unexpected_rows_of_the_right_sum(comm: Communicator) -> None:
    """Each rank gives two rows to each; the last one expects three from rank 0 and one from rank 1."""
    last = SIZE - 1
    expected = [3, 1, *[2] * (SIZE - 2)] if last == RANK else [2] * SIZE
    for call in (comm.all_to_all, lambda *args, **kwargs: comm.all_to_all_async(*args, **kwargs).wait()):
        with pytest.raises(MismatchError) as raised:
            call(np.ones((2 * SIZE, 3)), counts=[2] * SIZE, expected=expected)
        message = str(raised.value)
        assert f"  rank 0 gives rank {last} 2 rows\n      at {__file__}:" in message
        assert f"  rank {last} expects 3 from it\n      at {__file__}:" in message
        assert f"rank {last} expects 1 from it" in message
        assert "more" not in message.replace("as many rows", "")
        np.testing.assert_array_equal(comm.all_to_all(np.arange(SIZE)), np.full(SIZE, RANK))


@pytest.mark.min_ranks(2)
def test_one_that_does_not_say_what_it_expects(comm: Communicator) -> None:
    for _ in range(2):
        comm.all_to_all(np.ones(SIZE))
        with pytest.raises(MismatchError, match=r"all_to_all of float64\(\*\) with expected rows"):
            comm.all_to_all(np.ones(SIZE), expected=None if RANK == 1 else [1] * SIZE)
    comm.barrier()


@pytest.mark.min_ranks(2)
def test_a_mismatch_shows_both_calls(comm: Communicator) -> None:
    with pytest.raises(MismatchError, match=r"all_to_all of float32\(\*\)"):
        if RANK == 0:
            comm.all_to_all(np.ones(SIZE, "f4"))
        else:
            comm.all_to_all(np.ones(SIZE, "f8"))
    with pytest.raises(MismatchError, match="gather to rank 0 of"):
        comm.gather(np.ones(SIZE, "f4"), min(RANK, 1))
    with pytest.raises(MismatchError, match="parts of"):
        comm.reduce_scatter("SUM", np.ones(SIZE), counts=[SIZE, *[0] * (SIZE - 1)] if RANK else [1] * SIZE)
