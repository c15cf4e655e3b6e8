"""Optimizers, losses, metrics and accumulation on pretended GPUs: the numbers of the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist import IndexedSlices
from mpidist.arrays.device_ops import is_device_array

OPTIMIZERS: list[Callable[[], Any]] = [
    lambda: mpidist.optimizers.SGD(0.1),
    lambda: mpidist.optimizers.SGD(0.1, momentum=0.9),
    lambda: mpidist.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    lambda: mpidist.optimizers.Adam(0.1),
    lambda: mpidist.optimizers.AdamW(0.1),
    lambda: mpidist.optimizers.RMSprop(0.1, momentum=0.9, centered=True),
]


def trained(make: Callable[[], Any], values: list[Any], dtype: str, on_device: Callable[[Any], Any], n: int) -> Any:
    """Return variables after three updates, under the default strategy where ``n`` replicas are pretended."""
    variables = [mpidist.Variable(value.astype(dtype)) for value in values]
    optimizer = make()
    for step in range(3):
        dense = on_device(np.full(values[0].shape, n * (step + 1.0), dtype))
        rows = [IndexedSlices(np.ones((1, 2), dtype), [1], values[1].shape)] * n
        sparse = IndexedSlices(*(np.concatenate([getattr(r, a) for r in rows]) for a in ("values", "indices")))
        optimizer.apply_gradients([(dense, variables[0]), (sparse, variables[1])])
    return [variable.numpy() for variable in variables]


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
@pytest.mark.parametrize("make", OPTIMIZERS)
def test_optimizers(make: Callable[[], Any], dtype: str, gpu_strategy: Any, fake_gpus: Any) -> None:
    n = gpu_strategy.num_replicas_in_sync
    values = [np.arange(6.0).reshape(3, 2), np.ones((2, 2))]
    expected = trained(make, values, dtype, lambda array: array, n)
    with gpu_strategy.scope():
        variables = [mpidist.Variable(value, dtype=dtype) for value in values]
        optimizer = make()

    def step(number: int, where: Any) -> None:
        dense = where.full((3, 2), number + 1.0, dtype)
        sparse = IndexedSlices(where.ones((1, 2), dtype), [1], (2, 2))
        optimizer.apply_gradients([(dense, variables[0]), (sparse, variables[1])])

    # Also gradients of the host are taken, to where the variables are.
    for number, where in enumerate((fake_gpus, np, fake_gpus)):
        gpu_strategy.run(step, args=(number, where))
    tolerance = 1e-2 if dtype == "float16" else 1e-6
    for variable, wanted in zip(variables, expected, strict=True):
        for component in variable.values:
            np.testing.assert_allclose(component.numpy(), wanted, rtol=tolerance)
    assert optimizer.iterations.devices == ("cpu:0",) * len(variables[0].devices)
    assert int(optimizer.iterations) == 3
    for slot in optimizer.variables[1:]:
        assert slot.devices == variables[0].devices


def test_updates_in_cross_replica_context_and_constraints(gpu_strategy: Any, fake_gpus: Any) -> None:
    with gpu_strategy.scope():
        v = mpidist.Variable(np.ones(3), constraint=lambda x: np.maximum(x, 0.5))
        optimizer = mpidist.optimizers.SGD(1.0)
        optimizer.apply_gradients([([0.25, 1.0, 2.0], v)])
    for component in v.values:
        np.testing.assert_array_equal(component.numpy(), [0.75, 0.5, 0.5])


def test_clipping(gpu_strategy: Any, fake_gpus: Any) -> None:
    def step() -> None:
        clip = mpidist.optimizers.clip_by_global_norm
        rows = IndexedSlices(fake_gpus.full((2, 1), 2.0), [0, 0], (3, 1))
        clipped, norm = clip([fake_gpus.array([3.0], "float32"), None, rows], 1.0)
        assert is_device_array(norm)
        assert float(norm) == 5.0
        assert (clipped[0].dtype, clipped[1]) == (np.float32, None)
        np.testing.assert_allclose(clipped[0].get(), [0.6])
        np.testing.assert_allclose(clipped[2].to_dense().get(), [[0.8], [0.0], [0.0]])
        unclipped, _ = clip([fake_gpus.array([3.0])], 5.0)
        assert unclipped[0].get().tolist() == [3.0]
        (bad,), _ = clip([fake_gpus.array([np.inf])], 1.0)
        assert np.isnan(bad.get()).all()

    gpu_strategy.run(step)


def test_losses(gpu_strategy: Any, fake_gpus: Any) -> None:
    n = gpu_strategy.num_replicas_in_sync

    def step() -> None:
        losses = fake_gpus.array([1.0, 3.0], "float32")
        average = mpidist.compute_average_loss(losses)
        assert is_device_array(average)
        assert (average.dtype, average.shape, float(average)) == (np.float32, (), pytest.approx(4 / (2 * n)))
        weighted = mpidist.compute_average_loss(losses, sample_weight=[1.0, 0.0], global_batch_size=1)
        assert float(weighted) == 1.0
        assert float(mpidist.compute_average_loss(fake_gpus.zeros((0, 2)), global_batch_size=0)) == 0.0
        penalty = mpidist.scale_regularization_loss([np.float64(1.0), fake_gpus.ones(()), 2.0])
        assert is_device_array(penalty)
        assert float(penalty) == pytest.approx(4 / n)
        assert mpidist.global_count(losses) == 2 * n

    gpu_strategy.run(step)


def test_metrics(gpu_strategy: Any, fake_gpus: Any) -> None:
    with gpu_strategy.scope():
        mean, total, accuracy = mpidist.metrics.Mean(), mpidist.metrics.Sum(), mpidist.metrics.Accuracy()
    n = gpu_strategy.num_replicas_in_sync

    def step() -> None:
        mean.update_state(fake_gpus.array([1.0, 4.0]), sample_weight=[2, 1])
        mean.update_state(2.0)
        total.update_state([fake_gpus.ones(()), 2.0])
        accuracy.update_state([1, 2, 3, 4], fake_gpus.array([1, 2, 3, 0]))

    gpu_strategy.run(step)
    for variable in (*mean.variables, *total.variables):
        assert variable.devices == gpu_strategy.extended.worker_devices
    assert (mean.result(), total.result(), accuracy.result()) == (pytest.approx(2.0), 3.0 * n, 0.75)
    assert type(mean.result()) is np.float64
    inside = gpu_strategy.run(lambda: total.result())
    assert all(float(part) == 3.0 * n for part in gpu_strategy.experimental_local_results(inside))
    total.reset_state()
    assert total.result() == 0


def test_accumulation(gpu_strategy: Any, fake_gpus: Any) -> None:
    accumulator = mpidist.optimizers.GradientAccumulator(2)

    def step() -> None:
        gradient = fake_gpus.ones(2)
        rows = IndexedSlices(fake_gpus.ones((1, 2)), [0], (3, 2))
        assert accumulator.add([gradient, None, rows]) is None
        gradient[...] = 5
        sums = accumulator.add([gradient, None, rows])
        assert is_device_array(sums[0])
        assert sums[0].get().tolist() == [6.0, 6.0]
        assert sums[2].to_dense().get().tolist() == [[2.0, 2.0], [0.0, 0.0], [0.0, 0.0]]

    gpu_strategy.run(step)
