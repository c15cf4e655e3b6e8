"""The v1 ParameterServerStrategy: the specification's examples, its column of the matrix, variables, input, saving."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpidist
from mpidist import AutoShardPolicy, Dataset
from mpidist.experimental import cache_variable_reads
from tests.acceptance.checks import AUTO, MEAN, ON_READ, SUM, make_variable, replica_id, same
from tests.parameter_server.acceptance import acceptance_tests
from tests.parameter_server.workers import Strategy, error_of, on_workers, resolver_of, worker_of
from tests.support.ranks.layouts import per_replica
from tests.support.ranks.pool import run

pytestmark = [pytest.mark.jobs, pytest.mark.one_rank, pytest.mark.timeout(300)]


# What every strategy does -------------------------------------------------------------------------------------------


def every_acceptance_test(strategy: Any) -> list[str]:
    names = []
    for name, test in acceptance_tests():
        try:
            test(strategy)
        except BaseException as error:
            raise AssertionError(f"{name} failed") from error
        names.append(name)
    return names


@pytest.mark.parametrize("local", [1, 2])
def test_the_acceptance_tests_of_all_strategies(local: int) -> None:
    (names,) = on_workers(every_acceptance_test, 2, 1, local=local)
    assert len(names) > 100
    assert sum("example" in name for name in names) >= 19


# The matrix ---------------------------------------------------------------------------------------------------------


def facts(resolver: Any, local: int) -> None:
    worker = resolver.task_id
    devices = [f"cpu:{i}" for i in range(local)]
    strategy = Strategy(resolver, devices=devices)
    extended = strategy.extended
    assert strategy.num_replicas_in_sync == local
    assert strategy.cluster_resolver is resolver
    assert extended.worker_devices == tuple(devices)
    assert extended.parameter_devices == tuple(f"/job:ps/replica:0/task:{i}/device:CPU:0" for i in range(2))
    assert extended.should_checkpoint == extended.experimental_should_init == (worker == 0)
    assert extended.experimental_between_graph
    assert not extended.experimental_require_static_shapes

    # Variables: one for all, of either synchronization.
    variables = [make_variable(strategy, [1.0, 2.0], synchronization, SUM) for synchronization in (AUTO, ON_READ)]
    for variable in variables:
        assert len(variable.values) == 1
    assert extended.variable_created_in_scope(variables[0])
    calls: list[str] = []
    result = extended.update(variables[0], lambda component: calls.append(component.device) or component.value())
    assert len(calls) == 1
    same(result, [1.0, 2.0])
    with pytest.raises(ValueError, match="Reduce it first"):
        value = per_replica(strategy, [np.ones(2)] * local)
        extended.update(variables[0], lambda component, x: component.value() + x, args=(value,))
    strategy.barrier()
    # A value of each local replica becomes one before it is pushed.
    strategy.run(lambda: variables[1].assign_add(np.array([1.0, 0.0])))
    strategy.barrier()
    same(variables[1].numpy(), [1.0 + 3 * local, 2.0])

    # Reducing, over the local replicas alone.
    values = strategy.run(lambda: np.array(10.0 * worker + replica_id()))
    same(strategy.reduce("SUM", values), 10.0 * worker * local + sum(range(local)))
    if local > 1:
        with pytest.raises(ValueError, match="ambiguous"):
            strategy.reduce("SUM", 5.0)
    else:
        same(strategy.reduce("SUM", 5.0), 5.0)
    same(strategy.reduce("SUM", 0), 0)
    strategy.run(lambda: same(mpidist.get_replica_context().all_reduce("SUM", np.ones(2)), [float(local)] * 2))

    # Input.
    contexts: list[Any] = []

    def dataset_fn(context: Any) -> Dataset:
        contexts.append(context)
        return Dataset.range(12).shard(context.num_input_pipelines, context.input_pipeline_id).batch(2)

    own = strategy.distribute_datasets_from_function(dataset_fn)
    rows = [x for batch in own for part in strategy.experimental_local_results(batch) for x in part]
    same(rows, list(range(worker, 12, 3)))
    (context,) = contexts
    assert (context.num_input_pipelines, context.input_pipeline_id) == (3, worker)
    assert context.num_replicas_in_sync == local
    options = mpidist.InputOptions(experimental_replication_mode=mpidist.InputReplicationMode.PER_REPLICA)
    for distribute, what in (
        (strategy.distribute_datasets_from_function, dataset_fn),
        (strategy.experimental_distribute_dataset, Dataset.range(4).batch(2)),
    ):
        with pytest.raises(NotImplementedError, match="PER_REPLICA"):
            distribute(what, options)
    shares = strategy.experimental_distribute_values_from_function(lambda c: (c.replica_id_in_sync_group, worker))
    assert strategy.experimental_local_results(shares) == tuple((i, worker) for i in range(local))

    # The v1 iterators.
    iterator = strategy.make_dataset_iterator(Dataset.range(6 * local).batch(2 * local))
    assert iterator.initialize() == []
    doubled = strategy.experimental_run(lambda batch: 2 * batch, iterator)
    same(np.concatenate(strategy.experimental_local_results(doubled)), 2 * (worker * 2 * local + np.arange(2 * local)))
    with pytest.raises(mpidist.OutOfRangeError):
        iterator.get_next()
    if local > 1:
        with pytest.raises(ValueError, match="multiple|divi"):
            strategy.make_dataset_iterator(Dataset.range(6).batch(3))
    calls = iter(range(100))
    endless = strategy.make_input_fn_iterator(lambda _: lambda: np.array(next(calls)))
    endless.initialize()
    assert len(strategy.experimental_local_results(strategy.experimental_run(lambda x: x + 1, endless))) == local
    with pytest.raises(ValueError, match="PER_WORKER"):
        strategy.make_input_fn_iterator(dataset_fn, mpidist.InputReplicationMode.PER_REPLICA)
    same([int(x) for x in strategy.experimental_make_numpy_dataset(np.arange(3))], [0, 1, 2])

    with pytest.raises(ValueError, match="cannot be copied"):
        copy.deepcopy(strategy)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(strategy)
    with pytest.raises(RuntimeError, match="cannot be copied"), strategy.scope():
        copy.deepcopy(variables[0])
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(variables[0])
    with pytest.raises(RuntimeError, match="barrier"):
        strategy.run(strategy.barrier)
    strategy.barrier()
    strategies.append(strategy)


strategies: list[Any] = []


def matrix() -> None:
    resolver = resolver_of(2)
    if resolver.task_type == "ps":
        mpidist.Server(resolver).join()
        return
    for local in (1, 2):
        facts(resolver, local)
    for strategy in (*strategies, *strategies):
        strategy.close()


def test_the_matrix_on_three_workers_by_two_strategies_at_a_time() -> None:
    run(matrix, 5, timeout=240)


# Variables ----------------------------------------------------------------------------------------------------------


def dealt(strategy: Any) -> Any:
    worker = worker_of(strategy)
    with strategy.scope():
        variables = [mpidist.Variable(np.full(2, 10.0 * worker + i), name=f"v{i}") for i in range(5)]
        with strategy.extended.colocate_vars_with(variables[1]):
            beside = mpidist.Variable(0.0)
            with strategy.extended.colocate_vars_with(variables[2]):
                within = mpidist.Variable(0.0)
            beside_too = mpidist.Variable(0.0)
        after = mpidist.Variable(0.0)
        optimizer = mpidist.optimizers.Adam()
        optimizer.build(variables)
    with pytest.raises(RuntimeError, match="scope"), strategy.extended.colocate_vars_with(variables[0]):
        pass
    foreign = mpidist.Variable(0.0)
    refused = pytest.raises(ValueError, match="created in")
    with refused, strategy.scope(), strategy.extended.colocate_vars_with(foreign):
        pass
    for variable in variables:
        for slot in ("m", "s"):
            assert optimizer.get_slot(variable, slot).device == variable.device
    # The first worker's initial values count, whoever comes first.
    first = [variable.numpy().tolist() for variable in variables]
    with cache_variable_reads():
        before = variables[0].numpy()
        strategy.barrier()
        if worker == 1:
            variables[0].assign([7.0, 7.0])
        strategy.barrier()
        same(variables[0].numpy(), before)
        same(strategy.extended.read_all(variables[:2]), [before, variables[1].numpy()])
        with pytest.raises(ValueError, match="inside of itself"), cache_variable_reads():
            pass
    same(variables[0].numpy(), [7.0, 7.0])
    read = strategy.extended.read_all([variables[0], variables[0], variables[4]])
    read[0] += 1.0
    same(read[1], [7.0, 7.0])
    places = [int(variable.device.split("task:")[1][0]) for variable in (*variables, beside, within, beside_too, after)]
    return first, places, beside.is_initialized()


def test_variables_are_dealt_in_turn_and_start_as_the_first_worker_says() -> None:
    expected = [[float(i)] * 2 for i in range(5)], [0, 1, 0, 1, 0, 1, 0, 1, 1], True
    assert on_workers(dealt, 2, 3) == [expected] * 3


def differing(strategy: Any) -> list[tuple[str, str]]:
    first = worker_of(strategy) == 0
    errors = []

    def make(value: Any, **options: Any) -> Any:
        with strategy.scope():
            return mpidist.Variable(value, **options)

    one, _ = make(0.0, name="one"), make(0.0, name="two")
    for call in (
        lambda: make(np.zeros(2 if first else 3), name="shape"),
        lambda: make(np.zeros(2, np.float32 if first else np.float64), name="dtype"),
        lambda: make(0.0, name="name" if first else "other name"),
    ):
        if first:
            call()
        strategy.barrier()
        if not first:
            errors.append(error_of(call))
    # Beside another variable on one worker only: it would be on another server.
    with strategy.scope():
        if first:
            make(0.0, name="beside")
        strategy.barrier()
        if not first:
            with strategy.extended.colocate_vars_with(one):
                errors.append(error_of(lambda: make(0.0, name="beside")))
    strategy.barrier()
    if not first:
        errors.append(error_of(lambda: make(0.0, name="late")))
    return errors


def test_workers_that_create_different_variables() -> None:
    first, second = on_workers(differing, 2, 2)
    assert first == []
    *mismatches, late = second
    assert [kind for kind, _ in mismatches] == ["MismatchError"] * 4
    assert "'shape' of shape (3,)" in mismatches[0][1]
    assert "'shape' of shape (2,)" in mismatches[0][1]
    assert "float32" in mismatches[1][1]
    assert "'other name'" in mismatches[2][1]
    assert "on ps 0" in mismatches[3][1]
    assert "on ps 1" in mismatches[3][1]
    assert late[0] == "PeerError"
    assert "worker 0 ended, or closed its strategy, before it created this variable" in late[1]


def closed_before_creating(strategy: Any) -> Any:
    if worker_of(strategy) == 0:
        strategy.close()
        # It lives on, and has not released the server.
        MPI.COMM_WORLD.recv(source=2)
        return None
    with strategy.scope():
        error = error_of(lambda: mpidist.Variable(0.0, name="late"))
    MPI.COMM_WORLD.send("done", 1)
    return error


def test_the_first_worker_closes_its_strategy_before_it_creates_a_variable() -> None:
    _, (kind, text) = on_workers(closed_before_creating, 1, 2)
    assert kind == "PeerError"
    assert "worker 0 ended, or closed its strategy, before it created this variable" in text


def unequal_bounds() -> Any:
    resolver = resolver_of(1)
    if resolver.task_type == "ps":
        mpidist.Server(resolver).join()
        return None
    found = []
    for wrong, kind in ((-1, ValueError), (1.5, TypeError), (True, TypeError)):
        with pytest.raises(kind, match="max_staleness"):
            Strategy(resolver, max_staleness=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cluster_resolver"):
        Strategy("ps:1,worker:2")  # type: ignore[arg-type]
    strategy = Strategy(resolver)
    strategy.barrier()
    if resolver.task_id == 0:
        bounded = Strategy(resolver, max_staleness=3)
    strategy.barrier()
    if resolver.task_id == 1:
        found.append(error_of(lambda: Strategy(resolver)))
    else:
        bounded.close()
    strategy.close()
    return found


def test_workers_with_different_bounds_on_staleness() -> None:
    ((kind, text),) = run(unequal_bounds, 3, timeout=120)[2]
    assert kind == "MismatchError"
    assert "max_staleness=None, and another worker 3" in text


# Input --------------------------------------------------------------------------------------------------------------


def rows_of(strategy: Any, dataset: Any) -> list[int]:
    return [int(x) for batch in dataset for part in strategy.experimental_local_results(batch) for x in part]


def shared_out(strategy: Any, folder: str) -> dict[str, list[int]]:
    distribute = strategy.experimental_distribute_dataset
    plain = Dataset.range(26)
    found = {
        "batches": rows_of(strategy, distribute(plain.batch(4))),
        "off": rows_of(strategy, distribute(plain.batch(4).with_options(auto_shard_policy=AutoShardPolicy.OFF))),
        "shuffled": rows_of(strategy, distribute(plain.shuffle().batch(4))),
        "from a function": rows_of(
            strategy,
            strategy.distribute_datasets_from_function(
                lambda c: plain.shuffle().shard(c.num_input_pipelines, c.input_pipeline_id).batch(3)
            ),
        ),
        "hints": rows_of(
            strategy,
            distribute(
                plain.shuffle()
                .shard(mpidist.input.SHARD_HINT, mpidist.input.SHARD_HINT)
                .batch(4)
                .with_options(auto_shard_policy=AutoShardPolicy.HINT)
            ),
        ),
    }
    paths = [str(Path(folder, f"{i}.txt")) for i in range(6)]
    files = distribute(Dataset.from_files(paths, np.loadtxt).batch(2))
    found["files"] = [int(x) for batch in files for part in strategy.experimental_local_results(batch) for x in part]
    again = distribute(plain.shuffle().batch(4))
    passes = [rows_of(strategy, again) for _ in range(2)]
    assert passes[0] != passes[1]
    found["pass 0"], found["pass 1"] = passes
    return found


@pytest.mark.parametrize("local", [1, 2])
def test_workers_share_the_data_out(local: int, tmp_path: Path) -> None:
    for i in range(6):
        np.savetxt(tmp_path / f"{i}.txt", [2 * i, 2 * i + 1])
    found = on_workers(shared_out, 1, 3, str(tmp_path), local=local)
    for what in ("batches", "shuffled", "from a function", "hints", "pass 0", "pass 1"):
        assert sorted(x for shares in found for x in shares[what]) == list(range(26)), what
    assert sorted(x for shares in found for x in shares["files"]) == list(range(12))
    for worker, shares in enumerate(found):
        assert shares["batches"] == [x for x in range(26) if x // 4 % 3 == worker]
        assert shares["off"] == list(range(26))
        assert shares["files"] == [2 * worker, 2 * worker + 1, 2 * worker + 6, 2 * worker + 7]
        assert shares["shuffled"] != sorted(shares["shuffled"])


# Training -----------------------------------------------------------------------------------------------------------


def metrics_and_accumulated_gradients(strategy: Any) -> Any:
    worker, local = worker_of(strategy), strategy.num_replicas_in_sync
    with strategy.scope():
        mean = mpidist.metrics.Mean()
        weight = mpidist.Variable(np.zeros(2), name="w")
        optimizer = mpidist.optimizers.SGD(1.0)
    accumulator = mpidist.optimizers.GradientAccumulator(2)

    def step(value: float) -> Any:
        mean.update_state([value, value])
        return accumulator.apply_gradients(optimizer, [(np.full(2, value), weight)])

    for value in (1.0, 2.0, 3.0, 4.0):
        strategy.run(step, args=(value + worker,))
    strategy.barrier()
    assert mean.result() == pytest.approx(2.5 + 0.5)
    assert int(optimizer.iterations.numpy()) == 2 * 2
    same(weight.numpy(), np.full(2, -local * (10.0 + 14.0)))
    return make_variable(strategy, 1.0, ON_READ, MEAN).numpy()


def test_metrics_and_accumulated_gradients() -> None:
    assert on_workers(metrics_and_accumulated_gradients, 1, 2, local=2) == [1.0, 1.0]


# Checkpoints --------------------------------------------------------------------------------------------------------


def parts_of_training(strategy: Any) -> tuple[Any, Any, mpidist.Checkpoint]:
    with strategy.scope():
        weights = [mpidist.Variable(np.zeros(3), name=f"w{i}") for i in range(3)]
        optimizer = mpidist.optimizers.Adam(0.1)
        optimizer.build(weights)
    return weights, optimizer, mpidist.Checkpoint(weights=weights, optimizer=optimizer, epoch=0)


def save(strategy: Any, folder: str) -> Any:
    weights, optimizer, checkpoint = parts_of_training(strategy)
    for _ in range(3):
        strategy.run(lambda: optimizer.apply_gradients([(np.ones(3), w) for w in weights]))
    strategy.barrier()
    if not strategy.extended.should_checkpoint:
        return [
            error_of(call)
            for call in (
                lambda: checkpoint.save(folder + "/ckpt"),
                lambda: checkpoint.write(folder + "/other"),
                lambda: checkpoint.restore(folder + "/ckpt-1"),
                lambda: checkpoint.restore_latest(folder),
                lambda: mpidist.CheckpointManager(checkpoint, folder, 3),
            )
        ]
    manager = mpidist.CheckpointManager(checkpoint, folder, max_to_keep=2)
    checkpoint.epoch = 7
    for _ in range(3):
        manager.save()
    saved = [w.numpy() for w in weights]
    strategy.run(lambda: optimizer.apply_gradients([(np.ones(3), w) for w in weights]))
    after = [w.numpy() for w in weights]
    manager.restore_or_initialize()
    same([w.numpy() for w in weights], saved)
    # Goes on as it did, with the same moments and the same number of steps.
    strategy.run(lambda: optimizer.apply_gradients([(np.ones(3), w) for w in weights]))
    same([w.numpy() for w in weights], after)
    return saved, after, len(manager.checkpoints)


def restore(strategy: Any, folder: str) -> Any:
    weights, optimizer, checkpoint = parts_of_training(strategy)
    if strategy.extended.should_checkpoint:
        status = checkpoint.restore_latest(folder)
        assert status is not None
        status.assert_consumed()
        assert checkpoint.epoch == 7
    strategy.barrier()
    assert int(optimizer.iterations.numpy()) == 6
    found = [w.numpy() for w in weights]
    strategy.barrier()
    if worker_of(strategy) == 0:
        strategy.run(lambda: optimizer.apply_gradients([(np.ones(3), w) for w in weights]))
    strategy.barrier()
    return found, [w.numpy() for w in weights]


def test_the_chief_saves_and_restores_for_all(tmp_path: Path) -> None:
    (saved, after, kept), errors = on_workers(save, 1, 2, str(tmp_path))
    assert kept == 2
    assert len(list(tmp_path.iterdir())) == 2
    for kind, text in errors:
        assert kind == "RuntimeError"
        assert "was called on worker 1" in text
        assert "if strategy.extended.should_checkpoint:" in text
    for found in on_workers(restore, 3, 2, str(tmp_path)):
        same(found, (saved, after))
