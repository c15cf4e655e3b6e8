"""Reductions of a Communicator against NumPy: every operation, dtype, kind of memory and algorithm."""

from __future__ import annotations

import sys
from collections import OrderedDict
from functools import reduce
from types import MappingProxyType
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpidist import Communicator
from mpidist.collectives.mpi import mpi_types
from mpidist.collectives.node import packing
from mpidist.collectives.reduce.registry import wire_algorithms
from mpidist.core.settings import RANKS_PER_NODE
from mpidist.experimental import CommunicationOptions
from tests.support.ranks.cores import needs_core

pytestmark = [pytest.mark.nodes, pytest.mark.counts, pytest.mark.powers]

OPS = {"SUM": np.add, "MIN": np.minimum, "MAX": np.maximum, "PROD": np.multiply, "MEAN": np.add}
ALGORITHMS = [None, "mpi", "reduce_broadcast", "hierarchical", *wire_algorithms.names]
BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def value_of(rank: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """The array that a rank contributes: small whole numbers, so that every sum is exact."""
    rng = np.random.default_rng([7, rank])
    values = rng.integers(1, 5, shape)
    if np.dtype(dtype).kind == "c":
        return (values + 1j * rng.integers(1, 5, shape)).astype(dtype)
    return values.astype(dtype)


def expected(op: str, size: int, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    total = reduce(OPS[op], [value_of(r, shape, dtype).astype(np.result_type(dtype, "f4")) for r in range(size)])
    return total / size if op == "MEAN" else total


@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (3, 4), (40, 30)])
@pytest.mark.parametrize("op", OPS)
def test_every_operation(comm: Communicator, op: str, shape: tuple[int, ...]) -> None:
    got = comm.all_reduce(op, value_of(comm.rank, shape, "f8"))
    assert isinstance(got, np.ndarray)
    assert got.shape == shape
    np.testing.assert_allclose(got, expected(op, comm.size, shape, "f8"), rtol=1e-15)


@pytest.mark.parametrize("dtype", ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "g", "c8", "c16"])
@pytest.mark.parametrize("count", [4, 100])
def test_every_dtype_keeps_its_kind(comm: Communicator, dtype: str, count: int) -> None:
    got = comm.all_reduce("SUM", value_of(comm.rank, (count,), dtype))
    assert got.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(got, expected("SUM", comm.size, (count,), dtype).astype(dtype))


@pytest.mark.parametrize("dtype", [np.dtype("f2"), BFLOAT16], ids=str)
def test_halves_are_summed_in_float32(comm: Communicator, dtype: np.dtype) -> None:
    # 1 + 2^-11 + 2^-11 ... would stay 1 if every partial sum were rounded to 16 bits.
    mine = np.full(40, 1.0 if comm.rank == 0 else 2.0**-11, dtype)
    total = np.float32(1.0) + (comm.size - 1) * np.float32(2.0**-11)
    assert comm.all_reduce("SUM", mine).dtype == dtype
    np.testing.assert_array_equal(comm.all_reduce("SUM", mine), np.full(40, total).astype(dtype))


def test_the_mean_of_integers_is_float64(comm: Communicator) -> None:
    got = comm.all_reduce("MEAN", np.full(20, 100 + comm.rank, "i1"))
    assert got.dtype == np.float64
    np.testing.assert_array_equal(got, 100 + (comm.size - 1) / 2)


def test_large_integers_are_exact(comm: Communicator) -> None:
    big = 2**60 + 1
    assert int(comm.all_reduce("SUM", np.int64(big))) == big * comm.size


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("bytes_per_pack", [0, 1, 300])
def test_a_list_travels_together(comm: Communicator, algorithm: str | None, bytes_per_pack: int) -> None:
    shapes = [(3, 4), (), (50,), (0,), (7, 1, 2)]
    dtypes = ["f8", "f4", "f8", "i4", "f2"]
    values = [value_of(comm.rank, s, d) for s, d in zip(shapes, dtypes, strict=True)]
    options = CommunicationOptions(bytes_per_pack=bytes_per_pack, algorithm=algorithm)
    got = comm.all_reduce("SUM", values, options=options)
    assert isinstance(got, list)
    for result, shape, dtype in zip(got, shapes, dtypes, strict=True):
        assert result.dtype == np.dtype(dtype)
        np.testing.assert_array_equal(result, expected("SUM", comm.size, shape, dtype).astype(dtype))


