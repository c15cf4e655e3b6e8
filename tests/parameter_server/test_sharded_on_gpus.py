"""ShardedVariable whose shards are on GPUs, all on one or each on another."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist import IndexedSlices, Variable
from mpidist.arrays.device_ops import is_device_array
from mpidist.optimizers import SGD, Adam, Optimizer
from mpidist.parameter_server import ShardedVariable
from tests.parameter_server.shards import sharded

WHOLE = np.arange(14.0).reshape(7, 2)


def equal(actual: Any, expected: Any) -> None:
    assert is_device_array(actual)
    np.testing.assert_array_equal(actual.get(), expected)


def spread(cupy: Any) -> ShardedVariable:
    """Return WHOLE on two devices."""
    shards = []
    for device, rows in enumerate((WHOLE[:4], WHOLE[4:])):
        with cupy.cuda.Device(device):
            shards.append(Variable(cupy.asarray(rows), name=f"part_{device}"))
    return ShardedVariable(shards, name="spread")


def test_it_stays_on_the_device(gpu_strategy: Any) -> None:
    v = sharded(WHOLE, 3, gpu_strategy)
    for read, expected in [
        (v.value(), WHOLE),
        (v[1:6:2], WHOLE[1:6:2]),
        (v[[6, 0, 6], 1], WHOLE[[6, 0, 6], 1]),
        (v[-1], WHOLE[-1]),
        (v.sparse_read([5, 1]), WHOLE[[5, 1]]),
        (v.gather_nd([[5, 1]]), WHOLE[[5], [1]]),
        (v * 2, WHOLE * 2),
    ]:
        equal(read, expected)
    assert type(v.numpy()) is np.ndarray
    with pytest.raises(TypeError, match=r"variable.numpy\(\)"):
        np.asarray(v)


def test_what_was_read_is_a_copy(gpu_strategy: Any) -> None:
    v = sharded(WHOLE, 2, gpu_strategy)
    for read in (v[0], v[:4], v[2:6], v.value(), v.sparse_read([0])):
        with read.device:
            read[...] = 99
    np.testing.assert_array_equal(v.numpy(), WHOLE)


def test_shards_on_different_devices(fake_gpus: Any) -> None:
    v = spread(fake_gpus)
    assert [shard.device for shard in v.variables] == ["gpu:0", "gpu:1"]
    equal(v.value(), WHOLE)
    assert v.value().device.id == 0
    equal(v[3:5], WHOLE[3:5])
    equal(v[5], WHOLE[5])
    v.assign_add(np.ones((7, 2)))
    v.assign_sub(fake_gpus.ones((7, 2)))
    v.scatter_mul(IndexedSlices(fake_gpus.asarray([[2.0, 2.0], [3.0, 3.0]]), [6, 0]))
    expected = WHOLE.copy()
    expected[6] *= 2
    expected[0] *= 3
    np.testing.assert_array_equal(v.numpy(), expected)
    assert [v.cut(WHOLE)[i].shape for i in (0, 1)] == [(4, 2), (3, 2)]


@pytest.mark.parametrize("is_sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("make", [lambda: SGD(0.5), lambda: Adam(0.5)], ids=["sgd", "adam"])
def test_optimizers(gpu_strategy: Any, fake_gpus: Any, make: Callable[[], Optimizer], is_sparse: bool) -> None:
    v = sharded(WHOLE, 3, gpu_strategy)
    with gpu_strategy.scope():
        plain = Variable(WHOLE)
    for variable in (v, plain):
        optimizer = make()

        def step(variable: Any = variable, optimizer: Any = optimizer) -> None:
            gradient = fake_gpus.asarray(WHOLE[:2]) if is_sparse else fake_gpus.asarray(WHOLE)
            optimizer.apply_gradients([(IndexedSlices(gradient, [6, 0]) if is_sparse else gradient, variable)])

        for _ in range(2):
            gpu_strategy.run(step)
    np.testing.assert_allclose(v.numpy(), plain.numpy(), rtol=1e-14)
    assert v.numpy()[6, 1] != WHOLE[6, 1]


def test_a_checkpoint(gpu_strategy: Any, tmp_path: Any) -> None:
    path = mpidist.Checkpoint(v=sharded(WHOLE, 3, gpu_strategy)).save(tmp_path / "ckpt")
    other = sharded(WHOLE * 0, 2, gpu_strategy)
    mpidist.Checkpoint(v=other).restore(path).assert_consumed()
    np.testing.assert_array_equal(other.numpy(), WHOLE)
