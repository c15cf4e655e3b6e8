"""All-reduces of every dtype and operation, at sizes around every switch, from and to memory of every kind.

Bit for bit what NumPy makes of the arrays in rank order; of 16 bits, in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpidist
from mpidist.core.settings import RANKS_PER_NODE
from tests.support.ranks.cores import needs_core

pytestmark = [
    pytest.mark.counts,
    pytest.mark.powers,
    needs_core,
    pytest.mark.skipif(RANKS_PER_NODE.read() is not None, reason="between nodes sums are equal to rounding"),
]

SIZE = MPI.COMM_WORLD.Get_size()
REALS = [f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)]
REALS += ["float16", "float32", "float64", "longdouble"]
COMPLEX = ["complex64", "complex128", "clongdouble"]


def _product(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return a product whose steps are all rounded, as those of NumPy's are not on every processor."""
    if a.dtype.kind != "c":
        return a * b
    product = np.empty_like(a)
    product.real = a.real * b.real - a.imag * b.imag
    product.imag = a.real * b.imag + a.imag * b.real
    return product


COMBINE = {"SUM": np.add, "MEAN": np.add, "PROD": _product, "MIN": np.minimum, "MAX": np.maximum}
BITWISE = {"BAND": np.bitwise_and, "BOR": np.bitwise_or, "BXOR": np.bitwise_xor}
CASES = [(d, op) for d in REALS for op in COMBINE] + [(d, op) for d in COMPLEX for op in ("SUM", "MEAN", "PROD")]
CASES += [(d, op) for d in ["bool", *(name for name in REALS if "int" in name)] for op in BITWISE]
# Bytes: on a page, in the small slots of 4, 3 and 2 ranks, read by others or in one chunk, in several.
SWITCHES = (96, 8 << 10, 32 << 10, 64 << 10, 256 << 10 if SIZE == 1 else (256 << 10) // SIZE, 128 << 10, 700_000)


def inputs(count: int, dtype: np.dtype[Any]) -> list[np.ndarray]:
    """Return the input of each rank, with overflowing numbers, NaN and zeros of both signs."""
    random = np.random.default_rng(count)
    given = []
    for _ in range(SIZE):
        if dtype.kind == "b":
            given.append(random.random(count) < 0.7)
            continue
        if dtype.kind in "iu":
            info = np.iinfo(dtype)
            given.append(random.integers(info.min, info.max, count, dtype, endpoint=True))
            continue
        values = random.standard_normal(count) * 10.0 ** random.integers(-3, 3, count)
        values[random.random(count) < 0.02] = np.nan
        values[random.random(count) < 0.02] *= 0.0
        given.append((values + 1j * values[::-1] if dtype.kind == "c" else values).astype(dtype))
    return given


def expected(op: str, given: list[np.ndarray]) -> np.ndarray:
    dtype = given[0].dtype
    formed = (
        np.dtype("float32") if dtype == np.float16 else np.dtype("float64") if _is_mean_of_ints(op, dtype) else dtype
    )
    result = formed if _is_mean_of_ints(op, dtype) else dtype
    with np.errstate(all="ignore"):
        total = reduce((COMBINE | BITWISE)[op], [array.astype(formed) for array in given])
        return (total / SIZE if op == "MEAN" else total).astype(result)


def _is_mean_of_ints(op: str, dtype: np.dtype[Any]) -> bool:
    return op == "MEAN" and dtype.kind in "iu"


def same_bits(op: str, found: np.ndarray, wanted: np.ndarray) -> None:
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    both_nan = np.isnan(found) & np.isnan(wanted) if found.dtype.kind in "fc" else np.zeros(found.shape, bool)
    # Padding of a long double is nobody's; a NaN has many patterns.
    differ = (found != wanted) & ~both_nan
    assert not differ.any(), (np.flatnonzero(differ)[:5], found[differ][:5], wanted[differ][:5])
    if found.dtype.kind == "f" and op not in ("MIN", "MAX"):  # where NumPy takes one zero or the other
        zeros = (found == 0) & ~both_nan
        np.testing.assert_array_equal(np.signbit(found)[zeros], np.signbit(wanted)[zeros])


@pytest.fixture(scope="module", name="comm", params=["slots", "push"])
def _comm(request: pytest.FixtureRequest) -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("MPIDIST_PUSH_FROM", "1" if request.param == "push" else str(1 << 40))
        with mpidist.Communicator() as comm:
            yield comm


def _new(comm: Any, op: str, mine: np.ndarray, _: np.dtype[Any]) -> np.ndarray:
    return comm.all_reduce(op, mine)


def _out(comm: Any, op: str, mine: np.ndarray, result: np.dtype[Any]) -> np.ndarray:
    out = np.empty(mine.shape, result)
    assert comm.all_reduce(op, mine, out=out) is out
    return out


def _in_place(comm: Any, op: str, mine: np.ndarray, result: np.dtype[Any]) -> np.ndarray:
    copy = mine.copy()
    return comm.all_reduce(op, copy, out=copy) if result == mine.dtype else comm.all_reduce(op, copy)


def _shifted(comm: Any, op: str, mine: np.ndarray, result: np.dtype[Any]) -> np.ndarray:
    """Results overlap the input, one element further on, which is at an odd address for a vector."""
    whole = np.empty(mine.size + 2, mine.dtype)
    whole[:-2] = mine
    given, out = whole[:-2], whole[1:-1]
    return comm.all_reduce(op, given, out=out).copy() if result == mine.dtype else comm.all_reduce(op, given)


def _strided(comm: Any, op: str, mine: np.ndarray, result: np.dtype[Any]) -> np.ndarray:
    given, out = np.empty((mine.size, 2), mine.dtype), np.empty((mine.size, 3), result)
    given[:, 1] = mine
    return comm.all_reduce(op, given[:, 1], out=out[:, 2])


def _own(comm: Any, op: str, mine: np.ndarray, _: np.dtype[Any]) -> np.ndarray:
    own = comm.empty(mine.shape, mine.dtype)
    own[:] = mine
    return comm.all_reduce(op, own)


def _own_in_place(comm: Any, op: str, mine: np.ndarray, result: np.dtype[Any]) -> np.ndarray:
    own = comm.empty(mine.shape, mine.dtype)
    own[:] = mine
    return comm.all_reduce(op, own, out=own).copy() if result == mine.dtype else comm.all_reduce(op, own)


def _own_or_private(comm: Any, op: str, mine: np.ndarray, result: np.dtype[Any]) -> np.ndarray:
    own = comm.empty(mine.shape, mine.dtype)
    own[:] = mine
    return comm.all_reduce(op, own if comm.rank % 2 else mine)


def _among_others(comm: Any, op: str, mine: np.ndarray, result: np.dtype[Any]) -> np.ndarray:
    third = mine.size // 3
    parts = [mine[:third], np.ones(5, "int32"), mine[third:], mine[:1]]
    if op == "MEAN":
        parts[1] = np.ones(5)
    first, _, second, _ = comm.all_reduce(op, parts)
    return np.concatenate([first, second])


WAYS = (_new, _out, _in_place, _shifted, _strided, _own, _own_in_place, _own_or_private, _among_others)


@pytest.mark.parametrize(("dtype", "op"), CASES)
def test_results_equal_numpy_in_rank_order(comm: Any, dtype: str, op: str) -> None:
    kind = np.dtype(dtype)
    # Another way at each size, and others for the next case.
    turn = CASES.index((dtype, op))
    for nbytes in SWITCHES:
        for more in (-1, 0, 1):
            count, turn = max(1, nbytes // kind.itemsize + more), turn + 1
            given = inputs(count, kind)
            wanted = expected(op, given)
            for way in (WAYS[turn % len(WAYS)], _new):
                same_bits(op, way(comm, op, given[comm.rank], wanted.dtype), wanted)


@pytest.mark.parametrize("op", COMBINE)
@pytest.mark.parametrize("way", WAYS)
def test_every_way_at_every_switch(comm: Any, op: str, way: Any) -> None:
    for nbytes in SWITCHES:
        given = inputs(nbytes // 4 + 1, np.dtype("float32"))
        wanted = expected(op, given)
        for _ in range(3):
            same_bits(op, way(comm, op, given[comm.rank], wanted.dtype), wanted)
