"""Input of every kind gives the training of the arrays that are in it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import mpidist
from tests.keras.test_fit import BATCH, adopted, close
from tests.support.ranks.layouts import layouts

pytestmark = [pytest.mark.counts, pytest.mark.filterwarnings("default")]
ON_RANKS = pytest.mark.parametrize("strategy", layouts("multi_worker*"), indirect=True)
KINDS = ["PyDataset", "DataLoader", "Dataset", "distributed Dataset", "tensors", "dict"]


def given(
    kind: str, strategy: Any, keras: ModuleType, x: Any, y: Any, size: int = BATCH
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return x and y as the arguments of fit()."""
    rows = [slice(start, start + BATCH) for start in range(0, len(x), BATCH)]
    if kind == "PyDataset":

        class Batches(keras.utils.PyDataset):
            def __len__(self) -> int:
                return len(rows)

            def __getitem__(self, index: int) -> Any:
                return x[rows[index]], y[rows[index]]

        return (Batches(),), {}
    if kind == "DataLoader":
        torch = pytest.importorskip("torch", reason="PyTorch is missing: pip install '.[torch]'")
        dataset = torch.utils.data.TensorDataset(torch.tensor(x), torch.tensor(y))
        return (torch.utils.data.DataLoader(dataset, size),), {}
    if "Dataset" in kind:
        dataset = mpidist.Dataset.from_tensor_slices((x, y)).batch(BATCH)
        return (strategy.experimental_distribute_dataset(dataset) if "distributed" in kind else dataset,), {}
    if kind == "tensors":
        return (keras.ops.convert_to_tensor(x), keras.ops.convert_to_tensor(y)), {"batch_size": BATCH}
    return ({"first": x[:, :4], "rest": x[:, 4:]}, y), {"batch_size": BATCH}