@settings(max_examples=15)
@given(
    shapes=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 40)), max_size=5),
    op=st.sampled_from(["SUM", "MEAN", "MAX"]),
    algorithm=st.sampled_from(ALGORITHMS),
    bytes_per_pack=st.sampled_from([0, 8, 200]),
    limit=st.sampled_from([3, 50, 2**31 - 1]),
)
def test_any_plan(shapes: Any, op: str, algorithm: str | None, bytes_per_pack: int, limit: int) -> None:
    with Communicator() as comm, pytest.MonkeyPatch.context() as patch:
        # A count that MPI can hold is cut at this limit as it is at 2^31.
        patch.setattr(mpi_types, "MAX_COUNT", limit)
        options = CommunicationOptions(bytes_per_pack=bytes_per_pack, algorithm=algorithm)
        got = comm.all_reduce(op, [value_of(comm.rank, s, "f8") for s in shapes], options=options)
        for result, shape in zip(got, shapes, strict=True):
            np.testing.assert_allclose(result, expected(op, comm.size, shape, "f8"), rtol=1e-14)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("count", [3, 1000])
def test_all_ranks_hold_the_same_bits(comm: Communicator, algorithm: str | None, count: int) -> None:
    mine = np.random.default_rng(comm.rank).standard_normal(count)
    got = comm.all_reduce("MEAN", mine, options=CommunicationOptions(algorithm=algorithm))
    assert len(set(comm.all_gather_object(got.tobytes()))) == 1


def test_memory_of_any_layout(comm: Communicator) -> None:
    base = value_of(comm.rank, (20, 30), "f8")
    read_only = base.copy()
    read_only.flags.writeable = False
    total = expected("SUM", comm.size, (20, 30), "f8")
    for array, result in [(base.T, total.T), (base[::2, ::3], total[::2, ::3]), (read_only, total)]:
        np.testing.assert_array_equal(comm.all_reduce("SUM", array), result)


def test_the_input_is_never_touched_and_the_result_is_the_callers_own(comm: Communicator) -> None:
    mine = value_of(comm.rank, (50,), "f8")
    before = mine.copy()
    first = comm.all_reduce("SUM", mine)
    first += 1
    second = comm.all_reduce("SUM", mine)
    np.testing.assert_array_equal(mine, before)
    np.testing.assert_array_equal(second, first - 1)
    assert not np.shares_memory(first, mine)


@pytest.mark.parametrize("count", [4, 500])
def test_out_receives_the_result(comm: Communicator, count: int) -> None:
    out = [np.empty(count), np.empty((count, 2), "f4")]
    values = [value_of(comm.rank, (count,), "f8"), value_of(comm.rank, (count, 2), "f4")]
    got = comm.all_reduce("SUM", values, out=out)
    for result, target, value in zip(got, out, values, strict=True):
        assert result is target
        np.testing.assert_array_equal(target, expected("SUM", comm.size, value.shape, value.dtype))


class Pair(NamedTuple):
    one: Any
    other: Any


def nested(rank: int) -> dict[str, Any]:
    """Two leaves of each, and a rank's own values in them."""
    x, y = np.full((2, 1), 1.0 + rank), 2.0 * rank
    return {
        "dict": {"b": [x, (y,)], "a": {}},
        "ordered": OrderedDict(w=x, b=y),
        "named": Pair(x, y),
        "mapping": MappingProxyType({"w": x, "b": y}),
        "values": {"w": x, "b": y}.values(),
        "generator": (v for v in (x, y)),
        "generator in a dict": {"g": (v for v in (x,)), "y": y},
    }


RESULTS = {
    "dict": lambda x, y: {"b": [x, (y,)], "a": {}},
    "ordered": lambda x, y: OrderedDict(w=x, b=y),
    "named": Pair,
    "mapping": lambda x, y: {"w": x, "b": y},
    "values": lambda x, y: [x, y],
    "generator": lambda x, y: [x, y],
    "generator in a dict": lambda x, y: {"g": [x], "y": y},
}


@pytest.mark.parametrize("kind", RESULTS)
def test_nests_come_back_as_they_went_in(comm: Communicator, kind: str) -> None:
    n = comm.size
    total = RESULTS[kind](np.full((2, 1), n + sum(range(n)) + 0.0), np.float64(2.0 * sum(range(n))))
    last = RESULTS[kind](np.full((2, 1), float(n)), np.float64(2.0 * (n - 1)))

    def value() -> Any:
        return nested(comm.rank)[kind]

    def check(got: Any, expected: Any) -> None:
        assert type(got) is type(expected)
        assert repr(got) == repr(expected)

    check(comm.all_reduce("SUM", value()), total)
    check(comm.all_reduce_async("SUM", value()).wait(), total)
    check(comm.broadcast(value(), n - 1), last)
    check(comm.broadcast_async(value(), n - 1).wait(), last)
    for got in (comm.reduce("SUM", value()), comm.reduce_async("SUM", value()).wait()):
        if comm.rank == 0:
            check(got, total)
        else:
            assert got is None


