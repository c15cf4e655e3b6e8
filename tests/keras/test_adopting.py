"""Which models and strategies go together."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import mpidist
from tests.keras.test_fit import adopted
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


def test_only_models_are_adopted(keras: ModuleType) -> None:
    with pytest.raises(TypeError, match="expected a keras.Model"):
        adopted(mpidist.get_strategy(), keras.layers.Dense(1))


def test_not_within_run(keras: ModuleType, network: Callable[[], Any]) -> None:
    import mpidist.keras

    with pytest.raises(RuntimeError, match=r"mpidist.keras.adopt\(\)"):
        mpidist.OneDeviceStrategy("cpu:0").run(mpidist.keras.adopt, args=(network(),))


def test_parameter_servers_are_refused(keras: ModuleType, network: Callable[[], Any]) -> None:
    class Served(mpidist.Strategy):
        pass

    strategy = mpidist.OneDeviceStrategy("cpu:0")
    served = Served(strategy.extended)
    with pytest.raises(ValueError, match="not on parameter servers"), served.scope():
        mpidist.keras.adopt(network())


def test_one_batch_is_refused(keras: ModuleType, network: Callable[[], Any]) -> None:
    model = adopted(mpidist.get_strategy(), network())
    model.compile("sgd", "mse")
    for method in (model.train_on_batch, model.test_on_batch):
        with pytest.raises(NotImplementedError, match="keras.utils.PyDataset"):
            method([[0.0] * 10], [[0.0]])


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
