"""The fixture ``gpu_strategy``: strategies whose replicas are on pretended GPUs, in several layouts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import mpidist

LAYOUTS = ("one_device", "mirrored-1", "mirrored-2", "multi_worker")


@pytest.fixture(params=LAYOUTS)
def gpu_strategy(request: pytest.FixtureRequest, fake_gpus: Any) -> Iterator[Any]:
    """A strategy on pretended GPUs: in one process, or of all ranks with a GPU each; closed afterwards."""
    with opened(request.param) as strategy:
        yield strategy


def opened(layout: str) -> Any:
    """Return a strategy on pretended GPUs (collective for ``multi_worker``)."""
    from mpi4py import MPI

    if layout == "one_device":
        return mpidist.OneDeviceStrategy("gpu:1")
    if layout == "multi_worker":
        return mpidist.MultiWorkerMirroredStrategy(devices=[f"gpu:{MPI.COMM_WORLD.rank % 2}"])
    count = int(layout.removeprefix("mirrored-"))
    return mpidist.MirroredStrategy([f"gpu:{k}" for k in range(count)], communicator=MPI.COMM_SELF)
