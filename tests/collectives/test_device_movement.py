"""All-gather, broadcast and reduce-scatter of arrays on GPUs: by NCCL, or through page-locked memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpidist import Communicator, MismatchError
from mpidist.collectives.channel.operation import which_on_device
from mpidist.collectives.gpu import device_move
from mpidist.collectives.gpu.device_streams import DeviceCall
from mpidist.core.errors import PeerError
from mpidist.experimental import CommunicationOptions
from mpidist.topology import world_topology
from tests.support import fake_cupy
from tests.support.fake_cupy import nccl as fake_nccl

pytestmark = pytest.mark.min_ranks(2)
LATE = pytest.mark.parametrize("fake_gpus", [{"devices": 6, "jitter": 0.001}], indirect=True)
PUNCTUAL = pytest.mark.parametrize("fake_gpus", [{"devices": 6}], indirect=True)


@pytest.fixture
def by_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks are on one node, and nothing may pass through the host."""
    monkeypatch.setenv("MPIDIST_RANKS_PER_NODE", "8")
    monkeypatch.setattr(
        device_move, "which_on_device", lambda arrays: which_on_device(arrays) and pytest.fail("a copy to the host")
    )


@pytest.fixture
def by_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are on several nodes, where ``nccl`` is not the default."""
    monkeypatch.setenv("MPIDIST_RANKS_PER_NODE", "1")


def parts(rank: int) -> list[np.ndarray]:
    """Return the arrays of a rank to gather: different and equal lengths, empty ones, and several dtypes."""
    return [
        np.full((rank + 1, 2), rank, "f4"),
        np.arange(6.0).reshape(3, 2) + rank,
        np.zeros((0, 3), "i2") if rank else np.ones((2, 3), "i2"),
        np.full(3, rank % 2 == 0),
    ]


def gathered(size: int) -> list[np.ndarray]:
    return [np.concatenate(arrays) for arrays in zip(*(parts(rank) for rank in range(size)), strict=True)]


def check_movement(cupy: Any, comm: Communicator) -> None:
    for _ in range(3):
        mine = [cupy.asarray(part) for part in parts(comm.rank)]
        works = comm.all_gather_async(mine), comm.broadcast_async(mine[1], root=comm.size - 1)
        for got in (comm.all_gather(mine), works[0].wait()):
            for result, wanted in zip(got, gathered(comm.size), strict=True):
                assert isinstance(result, cupy.ndarray)
                assert result.dtype == wanted.dtype
                np.testing.assert_array_equal(result.get(), wanted)
        np.testing.assert_array_equal(works[1].wait().get(), parts(comm.size - 1)[1])
    turned = comm.all_gather(cupy.full((2, comm.rank + 1), comm.rank), axis=1)
    np.testing.assert_array_equal(
        turned.get(), np.concatenate([np.full((2, rank + 1), rank) for rank in range(comm.size)], axis=1)
    )
    values = [cupy.full((), comm.rank, "f2"), cupy.arange(6.0).reshape(2, 3).T + comm.rank, cupy.zeros(0)]
    for result, wanted in zip(comm.broadcast(values, root=1), [1, np.arange(6.0).reshape(2, 3).T + 1, []], strict=True):
        np.testing.assert_array_equal(result.get(), wanted)


@pytest.mark.counts
@LATE
@pytest.mark.usefixtures("by_nccl")
def test_arrays_move_from_gpu_to_gpu(cupy: Any) -> None:
    with Communicator() as comm:
        check_movement(cupy, comm)


@LATE
@pytest.mark.usefixtures("by_host")
def test_arrays_move_through_page_locked_memory(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with Communicator() as comm:
        check_movement(cupy, comm)
        reduced = comm.reduce("SUM", cupy.full(3, 1.0), root=0)
        assert reduced is None if comm.rank else reduced.get().tolist() == [comm.size] * 3
        monkeypatch.setattr(cupy.ndarray, "get", lambda *_: pytest.fail("a copy to pageable memory"))
        comm.broadcast([cupy.ones(1000) for _ in range(20)])
        comm.all_gather([cupy.ones(1000) for _ in range(20)])
        comm.reduce_scatter("SUM", cupy.ones(1000))


@PUNCTUAL
def test_scalars_and_empty_arrays_move_through_the_host(fake_gpus: Any) -> None:
    fake_gpus.cuda.Device(world_topology().rank).use()
    with Communicator(options=CommunicationOptions(algorithm="staged")) as comm:
        for _ in range(2):
            assert comm.broadcast(fake_gpus.full((), comm.rank)).get() == 0
            for move in (comm.all_gather, comm.all_to_all, comm.broadcast):
                assert move(fake_gpus.zeros((0, 3))).shape == (0, 3)


@pytest.mark.counts
@LATE
@pytest.mark.usefixtures("by_nccl")
@pytest.mark.parametrize("op", ["SUM", "MEAN", "PROD"])
@pytest.mark.parametrize("dtype", ["f4", "f2", "i2", "f8"])
@pytest.mark.parametrize("more", [0, 1])
def test_rows_of_a_reduction_stay_on_the_gpu(cupy: Any, op: str, dtype: str, more: int) -> None:
    with Communicator() as comm:
        rows = 2 * comm.size + more
        value = (np.arange(rows * 3).reshape(rows, 3) % 5 + 1).astype(dtype)
        wanted = comm.reduce_scatter(op, value)
        for got in (
            comm.reduce_scatter(op, cupy.asarray(value)),
            comm.reduce_scatter_async(op, cupy.asarray(value)).wait(),
        ):
            assert isinstance(got, cupy.ndarray)
            assert (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
            np.testing.assert_array_equal(got.get(), wanted)


@PUNCTUAL
def test_unsupported_reductions_use_the_host(cupy: Any) -> None:
    with Communicator() as comm:
        value = np.arange(2.0 * comm.size)
        value[0] = np.nan
        got = comm.reduce_scatter("MAX", cupy.asarray(value))
        np.testing.assert_array_equal(got.get(), value[2 * comm.rank : 2 * comm.rank + 2])


@pytest.mark.parametrize("fake_gpus", [{"devices": 6, "nccl": False, "jitter": 0.001}], indirect=True)
def test_without_nccl_arrays_move_with_a_warning(
    cupy: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MPIDIST_RANKS_PER_NODE", "8")
    with Communicator() as comm:
        part = comm.reduce_scatter_async("SUM", cupy.ones((comm.size, 2)))
        assert part.wait().get().tolist() == [[comm.size] * 2]
        check_movement(cupy, comm)
    assert len([record for record in caplog.records if "slow" in record.message]) == (world_topology().rank == 0)


@PUNCTUAL
@pytest.mark.usefixtures("by_nccl")
def test_host_and_device_arrays_mismatch(cupy: Any) -> None:
    with Communicator() as comm:
        mine = np.ones(3, "f4") if comm.rank else cupy.ones(3, "f4")
        with pytest.raises(MismatchError, match="broadcast of arrays on GPUs, which NCCL moves"):
            comm.broadcast(mine)
        assert comm.broadcast(cupy.full(2, comm.rank)).get().tolist() == [0, 0]
        with pytest.raises(MismatchError, match=r"broadcast from rank 0 of float32\(3,\) on GPUs"):
            comm.broadcast(mine)
        with pytest.raises(MismatchError, match=r"all_gather along axis 0 of float32\(\*\) on GPUs"):
            comm.all_gather(mine)
        assert comm.broadcast(cupy.full(2, comm.rank)).get().tolist() == [0, 0]


@PUNCTUAL
@pytest.mark.usefixtures("by_nccl")
@pytest.mark.parametrize("after", [0, 1])
def test_no_memory_for_rows_raises_on_all_ranks(cupy: Any, after: int) -> None:
    with Communicator(world_topology().world) as comm:
        value = cupy.ones((comm.size, 2), "f2")
        comm.reduce_scatter("SUM", value)
        is_poor = comm.rank == comm.size - 1
        if is_poor:
            fake_cupy.fail_allocations(after=after)
        with pytest.raises(cupy.cuda.memory.OutOfMemoryError if is_poor else PeerError, match="Out of memory"):
            comm.reduce_scatter("SUM", value)
        assert comm.reduce_scatter("SUM", value).get().tolist() == [[comm.size] * 2]


@PUNCTUAL
@pytest.mark.usefixtures("by_nccl")
def test_out_of_memory_raises_on_all_ranks(cupy: Any) -> None:
    with Communicator() as comm:
        mine = cupy.ones(3)
        comm.all_gather(mine)
        if comm.rank == 1:
            fake_cupy.fail_allocations()
        with pytest.raises(PeerError, match="rank 1 cannot allocate the result of all_gather.*Out of memory"):
            comm.all_gather(mine)
        assert comm.all_gather(mine).get().tolist() == [1] * 3 * comm.size


@LATE
@pytest.mark.usefixtures("by_nccl")
def test_dropped_arrays_live_until_used(cupy: Any) -> None:
    count = 50_000
    with Communicator() as comm:
        for number in range(10):
            works = [comm.all_gather_async(cupy.full(count, number + comm.rank, "f4")) for _ in range(2)]
            # Take the memory of what has been let go.
            cupy.full(count, -1, "f4")
            comm.broadcast_async(cupy.full(count, 7, "f4"))
            cupy.full(count, -1, "f4")
            for work in works:
                assert (work.wait().get().reshape(comm.size, -1) == number + np.arange(comm.size)[:, None]).all()


@PUNCTUAL
@pytest.mark.usefixtures("by_nccl")
def test_a_failed_move_frees_the_device(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with Communicator() as comm:
        mine = cupy.full(3, 1.0)
        comm.all_gather(mine)
        kept = [comm.broadcast_async(mine) if comm.rank else comm.all_gather_async(mine)]
        with pytest.raises(MismatchError):
            kept[0].wait()
        assert comm.all_reduce("SUM", mine).get()[0] == comm.size
        allocate = DeviceCall.allocate

        def without_memory(self: DeviceCall, signature: Any) -> None:
            if comm.rank == 0 and signature:
                raise MemoryError("none left")
            allocate(self, signature)

        monkeypatch.setattr(DeviceCall, "allocate", without_memory)
        kept.append(comm.all_gather_async(mine))
        with pytest.raises(PeerError, match="none left"):
            kept[1].wait()
        with pytest.raises((MemoryError, PeerError)) as caught:
            comm.broadcast(mine)
        monkeypatch.setattr(DeviceCall, "allocate", allocate)
        # What was caught keeps its call alive.
        assert comm.broadcast(mine).get()[0] == 1, caught


@PUNCTUAL
@pytest.mark.usefixtures("by_nccl")
@pytest.mark.parametrize("given", [{"algorithm": "staged"}, {"deterministic": True}])
def test_other_algorithms_start_no_nccl(fake_gpus: Any, monkeypatch: pytest.MonkeyPatch, given: Any) -> None:
    monkeypatch.setattr(device_move, "which_on_device", which_on_device)
    fake_gpus.cuda.Device(world_topology().rank).use()
    with Communicator(options=CommunicationOptions(**given)) as comm:
        mine = fake_gpus.full(comm.size, 1.0)
        comm.broadcast(mine)
        comm.all_gather(mine)
        comm.reduce_scatter("SUM", mine)
        comm.prepare_device("gpu", world_topology().rank)
        assert comm.all_reduce("SUM", mine).get()[0] == comm.size
        assert fake_nccl.open_communicators() == []


@PUNCTUAL
@pytest.mark.usefixtures("by_nccl")
def test_a_call_may_override_the_algorithm(fake_gpus: Any) -> None:
    fake_gpus.cuda.Device(world_topology().rank).use()
    with Communicator(options=CommunicationOptions(algorithm="staged")) as comm:
        mine = fake_gpus.full(3, comm.rank + 1.0)
        got = comm.broadcast(mine, options=CommunicationOptions(algorithm="nccl"))
        assert got.get().tolist() == [1.0] * 3


@PUNCTUAL
def test_one_rank_moves_arrays_of_any_gpu(fake_gpus: Any) -> None:
    from mpi4py import MPI

    first = world_topology().rank
    with Communicator(MPI.COMM_SELF) as alone:
        for device in (first, (first + 1) % 6):
            with fake_gpus.cuda.Device(device):
                assert alone.broadcast(fake_gpus.ones(3)).device.id == device
        with fake_gpus.cuda.Device((first + 2) % 6):
            assert alone.all_reduce("SUM", fake_gpus.ones(3)).get()[0] == 1
