"""Calls with out on the fast path: their results, and errors if out does not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from mpi4py import MPI

from mpidist import Communicator, MismatchError, PeerError
from mpidist.core.settings import RANKS_PER_NODE
from tests.support.ranks.cores import needs_core

pytestmark = [
    pytest.mark.counts,
    pytest.mark.powers,
    needs_core,
    pytest.mark.skipif(RANKS_PER_NODE.read() is not None, reason="the fast path needs one node"),
]
RANK, SIZE = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
ROOT = SIZE - 1
# Rows of one rank: on a page, in small slots, read where they are, past the pool's smallest, in several parts.
ROWS = (1, 12, 720, 9000, 40_008, 400_008)

# Each takes a communicator, the value of this rank, and an array for the result or None.
Call = Callable[..., np.ndarray]
CALLS: dict[str, Call] = {
    "all_gather": lambda comm, value, out=None: comm.all_gather(value, out=out),
    "broadcast": lambda comm, value, out=None: comm.broadcast(value, ROOT, out=out),
    "reduce_scatter": lambda comm, value, out=None: comm.reduce_scatter("SUM", value, out=out),
    "all_to_all": lambda comm, value, out=None: comm.all_to_all(value, out=out),
}
of_each_call = pytest.mark.parametrize("name", CALLS)


def given(rank: int, rows: int, dtype: str = "f4") -> np.ndarray:
    """Return the array of a rank: two columns, other numbers on each."""
    return ((np.arange(2 * rows) * 7 + 13 * rank) % 101).astype(dtype).reshape(rows, 2)


def expected(name: str, rows: int, dtype: str = "f4") -> np.ndarray:
    if name == "broadcast":
        return given(ROOT, rows, dtype)
    all_of_them = [given(rank, rows, dtype) for rank in range(SIZE)]
    if name == "all_gather":
        return np.concatenate(all_of_them)
    if name == "all_to_all":
        return np.concatenate([np.array_split(one, SIZE)[RANK] for one in all_of_them])
    whole: np.ndarray = np.add.reduce(all_of_them)
    return np.array_split(whole, SIZE)[RANK]


@pytest.fixture(name="comm", scope="module", params=["read", "in chunks"])
def _comm(request: pytest.FixtureRequest) -> Iterator[Communicator]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("MPIDIST_READ_NEIGHBOURS", "1" if request.param == "read" else "0")
        with Communicator() as comm:
            yield comm


@pytest.mark.parametrize("rows", ROWS)
@of_each_call
def test_into_an_array_of_the_program(comm: Communicator, name: str, rows: int) -> None:
    mine, right = given(RANK, rows), expected(name, rows)
    CALLS[name](comm, mine)
    guarded = np.full((len(right) + 2, 2), -1.0, "f4")
    out = guarded[1:-1]
    for _ in range(2):
        assert CALLS[name](comm, mine, out) is out
        np.testing.assert_array_equal(out, right)
        assert (guarded[[0, -1]] == -1).all()
        out[...] = -2
    np.testing.assert_array_equal(mine, given(RANK, rows))


@of_each_call
def test_it_uses_the_fast_path(comm: Communicator, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, right = given(RANK, 12), expected(name, 12)
    CALLS[name](comm, mine)
    monkeypatch.setattr(comm, "_run", None)  # the general path
    out = np.empty_like(right)
    assert CALLS[name](comm, mine, out) is out
    np.testing.assert_array_equal(out, right)


@pytest.mark.parametrize("rows", ROWS)
def test_all_gather_of_a_part_of_out(comm: Communicator, rows: int) -> None:
    comm.all_gather(given(RANK, rows))
    whole = np.full((SIZE * rows, 2), -1.0, "f4")
    part = whole[RANK * rows : (RANK + 1) * rows]
    part[:] = given(RANK, rows)
    assert comm.all_gather(part, out=whole) is whole
    np.testing.assert_array_equal(whole, expected("all_gather", rows))


@pytest.mark.parametrize("rows", ROWS)
def test_a_broadcast_into_the_value(comm: Communicator, rows: int) -> None:
    value = given(RANK, rows)
    comm.broadcast(value, ROOT)
    assert comm.broadcast(value, ROOT, out=value) is value
    np.testing.assert_array_equal(value, expected("broadcast", rows))


def _shifted(value: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return a value and a result that overlap by one row less."""
    memory = np.zeros((len(value) + len(right) + 2, 2), value.dtype)
    memory[1 : 1 + len(value)] = value
    return memory[1 : 1 + len(value)], memory[2 : 2 + len(right)]


# Each returns a value and an array for the result that need a copy.
ARRANGEMENTS: dict[str, Callable[..., tuple[np.ndarray, np.ndarray]]] = {
    "shifted": _shifted,
    "strided": lambda value, right: (value, np.zeros((len(right), 4), right.dtype)[:, ::2]),
    "another order": lambda value, right: (value, np.zeros(right.shape, right.dtype, order="F")),
    "own rows": lambda value, right: (
        (value, value[: len(right)]) if len(right) <= len(value) else _shifted(value, right)
    ),
}


@pytest.mark.parametrize("rows", [2 * SIZE + 1, 9001])
@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@of_each_call
def test_results_that_lie_otherwise(comm: Communicator, name: str, arrangement: str, rows: int) -> None:
    right = expected(name, rows)
    CALLS[name](comm, given(RANK, rows))
    # On one rank alone, while the others use the fast path.
    value, out = (
        ARRANGEMENTS[arrangement](given(RANK, rows), right) if RANK == 0 else (given(RANK, rows), np.empty_like(right))
    )
    assert CALLS[name](comm, value, out) is out
    np.testing.assert_array_equal(out, right)


