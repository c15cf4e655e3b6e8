"""ParameterServerStrategy with a ClusterCoordinator: variables, training in functions, checkpoints, wrong use."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.coordinator import ClusterCoordinator
from mpidist.experimental.partitioners import FixedShardsPartitioner
from mpidist.parameter_server import transport
from tests.parameter_server.coordinated import OnChief, error_of, run_on_chief
from tests.parameter_server.test_per_worker import on_each_worker

pytestmark = [pytest.mark.jobs, pytest.mark.one_rank]

JOBS = {"chief": 1, "ps": 2, "worker": 2}
chief = OnChief(__name__, "chief", JOBS)


# The strategy -------------------------------------------------------------------------------------------------


@chief
def test_what_the_strategy_is_on_the_chief(strategy: Any, coordinator: Any) -> None:
    assert strategy.num_replicas_in_sync == 1
    assert strategy.extended.should_checkpoint
    assert strategy.cluster_resolver.task_type == "chief"
    assert strategy.cluster_resolver.cluster_spec().num_tasks("worker") == 2
    assert strategy.extended.parameter_devices == tuple(f"/job:ps/replica:0/task:{i}/device:CPU:0" for i in range(2))
    with strategy.scope():
        variables = [mpidist.Variable(float(i)) for i in range(4)]
        with strategy.extended.colocate_vars_with(variables[1]):
            beside = mpidist.Variable(0.0)
    devices = [variable.values[0].device for variable in variables]
    assert set(devices) == set(strategy.extended.parameter_devices)
    assert devices[:2] == devices[2:]
    assert beside.values[0].device == devices[1]
    assert [variable.numpy() for variable in variables] == [0.0, 1.0, 2.0, 3.0]


@chief
def test_one_coordinator_for_a_strategy(strategy: Any, coordinator: Any) -> None:
    assert ClusterCoordinator(strategy) is coordinator
    assert coordinator.strategy is strategy
    error = error_of(ClusterCoordinator, mpidist.OneDeviceStrategy("cpu:0"))
    assert isinstance(error, ValueError)
    assert "expected a mpidist.ParameterServerStrategy" in str(error)


@chief
def test_run_and_reduce_are_about_one_worker(strategy: Any, coordinator: Any) -> None:
    def replica_fn(x: float) -> tuple[int, float]:
        context = mpidist.get_replica_context()
        return context.replica_id_in_sync_group, context.all_reduce("SUM", x)

    def fn() -> Any:
        assert strategy.run(replica_fn, args=(2.0,)) == (0, 2.0)
        assert not strategy.extended.should_checkpoint
        assert strategy.num_replicas_in_sync == 1
        resolver = strategy.cluster_resolver
        return strategy.reduce("SUM", 3.0, axis=None), resolver.task_type, resolver.task_id

    found = on_each_worker(strategy, coordinator, fn)
    assert found == [(3.0, "worker", 0), (3.0, "worker", 1)]


@chief
def test_variables_are_created_on_the_coordinator(strategy: Any, coordinator: Any) -> None:
    assert coordinator.fetch(coordinator.schedule(mpidist.get_strategy)) is strategy
    coordinator.schedule(mpidist.Variable, args=(0.0,), kwargs={"name": "late"})
    error = error_of(coordinator.join)
    assert isinstance(error, ValueError)
    assert "variable 'late' was created in a scheduled function. Create it on the coordinator" in str(error)


@chief
def test_the_strategy_is_neither_copied_nor_pickled(strategy: Any, coordinator: Any) -> None:
    assert isinstance(error_of(copy.deepcopy, strategy), ValueError)
    assert isinstance(error_of(pickle.dumps, strategy), TypeError)
    assert isinstance(error_of(copy.copy, strategy), RuntimeError)


@chief
def test_the_other_kind_of_strategy_at_the_same_time_is_an_error(strategy: Any, coordinator: Any) -> None:
    error = error_of(mpidist.v1.experimental.ParameterServerStrategy, strategy.cluster_resolver)
    assert isinstance(error, RuntimeError)
    assert "Use the same cluster and the same class, or run each program by mpidist.launch()" in str(error)
    assert coordinator.fetch(coordinator.schedule(lambda: 1)) == 1


@chief
def test_data_of_another_dtype_in_a_scheduled_function(strategy: Any, coordinator: Any) -> None:
    """Python numbers are converted; those in a dataset are int64, and the error says what to do."""
    with strategy.scope():
        v = mpidist.Variable(0, dtype="int32", name="v")
    iterator = iter(coordinator.create_per_worker_dataset(lambda: mpidist.Dataset.from_tensors(2).repeat()))
    coordinator.schedule(lambda it: v.assign_add(next(it)), args=(iterator,))
    error = error_of(coordinator.join)
    assert isinstance(error, TypeError)
    assert "value.astype('int32')" in str(error)
    assert "NumPy makes int64 and float64 of Python numbers" in str(error)
    coordinator.schedule(lambda it: v.assign_add(next(it).astype("int32")), args=(iterator,))
    coordinator.schedule(v.assign_add, args=(3,))
    coordinator.join()
    assert v.numpy() == 5


# Training -----------------------------------------------------------------------------------------------------


def adam_alone(start: Any, gradients: list[Any]) -> Any:
    variable = mpidist.Variable(start)
    optimizer = mpidist.optimizers.Adam(0.1)
    for gradient in gradients:
        optimizer.apply_gradients([(gradient, variable)])
    return variable.numpy()


@chief
def test_all_workers_share_an_optimizer(strategy: Any, coordinator: Any) -> None:
    start = np.array([1.0, -2.0])
    with strategy.scope():
        variable = mpidist.Variable(start)
        optimizer = mpidist.optimizers.Adam(0.1)
        optimizer.build([variable])

    def step(gradient: Any) -> None:
        strategy.run(lambda: optimizer.apply_gradients([(gradient, variable)]))

    gradients = [np.array([0.5, 0.25])] * 20
    on_each_worker(strategy, coordinator, step, gradients[0])
    for gradient in gradients[2:]:
        coordinator.schedule(step, args=(gradient,))
    coordinator.join()
    np.testing.assert_allclose(variable.numpy(), adam_alone(start, gradients), rtol=1e-12)
    assert optimizer.iterations.numpy() == len(gradients)
    # The coordinator is another of those who use it.
    optimizer.apply_gradients([(gradients[0], variable)])
    np.testing.assert_allclose(variable.numpy(), adam_alone(start, [*gradients, gradients[0]]), rtol=1e-12)


@chief
def test_workers_that_meet_two_optimizers_in_different_order(strategy: Any, coordinator: Any) -> None:
    with strategy.scope():
        one = mpidist.Variable(0.0)
        with strategy.extended.colocate_vars_with(one):
            two = mpidist.Variable(0.0)
        slow, fast = mpidist.optimizers.SGD(0.1), mpidist.optimizers.SGD(1.0, momentum=0.5)
        slow.build([one])
        fast.build([two])

    def step() -> None:
        pairs = [(slow, one), (fast, two)]
        if mpidist.coordinator.experimental_get_current_worker_index():
            pairs.reverse()
        for optimizer, variable in pairs:
            optimizer.apply_gradients([(1.0, variable)])

    on_each_worker(strategy, coordinator, step)
    np.testing.assert_allclose(one.numpy(), -0.2)
    # Momentum: 1, and then 1.5.
    np.testing.assert_allclose(two.numpy(), -2.5)


@chief
def test_what_the_program_changes_in_an_optimizer_goes_with_the_next_function(strategy: Any, coordinator: Any) -> None:
    with strategy.scope():
        variable = mpidist.Variable(0.0)
        optimizer = mpidist.optimizers.SGD(1.0)
        optimizer.build([variable])

    def step() -> None:
        optimizer.apply_gradients([(1.0, variable)])

    for rate in (1.0, 0.5, 0.25):
        optimizer.learning_rate = rate
        coordinator.fetch(coordinator.schedule(step))
    assert variable.numpy() == -1.75


@chief
def test_an_optimizer_that_is_not_built_says_where_to_build_it(strategy: Any, coordinator: Any) -> None:
    with strategy.scope():
        variable = mpidist.Variable(0.0)
        optimizer = mpidist.optimizers.Adam(1.0)
    coordinator.schedule(lambda: optimizer.apply_gradients([(1.0, variable)]))
    error = error_of(coordinator.join)
    assert isinstance(error, ValueError)
    assert "Create it on the coordinator" in str(error)
    assert "optimizer.build(variables)" in str(error)


@chief
def test_metrics_add_up_over_the_workers(strategy: Any, coordinator: Any) -> None:
    with strategy.scope():
        mean = mpidist.metrics.Mean()

    def step(x: float) -> None:
        strategy.run(lambda: mean.update_state(x))

    for x in range(11):
        coordinator.schedule(step, args=(float(x),))
    coordinator.join()
    assert mean.result() == 5.0
    assert coordinator.fetch(coordinator.schedule(mean.result)) == 5.0
    mean.reset_state()
    assert mean.result() == 0.0


# Variables in shards ------------------------------------------------------------------------------------------

_cut: dict[str, Any] = {"by": FixedShardsPartitioner(2)}
sharded = OnChief(__name__, "sharded", JOBS, lambda shape, dtype: _cut["by"](shape=shape, dtype=dtype))


@sharded
def test_a_partitioner_cuts_variables(strategy: Any, coordinator: Any) -> None:
    with strategy.scope():
        table = mpidist.Variable(np.arange(10.0).reshape(5, 2), name="table")
        number = mpidist.Variable(1.0)
        with strategy.extended.colocate_vars_with(number):
            whole = mpidist.Variable(np.zeros(4))
    assert isinstance(table, mpidist.experimental.ShardedVariable)
    assert [part.name for part in table.variables] == ["table/part_0", "table/part_1"]
    assert [part.shape for part in table.variables] == [(3, 2), (2, 2)]
    assert len({part.values[0].device for part in table.variables}) == 2
    assert isinstance(number, mpidist.Variable)
    assert isinstance(whole, mpidist.Variable)
    found = coordinator.fetch(coordinator.schedule(lambda: (table.shape, table.numpy(), table[3].tolist())))
    assert found[0] == (5, 2)
    assert np.array_equal(found[1], np.arange(10.0).reshape(5, 2))
    assert found[2] == [6.0, 7.0]


@sharded
def test_wrong_partitioners(strategy: Any, coordinator: Any) -> None:
    usual = _cut["by"]
    try:
        for wrong in ([1, 2], [2], [0, 1], [2, 2]):
            _cut["by"] = lambda shape, dtype, wrong=wrong: wrong
            with strategy.scope():
                error = error_of(mpidist.Variable, np.zeros((4, 4)), name="w")
            assert isinstance(error, ValueError)
            assert f"the partitioner returned {wrong} for variable 'w'" in str(error)
    finally:
        _cut["by"] = usual


@sharded
def test_an_embedding_lookup_moves_only_the_rows_asked_for(strategy: Any, coordinator: Any) -> None:
    with strategy.scope():
        table = mpidist.Variable(np.arange(4000.0).reshape(1000, 4), name="embedding")
        optimizer = mpidist.optimizers.SGD(1.0)
        optimizer.build([table])

    def train(rows: list[int]) -> tuple[Any, dict[str, int]]:
        moved: dict[str, int] = {}
        start = transport.Connection.start

        def counting(self: Any, request: Any) -> None:
            for part in request.parts:
                if part.arrays:
                    moved[part.method] = moved.get(part.method, 0) + len(part.arrays[0])
            start(self, request)

        transport.Connection.start = counting  # type: ignore[method-assign]
        try:
            found = table.sparse_read(rows)
            gradient = mpidist.IndexedSlices(np.ones((len(rows), 4)), np.array(rows), table.shape)
            strategy.run(lambda: optimizer.apply_gradients([(gradient, table)]))
        finally:
            transport.Connection.start = start  # type: ignore[method-assign]
        return found, moved

    rows = [999, 1, 500]
    found, moved = coordinator.fetch(coordinator.schedule(train, args=(rows,)))
    assert np.array_equal(found, np.arange(4000.0).reshape(1000, 4)[rows])
    assert moved.pop("gather") == 3
    assert moved.pop("update") == 3
    # All else was about numbers: the counter of steps.
    assert sum(moved.values()) <= 4, moved
    expected = np.arange(4000.0).reshape(1000, 4)
    expected[rows] -= 1.0
    assert np.array_equal(table.numpy(), expected)


# Checkpoints --------------------------------------------------------------------------------------------------


def make_model(strategy: Any) -> dict[str, Any]:
    with strategy.scope():
        table = mpidist.Variable(np.zeros((5, 2)), name="table")
        bias = mpidist.Variable(0.0, name="bias")
        optimizer = mpidist.optimizers.Adam(0.1)
        optimizer.build([table, bias])
    return {"table": table, "bias": bias, "optimizer": optimizer}


def train_steps(strategy: Any, coordinator: Any, model: dict[str, Any], steps: int) -> None:
    def step() -> None:
        pairs = [(np.full((5, 2), 0.5), model["table"]), (1.0, model["bias"])]
        strategy.run(lambda: model["optimizer"].apply_gradients(pairs))

    for _ in range(steps):
        coordinator.schedule(step)
    coordinator.join()


def save_some(strategy: Any, coordinator: Any, directory: str) -> Any:
    model = make_model(strategy)
    manager = mpidist.CheckpointManager(mpidist.Checkpoint(**model), directory, max_to_keep=2)
    for _ in range(3):
        train_steps(strategy, coordinator, model, 2)
        manager.save()
    assert len(manager.checkpoints) == 2
    saved = model["table"].numpy()
    # What comes after has to come out the same where it is restored.
    train_steps(strategy, coordinator, model, 3)
    return saved, model["table"].numpy(), model["bias"].numpy()


save_some.partitioner = FixedShardsPartitioner(2)  # type: ignore[attr-defined]


def restore_some(strategy: Any, coordinator: Any, directory: str) -> Any:
    model = make_model(strategy)
    mpidist.Checkpoint(**model).restore(mpidist.latest_checkpoint(directory))
    restored = model["table"].numpy()
    assert model["optimizer"].iterations.numpy() == 6
    train_steps(strategy, coordinator, model, 3)
    return restored, model["table"].numpy(), model["bias"].numpy()


restore_some.partitioner = FixedShardsPartitioner(3)  # type: ignore[attr-defined]


def test_a_checkpoint_is_restored_to_another_number_of_servers(tmp_path: Path) -> None:
    saved = run_on_chief(save_some, str(tmp_path), jobs={"chief": 1, "ps": 1, "worker": 1})
    restored = run_on_chief(restore_some, str(tmp_path), jobs={"chief": 1, "ps": 3, "worker": 1})
    for before, after in zip(saved, restored, strict=True):
        np.testing.assert_allclose(after, before, rtol=1e-12)