def test_a_gathered_nest_and_out_of_the_structure_of_the_value(comm: Communicator) -> None:
    rows = {"b": np.full((1, 2), comm.rank), "a": (np.zeros((comm.rank, 1)),)}
    for got in (comm.all_gather(rows), comm.all_gather_async(rows).wait()):
        assert (list(got), got["a"][0].shape) == (["b", "a"], (sum(range(comm.size)), 1))
        np.testing.assert_array_equal(got["b"][:, 0], range(comm.size))
    out = {"a": (np.empty(2),), "b": np.empty(3)}
    got = comm.all_reduce("SUM", {"b": np.ones(3), "a": (np.zeros(2),)}, out=out)
    assert got["b"] is out["b"]
    np.testing.assert_array_equal(out["b"], comm.size)


def test_a_leaf_that_is_no_array_is_named(comm: Communicator) -> None:
    for value, name in (({"w": 1.0, "kind": ["text"]}, r"value\['kind'\]\[0\]"), ([1.0, "text"], r"value\[1\]")):
        with pytest.raises(TypeError, match=f"{name} is of type str"):
            comm.all_reduce("SUM", value)


def test_out_may_be_the_input(comm: Communicator) -> None:
    mine = value_of(comm.rank, (300,), "f8")
    comm.all_reduce("SUM", mine, out=mine)
    np.testing.assert_array_equal(mine, expected("SUM", comm.size, (300,), "f8"))


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
@pytest.mark.parametrize("length", [2, 600, 20_000])
def test_results_may_lie_where_other_values_do(comm: Communicator, op: str, length: int) -> None:
    times = 1 if op == "MEAN" else comm.size
    for dtype in ("float64", "float16", BFLOAT16):
        first, second, third = (np.full(length, value, dtype) for value in (1, 2, 3))
        given = [second, first, third]
        got = comm.all_reduce(op, [first, second, third], out=given)
        assert all(one is other for one, other in zip(got, given, strict=True))
        assert [np.unique(array).astype(float).tolist() for array in (second, first, third)] == [
            [value * times] for value in (1.0, 2.0, 3.0)
        ]
    whole = np.arange(length + 1.0)
    comm.all_reduce(op, [whole[:-1], whole[1:]], out=[whole[1:], np.empty(length)])
    assert whole[1:].tolist() == (np.arange(float(length)) * times).tolist()


