"""NcclComm on pretended GPUs: every operation and dtype, groups, wrong arguments, errors and the end."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mpidist.collectives.gpu.nccl import nccl_dtype, nccl_reduction
from mpidist.core.errors import NcclFailure
from mpidist.core.options import ReduceOp
from mpidist.topology import import_mpi
from tests.collectives.nccl_ranks import Rank, nccl_rank
from tests.support.fake_cupy import nccl as fake_nccl

pytestmark = pytest.mark.parametrize("fake_gpus", [{"devices": 4, "jitter": 0.001}], indirect=True)

INTEGERS = ["int8", "uint8", "int32", "uint32", "int64", "uint64"]
FLOATS = ["float16", "float32", "float64", "bfloat16"]
COMPLEX = ["complex64", "complex128"]
OPS = {
    ReduceOp.SUM: np.add,
    ReduceOp.PROD: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
}
REDUCTIONS = [
    *((dtype, op) for dtype in INTEGERS for op in OPS),
    *((dtype, op) for dtype in FLOATS for op in OPS),
    *((dtype, ReduceOp.SUM) for dtype in COMPLEX),
]
SIZES = (0, 1, 7, 1000)


@pytest.fixture
def me(fake_gpus: Any) -> Iterator[Rank]:
    """This rank, in a communicator of all."""
    with nccl_rank() as rank:
        yield rank


def the_raw() -> Any:
    (raw,) = fake_nccl.open_communicators()
    return raw


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def values(rank: int, size: int, dtype: np.dtype[Any]) -> np.ndarray:
    """Small numbers that differ by rank, and whose sums and products are exact in every dtype."""
    return ((np.arange(size) + rank) % 3 + 1).astype(dtype)


def reduced(ranks: int, size: int, dtype: np.dtype[Any], op: ReduceOp) -> np.ndarray:
    total: np.ndarray = OPS[op].reduce([values(rank, size, dtype) for rank in range(ranks)], dtype=dtype)
    return total


def check(got: np.ndarray, expected: np.ndarray) -> None:
    np.testing.assert_array_equal(got, expected, strict=True)


@pytest.mark.parametrize(("name", "op"), REDUCTIONS)
def test_reductions(me: Rank, name: str, op: ReduceOp) -> None:
    dtype, comm = dtype_of(name), me.comm
    for size in SIZES:
        source, target = me.array(values(comm.rank, size, dtype)), me.empty(size, dtype)
        comm.all_reduce(source, target, op, me.stream)
        check(me.seen(target), reduced(comm.size, size, dtype, op))
        check(me.seen(source), values(comm.rank, size, dtype))
        whole = me.array(values(comm.rank, size * comm.size, dtype))
        comm.reduce_scatter(whole, target, op, me.stream)
        mine = slice(size * comm.rank, size * (comm.rank + 1))
        check(me.seen(target), reduced(comm.size, size * comm.size, dtype, op)[mine])
        root = size % comm.size
        comm.reduce(source, target, op, root, me.stream)
        got = me.seen(target)
        if comm.rank == root:
            check(got, reduced(comm.size, size, dtype, op))


def test_reductions_in_place(me: Rank) -> None:
    comm, dtype = me.comm, np.dtype("f4")
    array = me.array(values(comm.rank, 12 * comm.size, dtype))
    mine = array[12 * comm.rank : 12 * (comm.rank + 1)]
    comm.reduce_scatter(array, mine, ReduceOp.SUM, me.stream)
    comm.all_gather(mine, array, me.stream)
    check(me.seen(array), reduced(comm.size, 12 * comm.size, dtype, ReduceOp.SUM))
    comm.all_reduce(array, array, ReduceOp.MAX, me.stream)
    check(me.seen(array), reduced(comm.size, 12 * comm.size, dtype, ReduceOp.SUM))


def test_reduce_without_targets(me: Rank) -> None:
    comm = me.comm
    source = me.array(np.full(5, comm.rank, "i4"))
    target = me.empty(5, "i4") if comm.rank == comm.size - 1 else None
    comm.reduce(source, target, ReduceOp.SUM, comm.size - 1, me.stream)
    me.stream.synchronize()
    if target is not None:
        check(me.seen(target), np.full(5, sum(range(comm.size)), "i4"))


@pytest.mark.parametrize("name", ["bool", "int16", "complex64", "bfloat16", "float64"])
def test_movement_of_any_dtype(me: Rank, name: str) -> None:
    comm, dtype = me.comm, dtype_of(name)
    for size in SIZES:
        source, whole = me.array(values(comm.rank, size, dtype)), me.empty(size * comm.size, dtype)
        comm.all_gather(source, whole, me.stream)
        expected = np.concatenate([values(rank, size, dtype) for rank in range(comm.size)])
        check(me.seen(whole), expected)
        for root in range(comm.size):
            target = me.empty(size, dtype)
            comm.broadcast(source if comm.rank == root else None, target, root, me.stream)
            check(me.seen(target), values(root, size, dtype))
        comm.broadcast(None, source, 0, me.stream)
        check(me.seen(source), values(0, size, dtype))


def test_shapes_do_not_matter(me: Rank) -> None:
    comm = me.comm
    source, target = me.array(np.ones((3, 4), "f4")), me.empty(12, "f4")
    comm.all_reduce(source, target, ReduceOp.SUM, me.stream)
    check(me.seen(target), np.full(12, comm.size, "f4"))


@pytest.mark.parametrize("has_last", [True, False])
def test_slices_of_several_lengths(me: Rank, has_last: bool) -> None:
    comm, size = me.comm, 3 * me.comm.size + 2
    borders = np.linspace(0, size, comm.size + has_last).astype(int).tolist()
    cuts = [*itertools.pairwise(borders)] or [(0, size)]
    start, stop = (*cuts[comm.rank :], (0, 0))[0]
    source, target = me.array(values(comm.rank, size, np.dtype("f4"))), me.empty(size, "f4")
    comm.reduce_scatter(source, target[start:stop], ReduceOp.SUM, me.stream, cuts)
    comm.all_gather(target[start:stop], target, me.stream, cuts)
    check(me.seen(target), reduced(comm.size, size, np.dtype("f4"), ReduceOp.SUM))


def test_calls_on_two_streams_keep_their_order(me: Rank) -> None:
    comm, other = me.comm, me.ops.stream(me.comm.device)
    arrays = [me.array(np.full(100, index + comm.rank, "i8")) for index in range(20)]
    other.wait(me.stream.record())
    for index, array in enumerate(arrays):
        comm.all_reduce(array, array, ReduceOp.SUM, me.stream if index % 2 else other)
    other.synchronize()
    for index, array in enumerate(arrays):
        check(me.seen(array), np.full(100, comm.size * index + sum(range(comm.size)), "i8"))


def test_a_group_on_two_streams(me: Rank) -> None:
    comm, other = me.comm, me.ops.stream(me.comm.device)
    one, two = me.array(np.ones(3, "f4")), me.array(np.full(4, 2.0, "f4"))
    other.wait(me.stream.record())
    with comm.group():
        comm.all_reduce(one, one, ReduceOp.SUM, me.stream)
        comm.all_reduce(two, two, ReduceOp.SUM, other)
    me.stream.wait(other.record())
    check(me.seen(one), np.full(3, comm.size, "f4"))
    check(me.seen(two), np.full(4, 2 * comm.size, "f4"))


# Wrong arguments ----------------------------------------------------------------------------------------------------


def wrong_calls(me: Rank) -> list[tuple[Any, type[Exception], str]]:
    """Each with what it raises; none of them may communicate."""
    comm, stream, total = me.comm, me.stream, ReduceOp.SUM
    here, n = comm.device, comm.size
    good, short = me.array(np.ones(6, "f4")), me.array(np.ones(5, "f4"))
    double, grid, small = me.array(np.ones(6)), me.array(np.ones((6, 6), "f4")), me.array(np.ones(6, "i2"))
    away = (here + 1) % 4
    elsewhere = me.ops.from_host(np.ones(6, "f4"), away)
    return [
        (lambda: comm.all_reduce(good, short, total, stream), ValueError, "target has 5 elements. Pass 6"),
        (lambda: comm.all_reduce(good, double, total, stream), TypeError, "source is float32 and target is float64"),
        (lambda: comm.all_reduce(good, elsewhere, total, stream), ValueError, f"target is on gpu:{away}. .*gpu:{here}"),
        (lambda: comm.all_reduce(grid[:, 1], good, total, stream), ValueError, "source of shape .6,..*not contiguous"),
        (lambda: comm.all_reduce(np.ones(6, "f4"), good, total, stream), TypeError, "source is of type numpy.ndarray"),
        (lambda: comm.all_reduce(small, small, total, stream), TypeError, "NCCL has no SUM of int16"),
        (
            lambda: comm.all_gather(good, me.array(np.ones(6 * n + 1, "f4")), stream),
            ValueError,
            f"Pass {6 * n}, ",
        ),
        (
            lambda: comm.reduce_scatter(me.array(np.ones(6 * n + 1, "f4")), good, total, stream),
            ValueError,
            f"{n} ranks",
        ),
        (lambda: comm.reduce(good, short, total, 0, stream), ValueError, "target has 5"),
        (lambda: comm.reduce(good, None, total, comm.rank, stream), ValueError, "target is None on the root"),
        (
            lambda: comm.reduce(good, good, total, n, stream),
            ValueError,
            f"root is {n}. Pass a rank from 0 to {n - 1}",
        ),
        (lambda: comm.broadcast(short, good, comm.rank, stream), ValueError, "target has 6 elements. Pass 5"),
        (lambda: comm.broadcast(None, good, -1, stream), ValueError, "root is -1"),
        (lambda: comm.broadcast(None, grid.T, 0, stream), ValueError, "not contiguous"),
    ]


def test_wrong_arguments_are_refused_and_do_no_harm(me: Rank) -> None:
    for call, kind, message in wrong_calls(me):
        with pytest.raises(kind, match=message):
            call()
    array = me.array(np.ones(3))
    me.comm.all_reduce(array, array, ReduceOp.SUM, me.stream)
    check(me.seen(array), np.full(3, float(me.comm.size)))


def test_a_group_ends_whatever_happens_in_it(me: Rank) -> None:
    comm, array = me.comm, me.array(np.ones(3))
    with pytest.raises(ValueError, match="root is"), comm.group():
        comm.all_reduce(array, array, ReduceOp.SUM, me.stream)
        comm.broadcast(array, array, comm.size, me.stream)
    check(me.seen(array), np.full(3, float(comm.size)))
    comm.all_reduce(array, array, ReduceOp.SUM, me.stream)
    check(me.seen(array), np.full(3, float(comm.size) ** 2))


def test_an_error_at_the_end_of_a_group(me: Rank, monkeypatch: Any) -> None:
    def fail() -> None:
        fake_group_end()
        raise fake_nccl.NcclError(3)

    fake_group_end = fake_nccl.groupEnd
    monkeypatch.setattr(fake_nccl, "groupEnd", fail)
    with pytest.raises(NcclFailure, match="group of calls: NCCL_ERROR_INTERNAL") as caught, me.comm.group():
        pass
    assert caught.value.status == 3


@pytest.mark.parametrize(
    ("dtype", "op"),
    [("c8", "PROD"), ("c16", "MAX"), ("i4", "MEAN"), ("u2", "SUM"), ("?", "SUM"), (">f4", "SUM"), ("U3", "SUM")],
)
def test_reductions_that_nccl_lacks(fake_gpus: Any, dtype: str, op: str) -> None:
    with pytest.raises(TypeError, match=f"NCCL has no {op} of {np.dtype(dtype)}. Cast to"):
        nccl_reduction(np.dtype(dtype), ReduceOp.of(op))


def test_the_dtype_to_cast_to(fake_gpus: Any) -> None:
    def name(dtype: Any, op: str) -> str | None:
        found = nccl_dtype(np.dtype(dtype), ReduceOp.of(op))
        return None if found is None else found.name

    assert [name(dtype, "SUM") for dtype in ("i2", "u2", "i1", "u8", "f2", "f8", "c8")] == [
        "int32", "uint32", "int8", "uint64", "float16", "float64", "complex64"
    ]  # fmt: skip
    assert name(ml_dtypes.bfloat16, "SUM") == "bfloat16"
    assert [name("i2", op) for op in ("PROD", "MIN", "MAX")] == ["int32"] * 3
    assert [name("f4", op) for op in ("PROD", "MEAN", "MIN", "MAX")] == ["float32", "float32", None, None]
    assert [name("c16", op) for op in ("MEAN", "PROD", "MIN", "MAX")] == ["complex128", None, None, None]
    assert [name(dtype, "SUM") for dtype in ("?", ">f4", ">i2", "O", "f16")] == [None] * 5


# Errors and the end -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [6, 8])
def test_an_error_of_nccl_is_found(me: Rank, status: int) -> None:
    comm = me.comm
    comm.check_async_error()
    the_raw().async_error = status
    with pytest.raises(NcclFailure, match="remote process exited" if status == 6 else "status 8") as caught:
        comm.check_async_error()
    assert caught.value.status == status
    assert f"rank {comm.rank} of {comm.size} (gpu:{comm.device})" in str(caught.value)
    # To abort takes all ranks.
    assert not comm.is_closed


def test_nccl_at_work_is_no_error(me: Rank) -> None:
    the_raw().async_error = 7
    me.comm.check_async_error()


def test_a_call_that_nccl_refuses(me: Rank) -> None:
    array = me.array(np.ones(3))
    other = me.ops.stream((me.comm.device + 1) % 4)
    with pytest.raises(NcclFailure, match="failed in all_reduce on rank .*UNHANDLED_CUDA_ERROR") as caught:
        me.comm.all_reduce(array, array, ReduceOp.SUM, other)
    assert caught.value.status == 1


@pytest.mark.min_ranks(2)
def test_abort_frees_a_stream_whose_peers_never_come(me: Rank) -> None:
    comm, array = me.comm, me.array(np.ones(3))
    if comm.rank:
        comm.all_reduce(array, array, ReduceOp.SUM, me.stream)
    done = me.stream.record()
    comm.abort()
    done.synchronize()
    comm.abort()
    comm.close()
    with pytest.raises(RuntimeError, match="can no longer be used: it was aborted"):
        comm.all_reduce(array, array, ReduceOp.SUM, me.stream)
    # Of what was sent nothing is left where programs have their messages.
    world = import_mpi().COMM_WORLD
    world.Barrier()
    assert not world.Iprobe()


def test_closing(me: Rank) -> None:
    comm, array = me.comm, me.array(np.ones(3))
    assert repr(comm) == f"<NcclComm, rank {comm.rank} of {comm.size} on gpu:{comm.device}>"
    comm.close()
    comm.close()
    comm.abort()
    assert comm.is_closed
    assert "closed" in repr(comm)
    with pytest.raises(RuntimeError, match="can no longer be used: it has been closed"):
        comm.all_reduce(array, array, ReduceOp.SUM, me.stream)
    assert fake_nccl.open_communicators() == []


@pytest.mark.min_ranks(2)
def test_the_double_finds_ranks_that_make_different_calls(me: Rank) -> None:
    comm, array = me.comm, me.array(np.ones(3 + me.comm.rank))
    comm.all_reduce(array, array, ReduceOp.SUM, me.stream)
    with pytest.raises(RuntimeError, match="rank . makes another call: allReduce of [34] elements"):
        me.stream.synchronize()
    comm.abort()


@pytest.mark.min_ranks(2)
def test_an_abort_may_want_all_ranks(me: Rank, monkeypatch: Any) -> None:
    monkeypatch.setattr(fake_nccl, "abort_waits", True)
    aborting = threading.Thread(target=the_raw().abort)
    if me.comm.rank == 0:
        aborting.start()
        aborting.join(0.3)
        assert aborting.is_alive()
    import_mpi().COMM_WORLD.Barrier()
    if me.comm.rank:
        aborting.start()
    aborting.join(30)
    assert not aborting.is_alive()
    me.comm.abort()
