"""CUDA graphs that the program records: the threads of a communicator leave them alone, and no all-reduce is in one."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from mpidist import Communicator
from mpidist.collectives.gpu import device_streams
from mpidist.collectives.gpu.device_streams import DeviceStreams
from mpidist.core.errors import PeerError
from mpidist.topology import world_topology

pytestmark = pytest.mark.parametrize("fake_gpus", [{"devices": 6}], indirect=True)


@pytest.mark.counts
def test_a_graph_is_recorded_while_works_run(fake_gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if world_topology().num_nodes > 1:
        pytest.skip("between nodes nothing is left to the device alone while its streams wait")
    looks, oldest = threading.Semaphore(0), DeviceStreams.oldest

    def noticed(self: DeviceStreams) -> Any:
        found = oldest(self)
        if found is not None and threading.current_thread().name == "mpidist-device-watch":
            looks.release()
        return found

    monkeypatch.setattr(DeviceStreams, "oldest", noticed)
    monkeypatch.setattr(device_streams, "_LOOK_SECONDS", 0.001)
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
            for _ in range(5):
                assert looks.acquire(timeout=30)
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