@pytest.mark.parametrize(
    ("out", "message"),
    [(np.empty(3), r"float64\(3,\).*expected float64\(4,\)"), (np.empty(4, "f4"), "float32")],
)
def test_an_out_that_does_not_fit(comm: Communicator, out: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        comm.all_reduce("SUM", np.ones(4), out=out)


def test_numbers_come_back_as_numpy_scalars(comm: Communicator) -> None:
    assert type(comm.all_reduce("SUM", 1.5)) is np.float64
    assert type(comm.all_reduce("SUM", 2)) is np.int64
    assert type(comm.all_reduce("MAX", np.float32(2))) is np.float32


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (np.ones(3, bool), "bool.*Cast"),
        (True, "bool.*Cast"),
        (np.ones(3, ">f4"), "byte order.*astype"),
        (np.array([object()]), "byte order|Python objects|object"),
        (np.zeros(2, [("a", "f4")]), "dtype"),
        ("text", "str.*expected a number"),
        (None, "NoneType"),
    ],
)
def test_what_cannot_be_reduced(comm: Communicator, value: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        comm.all_reduce("SUM", value)


def calls_of(comm: Communicator, value: Any, out: Any = None) -> int:
    """Count the calls of functions: what stands between a program and its message, on whatever machine."""
    calls: list[str] = []
    for _ in range(3):
        comm.all_reduce("SUM", value, out=out)
    sys.setprofile(lambda frame, event, _: calls.append(event) if event in ("call", "c_call") else None)
    comm.all_reduce("SUM", value, out=out)
    sys.setprofile(None)
    return len(calls) - 1  # the last one is setprofile


@pytest.mark.one_rank
def test_one_array_takes_few_calls() -> None:
    with Communicator() as comm:
        assert calls_of(comm, np.ones(4)) <= 68


@needs_core
@pytest.mark.min_ranks(2)
@pytest.mark.skipif(RANKS_PER_NODE.read() is not None, reason="the short way is that of one node")
def test_an_array_like_the_one_before_takes_hardly_any_calls(comm: Communicator) -> None:
    # A rank that has to wait for long for the others takes more.
    new = min(calls_of(comm, np.ones(4)) for _ in range(20))
    given = min(calls_of(comm, np.ones(300), np.empty(300)) for _ in range(20))
    assert max(new, given) <= 4


@pytest.mark.one_rank
@pytest.mark.parametrize("is_in_place", [False, True])
def test_small_arrays_take_no_more_calls_with_out(is_in_place: bool) -> None:
    values = [np.ones(40) for _ in range(50)]
    out = values if is_in_place else [np.ones(40) for _ in range(50)]
    with Communicator() as comm:
        assert calls_of(comm, values, out) <= calls_of(comm, values)


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("wire", [None, *wire_algorithms.names])
@pytest.mark.parametrize("nbytes", [300_000, 3 << 20])
def test_large_arrays_are_reduced_in_place_without_a_copy(
    comm: Communicator, monkeypatch: pytest.MonkeyPatch, wire: str | None, nbytes: int
) -> None:
    options = CommunicationOptions(algorithm=wire or "hierarchical")
    mine = np.random.default_rng(comm.rank).random(nbytes // 8)
    wanted = comm.all_reduce("SUM", mine, options=options)
    if comm.last_algorithm != "mpi":
        monkeypatch.setattr(packing, "_copied", None)
    for arrays in ([mine.copy()], [mine.copy(), mine.copy()]):
        comm.all_reduce("SUM", arrays, out=arrays, options=options)
        for found in arrays:
            np.testing.assert_allclose(found, wanted, rtol=1e-12)


@pytest.mark.parametrize("per_node", [None, "1"])
@pytest.mark.parametrize("wire", wire_algorithms.names)
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_one_memory_twice_in_place(monkeypatch: pytest.MonkeyPatch, op: str, wire: str, per_node: str | None) -> None:
    if per_node is not None:
        monkeypatch.setenv("MPIDIST_RANKS_PER_NODE", per_node)
    with Communicator() as comm:
        whole = np.empty(100_000, "f4")
        both = [whole, whole[:]]
        for _ in range(2):
            whole[:] = comm.rank + 1
            comm.all_reduce(op, both, out=both, options=CommunicationOptions(algorithm=wire))
            total = sum(range(1, comm.size + 1))
            np.testing.assert_array_equal(whole, total if op == "SUM" else total / comm.size)


@pytest.mark.parametrize("step", [1, -1, 1000])
def test_results_that_are_shifted_against_their_inputs(comm: Communicator, step: int) -> None:
    whole = np.random.default_rng(comm.rank).random(50_000 + abs(step))
    array, out = (whole[: -abs(step)], whole[abs(step) :])[:: 1 if step > 0 else -1]
    wanted = comm.all_reduce("SUM", array)
    comm.all_reduce("SUM", array, out=out)
    np.testing.assert_allclose(out, wanted, rtol=1e-12)


def test_complex_numbers_have_no_maximum(comm: Communicator) -> None:
    with pytest.raises(TypeError, match="no order"):
        comm.all_reduce("MAX", 1j)


@pytest.mark.parametrize(("op", "error"), [("mode", ValueError), (3, TypeError), (None, TypeError)])
def test_unknown_operations(comm: Communicator, op: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="SUM|ReduceOp"):
        comm.all_reduce(op, 1.0)


def test_an_unknown_algorithm_is_refused_before_any_message(comm: Communicator) -> None:
    with pytest.raises(ValueError, match="'magic'.*hierarchical.*mpi"):
        comm.all_reduce("SUM", 1.0, options=CommunicationOptions(algorithm="magic"))


@pytest.mark.parametrize("root", [0, -1])
def test_reduce_to_one_rank(comm: Communicator, root: int) -> None:
    root %= comm.size
    got = comm.reduce("MEAN", value_of(comm.rank, (4, 5), "f8"), root=root)
    if comm.rank == root:
        np.testing.assert_allclose(got, expected("MEAN", comm.size, (4, 5), "f8"), rtol=1e-15)
    else:
        assert got is None


@pytest.mark.parametrize("rows", [0, 1, 7, 12])
@pytest.mark.parametrize("limit", [2, 2**31 - 1])
def test_reduce_scatter_deals_rows(comm: Communicator, monkeypatch: Any, rows: int, limit: int) -> None:
    monkeypatch.setattr(mpi_types, "MAX_COUNT", limit)
    got = comm.reduce_scatter("MEAN", value_of(comm.rank, (rows, 3), "f4"))
    whole = expected("MEAN", comm.size, (rows, 3), "f4").astype("f4")
    np.testing.assert_allclose(got, np.array_split(whole, comm.size)[comm.rank], rtol=1e-6)
    assert got.dtype == np.float32


@pytest.mark.parametrize("dtype", ["f4", "f2", "i8"])
def test_reduce_scatter_of_many_chunks(comm: Communicator, dtype: str) -> None:
    shape = (70_001, 7)
    got = comm.reduce_scatter("SUM", value_of(comm.rank, shape, dtype))
    whole = expected("SUM", comm.size, shape, dtype).astype(dtype)
    np.testing.assert_array_equal(got, np.array_split(whole, comm.size)[comm.rank])
    own = comm.empty(shape, dtype)
    own[:] = value_of(comm.rank, shape, dtype)
    np.testing.assert_array_equal(comm.reduce_scatter("SUM", own), got)
