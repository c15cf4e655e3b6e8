"""NCCL on the GPU: one rank, then several ranks that share it, each operation and dtype against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.gpu import machine
from tests.support.ranks.jobs import run_alone

pytestmark = [pytest.mark.jobs, pytest.mark.one_rank, pytest.mark.timeout(300)]

LIMIT_SECONDS = 120.0
REDUCED = ["int8", "uint8", "int32", "uint32", "int64", "uint64"]
REDUCED += ["float16", "float32", "float64", "complex64"]
MOVED = ["int16", "bool", "complex128"]
SIZES = (1, 7, 1000, 300_001)


@pytest.fixture(autouse=True)
def _needs_nccl() -> None:
    problem = machine.nccl_problem()
    if problem is not None:
        pytest.skip(problem)


def _values(rank: int, size: int, name: str) -> np.ndarray[Any, Any]:
    """Small numbers that differ by rank, whose sums and products are exact in every dtype."""
    from mpidist.arrays.dtypes import as_dtype

    return ((np.arange(size) + rank) % 3 + 1).astype(as_dtype(name))


class _Rank:
    """This rank's end of a communicator of all ranks, and what it gets."""

    def __init__(self) -> None:
        from mpi4py import MPI

        from mpidist.arrays.device_ops import ops_for
        from mpidist.collectives.gpu.nccl import NcclComm, make_nccl
        from mpidist.collectives.mpi.waiting import drive
        from mpidist.core.concurrency import Deadline

        def failure(waited: float) -> TimeoutError:
            return TimeoutError(f"NCCL did not start within {waited:.0f} s")

        self.cupy, _ = machine.join()
        self.device = int(self.cupy.cuda.Device().id)
        world = MPI.COMM_WORLD.Dup()
        made = drive(make_nccl(world, self.device), lambda: Deadline(None, failure, 60.0))
        assert isinstance(made, NcclComm), made
        self.comm, self.ops = made, ops_for("gpu")
        self.stream = self.ops.stream(self.device)

    def array(self, values: np.ndarray[Any, Any]) -> Any:
        array = self.ops.from_host(values, self.device)
        self.stream.wait(self.ops.current_stream(self.device).record())
        return array

    def seen(self, array: Any) -> np.ndarray[Any, Any]:
        self.stream.synchronize()
        return self.ops.to_host(array)

    def leave(self) -> None:
        self.stream.synchronize()
        self.comm.check_async_error()
        self.comm.close()


def _reductions(names: list[str]) -> int:
    from mpidist.core.options import ReduceOp

    me = _Rank()
    rank, size = me.comm.rank, me.comm.size
    checked = 0
    for name in names:
        for count in SIZES:
            everyone = np.stack([_values(other, count * size, name) for other in range(size)])
            wanted = {
                ReduceOp.SUM: np.add.reduce(everyone, dtype=everyone.dtype),
                ReduceOp.PROD: np.multiply.reduce(everyone, dtype=everyone.dtype),
                ReduceOp.MIN: np.minimum.reduce(everyone),
                ReduceOp.MAX: np.maximum.reduce(everyone),
            }
            for op in [ReduceOp.SUM] if name.startswith("complex") else list(wanted):
                source = me.array(everyone[rank])
                target, part = me.array(np.zeros_like(everyone[0])), me.array(np.zeros_like(everyone[0, :count]))
                me.comm.all_reduce(source, target, op, me.stream)
                me.comm.reduce_scatter(source, part, op, me.stream)
                np.testing.assert_array_equal(me.seen(target), wanted[op], f"{name} {op}")
                np.testing.assert_array_equal(me.seen(part), wanted[op][count * rank : count * (rank + 1)])
                me.comm.all_reduce(source, source, op, me.stream)
                np.testing.assert_array_equal(me.seen(source), wanted[op])
                checked += 1
    me.leave()
    return checked


def _movements(names: list[str]) -> int:
    me = _Rank()
    rank, size = me.comm.rank, me.comm.size
    checked = 0
    for name in names:
        for count in SIZES:
            mine, whole = me.array(_values(rank, count, name)), me.array(np.zeros_like(_values(0, count * size, name)))
            me.comm.all_gather(mine, whole, me.stream)
            wanted = np.concatenate([_values(other, count, name) for other in range(size)])
            np.testing.assert_array_equal(me.seen(whole), wanted)
            array = me.array(_values(rank, count, name))
            me.comm.broadcast(array, array, size - 1, me.stream)
            np.testing.assert_array_equal(me.seen(array), _values(size - 1, count, name))
            checked += 1
    me.leave()
    return checked


def _abort() -> bool:
    me = _Rank()
    me.comm.abort()
    return me.comm.is_closed


@pytest.mark.parametrize(
    ("ranks", "names"), [(1, REDUCED), (2, REDUCED), (4, ["float32"]), (2, ["bfloat16"]), (4, ["bfloat16"])]
)
def test_reductions(ranks: int, names: list[str]) -> None:
    checked = run_alone(_reductions, ranks, names, timeout=LIMIT_SECONDS)
    assert len(set(checked)) == 1
    assert checked[0] >= len(names) * len(SIZES)


@pytest.mark.parametrize(("ranks", "names"), [(1, MOVED), (2, MOVED), (2, ["bfloat16"])])
def test_movements(ranks: int, names: list[str]) -> None:
    assert run_alone(_movements, ranks, names, timeout=LIMIT_SECONDS) == [len(names) * len(SIZES)] * ranks


def test_abort_ends_a_communicator() -> None:
    assert run_alone(_abort, 2, timeout=LIMIT_SECONDS) == [True, True]