@ON_RANKS
@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_input(strategy: Any, keras: ModuleType, data: Any, network: Callable[[], Any], kind: str) -> None:
    x, y = (array.astype("float32") for array in data[:2])
    alone, model = network(), network()
    if kind == "dict":
        inputs = {"first": keras.Input((4,), name="first"), "rest": keras.Input((6,), name="rest")}
        model = keras.Model(inputs, model(keras.layers.Concatenate()([inputs["first"], inputs["rest"]])))
    alone.compile("sgd", "mse", metrics=["mae"])
    expected = alone.fit(x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
    model = adopted(strategy, model)
    model.compile("sgd", "mse", metrics=["mae"])
    arguments, options = given(kind, strategy, keras, x, y)
    found = model.fit(*arguments, **options, epochs=2, shuffle=False, verbose=0).history
    for name in expected:
        close(found[name], expected[name], 1e-5)
    for mine, theirs in zip(model.get_weights(), alone.get_weights(), strict=True):
        close(mine, theirs, 1e-5)
    if kind == "distributed Dataset":
        with pytest.raises(TypeError, match="no order is known"):
            model.predict(arguments[0], verbose=0)
    else:
        close(model.predict(arguments[0], verbose=0), alone.predict(x, verbose=0), 1e-5)


@ON_RANKS
def test_validation_split_is_that_of_keras(
    strategy: Any, keras: ModuleType, data: Any, network: Callable[[], Any]
) -> None:
    x, y, weights = data
    histories = []
    for model in (network(), adopted(strategy, network())):
        model.compile("sgd", "mse", metrics=["mae"])
        options = {"batch_size": BATCH, "validation_split": 0.2, "shuffle": False, "verbose": 0}
        histories.append(model.fit(x, y, sample_weight=weights, **options).history)
    for name in histories[0]:
        close(histories[1][name], histories[0][name], 1e-5)


@ON_RANKS
def test_batches_of_a_dataset_are_shuffled_alike(strategy: Any, keras: ModuleType, data: Any) -> None:
    asked = []

    class Batches(keras.utils.PyDataset):
        num_batches = 8

        def __getitem__(self, index: int) -> Any:
            asked.append(index)
            return np.full((4, 10), index), np.ones((4, 1))

    keras.utils.set_random_seed(mpidist.rank())
    model = adopted(strategy, keras.Sequential([keras.Input((10,)), keras.layers.Dense(1)]))
    model.compile("sgd", "mse")
    model.fit(Batches(), epochs=2, verbose=0)
    communicator = strategy.extended.communicator
    if communicator is not None:
        assert len(set(communicator.all_gather_object(tuple(asked)))) == 1
    assert asked[-16:-8] != asked[-8:] != sorted(asked[-8:])


@ON_RANKS
def test_arguments_that_do_not_fit(strategy: Any, keras: ModuleType, data: Any, network: Callable[[], Any]) -> None:
    x, y, _ = data
    model = adopted(strategy, network())
    model.compile("sgd", "mse")
    loader = mpidist.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    for arguments, options, kind, text in [
        ((loader, y), {}, ValueError, "y beside a Dataset"),
        ((loader,), {"batch_size": 4}, ValueError, "batch_size beside"),
        ((iter([(x, y)]),), {}, TypeError, "expected arrays, a keras.utils.PyDataset"),
        ((x, y[:5]), {}, ValueError, r"arrays of \[103, 5\] rows"),
        ((x, y), {"callbacks": keras.callbacks.CallbackList()}, TypeError, "expected a list of callbacks"),
    ]:
        with pytest.raises(kind, match=text):
            model.fit(*arguments, **options, verbose=0)


@pytest.mark.min_ranks(2)
@pytest.mark.own_strategy
@pytest.mark.parametrize("differ", ["rows", "values", "arrays", "Dataset", "epochs"])
def test_ranks_with_other_data_have_an_error(keras: ModuleType, data: Any, differ: str) -> None:
    x, y, _ = data
    rank = mpidist.rank()
    with mpidist.MultiWorkerMirroredStrategy() as strategy:
        model = adopted(strategy, keras.Sequential([keras.Input((10,)), keras.layers.Dense(1)]))
        model.compile("sgd", "mse")
        rows = len(x) - rank * (differ == "rows")
        x = x + rank if differ in ("values", "arrays", "Dataset") else x
        kind = {"values": "PyDataset", "Dataset": "Dataset"}.get(differ)
        arguments = given(kind, strategy, keras, x, y)[0] if kind else (x[:rows], y[:rows])
        remedies = r"checksum.*mpidist.keras.sharded\(x\).*strategy.distribute_datasets_from_function\(\)"
        texts = dict.fromkeys(["values", "arrays", "Dataset"], remedies)
        with pytest.raises(mpidist.errors.MismatchError, match=texts.get(differ, "fit()")):
            model.fit(*arguments, epochs=1 + rank * (differ == "epochs"), verbose=0)


@ON_RANKS
@pytest.mark.parametrize("kind", ["arrays", "Dataset", "DataLoader", "function"])
def test_sharded_data_train_all_rows(
    strategy: Any, keras: ModuleType, data: Any, network: Callable[[], Any], kind: str
) -> None:
    """Ranks have parts of each global batch, the last one of other sizes."""
    if len(strategy.extended.local_replica_ids) > 1:
        pytest.skip("replicas of one rank take batches in turn")
    x, y = (array.astype("float32") for array in data[:2])
    ranks, rank = strategy.num_replicas_in_sync, strategy.extended.local_replica_ids[0]
    each = 8
    alone = network()
    alone.compile("sgd", "mse", metrics=["mae"])
    mine = shares(len(x), ranks)[rank]
    steps = max(-(-len(part) // each) for part in shares(len(x), ranks))
    options = {"batch_size": each * ranks} if kind == "arrays" else {}
    own = mpidist.Dataset.from_tensor_slices((x[mine], y[mine])).batch(each)
    arguments: tuple[Any, ...] = {
        "arrays": (mpidist.keras.sharded(x[mine]), y[mine]),
        "Dataset": (mpidist.keras.sharded(own),),
        "DataLoader": (mpidist.keras.sharded(given("DataLoader", strategy, keras, x[mine], y[mine], each)[0][0]),),
        "function": (strategy.distribute_datasets_from_function(lambda _: own),),
    }[kind]
    with strategy.scope():
        model = network()
        model.compile("sgd", "mse", metrics=["mae"])
    for number in range(steps):
        rows = np.concatenate([part[number * each : (number + 1) * each] for part in shares(len(x), ranks)])
        alone.train_on_batch(x[rows], y[rows])
    model.fit(*arguments, **options, shuffle=False, verbose=0)
    for found, expected in zip(model.get_weights(), alone.get_weights(), strict=True):
        close(found, expected, 1e-5)
    found = model.evaluate(*arguments, **options, verbose=0)
    close(found, alone.evaluate(x, y, verbose=0), 1e-5)
    with pytest.raises(TypeError, match="no order"):
        model.predict(arguments[0], verbose=0)
    if kind == "arrays":
        model.fit(*arguments, **options, validation_split=0.25, verbose=0)


def shares(rows: int, ranks: int) -> list[Any]:
    """Return the numbers of the rows that each rank has."""
    return np.array_split(np.arange(rows), ranks)


@ON_RANKS
def test_a_data_loader_that_forks_is_refused(strategy: Any, keras: ModuleType) -> None:
    from mpidist.keras.global_batches import global_batches

    torch = pytest.importorskip("torch", reason="PyTorch is missing: pip install '.[torch]'")
    model = adopted(strategy, keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)]))
    model.compile("sgd", "mse")
    table = torch.utils.data.TensorDataset(torch.ones(8, 3), torch.ones(8, 1))

    def loader(method: str | None) -> Any:
        return torch.utils.data.DataLoader(table, 4, num_workers=2, multiprocessing_context=method)

    loaders = [loader("fork"), *([loader(None)] if multiprocessing.get_all_start_methods()[0] == "fork" else [])]
    for forking in loaders:
        for call in (model.fit, model.evaluate, model.predict):
            with pytest.raises(ValueError, match="num_workers=2, which it forks, .* expected num_workers=0"):
                call(forking, verbose=0)
        with pytest.raises(ValueError, match="must not be forked"):
            model.fit(np.ones((8, 3)), np.ones((8, 1)), validation_data=forking, verbose=0)
    for method in ("spawn", "forkserver"):
        assert global_batches(strategy, loader(method)).num_batches == 2


