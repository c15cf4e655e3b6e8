"""Collectives on GPUs if memory is scarce, streams are late, compilers fail or calls come in unusual orders.

On stand-ins for CuPy and NCCL (see tests/support/fake_cupy), whose GPUs do NCCL's calls one after the other.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mpidist import Communicator
from mpidist.arrays.cupy_ops import CupyOps
from mpidist.arrays.kernels import kernel_name
from mpidist.collectives.gpu import reduce
from mpidist.collectives.reduce.algorithms import inter_node
from mpidist.collectives.reduce.registry import wire_algorithms
from mpidist.core.errors import PeerError
from mpidist.experimental import CommunicationOptions
from mpidist.topology import import_mpi, world_topology
from tests.support import fake_cupy
from tests.support.fake_cupy import devices, memory, raw_kernel
from tests.support.fake_cupy import nccl as fake_nccl
from tests.support.fake_cupy.nccl_messages import Steps
from tests.support.speed import scaled

pytestmark = [
    pytest.mark.nodes,
    pytest.mark.min_ranks(2),
    pytest.mark.parametrize("fake_gpus", [{"devices": 6}], indirect=True),
]
HIERARCHICAL = CommunicationOptions(algorithm="hierarchical")
# So long may take what has to happen, and is looked out for what must not.
LIMIT_SECONDS, MOMENT_SECONDS = scaled(20.0), 0.3


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    made = threading.Event()
    yield made
    made.set()


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of allocations on GPUs, in bytes."""
    sizes: list[int] = []
    allocate = memory.Memory.__init__

    def noted(self: Any, size: int) -> None:
        sizes.append(size)
        allocate(self, size)

    monkeypatch.setattr(memory.Memory, "__init__", noted)
    return sizes


