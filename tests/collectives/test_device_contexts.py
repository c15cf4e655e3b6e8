"""Each rank has a context on its own GPU and on no other one, whichever threads have to do with it."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist import Communicator
from mpidist.collectives.gpu import device_streams
from mpidist.collectives.gpu.device_streams import DeviceStreams
from mpidist.experimental import CommunicationOptions
from mpidist.topology import world_topology
from tests.support import fake_cupy
from tests.support.fake_cupy.devices import current_device, machine

pytestmark = [pytest.mark.counts, pytest.mark.parametrize("fake_gpus", [{"devices": 6}], indirect=True)]


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Happens when the watch has looked at a streams."""
    happened, oldest = threading.Event(), DeviceStreams.oldest

    def noticed(self: DeviceStreams) -> Any:
        found = oldest(self)
        if threading.current_thread().name == "mpidist-device-watch":
            happened.set()
        return found

    monkeypatch.setattr(DeviceStreams, "oldest", noticed)
    monkeypatch.setattr(device_streams, "_LOOK_SECONDS", 0.001)
    return happened


@pytest.mark.parametrize("algorithm", ["nccl", "hierarchical", "staged"])
def test_collectives(algorithm: str, fake_gpus: Any, looked: threading.Event) -> None:
    mine = world_topology().rank + 1
    fake_gpus.cuda.Device(mine).use()
    options = CommunicationOptions(algorithm=algorithm)
    with Communicator() as comm:
        array = fake_gpus.ones(5000, "f4")
        works = [comm.all_reduce_async("SUM", array, options=options) for _ in range(3)]
        assert [float(work.wait()[0]) for work in works] == [comm.size] * 3
        assert looked.wait(30)
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