@ON_RANKS
@pytest.mark.parametrize("kind", ["DataLoader", "Dataset", "distributed Dataset"])
def test_streams_of_unknown_length(strategy: Any, keras: ModuleType, data: Any, kind: str) -> None:
    """With steps_per_epoch they go on over epochs and passes; without, an error says what to type."""
    x, y = (array[:100].astype("float32") for array in data[:2])
    results = []
    for whose in (mpidist.OneDeviceStrategy("cpu:0"), strategy):
        keras.utils.set_random_seed(3)
        model = adopted(whose, keras.Sequential([keras.Input((10,)), keras.layers.Dense(1)]))
        model.compile("sgd", "mse")
        if whose is strategy:
            stream = unknown(kind, strategy, x, y)
            for call in (model.fit, model.evaluate, *([] if kind == "distributed Dataset" else [model.predict])):
                with pytest.raises(ValueError, match=r"expected steps_per_epoch=\.\.\. in fit"):
                    call(stream, verbose=0)
            model.fit(stream, epochs=4, steps_per_epoch=3, validation_data=stream, validation_steps=2, verbose=0)
        else:
            # Twelve batches: three passes of four.
            model.fit(x, y, batch_size=BATCH, epochs=3, shuffle=False, verbose=0)
        results.append(model.get_weights())
    for mine, theirs in zip(*results, strict=True):
        close(mine, theirs, 1e-5)
    model.evaluate(stream, steps=4, verbose=0)
    with pytest.raises(ValueError, match="ended after 4 batches"):
        model.evaluate(stream, steps=5, verbose=0)


def unknown(kind: str, strategy: Any, x: Any, y: Any) -> Any:
    """Return batches of which nobody knows how many there are."""
    if kind == "DataLoader":
        torch = pytest.importorskip("torch", reason="PyTorch is missing: pip install '.[torch]'")

        class Rows(torch.utils.data.IterableDataset):
            def __iter__(self) -> Any:
                return iter(zip(x, y, strict=True))

        return torch.utils.data.DataLoader(Rows(), BATCH)
    dataset = mpidist.Dataset.from_tensor_slices((x, y)).filter(lambda *_: True).batch(BATCH)
    return strategy.experimental_distribute_dataset(dataset) if "distributed" in kind else dataset


@ON_RANKS
def test_a_stream_without_batches_is_an_error(strategy: Any, keras: ModuleType) -> None:
    model = adopted(strategy, keras.Sequential([keras.Input((10,)), keras.layers.Dense(1)]))
    model.compile("sgd", "mse")
    empty = mpidist.Dataset.from_tensor_slices((np.ones((4, 10)), np.ones((4, 1)))).filter(lambda *_: False).batch(2)
    with pytest.raises(ValueError, match="ended after 0 batches"):
        model.fit(empty, steps_per_epoch=2, verbose=0)