@pytest.fixture
def per_node(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """So many ranks on each node, or one more on each than there are ranks."""
    ranks: int = getattr(request, "param", 1)
    monkeypatch.setenv("MPIDIST_RANKS_PER_NODE", str(ranks))
    return ranks


# The order of calls -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_node", [8, 2], indirect=True)
def test_two_communicators_use_nccl_in_one_order(cupy: Any, monkeypatch: pytest.MonkeyPatch, per_node: int) -> None:
    if per_node == 2 and world_topology().size < 4:
        pytest.skip("two nodes with two ranks each")
    order: list[int] = []
    launch, barrier = fake_nccl._launch, import_mpi().COMM_WORLD.Barrier

    def noted(raw: Any, calls: Any) -> None:
        order.append(raw._transport._number)
        launch(raw, calls)

    monkeypatch.setattr(fake_nccl, "_launch", noted)
    with Communicator() as one, Communicator() as other:
        mine, total = cupy.full(100_000, one.rank + 1, "f4"), sum(range(1, one.size + 1))
        values = [mine, mine * 2]
        for number in range(30):
            is_late = (one.rank + number) % 2
            if is_late:
                barrier()
            works = [comm.all_reduce_async("SUM", value) for comm, value in zip((one, other), values, strict=True)]
            if not is_late:
                barrier()
            for place in (0, 1) if is_late else (1, 0):
                assert (works[place].wait().get() == total * (place + 1)).all()
        orders = one.all_gather_object(order)
    assert len(order) >= 60
    assert order in [others for rank, others in enumerate(orders) if rank != one.rank]


def test_each_wait_orders_the_current_stream(cupy: Any, gate: threading.Event) -> None:
    with Communicator() as comm:
        comm.all_reduce("SUM", cupy.ones(3)).get()
        lane_stream = comm._engine._on_device.streams.stream.raw
        lane_stream.launch_host_func(lambda _: gate.wait(LIMIT_SECONDS), None)
        # Forced, as small sums between nodes pass through the host, and there on the caller's stream alone.
        options = CommunicationOptions(algorithm="nccl")
        work = comm.all_reduce_async("SUM", cupy.full(1000, 7, "f4"), options=options)
        early = [threading.Event() for _ in range(3)]
        streams = [cupy.cuda.Stream(non_blocking=True) for _ in early]
        for stream, event in zip(streams, early, strict=True):
            with stream:
                result = work.wait()
                stream.launch_host_func(lambda event: event.set(), event)
        assert not [event for event in early if event.wait(MOMENT_SECONDS)]
        gate.set()
        for stream in streams:
            assert (result.get(stream=stream) == 7 * comm.size).all()


# Results in the place of inputs -------------------------------------------------------------------------------------


def test_overlap_on_another_current_device(fake_gpus: Any) -> None:
    with Communicator() as comm:
        size = comm.size
        with fake_gpus.cuda.Device((comm.rank + 1) % 6):
            same, base = fake_gpus.ones(1000, "f4"), fake_gpus.arange(10.0)
            pair = [fake_gpus.full(5, 1.0), fake_gpus.full(5, 2.0)]
        comm.all_reduce("SUM", same, out=same)
        comm.all_reduce("SUM", base[:8], out=base[2:])
        comm.all_reduce("SUM", pair, out=pair[::-1])
        assert comm.all_reduce("SUM", 1.0) == size
        # Each in a pack of its own, so that the first is written before the second is sent.
        with fake_gpus.cuda.Device((comm.rank + 1) % 6):
            apart = [fake_gpus.full(5, 1.0), fake_gpus.full(5, 2.0)]
        comm.all_reduce("SUM", apart, out=apart[::-1], options=CommunicationOptions(bytes_per_pack=1))
        assert [part.get()[0] for part in apart] == [2 * size, size]
        assert (same.get() == size).all()
        assert base.get().tolist() == [0, 1, *(size * value for value in range(8))]
        assert [part.get()[0] for part in pair] == [2 * size, size]


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
@pytest.mark.parametrize("algorithm", ["nccl", "staged"])
def test_a_call_in_place_copies_nothing(cupy: Any, allocated: list[int], op: str, algorithm: str) -> None:
    options = CommunicationOptions(deterministic=algorithm == "staged")
    with Communicator() as comm:
        array = cupy.ones(1 << 16, "f4")
        comm.all_reduce(op, array, out=array, options=options)
        allocated.clear()
        comm.all_reduce(op, array, out=array, options=options)
        assert sum(allocated) < array.nbytes
        assert (array.get() == (comm.size**2 if op == "SUM" else 1)).all()


@pytest.mark.parametrize("aware", ["0", "1"])
def test_sums_between_nodes_allocate_nothing(
    cupy: Any, allocated: list[int], monkeypatch: pytest.MonkeyPatch, per_node: int, aware: str
) -> None:
    monkeypatch.setenv("MPIDIST_GPU_AWARE_MPI", aware)

    def on_the_host(*_: Any) -> Any:
        raise AssertionError("sums are formed on the host")

    monkeypatch.setattr(inter_node.Ring, "all_reduce", on_the_host)
    with Communicator() as comm:
        array = cupy.ones(1 << 16, "f4")
        comm.all_reduce("SUM", array, out=array, options=HIERARCHICAL)
        allocated.clear()
        comm.all_reduce("SUM", array, out=array, options=HIERARCHICAL)
        # Tables of addresses.
        assert sum(allocated) < 1024
        assert (array.get() == comm.size**2).all()


# Memory -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 1])
def test_out_of_memory_raises_on_all_ranks(cupy: Any, after: int) -> None:
    # A communicator of its own: it is not used any more where a rank was told of an error.
    with Communicator(world_topology().world) as comm:
        # They are summed as floats of 32 bits.
        arrays = [cupy.ones(1000, "f2") for _ in range(3)]
        for result in comm.all_reduce("SUM", arrays):
            assert (result.get() == comm.size).all()
        is_poor = comm.rank == comm.size - 1
        if is_poor:
            # For the results, and after them for the sums.
            fake_cupy.fail_allocations(after=after)
            with pytest.raises(cupy.cuda.memory.OutOfMemoryError):
                comm.all_reduce("SUM", arrays)
        else:
            with pytest.raises(PeerError, match=f"rank {comm.size - 1}.*Out of memory"):
                comm.all_reduce("SUM", arrays)
        # It has let go of something.
        assert comm.all_reduce("SUM", arrays)[2].get().tolist() == [comm.size] * 1000


def test_without_pinned_memory_all_use_staged(
    cupy: Any, monkeypatch: pytest.MonkeyPatch, per_node: int, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: Any, nbytes: int) -> Any:
        raise MemoryError("cudaErrorMemoryAllocation: no memory to page-lock")

    if world_topology().rank == 1:
        changed = [fail]
        pinned = CupyOps.pinned
        monkeypatch.setattr(CupyOps, "pinned", lambda self, n: changed.pop()(self, n) if changed else pinned(self, n))
    with Communicator() as comm:
        assert (comm.all_reduce("SUM", cupy.ones(1000, "f4")).get() == comm.size).all()
        assert comm.last_algorithm == "staged"
        assert ("rank 1: MemoryError: cudaErrorMemoryAllocation" in caplog.text) == (comm.rank == 0)


@pytest.mark.parametrize("op", ["SUM", "MEAN"])
def test_a_compile_error_raises_on_all_ranks(cupy: Any, monkeypatch: pytest.MonkeyPatch, op: str) -> None:
    def fail(kernel: raw_kernel.RawKernel) -> None:
        if kernel.name == apart:
            raise RuntimeError("nvrtc: error: failed to load builtins")

    apart = kernel_name(np.dtype("f4"), np.dtype("f2"), op == "MEAN")
    with Communicator(world_topology().world) as comm:
        arrays = [cupy.ones(1000, "f2") for _ in range(3)]
        with monkeypatch.context() as changed:
            if comm.rank == comm.size - 1:
                changed.setattr(raw_kernel, "compile_source", fail)
                with pytest.raises(RuntimeError, match="nvrtc"):
                    comm.all_reduce(op, arrays)
            else:
                with pytest.raises(PeerError, match=f"rank {comm.size - 1}.*nvrtc"):
                    comm.all_reduce(op, arrays)
        expected = comm.size if op == "SUM" else 1
        assert comm.all_reduce(op, arrays)[2].get().tolist() == [expected] * 1000


@pytest.mark.parametrize("algorithm", ["nccl", "staged"])
def test_finished_results_are_freed(cupy: Any, algorithm: str) -> None:
    options = CommunicationOptions(deterministic=algorithm == "staged")
    with Communicator() as comm:
        array = cupy.ones(1 << 16, "f4")
        comm.all_reduce("SUM", array, options=options).get()
        before = _used_bytes()
        with cupy.cuda.Stream(non_blocking=True):
            work = comm.all_reduce_async("SUM", array, options=options)
        assert (work.wait().get() == comm.size).all()
        del work
        give_up = time.monotonic() + LIMIT_SECONDS
        # Less than a result: kernels keep tables of the arrays that they were given last.
        while _used_bytes() >= before + array.nbytes:
            assert time.monotonic() < give_up, f"{_used_bytes() - before} bytes are kept"
            time.sleep(0.01)


def _used_bytes() -> int:
    return devices.machine().used[devices.current_device()]


def test_staged_pins_a_few_chunks(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MPIDIST_STAGING_BYTES", "65536" if world_topology().rank == 0 else "1048576")
    asked: list[int] = []
    pinned = CupyOps.pinned

    def noted(self: Any, nbytes: int) -> Any:
        asked.append(nbytes)
        return pinned(self, nbytes)

    monkeypatch.setattr(CupyOps, "pinned", noted)
    with Communicator() as comm:
        # It does not divide, and neither do the chunks.
        value = cupy.arange(300_001, dtype="f4") % 97
        asked.clear()
        for factor in (1, 2):
            got = comm.all_reduce("MAX", value * factor)
            np.testing.assert_array_equal(got.get(), np.arange(300_001, dtype="f4") % 97 * factor)
        assert comm.last_algorithm == "staged"
    assert 0 < sum(asked) <= 4 * 65536


@pytest.mark.parametrize("count", [1000, 100_000, 700_000])
def test_slices_have_the_smallest_size_of_all(
    cupy: Any, monkeypatch: pytest.MonkeyPatch, per_node: int, count: int
) -> None:
    monkeypatch.setenv("MPIDIST_STAGING_BYTES", "65536" if world_topology().rank == 0 else "1048576")
    with Communicator() as comm:
        got = comm.all_reduce("SUM", cupy.arange(count, dtype="f4") % 97, options=HIERARCHICAL)
        np.testing.assert_array_equal(got.get(), np.arange(count, dtype="f4") % 97 * comm.size)


# MPI on device memory -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_node", [1, 2], indirect=True)
def test_gpu_aware_mpi_limits_slices_in_flight(cupy: Any, monkeypatch: pytest.MonkeyPatch, per_node: int) -> None:
    if per_node == 2 and world_topology().size < 4:
        pytest.skip("two nodes with two ranks each")
    monkeypatch.setenv("MPIDIST_GPU_AWARE_MPI", "1")
    monkeypatch.setenv("MPIDIST_STAGING_BYTES", "65536")
    under_way: set[int] = set()
    most, at_once = [], []
    cross, carry_out = reduce.DeviceRing.all_reduce, fake_nccl.NcclCommunicator._carry_out

    def counted(self: Any, flat: Any, op: Any, chunk: int, *others: Any) -> Steps[Any]:
        under_way.add(chunk)
        most.append(len(under_way))
        arrived = yield from cross(self, flat, op, chunk, *others)
        under_way.discard(chunk)
        return arrived

    def looked_at(self: Any, turn: int, calls: Any) -> None:
        at_once.append(len(under_way))
        carry_out(self, turn, calls)
        at_once.append(len(under_way))

    with Communicator() as comm:
        comm.all_reduce("SUM", cupy.ones(10, "f4"), options=HIERARCHICAL).get()
        monkeypatch.setattr(reduce.DeviceRing, "all_reduce", counted)
        monkeypatch.setattr(fake_nccl.NcclCommunicator, "_carry_out", looked_at)
        got = comm.all_reduce("SUM", cupy.ones(1 << 20, "f4"), options=HIERARCHICAL)
        assert (got.get() == comm.size).all()
    assert 1 < max(most) <= reduce.SLOTS
    assert not any(at_once)
    assert per_node == 1 or at_once


# Names of algorithms ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_node", [8, 1], indirect=True)
@pytest.mark.parametrize("name", ["hierarchical", *wire_algorithms.names])
def test_inter_node_algorithms_on_any_nodes(cupy: Any, per_node: int, name: str) -> None:
    with Communicator() as comm:
        got = comm.all_reduce("SUM", cupy.ones(10_000, "f4"), options=CommunicationOptions(algorithm=name))
        assert (got.get() == comm.size).all()
        assert comm.last_algorithm == ("nccl" if per_node == 8 else "hierarchical")
