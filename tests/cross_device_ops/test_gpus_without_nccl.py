"""Several GPUs of one process without NCCL: peer copies take its place, and the log says so."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpidist import NcclAllReduce, ReductionToOneDevice
from mpidist.arrays.device_ops import is_device_array
from mpidist.cross_device_ops import select_cross_device_ops
from tests.cross_device_ops.test_gpu_reductions import on_devices

pytestmark = pytest.mark.one_rank
without_nccl = pytest.mark.parametrize("fake_gpus", [{"devices": 2, "nccl": False}], indirect=True)


@without_nccl
def test_copies_are_used_and_logged_once(fake_gpus: Any, caplog: pytest.LogCaptureFixture) -> None:
    ops = NcclAllReduce()
    for _ in range(2):
        value = on_devices(fake_gpus, [np.ones(2), np.ones(2)])
        result = ops.reduce("SUM", value, value)
        assert all(is_device_array(array) for array in result.values)
        assert [array.get().tolist() for array in result.values] == [[2.0, 2.0]] * 2
    assert [r.message.count("nvidia-nccl") for r in caplog.records] == [1]
    ops.close()


@pytest.mark.parametrize("fake_gpus", [{"devices": 2}], indirect=True)
def test_gpus_that_nccl_cannot_join(
    fake_gpus: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(devices: list[int]) -> Any:
        raise KeyError(7)

    monkeypatch.setattr(fake_gpus.cuda.nccl.NcclCommunicator, "initAll", fail)
    value = on_devices(fake_gpus, [np.ones(2), np.ones(2)])
    assert [array.get().tolist() for array in NcclAllReduce().reduce("SUM", value, value).values] == [[2.0, 2.0]] * 2
    assert "could not join the GPUs [0, 1] of one process: NCCL returned status 7" in caplog.text


@without_nccl
def test_copies_are_chosen(fake_gpus: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert type(select_cross_device_ops(("gpu:0", "gpu:1"), 2, None)) is ReductionToOneDevice
    assert "nvidia-nccl" in caplog.text
