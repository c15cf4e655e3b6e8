"""NcclComm on simulated GPUs: every operation and dtype, errors and the end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mpidist.collectives.gpu.nccl import nccl_dtype
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
    assert [name(dtype, "SUM") for dtype in ("?", ">f4", ">i2", "O", "U3", "f16")] == [None] * 6


# Errors and the end -------------------------------------------------------------------------------------------------


def test_a_group_ends_whatever_happens_in_it(me: Rank) -> None:
    comm, array = me.comm, me.array(np.ones(3))
    with pytest.raises(KeyError), comm.group():
        comm.all_reduce(array, array, ReduceOp.SUM, me.stream)
        comm.all_reduce(array, array, ReduceOp.MEAN, me.stream)
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


@pytest.mark.parametrize("status", [6, 8])
def test_an_error_of_nccl_is_found(me: Rank, status: int) -> None:
    comm = me.comm
    for harmless in (0, 7):
        the_raw().async_error = harmless
        comm.check_async_error()
    the_raw().async_error = status
    with pytest.raises(NcclFailure, match="remote process exited" if status == 6 else "status 8") as caught:
        comm.check_async_error()
    assert caught.value.status == status
    assert f"rank {comm.rank} of {comm.size} (gpu:{comm.device})" in str(caught.value)
    # To abort takes all ranks.
    assert not comm.is_closed


def test_a_call_that_nccl_refuses(me: Rank) -> None:
    array = me.array(np.ones(3))
    other = me.ops.stream((me.comm.device + 1) % 4)
    with pytest.raises(NcclFailure, match="failed in allReduce on rank .*UNHANDLED_CUDA_ERROR") as caught:
        me.comm.all_reduce(array, array, ReduceOp.SUM, other)
    assert caught.value.status == 1


@pytest.mark.min_ranks(2)
def test_abort_frees_a_waiting_stream(me: Rank) -> None:
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
def test_the_double_finds_different_calls(me: Rank) -> None:
    comm, array = me.comm, me.array(np.ones(3 + me.comm.rank))
    comm.all_reduce(array, array, ReduceOp.SUM, me.stream)
    with pytest.raises(RuntimeError, match="rank . makes another call: allReduce of [34] elements"):
        me.stream.synchronize()
    comm.abort()