@of_each_call
def test_only_some_ranks_say_where(comm: Communicator, name: str) -> None:
    for rows in (5, 20_000):
        mine, right = given(RANK, rows), expected(name, rows)
        CALLS[name](comm, mine)
        for out in (np.empty_like(right) if RANK % 2 else None, None if RANK % 2 else np.empty_like(right)):
            found = CALLS[name](comm, mine, out)
            assert out is None or found is out
            np.testing.assert_array_equal(found, right)


def _read_only(right: np.ndarray) -> np.ndarray:
    out = np.zeros_like(right)
    out.flags.writeable = False
    return out


WRONG: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "longer": lambda right: np.zeros((len(right) + 1, 2), right.dtype),
    "flat": lambda right: np.zeros(right.size, right.dtype),
    "another dtype": lambda right: np.zeros(right.shape, "i4"),
    "read-only": _read_only,
}


@pytest.mark.parametrize("kind", WRONG)
@of_each_call
def test_results_that_do_not_fit(comm: Communicator, name: str, kind: str) -> None:
    mine, right = given(RANK, 6), expected(name, 6)
    CALLS[name](comm, mine)
    out = WRONG[kind](right)
    with pytest.raises(ValueError, match="read-only" if kind == "read-only" else r"out has .*; expected float32"):
        CALLS[name](comm, mine, out)
    assert not out.any()
    np.testing.assert_array_equal(CALLS[name](comm, mine, np.empty_like(right)), right)


def test_out_of_another_length(comm: Communicator) -> None:
    # Only one rank passes it, and the others must not wait.
    out = [np.zeros(comm.size)] if comm.rank == 0 else None
    with pytest.raises(ValueError if comm.rank == 0 else PeerError, match="out has 1 arrays; expected 2"):
        comm.all_gather([np.ones(1), np.ones(1)], out=out)
    assert comm.all_reduce("SUM", 1) == comm.size


def test_elements_without_bytes(comm: Communicator) -> None:
    with pytest.raises(TypeError, match=r"SUM does not support dtype dtype\('V'\)"):
        comm.all_reduce("SUM", np.zeros(3, "V0"))


@pytest.mark.min_ranks(2)
@of_each_call
def test_a_mismatch_leaves_the_result_alone(comm: Communicator, name: str) -> None:
    CALLS[name](comm, given(RANK, 6))
    CALLS[name](comm, given(RANK, 6, "i4"))
    out = np.full_like(expected(name, 6), -1)
    with pytest.raises(MismatchError, match="int32"):
        CALLS[name](comm, *((given(RANK, 6), out) if RANK else (given(RANK, 6, "i4"),)))
    assert (out == -1).all()
    right = expected(name, 6)
    np.testing.assert_array_equal(CALLS[name](comm, given(RANK, 6), np.empty_like(right)), right)


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("rows", [1, 5000])
def test_parts_that_are_not_equal_after_all(comm: Communicator, rows: int) -> None:
    """Each rank knows the call from ranks that gave as much as it does."""
    for factor in range(1, SIZE + 1):
        comm.all_gather(given(RANK, rows * factor))
    mine = given(RANK, rows * (RANK + 1))
    right = np.concatenate([given(rank, rows * (rank + 1)) for rank in range(SIZE)])
    out = np.empty_like(right)
    for _ in range(2):
        assert comm.all_gather(mine, out=out) is out
        np.testing.assert_array_equal(out, right)
    if len(right) != SIZE * len(mine):
        with pytest.raises(ValueError, match=r"out has .*; expected float32"):
            comm.all_gather(mine, out=np.empty((SIZE * len(mine), 2), "f4"))
    else:
        comm.all_gather(mine, out=out)
    np.testing.assert_array_equal(comm.all_gather(mine), right)


@pytest.mark.min_ranks(2)
def test_rows_that_one_rank_deals_otherwise(comm: Communicator) -> None:
    mine, right = given(RANK, 12), expected("all_to_all", 12)
    comm.all_to_all(mine)
    counts = [12, *[0] * (SIZE - 1)] if RANK == 0 else None
    right = np.concatenate([mine[: 12 if RANK == 0 else 0], right[12 // SIZE :]])
    out = np.empty_like(right)
    assert comm.all_to_all(mine, counts=counts, out=out) is out
    np.testing.assert_array_equal(out, right)
    np.testing.assert_array_equal(comm.all_to_all(mine, counts=counts), right)
    with pytest.raises(ValueError, match=r"out has .*; expected float32"):
        comm.all_to_all(mine, counts=counts, out=np.empty_like(mine))


@pytest.mark.min_ranks(3)
@pytest.mark.parametrize("rows", [1, 5000])
@pytest.mark.parametrize("is_known", [True, False])
def test_a_part_that_comes_to_lie_elsewhere(comm: Communicator, rows: int, is_known: bool) -> None:
    """The second rank gives the mean of all, where it would lie in the result if all gave as much."""
    lengths = [rows, 2 * rows, *[2 * rows] * (SIZE - 3), 3 * rows]
    mine = given(RANK, lengths[RANK], "f4" if is_known else "f8")
    if is_known:
        for length in (1, 2, 3):
            comm.all_gather(given(RANK, length * rows))
    right = np.concatenate([given(rank, length, mine.dtype.str) for rank, length in enumerate(lengths)])
    whole = np.zeros_like(right)
    begin = RANK * lengths[RANK] if RANK < SIZE - 1 else len(whole) - len(mine)
    part = whole[begin : begin + len(mine)]
    part[:] = mine
    comm.all_gather(part, out=whole)
    np.testing.assert_array_equal(whole, right)
