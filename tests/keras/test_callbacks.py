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
