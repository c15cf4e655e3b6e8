"""What an all-reduce asks of CUDA, counted by the stand-in: the table in docs/gpu.md.

Counts of the second call, once all that is kept has been made.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from mpidist import Communicator
from mpidist.experimental import CommunicationOptions
from mpidist.topology import world_topology
from tests.support import fake_cupy

pytestmark = [
    pytest.mark.min_ranks(2),
    pytest.mark.parametrize("fake_gpus", [{"devices": 6}], indirect=True),
]
ARRAYS_OF_A_LAUNCH = 120


@pytest.fixture
def cupy(fake_gpus: Any) -> Iterator[Any]:
    """Each rank has a GPU of its own."""
    with fake_gpus.cuda.Device(world_topology().rank):
        yield fake_gpus


def gradients(cupy: Any, count: int, elements: int = 576) -> list[Any]:
    """Return arrays of some sizes, in bytes multiples of 16 and others."""
    return [cupy.ones(elements if number % 3 else elements + 7, "f4") for number in range(count)]


def expected_launches(algorithm: str, op: str, is_in_place: bool, number: int, ranks: int) -> int:
    """Return the kernels of a call: of NCCL, of the ring, to pack and unpack, to divide or to copy."""
    launches = {"nccl": 1, "ring": ranks - 1, "staged": 0}[algorithm]
    if number > 1:
        # What is unpacked is divided there.
        return launches + 2 * -(-number // ARRAYS_OF_A_LAUNCH)
    return launches + (op == "MEAN") + (algorithm == "ring" and not is_in_place)


@pytest.mark.parametrize("number", [1, 160, 600])
@pytest.mark.parametrize("is_in_place", [False, True])
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
@pytest.mark.parametrize("algorithm", ["nccl", "ring", "staged"])
def test_what_an_all_reduce_asks_of_cuda(
    cupy: Any, monkeypatch: pytest.MonkeyPatch, algorithm: str, op: str, is_in_place: bool, number: int
) -> None:
    # Of several nodes, where the ring has something to do.
    monkeypatch.setenv("MPIDIST_RANKS_PER_NODE", "1")
    with Communicator() as comm:
        found = counted(comm, gradients(cupy, number), algorithm, op, is_in_place)
        assert found == (expected_launches(algorithm, op, is_in_place, number, comm.size), 0, 0)


def counted(comm: Communicator, arrays: list[Any], algorithm: str, op: str, is_in_place: bool) -> tuple[int, ...]:
    """Return launches, pinned allocations and waits of the second call, whose results are right."""
    counts, options = fake_cupy.counts(), CommunicationOptions(algorithm=algorithm)
    for _ in range(2):
        for array in arrays:
            array.fill(1)
        comm.barrier()
        counts.clear()
        results = comm.all_reduce(op, arrays, out=arrays if is_in_place else None, options=options)
        found = (counts.launches, counts.pinned_allocations, counts.synchronizations)
        switches = counts.device_switches
        assert all((result.get() == (comm.size if op == "SUM" else 1)).all() for result in results)
        del results
    # The thread that watches makes its GPU current once.
    assert switches <= 1
    return found


@pytest.mark.parametrize(("op", "launches"), [("SUM", 1), ("MEAN", 2)])
@pytest.mark.parametrize("is_in_place", [False, True])
def test_large_arrays_of_one_node_are_not_packed(
    cupy: Any, monkeypatch: pytest.MonkeyPatch, is_in_place: bool, op: str, launches: int
) -> None:
    monkeypatch.setenv("MPIDIST_RANKS_PER_NODE", "8")
    with Communicator() as comm:
        assert counted(comm, gradients(cupy, 20, 16_384), "nccl", op, is_in_place) == (launches, 0, 0)


def test_results_are_independent_and_begin_where_vectors_do(cupy: Any) -> None:
    with Communicator() as comm:
        for dtype in ("f4", "f2", "i2", "f8"):
            arrays = [cupy.full(size, 2, dtype) for size in (7, 1, 64, 33)]
            results = comm.all_reduce("SUM", arrays)
            assert len({id(result.data.mem) for result in results}) == len(arrays)
            assert not any(result.data.ptr % 16 for result in results)
            for array, result in zip(arrays, results, strict=True):
                assert (result.shape, result.dtype) == (array.shape, array.dtype)
                assert result.get().tolist() == [2 * comm.size] * array.size


def test_other_arrays_in_each_call_pin_no_memory(cupy: Any) -> None:
    with Communicator() as comm:
        kept = [comm.all_reduce("SUM", gradients(cupy, 20))]
        fake_cupy.counts().clear()
        for _ in range(20):
            arrays = gradients(cupy, 20)
            kept.append(arrays)
            kept.append(comm.all_reduce("SUM", arrays))
        assert fake_cupy.counts().pinned_allocations == 0
        assert all((result.get() == comm.size).all() for results in kept[2::2] for result in results)


@pytest.mark.nodes
@pytest.mark.parametrize("sizes", [(1,), (1001,), (7, 33, 100_003), (40_000, 5)])
def test_slices_between_nodes_begin_where_nccl_reads_many_elements_at_a_time(
    cupy: Any, monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, ...]
) -> None:
    if world_topology().size < 4:
        pytest.skip("two nodes with two ranks each")
    monkeypatch.setenv("MPIDIST_RANKS_PER_NODE", "2")
    monkeypatch.setenv("MPIDIST_STAGING_BYTES", "65536")
    with Communicator() as comm:
        options = CommunicationOptions(algorithm="hierarchical")
        for dtype in ("f4", "f8"):
            results = comm.all_reduce("SUM", [cupy.ones(size, dtype) for size in sizes], options=options)
            assert all((result.get() == comm.size).all() for result in results)
        assert comm.last_algorithm == "hierarchical"
    assert fake_cupy.counts().unaligned == 0


def test_what_other_ranks_wait_for_goes_first(cupy: Any) -> None:
    with Communicator() as comm:
        comm.all_reduce("SUM", cupy.ones(3))
        streams = comm._engine._on_device.streams
        assert [stream.raw.priority for stream in (streams.stream, streams.to_host, streams.to_device)] == [-5] * 3
