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
