"""LocalNccl: several GPUs of one process; on each rank for itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mpidist.arrays.device_ops import ops_for
from mpidist.collectives.gpu.nccl_comm import LocalNccl
from mpidist.core.errors import DeviceError, NcclFailure
from mpidist.core.options import ReduceOp
from tests.support.fake_cupy import nccl as fake_nccl

pytestmark = pytest.mark.one_rank

four_gpus = pytest.mark.parametrize("fake_gpus", [{"devices": 4, "jitter": 0.001}], indirect=True)
DEVICES = [2, 0, 3]


class Gpus:
    """Three GPUs, and a stream on each."""

    def __init__(self) -> None:
        self.ops = ops_for("gpu")
        self.local = LocalNccl(DEVICES)
        self.streams = [self.ops.stream(device) for device in DEVICES]

    def arrays(self, *values: Any) -> list[Any]:
        """Put one value on each GPU, there for its stream."""
        made = [self.ops.from_host(np.asarray(v), device) for v, device in zip(values, DEVICES, strict=True)]
        for device, stream in zip(DEVICES, self.streams, strict=True):
            stream.wait(self.ops.current_stream(device).record())
        return made

    def seen(self, arrays: list[Any]) -> list[np.ndarray]:
        for stream in self.streams:
            stream.synchronize()
        return [self.ops.to_host(array) for array in arrays]


@pytest.fixture
def gpus(fake_gpus: Any) -> Iterator[Gpus]:
    """Closed afterwards."""
    made = Gpus()
    yield made
    made.local.close()
    assert fake_nccl.open_communicators() == []


@four_gpus
@pytest.mark.parametrize("dtype", ["f4", "i8", "c16", "f2"])
def test_all_reduce(gpus: Gpus, dtype: str) -> None:
    values = [(np.arange(1000) % 7 + place).astype(dtype) for place in range(3)]
    arrays = gpus.arrays(*values)
    targets = gpus.arrays(*[np.zeros(1000, dtype)] * 3)
    gpus.local.all_reduce(arrays, ReduceOp.SUM, gpus.streams, targets)
    gpus.local.all_reduce(arrays, ReduceOp.SUM, gpus.streams)
    for got in gpus.seen(arrays + targets):
        np.testing.assert_array_equal(got, sum(values))


@four_gpus
def test_wrong_arguments_are_refused_before_anything_is_started(gpus: Gpus) -> None:
    local, streams, total = gpus.local, gpus.streams, ReduceOp.SUM
    a, b, c = gpus.arrays(*[np.ones(4, "f4")] * 3)
    _, _, short = gpus.arrays(*[np.ones(3, "f4")] * 3)
    _, _, double = gpus.arrays(*[np.ones(4)] * 3)
    _, _, grid = gpus.arrays(*[np.ones((4, 4), "f4")] * 3)
    small = gpus.arrays(*[np.ones(4, "i2")] * 3)
    wrong: list[tuple[Any, type[Exception], str]] = [
        (lambda: local.all_reduce([a, b], total, streams), ValueError, "2 arrays or streams were given for 3 GPUs"),
        (lambda: local.all_reduce([a, b, c], total, streams[:2]), ValueError, "2 arrays or streams"),
        (lambda: local.all_reduce([a, b, short], total, streams), ValueError, "array 2 has 3 elements of float32"),
        (lambda: local.all_reduce([a, b, double], total, streams), ValueError, "array 2 has 4 elements of float64"),
        (
            lambda: local.all_reduce([a, c, b], total, streams),
            ValueError,
            "array 1 is on gpu:3. Pass an array on gpu:0",
        ),
        (lambda: local.all_reduce([a, b, grid[:, 0]], total, streams), ValueError, "not contiguous"),
        (lambda: local.all_reduce([a, b, c], total, streams, [a, b, short]), ValueError, "array 2 has 3"),
        (lambda: local.all_reduce(small, total, streams), TypeError, "no SUM of int16"),
    ]
    for call, kind, message in wrong:
        with pytest.raises(kind, match=message):
            call()
    for got in gpus.seen([a, b, c]):
        np.testing.assert_array_equal(got, np.ones(4))


@four_gpus
def test_closing(gpus: Gpus) -> None:
    arrays = gpus.arrays(*[np.ones(3)] * 3)
    assert repr(gpus.local) == "<LocalNccl of GPUs [2, 0, 3]>"
    gpus.local.close()
    gpus.local.close()
    assert "closed" in repr(gpus.local)
    with pytest.raises(RuntimeError, match="can no longer be used: it has been closed"):
        gpus.local.all_reduce(arrays, ReduceOp.SUM, gpus.streams)


@four_gpus
@pytest.mark.parametrize("devices", [[], [1, 1]])
def test_wrong_devices(fake_gpus: Any, devices: list[int]) -> None:
    with pytest.raises(ValueError, match="Pass at least one GPU, each once"):
        LocalNccl(devices)


@four_gpus
def test_gpus_that_nccl_cannot_join(fake_gpus: Any, monkeypatch: Any) -> None:
    def fail(devices: list[int]) -> Any:
        raise KeyError(7)

    monkeypatch.setattr(fake_nccl.NcclCommunicator, "initAll", fail)
    with pytest.raises(NcclFailure, match=r"could not join the GPUs \[0, 1\] of one process: NCCL returned status 7"):
        LocalNccl([0, 1])


@pytest.mark.parametrize("fake_gpus", [{"nccl": False}], indirect=True)
def test_without_the_library(fake_gpus: Any) -> None:
    with pytest.raises(DeviceError, match="finds no NCCL library"):
        LocalNccl([0, 1])
