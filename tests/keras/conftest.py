"""Models and data of the tests of Keras models, on the backend that KERAS_BACKEND names."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

# JAX reads it when it is imported.
os.environ.setdefault("JAX_ENABLE_X64", "true")


@pytest.fixture
def keras() -> Iterator[ModuleType]:
    """Keras, with seeds and settings that no other test has touched."""
    keras = pytest.importorskip("keras", reason="Keras is missing: pip install '.[keras]' torch jax")
    keras.utils.set_random_seed(3)
    yield keras
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")


@pytest.fixture
def data() -> tuple[Any, Any, Any]:
    """103 rows of ten features, a target, and weights."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(103, 10))
    return x, 2 * x[:, :1] + x[:, 1:2] ** 2, rng.uniform(0.5, 2, size=103)


@pytest.fixture
def network(keras: ModuleType) -> Callable[[], Any]:
    """Makes networks of equal weights."""

    def make() -> Any:
        keras.utils.set_random_seed(3)
        layers = keras.layers
        hidden = layers.Dense(16, activation="tanh", kernel_regularizer=keras.regularizers.L2(0.01))
        return keras.Sequential([keras.Input((10,)), hidden, layers.Dense(1)])

    return make
