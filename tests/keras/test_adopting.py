"""Which models and strategies go together."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import mpidist
from tests.keras.test_fit import BATCH, adopted, close
from tests.support.ranks.layouts import layouts

pytestmark = pytest.mark.filterwarnings("default")
SEVERAL = pytest.mark.parametrize("strategy", layouts("multi_worker-1local"), indirect=True)


def test_adopting_again_changes_nothing(keras: ModuleType, network: Callable[[], Any]) -> None:
    strategy = mpidist.OneDeviceStrategy("cpu:0")
    model = network()
    model.compile("sgd", "mse")
    assert adopted(strategy, model) is model
    kinds = type(model), type(model.optimizer)
    assert adopted(strategy, model) is model
    assert kinds == (type(model), type(model.optimizer))
    assert isinstance(model, keras.Sequential)
    with pytest.raises(ValueError, match="belongs to another OneDeviceStrategy"):
        adopted(mpidist.OneDeviceStrategy("cpu:0"), model)


@pytest.mark.counts
@pytest.mark.parametrize("strategy", layouts("multi_worker*"), indirect=True)
@pytest.mark.parametrize("kind", ["arrays", "Dataset", "distributed"])
@pytest.mark.parametrize("compiles_in_scope", [True, False])
def test_models_of_a_scope_need_no_adopt(
    strategy: Any, keras: ModuleType, data: Any, network: Callable[[], Any], kind: str, compiles_in_scope: bool
) -> None:
    x, y = (array.astype("float32") for array in data[:2])
    alone = network()
    alone.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
    alone.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    with strategy.scope():
        model = network()
        if compiles_in_scope:
            model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
    if not compiles_in_scope:
        model.compile(keras.optimizers.SGD(0.05), "mse", metrics=["mae"])
    whole = mpidist.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    given: Any = whole if kind == "Dataset" else strategy.experimental_distribute_dataset(whole)
    arguments, options = ((x, y), {"batch_size": BATCH}) if kind == "arrays" else ((given,), {})
    model.fit(*arguments, **options, epochs=2, shuffle=False, verbose=0)
    for mine, theirs in zip(model.get_weights(), alone.get_weights(), strict=True):
        close(mine, theirs, 1e-5)
    expected = alone.evaluate(x, y, batch_size=BATCH, verbose=0)
    close(model.evaluate(*arguments, **options, verbose=0), expected, 1e-5)
    if kind != "distributed":
        close(model.predict(arguments[0], **options, verbose=0), alone.predict(x, verbose=0), 1e-5)


@SEVERAL
def test_a_model_loaded_in_a_scope_is_adopted(
    strategy: Any, keras: ModuleType, data: Any, network: Callable[[], Any], tmp_path: Any
) -> None:
    x, y, _ = data
    model = network()
    model.compile("adam", "mse")
    model.fit(x, y, verbose=0)
    model.save(tmp_path / "model.keras")
    with strategy.scope():
        loaded = keras.models.load_model(tmp_path / "model.keras")
    for each in (model, loaded):
        each.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    for mine, theirs in zip(loaded.get_weights(), model.get_weights(), strict=True):
        close(mine, theirs, 1e-4)


def test_models_of_no_scope_are_those_of_keras(keras: ModuleType, network: Callable[[], Any]) -> None:
    model = network()
    with mpidist.OneDeviceStrategy("cpu:0").scope():
        pass
    model.compile("sgd", "mse")
    assert type(model) is keras.Sequential


def test_only_models_are_adopted(keras: ModuleType) -> None:
    with pytest.raises(TypeError, match="expected a keras.Model"):
        adopted(mpidist.OneDeviceStrategy("cpu:0"), keras.layers.Dense(1))


@pytest.mark.min_ranks(2)
@SEVERAL
def test_adopt_outside_the_scope_raises(strategy: Any, keras: ModuleType, network: Callable[[], Any]) -> None:
    assert strategy.num_replicas_in_sync > 1
    with pytest.raises(RuntimeError, match=r"outside of the scope of MultiWorkerMirroredStrategy.*with strategy.scope"):
        mpidist.keras.adopt(network())


@pytest.mark.min_ranks(2)
@SEVERAL
@pytest.mark.parametrize("is_adopted", [True, False])
def test_fit_of_a_strange_model_in_scope_raises(
    strategy: Any, keras: ModuleType, data: Any, network: Callable[[], Any], is_adopted: bool
) -> None:
    x, y, _ = data
    model = adopted(mpidist.OneDeviceStrategy("cpu:0"), network()) if is_adopted else network()
    model.compile("sgd", "mse")
    for train in (model.fit, model.train_on_batch):
        with (
            pytest.raises(RuntimeError, match="MultiWorkerMirroredStrategy, which has not adopted it"),
            strategy.scope(),
        ):
            train(x, y)
    model.fit(x, y, verbose=0)


def test_not_within_run(keras: ModuleType, network: Callable[[], Any]) -> None:
    import mpidist.keras

    with pytest.raises(RuntimeError, match=r"mpidist.keras.adopt\(\)"):
        mpidist.OneDeviceStrategy("cpu:0").run(mpidist.keras.adopt, args=(network(),))


def test_parameter_servers_are_refused(keras: ModuleType, network: Callable[[], Any]) -> None:
    class Served(mpidist.Strategy):
        pass

    strategy = mpidist.OneDeviceStrategy("cpu:0")
    served = Served(strategy.extended)
    with served.scope():
        model = network()
        with pytest.raises(ValueError, match="not on parameter servers"):
            mpidist.keras.adopt(model)
        with pytest.raises(ValueError, match="not on parameter servers"):
            model.compile("sgd", "mse")


@SEVERAL
def test_one_batch_is_for_one_rank(strategy: Any, keras: ModuleType, network: Callable[[], Any]) -> None:
    for whose in (strategy, mpidist.OneDeviceStrategy("cpu:0")):
        model = adopted(whose, network())
        model.compile("sgd", "mse")
        for method in (model.train_on_batch, model.test_on_batch):
            if whose.num_replicas_in_sync > 1:
                with pytest.raises(NotImplementedError, match="keras.utils.PyDataset"):
                    method(np.zeros((1, 10)), np.zeros((1, 1)))
            else:
                assert method(np.zeros((1, 10)), np.zeros((1, 1))) > 0


@pytest.mark.min_ranks(2)
@SEVERAL
def test_a_second_optimizer_is_refused(strategy: Any, keras: ModuleType, network: Callable[[], Any]) -> None:
    model = adopted(strategy, network())
    model.compile("sgd", "mse")
    model.of_another_part = keras.optimizers.Adam()
    with pytest.raises(ValueError, match="of model.optimizer alone"):
        model.fit(np.ones((4, 10)), np.ones((4, 1)), verbose=0)


@pytest.mark.min_ranks(2)
@SEVERAL
def test_outputs_with_a_mask_are_refused(strategy: Any, keras: ModuleType) -> None:
    layers = [keras.Input((5, 2)), keras.layers.Masking(), keras.layers.Dense(1)]
    model = adopted(strategy, keras.Sequential(layers))
    model.compile("sgd", "mse")
    # A rank without rows hears of it.
    with pytest.raises((ValueError, mpidist.errors.PeerError), match="an output has a mask"):
        model.fit(np.ones((4, 5, 2)), np.ones((4, 5, 1)), verbose=0)


@SEVERAL
def test_losses_that_are_no_means_over_rows(strategy: Any, keras: ModuleType, network: Callable[[], Any]) -> None:
    model = adopted(strategy, network())
    if strategy.num_replicas_in_sync == 1:
        model.compile("sgd", keras.losses.MeanSquaredError(reduction="sum"))
        return
    with pytest.raises(ValueError, match="expected reduction='sum_over_batch_size'"):
        model.compile("sgd", {"dense_1": keras.losses.MeanSquaredError(reduction="sum")})
