"""Threads of a communicator make no context on other GPUs, and leave CUDA graphs of the program alone."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist import Communicator
from mpidist.collectives.gpu import device_streams
from mpidist.collectives.gpu.device_streams import DeviceStreams
from mpidist.core.errors import PeerError
from mpidist.experimental import CommunicationOptions
from mpidist.topology import world_topology
from tests.support import fake_cupy
from tests.support.fake_cupy.devices import current_device, machine

pytestmark = [pytest.mark.counts, pytest.mark.parametrize("fake_gpus", [{"devices": 6}], indirect=True)]


@pytest.fixture
def polls(monkeypatch: pytest.MonkeyPatch) -> threading.Semaphore:
    """Counts the polls of the watch thread."""
    found, oldest = threading.Semaphore(0), DeviceStreams.oldest

    def noticed(self: DeviceStreams) -> Any:
        call = oldest(self)
        if threading.current_thread().name == "mpidist-device-watch":
            found.release()
        return call

    monkeypatch.setattr(DeviceStreams, "oldest", noticed)
    monkeypatch.setattr(device_streams, "_LOOK_SECONDS", 0.001)
    return found


@pytest.mark.parametrize("algorithm", ["nccl", "hierarchical", "staged"])
def test_collectives(algorithm: str, fake_gpus: Any, polls: threading.Semaphore) -> None:
    mine = world_topology().rank + 1
    fake_gpus.cuda.Device(mine).use()
    options = CommunicationOptions(algorithm=algorithm)
    with Communicator() as comm:
        array = fake_gpus.ones(5000, "f4")
        works = [comm.all_reduce_async("SUM", array, options=options) for _ in range(3)]
        assert [float(work.wait()[0]) for work in works] == [comm.size] * 3
        assert polls.acquire(timeout=30)
        fake_cupy.counts().clear()
        comm.all_reduce("MEAN", [array] * 3, options=options)
        assert fake_cupy.counts().device_switches == 0
    assert machine().contexts.devices == {mine}


def test_a_strategy_makes_the_ranks_gpu_current(fake_gpus: Any) -> None:
    mine = world_topology().rank + 1
    with mpidist.MultiWorkerMirroredStrategy(devices=[f"gpu:{mine}"]) as strategy:
        assert fake_gpus.ones(3).device.id == mine
        dataset = mpidist.Dataset.from_tensor_slices(np.arange(12.0)).batch(6)
        for batch in strategy.experimental_distribute_dataset(dataset):
            total = strategy.run(lambda x: mpidist.get_replica_context().all_reduce("SUM", x.sum()), args=(batch,))
        assert total.device.id == mine
        assert current_device() == mine
    assert machine().contexts.devices == {mine}


def test_the_gpus_of_one_process(fake_gpus: Any) -> None:
    from mpi4py import MPI

    with mpidist.MirroredStrategy(["gpu:2", "gpu:1"], communicator=MPI.COMM_SELF) as strategy:
        total = strategy.run(lambda: mpidist.get_replica_context().all_reduce("SUM", fake_gpus.ones(3)))
        assert [part.get().tolist() for part in total.values] == [[2.0] * 3] * 2
    assert machine().contexts.devices == {1, 2}


def test_a_graph_is_recorded_while_works_run(fake_gpus: Any, polls: threading.Semaphore) -> None:
    if world_topology().num_nodes > 1:
        pytest.skip("between nodes nothing is left to the device alone while its streams wait")
    fake_gpus.cuda.Device(world_topology().rank).use()
    gate, graph = threading.Event(), fake_gpus.cuda.Stream(non_blocking=True)
    with Communicator() as comm:
        arrays = [fake_gpus.full(2000, float(comm.rank)) for _ in range(3)]
        comm.all_reduce("SUM", arrays[0])
        # The work cannot end on the device before the graph has.
        fake_gpus.cuda.get_current_stream().launch_host_func(lambda gate: gate.wait(30), gate)
        works = [comm.all_reduce_async("SUM", array) for array in arrays]
        graph.begin_capture(fake_gpus.cuda.runtime.streamCaptureModeGlobal)
        try:
            while polls.acquire(blocking=False):
                pass  # of the time before
            for _ in range(5):
                assert polls.acquire(timeout=30)
            graph.end_capture()
        finally:
            gate.set()
        expected = sum(range(comm.size))
        assert [float(work.wait().get()[0]) for work in works] == [expected] * 3


@pytest.mark.parametrize("everywhere", [True, False])
def test_an_all_reduce_is_no_part_of_one(everywhere: bool, fake_gpus: Any) -> None:
    fake_gpus.cuda.Device(world_topology().rank).use()
    # A communicator of its own: its ranks part ways when one is told of the other's error.
    with Communicator(world_topology().world) as comm:
        array, graph = fake_gpus.ones(3), fake_gpus.cuda.Stream(non_blocking=True)
        comm.all_reduce("SUM", array)
        if everywhere or comm.rank == 0:
            graph.begin_capture(fake_gpus.cuda.runtime.streamCaptureModeGlobal)
            with (
                graph,
                pytest.raises(RuntimeError, match="all_reduce: the current stream records a CUDA graph.*between two"),
            ):
                comm.all_reduce("SUM", array)
            graph.end_capture()
        else:
            with pytest.raises(PeerError, match="records a CUDA graph"):
                comm.all_reduce("SUM", array)
