"""Callbacks decide alike on all ranks; files and output are the first rank's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import mpidist
from tests.keras.test_fit import BATCH, adopted, gathered
from tests.support.ranks.layouts import layouts

pytestmark = [pytest.mark.counts, pytest.mark.filterwarnings("default")]
ON_RANKS = pytest.mark.parametrize("strategy", layouts("multi_worker-1local"), indirect=True)


@ON_RANKS
def test_all_ranks_stop_in_the_same_epoch(
    strategy: Any, keras: ModuleType, data: Any, network: Callable[[], Any]
) -> None:
    x, y, _ = data
    model = adopted(strategy, network())
    model.compile(keras.optimizers.SGD(0.3), "mse")
    callbacks = [
        keras.callbacks.EarlyStopping(patience=2, restore_best_weights=True),
        keras.callbacks.ReduceLROnPlateau(patience=1),
    ]
    options = {"batch_size": BATCH, "validation_split": 0.3, "verbose": 0}
    history = model.fit(x, y, epochs=60, callbacks=callbacks, **options).history
    of_ranks = gathered(strategy, (history, float(keras.ops.convert_to_numpy(model.optimizer.learning_rate))))
    assert all(values == of_ranks[0] for values in of_ranks)
    assert len(history["loss"]) < 60


@ON_RANKS
def test_a_rank_that_stops_after_a_batch_stops_all(strategy: Any, keras: ModuleType, data: Any) -> None:
    x, y, _ = data
    steps = []

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            steps.append(batch)
            if batch == 2 and mpidist.rank() == mpidist.size() - 1:
                self.model.stop_training = True

    model = adopted(strategy, keras.Sequential([keras.Input((10,)), keras.layers.Dense(1)]))
    model.compile("sgd", "mse")
    model.fit(x, y, batch_size=BATCH, epochs=3, verbose=0, callbacks=[Stop()])
    assert steps == [0, 1, 2]


@pytest.mark.min_ranks(2)
@pytest.mark.own_strategy
@pytest.mark.parametrize("what", ["rate", "weights", "optimizer"])
@pytest.mark.parametrize("when", ["on_epoch_begin", "on_train_batch_end"])
@pytest.mark.parametrize("ranks", ["one", "all"])
def test_changes_of_one_rank_alone_raise(
    keras: ModuleType, data: Any, network: Callable[[], Any], what: str, when: str, ranks: str
) -> None:
    x, y, _ = data

    def change(self: Any, number: int, logs: Any = None) -> None:
        if number != 1 or (ranks == "one" and mpidist.rank() > 0):
            return
        if what == "rate":
            self.model.optimizer.learning_rate = 0.25
        elif what == "weights":
            self.model.set_weights([0.5 * value for value in self.model.get_weights()])
        else:
            self.model.optimizer = keras.optimizers.SGD(0.25, momentum=0.5)

    if what == "optimizer" and keras.backend.backend() == "jax":
        pytest.skip("with jax Keras itself cannot change the optimizer within fit()")
    # With a method for batches Keras starts no thread, which it would leave behind after an error.
    methods = {"on_train_batch_end": lambda self, batch, logs=None: None, when: change}
    callback = type("Change", (keras.callbacks.Callback,), methods)()
    with mpidist.MultiWorkerMirroredStrategy() as strategy:
        model = adopted(strategy, network())
        model.compile(keras.optimizers.SGD(0.1), "mse")
        options = {"batch_size": BATCH, "epochs": 3, "verbose": 0, "callbacks": [callback]}
        if ranks == "all":
            model.fit(x, y, **options)
            assert len(set(gathered(strategy, str(model.get_weights())))) == 1
        else:
            with pytest.raises(mpidist.MismatchError, match="changed between two steps.*alike on every rank"):
                model.fit(x, y, **options)


@ON_RANKS
def test_an_optimizer_set_between_fits_is_adopted(
    strategy: Any, keras: ModuleType, data: Any, network: Callable[[], Any]
) -> None:
    x, y, _ = data
    weights = []
    for whose in (mpidist.OneDeviceStrategy("cpu:0"), strategy):
        model = adopted(whose, network())
        model.compile(keras.optimizers.SGD(0.05), "mse")
        for momentum in (0.0, 0.9):
            model.optimizer = keras.optimizers.SGD(0.02, momentum=momentum)
            model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    for mine, theirs in zip(*weights, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)
    if strategy.num_replicas_in_sync > 1:
        model.optimizer = keras.optimizers.SGD(0.02, momentum=0.5 * float(mpidist.rank() == 0))
        with pytest.raises(mpidist.MismatchError, match="'momentum': 0.5"):
            model.fit(x, y, verbose=0)


@ON_RANKS
def test_a_loss_that_is_no_number_stops_all(strategy: Any, keras: ModuleType, data: Any) -> None:
    """Only one rank has the row that spoils it."""
    x, y, _ = data
    x[30] = np.nan
    model = adopted(strategy, keras.Sequential([keras.Input((10,)), keras.layers.Dense(1)]))
    model.compile("sgd", "mse")
    callbacks = [keras.callbacks.TerminateOnNaN()]
    history = model.fit(x, y, batch_size=BATCH, epochs=3, shuffle=False, verbose=0, callbacks=callbacks)
    assert np.isnan(history.history["loss"]).tolist() == [True]


@ON_RANKS
def test_files_and_lines_are_those_of_the_first_rank(
    strategy: Any, keras: ModuleType, data: Any, network: Callable[[], Any], tmp_path: Path, capfd: Any
) -> None:
    x, y, _ = data
    model = adopted(strategy, network())
    model.compile("adam", "mse")
    callbacks = [
        keras.callbacks.ModelCheckpoint(tmp_path / "best.keras", monitor="loss", save_best_only=True),
        keras.callbacks.ModelCheckpoint(tmp_path / "{batch}.weights.h5", save_weights_only=True, save_freq=2),
        keras.callbacks.CSVLogger(tmp_path / "log.csv"),
    ]
    history = model.fit(x, y, batch_size=BATCH, epochs=2, verbose=2, callbacks=callbacks).history
    model.evaluate(x, y, verbose=2)
    model.predict(x, verbose=1)
    printed = capfd.readouterr().out
    if mpidist.rank():
        assert list(tmp_path.iterdir()) == []
        assert printed == ""
        return
    assert "Epoch 2/2" in printed
    lines = (tmp_path / "log.csv").read_text().splitlines()
    assert [float(line.split(",")[1]) for line in lines[1:]] == history["loss"]
    loaded = keras.models.load_model(tmp_path / "best.keras")
    for mine, theirs in zip(loaded.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.own_strategy
@pytest.mark.min_ranks(2)
def test_an_error_in_a_callback_is_one_of_all_ranks(keras: ModuleType, data: Any) -> None:
    x, y, _ = data

    class Fail(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            if mpidist.rank() == 0:
                raise OSError("the disk is full")

    with mpidist.MultiWorkerMirroredStrategy() as strategy:
        model = adopted(strategy, keras.Sequential([keras.Input((10,)), keras.layers.Dense(1)]))
        model.compile("sgd", "mse")
        with pytest.raises((OSError, mpidist.errors.PeerError), match="the disk is full"):
            model.fit(x, y, epochs=3, verbose=0, callbacks=[Fail()])


def test_a_backup_is_gone_on_from(keras: ModuleType, data: Any, network: Callable[[], Any], tmp_path: Path) -> None:
    """The epoch goes on with the rows in the order that they would have had."""
    x, y, _ = data

    class Leave(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            if epoch == 2:
                raise KeyboardInterrupt

    weights = []
    for callbacks in ([], [Leave()], []):
        keras.utils.set_random_seed(8)
        model = adopted(mpidist.OneDeviceStrategy("cpu:0"), network())
        model.compile("adam", "mse")
        backup = [keras.callbacks.BackupAndRestore(tmp_path / "backup")] if weights or callbacks else []
        try:
            model.fit(x, y, batch_size=BATCH, epochs=4, verbose=0, callbacks=[*backup, *callbacks])
        except KeyboardInterrupt:
            continue
        weights.append(b"".join(value.tobytes() for value in model.get_weights()))
    assert weights[0] == weights[1]
