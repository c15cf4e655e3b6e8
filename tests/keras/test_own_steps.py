"""Steps that a user has written for testing: their logs, and batches that leave a rank without rows."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import mpidist
from tests.keras.test_fit import adopted
from tests.support.ranks.layouts import layouts

pytestmark = [
    pytest.mark.counts,
    pytest.mark.filterwarnings("default"),
    pytest.mark.parametrize("strategy", layouts("multi_worker-1local"), indirect=True),
]


def own_model(keras: ModuleType) -> Any:
    """Return a model whose test_step tells the mean of a batch's targets, which is no metric."""

    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.inner = keras.layers.Dense(1)

        def call(self, inputs: Any) -> Any:
            return self.inner(inputs)

        def test_step(self, *arguments: Any) -> Any:
            mean = keras.ops.mean(arguments[-1][1])
            return {"target": mean} if len(arguments) == 1 else ({"target": mean}, arguments[0])

    model = Own()
    model.compile("sgd", "mse")
    return model


def test_logs_are_means_by_rows(strategy: Any, keras: ModuleType) -> None:
    model = adopted(strategy, own_model(keras))
    replicas = strategy.num_replicas_in_sync
    model.evaluate(np.ones((replicas, 3)), np.ones((replicas, 1)), batch_size=replicas, verbose=0)
    # One rank has a row more, in a batch after those for which the step was compiled.
    rows = 2 * replicas + 1
    x, y = np.ones((3 * rows, 3)), np.arange(3.0 * rows)[:, None]
    for _ in range(2):
        found = model.evaluate(x, y, batch_size=rows, verbose=0, return_dict=True)
        assert found["target"] == pytest.approx(y[-rows:].mean(), rel=1e-6)
        # And the other way round, with shapes that are known.
        model.evaluate(np.ones((replicas, 3)), np.ones((replicas, 1)), batch_size=replicas, verbose=0)


@pytest.mark.min_ranks(2)
@pytest.mark.own_strategy
def test_a_rank_without_rows_is_an_error(strategy: Any, keras: ModuleType) -> None:
    model = adopted(strategy, own_model(keras))
    rows = strategy.num_replicas_in_sync + 1
    with pytest.raises(Exception, match=r"a test_step\(\) of one's own has to have some"):
        model.evaluate(np.ones((rows, 3)), np.ones((rows, 1)), batch_size=rows - 1, verbose=0)


def with_step(keras: ModuleType, on_torch: Callable[..., None], on_jax: Callable[..., Any]) -> Any:
    """Return a model of one layer with a train_step of its own.

    Args:
        keras: Keras.
        on_torch: Leaves gradients in the weights; takes model, rows and targets.
        on_jax: Returns the state after a step; takes model, state, rows and targets.
    """

    class Torch(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            import torch

            self.zero_grad()
            on_torch(self, *data)
            weights = self.trainable_weights
            with torch.no_grad():
                self.optimizer.apply([weight.value.grad for weight in weights], weights)
            return {}

    class Jax(keras.Sequential):
        def train_step(self, state: Any, data: Any) -> Any:
            return {}, on_jax(self, state, *data)

    kind = Torch if keras.backend.backend() == "torch" else Jax
    return kind([keras.Input((10,)), keras.layers.Dense(1)])


def without_scale_loss(keras: ModuleType) -> Any:
    """Return a model whose train_step takes gradients by itself, with PyTorch by two calls of backward."""

    def on_torch(model: Any, x: Any, y: Any) -> None:
        for target in (y, y + 1):
            (0.5 * (model(x, training=True) - target) ** 2).mean().backward()

    def on_jax(model: Any, state: Any, x: Any, y: Any) -> Any:
        import jax

        trainable, non_trainable, optimizer, metrics = state

        def loss(trainable: Any) -> Any:
            outputs, _ = model.stateless_call(trainable, non_trainable, x)
            return sum((0.5 * (outputs - target) ** 2).mean() for target in (y, y + 1))

        found = model.optimizer.stateless_apply(optimizer, jax.grad(loss)(trainable), trainable)
        return found[0], non_trainable, found[1], metrics

    return with_step(keras, on_torch, on_jax)


def in_float16(keras: ModuleType) -> Any:
    """Return a model whose gradients have no room for their products with rows."""
    layer = keras.layers.Dense(1, dtype="mixed_float16")
    return keras.Sequential([keras.Input((10,)), keras.layers.Rescaling(30.0), layer])


@pytest.mark.parametrize(("make", "rate"), [(without_scale_loss, 0.1), (in_float16, 1e-5)])
def test_gradients_of_losses_that_are_not_weighted(
    strategy: Any, keras: ModuleType, data: Any, make: Any, rate: float
) -> None:
    x, y = (array[:90].astype("float32") for array in data[:2])
    weights = []
    for whose in (mpidist.OneDeviceStrategy("cpu:0"), strategy):
        keras.utils.set_random_seed(3)
        model = adopted(whose, make(keras))
        model.compile(keras.optimizers.SGD(rate), "mse")
        before = model.get_weights()
        model.fit(x, y, batch_size=31, shuffle=False, verbose=0)
        weights.append([after - value for after, value in zip(model.get_weights(), before, strict=True)])
    for mine, alone in zip(*weights, strict=True):
        largest, exactness = np.abs(alone).max(), 1e-2 if make is in_float16 else 1e-5
        assert largest > 0
        np.testing.assert_allclose(mine, alone, rtol=0, atol=exactness * largest)


def clipping(keras: ModuleType) -> Any:
    """Return a model whose train_step scales the loss and clips gradients, with JAX of a function that it keeps."""

    def on_torch(model: Any, x: Any, y: Any) -> None:
        import torch

        model.optimizer.scale_loss(model.compute_loss(x=x, y=y, y_pred=model(x, training=True))).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)

    def on_jax(model: Any, state: Any, x: Any, y: Any) -> Any:
        import jax

        trainable, non_trainable, optimizer, metrics = state
        if not hasattr(model, "kept"):
            grad = jax.grad(model.compute_loss_and_updates, has_aux=True)
            object.__setattr__(model, "kept", jax.jit(grad, static_argnames="training"))
        grads, (_, _, non_trainable, metrics) = model.kept(
            trainable, non_trainable, metrics, x, y, None, training=True, optimizer_variables=optimizer
        )
        norm = sum((value**2).sum() for value in grads) ** 0.5
        grads = [value * jax.numpy.minimum(1.0, 0.5 / norm) for value in grads]
        trainable, optimizer = model.optimizer.stateless_apply(optimizer, grads, trainable)
        return trainable, non_trainable, optimizer, metrics

    return with_step(keras, on_torch, on_jax)


def test_a_step_sees_gradients_of_means(strategy: Any, keras: ModuleType) -> None:
    # All rows are alike, so that every rank clips as one process does.
    x = np.ones((90, 10), np.float32)
    weights = []
    for whose in (mpidist.OneDeviceStrategy("cpu:0"), strategy):
        keras.utils.set_random_seed(3)
        model = adopted(whose, clipping(keras))
        model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
        model.fit(x, 2 * x[:, :1], batch_size=30, epochs=2, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    for mine, alone in zip(*weights, strict=True):
        np.testing.assert_allclose(mine, alone, rtol=1e-4, atol=1e-5)
