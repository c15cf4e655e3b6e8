"""Strategy: its methods and how the strategies differ in behaviour, in every layout."""

from __future__ import annotations

import copy
import pickle
from collections import namedtuple
from typing import Any

import numpy as np
import pytest

import mpidist
from tests.acceptance.checks import (
    MEAN,
    ON_READ,
    SUM,
    check_components,
    check_each,
    is_central,
    is_default,
    is_single,
    local_ids,
    make_variable,
    num_workers,
    replica_id,
    same,
)
from tests.support.ranks.layouts import layouts, per_replica

pytestmark = pytest.mark.nodes

Pair = namedtuple("Pair", "left right")
REPLICATED = ("mirrored-*", "mirrored_node-*", "multi_worker-*", "central*")


def test_copies_and_pickles(strategy: Any) -> None:
    with pytest.raises(RuntimeError):
        copy.copy(strategy)
    with pytest.raises(Exception, match="pickle"):
        pickle.dumps(strategy)
    if is_default(strategy):
        with pytest.raises(RuntimeError):
            copy.deepcopy(strategy)
        with pytest.raises(RuntimeError):
            type(strategy)()
    elif isinstance(strategy, mpidist.MultiWorkerMirroredStrategy) or num_workers(strategy) > 1:
        with pytest.raises(ValueError):
            copy.deepcopy(strategy)
    assert isinstance(strategy.extended, mpidist.StrategyExtended)


@pytest.mark.parametrize("strategy", layouts("one_device"), indirect=True)
def test_deepcopy_of_a_strategy_without_a_communicator(strategy: Any) -> None:
    twin = copy.deepcopy(strategy)
    assert twin is not strategy
    assert twin.extended is not strategy.extended
    with twin.scope():
        assert mpidist.get_strategy() is twin
    same(twin.reduce("SUM", twin.run(lambda: 3.0), axis=None), 3.0)


def test_run_resolves_the_components_of_nested_arguments(strategy: Any) -> None:
    value = per_replica(strategy, lambda i: np.array([i, 10 * i]))

    def fn(one: Any, nest: Any, *, pair: Any, plain: Any) -> Any:
        assert plain is marker
        return {"one": one + 1, "nest": nest, "pair": pair}

    marker = object()
    nest = [value, (value, {"k": value, "text": "as it is"})]
    result = strategy.run(fn, args=(value, nest), kwargs={"pair": Pair(value, 5), "plain": marker})
    assert isinstance(result, dict)
    assert isinstance(result["pair"], Pair)
    for index, i in enumerate(local_ids(strategy)):
        part = strategy.experimental_local_results(result)[index]
        array = np.array([i, 10 * i])
        same(part["one"], array + 1)
        same(part["nest"][0], array)
        same(part["nest"][1][1]["k"], array)
        assert part["nest"][1][1]["text"] == "as it is"
        assert isinstance(part["pair"], Pair)
        same(part["pair"].right, 5)


def test_run_gives_plain_values_to_every_replica(strategy: Any) -> None:
    array = np.arange(3)
    seen: list[Any] = []
    strategy.run(seen.append, args=[array])
    assert len(seen) == len(local_ids(strategy))
    assert all(item is array for item in seen)


def test_run_takes_a_list_or_a_tuple(strategy: Any) -> None:
    for bad in (5, "ab", {"a": 1}, np.arange(2)):
        with pytest.raises(ValueError, match="args"):
            strategy.run(lambda *_: None, args=bad)
    same(strategy.run(lambda: None), None)


def test_what_run_collapses(strategy: Any) -> None:
    """Of identical results only None, strings and variables come back unwrapped."""
    variable = make_variable(strategy, 1.0)
    captured, number = np.arange(2), 257.0
    results = strategy.run(lambda: {"a": captured, "n": number, "t": "x", "z": None, "v": variable, "i": 1, "b": True})
    assert results["t"] == "x"
    assert results["z"] is None
    assert results["v"] is variable
    several = len(local_ids(strategy)) > 1
    for name in ("a", "n", "i", "b"):
        assert isinstance(results[name], mpidist.DistributedValues) == several, name
    texts = strategy.run(lambda: f"replica {replica_id()}")
    assert strategy.experimental_local_results(texts) == tuple(f"replica {i}" for i in local_ids(strategy))
    assert isinstance(texts, mpidist.DistributedValues) == several


