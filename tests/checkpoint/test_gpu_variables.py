"""Checkpoints of variables on pretended GPUs: saved through the host, restored to wherever they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist import VariableAggregation, VariableSynchronization
from mpidist.arrays.device_ops import is_device_array


@pytest.mark.parametrize("async_save", [False, True])
def test_saving_and_restoring(gpu_strategy: Any, fake_gpus: Any, async_save: bool, tmp_path: Any) -> None:
    def objects() -> dict[str, Any]:
        with gpu_strategy.scope():
            weights = mpidist.Variable(np.arange(6.0).reshape(2, 3), name="weights")
            count = mpidist.Variable(
                0, synchronization=VariableSynchronization.ON_READ, aggregation=VariableAggregation.SUM
            )
            optimizer = mpidist.optimizers.Adam(0.1)
            mean = mpidist.metrics.Mean()
        return {"weights": weights, "count": count, "optimizer": optimizer, "mean": mean, "array": fake_gpus.arange(3)}

    def step(parts: dict[str, Any]) -> None:
        parts["count"].assign_add(3)
        parts["mean"].update_state(fake_gpus.arange(4.0))
        parts["optimizer"].apply_gradients([(fake_gpus.ones((2, 3)), parts["weights"])])

    first = objects()
    gpu_strategy.run(lambda: step(first))
    checkpoint = mpidist.Checkpoint(**first)
    path = checkpoint.save(tmp_path / "ckpt", async_save=async_save)
    gpu_strategy.run(lambda: step(first))
    checkpoint.wait()
    second = objects()
    second["array"][...] = 0
    mpidist.Checkpoint(**second).restore(path)
    gpu_strategy.run(lambda: step(second))
    for name in ("weights", "count"):
        assert is_device_array(second[name].value())
        assert second[name].devices == gpu_strategy.extended.worker_devices
        np.testing.assert_array_equal(second[name].numpy(), first[name].numpy())
    assert second["mean"].result() == first["mean"].result() == 1.5
    assert int(second["optimizer"].iterations) == 2
    assert second["array"].get().tolist() == [0, 1, 2]


def test_what_a_gpu_saved_a_cpu_restores(fake_gpus: Any, tmp_path: Any) -> None:
    with mpidist.OneDeviceStrategy("gpu:1").scope():
        on_gpu = mpidist.Variable([1.0, 2.0])
    path = mpidist.Checkpoint(v=on_gpu).save(tmp_path / "ckpt")
    on_host = mpidist.Variable([0.0, 0.0])
    mpidist.Checkpoint(v=on_host).restore(path).assert_consumed()
    assert on_host.numpy().tolist() == [1.0, 2.0]
