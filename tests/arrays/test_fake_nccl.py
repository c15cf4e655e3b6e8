"""The pretended NCCL: what its calls wait for on a GPU."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.support.fake_cupy import nccl as fake_nccl

pytestmark = pytest.mark.one_rank


def crossed(fake_gpus: Any) -> tuple[list[Any], list[Any]]:
    """Launch calls of two communicators of two GPUs, in another order on each; returns them and the GPUs' events."""
    pairs = [fake_nccl.NcclCommunicator.initAll([0, 1]) for _ in range(2)]
    arrays, streams, events = [], [], []
    for device in (0, 1):
        with fake_gpus.cuda.Device(device):
            arrays.append(fake_gpus.ones(1, "f4"))
            fake_gpus.cuda.get_current_stream().synchronize()
            streams.append([fake_gpus.cuda.Stream(non_blocking=True) for _ in pairs])
    for order in ((0, 1), (1, 0)):
        fake_nccl.groupStart()
        for device, which in enumerate(order):
            address = arrays[device].data.ptr
            pairs[which][device].allReduce(address, address, 1, 7, 0, streams[device][which].ptr)
        fake_nccl.groupEnd()
    for device in (0, 1):
        with fake_gpus.cuda.Device(device):
            events += [stream.record() for stream in streams[device]]
    return [raw for pair in pairs for raw in pair], events


@pytest.mark.parametrize("fake_gpus", [{"serial_nccl": False}], indirect=True)
def test_calls_of_two_communicators_may_overlap(fake_gpus: Any) -> None:
    raws, events = crossed(fake_gpus)
    for event in events:
        event.synchronize()
    for raw in raws:
        raw.destroy()


def test_a_gpu_does_one_call_after_the_other(fake_gpus: Any) -> None:
    raws, events = crossed(fake_gpus)
    look_out = time.monotonic() + 0.3
    while time.monotonic() < look_out:
        assert not any(event.done for event in events)
    for raw in raws:
        raw.abort()
    for event in events:
        event.synchronize()