def test_run_does_not_collapse_other_objects(strategy: Any) -> None:
    """*Only* None, strings and variables."""
    opaque = object()
    result = strategy.run(lambda: opaque)
    assert isinstance(result, mpidist.DistributedValues) == (len(local_ids(strategy)) > 1)
    assert all(part is opaque for part in strategy.experimental_local_results(result))


def test_run_passes_variables_as_they_are(strategy: Any) -> None:
    variable = make_variable(strategy, 0.0, ON_READ, SUM)

    def fn(passed: Any) -> Any:
        assert passed is variable
        passed.assign_add(replica_id() + 1.0)
        return passed + 0.5

    of_all = sum(i + 1.5 for i in range(strategy.num_replicas_in_sync))
    extra = 0.5 * (strategy.num_replicas_in_sync - 1)
    expected = (lambda _: of_all - extra) if is_central(strategy) else (lambda i: i + 1.5)
    check_each(strategy, strategy.run(fn, args=(variable,)), expected)


def test_exceptions_of_a_replica_reach_the_caller(strategy: Any) -> None:
    def fn() -> None:
        raise KeyError(f"replica {replica_id()}")

    with pytest.raises(KeyError, match="replica"):
        strategy.run(fn)
    same(strategy.reduce("SUM", strategy.run(lambda: 1.0), axis=None), float(strategy.num_replicas_in_sync))


def test_run_options(strategy: Any) -> None:
    options = mpidist.RunOptions()
    assert options == (True, False, None)
    with pytest.raises(AttributeError):
        options.experimental_xla_options = 1
    check_each(strategy, strategy.run(replica_id, options=mpidist.RunOptions(False, True)), lambda i: i)
    with pytest.raises((TypeError, ValueError), match="RunOptions"):
        strategy.run(replica_id, options={"experimental_enable_dynamic_batch_size": True})


def test_local_results(strategy: Any) -> None:
    ids = local_ids(strategy)
    value = per_replica(strategy, lambda i: 10 * i)
    expected = tuple(10 * i for i in ids)
    assert strategy.experimental_local_results(value) == expected
    assert strategy.unwrap(value) == expected
    assert strategy.experimental_local_results(7) == (7,)
    assert strategy.experimental_local_results({"a": value, "b": [value, "s"]}) == tuple(
        {"a": x, "b": [x, "s"]} for x in expected
    )
    with strategy.scope():
        assert strategy.experimental_local_results(value) == expected


def test_logical_devices(strategy: Any) -> None:
    array = np.zeros((2, 3))
    same(strategy.experimental_assign_to_logical_device(array, 0), array)
    same(strategy.experimental_split_to_logical_devices(array, [1, 1]), array)
    same(strategy.experimental_replicate_to_logical_devices(array), array)
    for bad in (-1, 1, 5):
        with pytest.raises(ValueError, match=str(bad)):
            strategy.experimental_assign_to_logical_device(array, bad)
    for dimensions in ([1], [1, 1, 1], [2, 1], [1, 2], [2, 3]):
        with pytest.raises(ValueError):
            strategy.experimental_split_to_logical_devices(array, dimensions)


def test_update_config_proto_returns_a_copy(strategy: Any) -> None:
    assert strategy.update_config_proto(None) is None
    config = {"a": [1]}
    updated = strategy.update_config_proto(config)
    assert updated == config
    assert updated is not config
    assert updated["a"] is not config["a"]


