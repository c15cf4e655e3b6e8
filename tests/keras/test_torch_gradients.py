"""Gradients of PyTorch's backend that are missing, shared or short of bits."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest

import mpidist
from tests.keras.test_fit import adopted, close
from tests.support.ranks.layouts import layouts

pytestmark = [
    pytest.mark.counts,
    pytest.mark.filterwarnings("default"),
    pytest.mark.parametrize("strategy", layouts("multi_worker*"), indirect=True),
]


@pytest.fixture(autouse=True)
def _with_torch(keras: ModuleType) -> None:
    if keras.backend.backend() != "torch":
        pytest.skip("under JAX each variable has a gradient of its own")


def test_a_variable_without_a_gradient_stays_as_it_is(strategy: Any, keras: ModuleType) -> None:
    x, y = np.random.default_rng(0).normal(size=(7, 3)).astype("float32"), np.ones((7, 1), "float32")

    class Idle(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = keras.layers.Dense(1), keras.layers.Dense(1)
            self.idle.build((None, 3))

        def call(self, inputs: Any) -> Any:
            return self.used(inputs)

    results = []
    for whose in (mpidist.OneDeviceStrategy("cpu:0"), strategy):
        keras.utils.set_random_seed(4)
        model = adopted(whose, Idle())
        before = model.idle.get_weights()[0].copy()
        model.compile(keras.optimizers.AdamW(0.1, weight_decay=0.5), "mse")
        # Also a step in which one of the ranks has no rows.
        model.fit(x, y, batch_size=6, epochs=2, shuffle=False, verbose=0)
        np.testing.assert_array_equal(model.idle.get_weights()[0], before)
        results.append(model.get_weights())
    for mine, theirs in zip(*results, strict=True):
        close(mine, theirs, 1e-4)


def test_gradients_that_share_memory(strategy: Any, keras: ModuleType) -> None:
    import torch

    if strategy.extended.communicator is None:
        pytest.skip("nothing is summed on one rank")
    model = adopted(strategy, keras.Sequential([keras.Input((1,)), keras.layers.Dense(3), keras.layers.Dense(3)]))
    model.compile(keras.optimizers.SGD(1.0), "mse")
    model.fit(np.zeros((8, 1)), np.zeros((8, 3)), verbose=0)
    biases = [model.layers[0].bias, model.layers[1].bias]
    for bias in biases:
        bias.assign(np.zeros(3))
    kernel = model.layers[1].kernel.numpy().copy()
    gradient = torch.arange(3.0)
    model.optimizer.apply([torch.ones(1, 3), gradient, torch.tensor(2.0).expand(3, 3), gradient], model.weights)
    for bias in biases:
        close(bias.numpy(), -np.arange(3.0), 1e-6)
    close(model.layers[1].kernel.numpy(), kernel - 2, 1e-5)
