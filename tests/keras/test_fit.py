"""Training, evaluation and prediction under a strategy are those of one process that has all rows."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import mpidist
from tests.support.ranks.layouts import layouts

pytestmark = [pytest.mark.counts, pytest.mark.filterwarnings("default")]

# Steps of 25 rows, a last one of 3, which does not divide, and with 4 replicas leaves one without rows.
BATCH, EPOCHS = 25, 4
# Keras takes means, as those of losses, in float32, whatever the model has.
EXACT = {("float32", "sgd"): 1e-5, ("float32", "adam"): 1e-3, ("float64", "sgd"): 1e-5}
OF_METRICS = 1e-5


def adopted(strategy: Any, model: Any) -> Any:
    import mpidist.keras

    with strategy.scope():
        return mpidist.keras.adopt(model)


def compiled(keras: ModuleType, model: Any, optimizer: Any = "sgd") -> Any:
    metrics = ["mae", keras.metrics.RootMeanSquaredError()]
    model.compile(optimizer=optimizer, loss="mse", metrics=metrics, weighted_metrics=["mse"])
    return model


def close(found: Any, expected: Any, exactness: float) -> None:
    scale = max(float(np.abs(expected).max()), 1e-3)
    np.testing.assert_allclose(found, expected, rtol=exactness, atol=exactness * scale)


EVERYWHERE = layouts("one_device", "mirrored-3local", "multi_worker*", "central_node-1local")


@pytest.mark.parametrize("strategy", EVERYWHERE, indirect=True)
@pytest.mark.parametrize(("floatx", "optimizer"), EXACT)
def test_twenty_steps_are_those_of_one_process(
    strategy: Any, keras: ModuleType, data: Any, network: Callable[[], Any], floatx: str, optimizer: str
) -> None:
    keras.config.set_floatx(floatx)
    keras.config.set_dtype_policy(floatx)
    (x, y, weights), exactness = data, EXACT[floatx, optimizer]
    options = {
        "sample_weight": weights,
        "batch_size": BATCH,
        "epochs": EPOCHS,
        "shuffle": False,
        "validation_data": (x[:33], y[:33]),
        "validation_batch_size": 16,
        "verbose": 0,
    }
    alone = compiled(keras, network(), optimizer)
    expected = alone.fit(x, y, **options).history
    model = compiled(keras, adopted(strategy, network()), optimizer)
    found = model.fit(x, y, **options).history
    assert found.keys() == expected.keys()
    for name in expected:
        close(found[name], expected[name], OF_METRICS)
    for mine, theirs in zip(model.get_weights(), alone.get_weights(), strict=True):
        close(mine, theirs, exactness)
    close(model.evaluate(x, y, batch_size=40, verbose=0), alone.evaluate(x, y, batch_size=40, verbose=0), OF_METRICS)
    close(model.predict(x, batch_size=27, verbose=0), alone.predict(x, batch_size=27, verbose=0), exactness)


def bits(model: Any) -> bytes:
    return b"".join(np.ascontiguousarray(value).tobytes() for value in model.get_weights())


@pytest.mark.parametrize("strategy", layouts("multi_worker*"), indirect=True)
def test_rows_are_shuffled_alike_whatever_the_number_of_ranks(
    strategy: Any, keras: ModuleType, data: Any, network: Callable[[], Any]
) -> None:
    x, y, _ = data
    weights = []
    for whose in (strategy, mpidist.OneDeviceStrategy("cpu:0")):
        keras.utils.set_random_seed(5)
        model = compiled(keras, adopted(whose, network()))
        # Ranks draw apart, as in a program that seeds nothing.
        keras.utils.set_random_seed(5 + mpidist.rank() * (whose is strategy))
        model.fit(x, y, batch_size=BATCH, epochs=2, verbose=0)
        weights.append(model.get_weights())
    for mine, theirs in zip(*weights, strict=True):
        close(mine, theirs, 1e-5)


@pytest.mark.parametrize("strategy", layouts("multi_worker*"), indirect=True)
def test_ranks_begin_with_the_weights_of_the_first(
    strategy: Any, keras: ModuleType, data: Any, network: Callable[[], Any]
) -> None:
    x, y, _ = data
    make = adopted(strategy, network())
    keras.utils.set_random_seed(mpidist.rank())
    other = adopted(strategy, keras.models.clone_model(make))
    compiled(keras, other, "adam").fit(x, y, batch_size=BATCH, verbose=0)
    assert strategy.extended.communicator is None or len(set(gathered(strategy, bits(other)))) == 1


def gathered(strategy: Any, value: Any) -> list[Any]:
    communicator = strategy.extended.communicator
    return [value] if communicator is None else communicator.all_gather_object(value)


@pytest.mark.parametrize("strategy", layouts("multi_worker*", "mirrored-3local"), indirect=True)
def test_class_weights(strategy: Any, keras: ModuleType, data: Any, network: Callable[[], Any]) -> None:
    x, y, _ = data
    labels = (y[:, 0] > 0).astype(int)
    weights = []
    for model in (network(), adopted(strategy, network())):
        model.add(keras.layers.Dense(2, activation="softmax", kernel_initializer="ones"))
        model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"], weighted_metrics=["accuracy"])
        options = {"class_weight": {0: 3.0, 1: 0.5}, "batch_size": BATCH, "shuffle": False, "verbose": 0}
        weights.append([model.fit(x, labels, **options).history, model.get_weights()])
    (expected, theirs), (found, mine) = weights
    for name in expected:
        close(found[name], expected[name], 1e-5)
    for one, other in zip(mine, theirs, strict=True):
        close(one, other, 1e-5)


@pytest.mark.parametrize("strategy", layouts("multi_worker*"), indirect=True)
def test_statistics_are_those_of_all_rows(strategy: Any, keras: ModuleType, data: Any) -> None:
    """Equal after each batch, and the mean over ranks, which for the mean of all rows is the one of one process."""
    x, y, _ = data

    def make() -> Any:
        layers = [keras.Input((10,)), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
        model = keras.Sequential([*layers, keras.layers.Dense(1, trainable=False)])
        model.compile(keras.optimizers.SGD(0.0), "mse")
        return model

    after_batches = []

    class Keep(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            after_batches.append(bits(self.model.layers[0]))

    model = adopted(strategy, make())
    model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, callbacks=[Keep()])
    alone = make()
    alone.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    close(model.layers[0].moving_mean.numpy(), alone.layers[0].moving_mean.numpy(), 1e-5)
    assert len(after_batches) == 5
    of_ranks = gathered(strategy, after_batches)
    assert all(values == of_ranks[0] for values in of_ranks)


@pytest.mark.parametrize("strategy", layouts("multi_worker-1local"), indirect=True)
def test_each_rank_drops_out_other_units(strategy: Any, keras: ModuleType) -> None:
    if keras.backend.backend() == "torch":
        pytest.skip("Keras' dropout takes the numbers of PyTorch's own generator there")
    model = adopted(strategy, keras.Sequential([keras.Input((50,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)]))
    model.compile(keras.optimizers.SGD(0.0), "mse")
    model.fit(np.ones((8, 50)), np.ones((8, 1)), batch_size=8, verbose=0)
    outputs = np.asarray(keras.ops.convert_to_numpy(model.layers[0](np.ones((1, 50), "float32"), training=True)))
    kept = gathered(strategy, outputs.tobytes())
    assert len(set(kept)) == len(kept)


@pytest.mark.parametrize("strategy", layouts("multi_worker*"), indirect=True)
def test_batches_of_fewer_rows_than_replicas(strategy: Any, keras: ModuleType) -> None:
    """Layers that know nothing of batches without rows."""
    layers, results = keras.layers, []
    for whose in (mpidist.OneDeviceStrategy("cpu:0"), strategy):
        keras.utils.set_random_seed(4)
        model = adopted(whose, keras.Sequential([layers.Conv2D(3, 2), layers.Flatten(), layers.Dense(2)]))
        model.compile("sgd", "mse", metrics=["mae"])
        images, targets = np.random.default_rng(1).normal(size=(5, 4, 4, 1)), np.ones((5, 2))
        history = model.fit(
            images, targets, batch_size=2, epochs=2, validation_data=(images[:1], targets[:1]), verbose=0
        )
        predicted = model.predict(images, batch_size=2, verbose=0)
        results.append([*history.history.values(), *model.get_weights(), predicted])
    for mine, theirs in zip(*results, strict=True):
        close(mine, theirs, 1e-5)


@pytest.mark.parametrize("strategy", layouts("multi_worker-1local"), indirect=True)
def test_a_step_of_ones_own(strategy: Any, keras: ModuleType, data: Any, network: Callable[[], Any]) -> None:
    x, y, _ = data

    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def call(self, inputs: Any) -> Any:
            return self.inner(inputs)

        def train_step(self, *arguments: Any) -> Any:
            return super().train_step(*arguments)

    weights = []
    for model in (Own(), adopted(strategy, Own())):
        model.compile("sgd", "mse")
        model.fit(x[:100], y[:100], batch_size=BATCH, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    for mine, theirs in zip(*weights, strict=True):
        close(mine, theirs, 1e-5)


def test_the_file_of_an_adopted_model_is_keras_own(
    keras: ModuleType, network: Callable[[], Any], tmp_path: Any, data: Any
) -> None:
    x, y, _ = data
    model = compiled(keras, adopted(mpidist.OneDeviceStrategy("cpu:0"), network()), "adam")
    model.fit(x, y, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert type(loaded) is keras.Sequential
    assert type(loaded.optimizer) is type(keras.optimizers.get("adam"))
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), model.predict(x, verbose=0))