def test_behaviour_matrix(strategy: Any) -> None:
    n, ids, workers = strategy.num_replicas_in_sync, local_ids(strategy), num_workers(strategy)
    extended = strategy.extended
    if is_single(strategy):
        assert n == 1
    if is_default(strategy):
        for name in ("worker_devices", "parameter_devices"):
            with pytest.raises(RuntimeError):
                getattr(extended, name)
    else:
        assert len(extended.worker_devices) == len(ids)
        assert extended.parameter_devices == (("cpu:0",) if is_central(strategy) else extended.worker_devices)
        assert len(set(extended.worker_devices)) == len(ids)
        assert all(isinstance(device, str) and "cpu" in device.lower() for device in extended.worker_devices)
        assert tuple(extended.worker_devices_by_replica) == tuple((d,) for d in extended.worker_devices)
    rank = ids[0] // len(ids)
    assert extended.should_checkpoint == (rank == 0)
    assert extended.should_save_summary == (rank == 0)
    assert extended.experimental_should_init is True
    assert extended.experimental_require_static_shapes is False
    assert extended.experimental_between_graph == (workers > 1 or is_central(strategy))
    assert (strategy.cluster_resolver is not None) == isinstance(strategy, mpidist.MultiWorkerMirroredStrategy)
    contexts: list[Any] = []

    def dataset_fn(context: Any) -> Any:
        contexts.append(context)
        return mpidist.Dataset.range(2).batch(1)

    dataset = strategy.distribute_datasets_from_function(dataset_fn)
    found = [(c.num_input_pipelines, c.input_pipeline_id, c.num_replicas_in_sync) for c in contexts]
    assert found == [(workers, rank, n)]
    if is_default(strategy):
        assert isinstance(dataset, mpidist.Dataset)
        plain = mpidist.Dataset.range(4).batch(2)
        assert strategy.experimental_distribute_dataset(plain) is plain
    value = strategy.experimental_distribute_values_from_function(lambda c: c.replica_id_in_sync_group)
    if is_single(strategy):
        assert value == 0
    else:
        assert isinstance(value, mpidist.DistributedValues)
        assert value.values == ids
        assert repr(value).startswith("PerReplica:{")
    variable = make_variable(strategy, 1.0, aggregation=MEAN)
    calls: list[Any] = []
    extended.update(variable, calls.append)
    assert len(calls) == (1 if is_central(strategy) else len(ids))


@pytest.mark.parametrize("strategy", layouts("*"), indirect=True)
def test_per_replica_input_is_for_mirrored_alone(strategy: Any) -> None:
    options = mpidist.InputOptions(experimental_replication_mode=mpidist.InputReplicationMode.PER_REPLICA)
    mirrored = isinstance(strategy, mpidist.MirroredStrategy) and num_workers(strategy) == 1
    if mirrored:
        found: list[Any] = []

        def dataset_fn(context: Any) -> Any:
            found.append((context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync))
            return mpidist.Dataset.range(2).batch(1)

        n = strategy.num_replicas_in_sync
        strategy.distribute_datasets_from_function(dataset_fn, options)
        assert found == [(n, i, n) for i in range(n)]
    elif not isinstance(strategy, mpidist.MirroredStrategy):
        with pytest.raises(NotImplementedError):
            strategy.distribute_datasets_from_function(lambda c: mpidist.Dataset.range(2).batch(1), options)


def test_skeleton_of_a_training_loop(strategy: Any) -> None:
    """A custom training loop, with both ways to iterate; one program, the same numbers in every layout."""
    x = np.arange(24, dtype=float).reshape(12, 2) / 10
    target = x @ np.array([1.0, -2.0]) + 0.5
    batch, steps, rate = 6, 4, 0.05
    weights, bias = np.zeros(2), 0.0
    losses = []
    for step in range(steps):
        rows = slice(step % 2 * batch, (step % 2 + 1) * batch)
        error = x[rows] @ weights + bias - target[rows]
        losses.append((error**2).sum() / batch)
        weights, bias = weights - rate * 2 * error @ x[rows] / batch, bias - rate * 2 * error.sum() / batch
    with strategy.scope():
        w = mpidist.Variable(np.zeros(2), aggregation=SUM)
        b = mpidist.Variable(0.0, aggregation=SUM)
    dataset = mpidist.Dataset.from_tensor_slices((x, target)).batch(batch)
    distributed = strategy.experimental_distribute_dataset(dataset)

    def train_step(inputs: Any) -> Any:
        features, labels = inputs
        error = features @ np.asarray(w) + np.asarray(b) - labels
        gradients = [2 * error @ features / batch, 2 * error.sum() / batch]
        gradients = mpidist.get_replica_context().all_reduce("SUM", gradients)
        w.assign_sub(rate * gradients[0] / strategy.num_replicas_in_sync)
        b.assign_sub(rate * gradients[1] / strategy.num_replicas_in_sync)
        return (error**2).sum() / batch

    found = [strategy.reduce("SUM", strategy.run(train_step, args=(inputs,)), axis=None) for inputs in distributed]
    iterator = iter(distributed)
    for _ in range(2):
        found.append(strategy.reduce("SUM", strategy.run(train_step, args=(next(iterator),)), axis=None))
    np.testing.assert_allclose(found, losses, rtol=1e-12)
    np.testing.assert_allclose(w.numpy(), weights, rtol=1e-12)
    np.testing.assert_allclose(b.numpy(), bias, rtol=1e-12)
    check_components(strategy, b, lambda _: b.numpy())
