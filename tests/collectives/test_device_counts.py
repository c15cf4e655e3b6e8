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
# Kernels of a sum: one packs; one is NCCL's, where ranks share a node; what is given is written by one. By one more
# means are divided, unless that is done where it is written. Between nodes a ring adds what comes from each other one.
LAUNCHES = {
    "nccl": {"one": 1, "one in place": 1, "many": 2, "many in place": 3},
    "ring": {"one": 1, "one in place": 0, "many": 1, "many in place": 2},
    "staged": {"one": 0, "one in place": 0, "many": 1, "many in place": 2},
}


@pytest.fixture
def cupy(fake_gpus: Any) -> Iterator[Any]:
    """Each rank has a GPU of its own."""
    with fake_gpus.cuda.Device(world_topology().rank):
        yield fake_gpus


def gradients(cupy: Any, count: int) -> list[Any]:
    """Return arrays of some sizes, in bytes multiples of 16 and others."""
    return [cupy.ones((64, 9) if number % 3 else 7, "f4") for number in range(count)]


@pytest.mark.parametrize("number", [1, 160, 600])
@pytest.mark.parametrize("is_in_place", [False, True])
@pytest.mark.parametrize("op", ["SUM", "MEAN"])
@pytest.mark.parametrize("algorithm", ["nccl", "ring", "staged"])
def test_an_all_reduce_costs_the_same_however_many_arrays_it_has(
    cupy: Any, monkeypatch: pytest.MonkeyPatch, algorithm: str, op: str, is_in_place: bool, number: int
) -> None:
    # Of several nodes, where the ring has something to do.
    monkeypatch.setenv("MPIDIST_RANKS_PER_NODE", "1")
    counts, options = fake_cupy.counts(), CommunicationOptions(algorithm=algorithm)
    with Communicator() as comm:
        arrays = gradients(cupy, number)
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
    case = ("many" if number > 1 else "one") + (" in place" if is_in_place else "")
    divides = op == "MEAN" and case != "many in place"
    added = comm.size - 1 if algorithm == "ring" else 0
    assert found == (LAUNCHES[algorithm][case] + divides + added, 0, 0)
    # The thread that watches makes its GPU current once.
    assert switches <= 1


def test_results_of_one_call_are_views_of_one_array_and_begin_where_vectors_do(cupy: Any) -> None:
    with Communicator() as comm:
        for dtype in ("f4", "f2", "i2", "f8"):
            arrays = [cupy.full(size, 2, dtype) for size in (7, 1, 64, 33)]
            results = comm.all_reduce("SUM", arrays)
            assert len({id(result.data.mem) for result in results}) == 1
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
