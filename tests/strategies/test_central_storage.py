"""CentralStorageStrategy: one copy of each variable, in one process and on the ranks of a node."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.collectives.node import memory
from mpidist.core.errors import DeviceError
from mpidist.experimental import CentralStorageStrategy
from tests.acceptance.checks import FIRST, MEAN, NONE, ON_READ, ON_WRITE, SUM, fill, make_variable, replica_id, same
from tests.support.ranks.layouts import layouts, per_replica

pytestmark = [pytest.mark.nodes, pytest.mark.counts]

CENTRAL = pytest.mark.parametrize("strategy", layouts("central*"), indirect=True)
ON_RANKS = pytest.mark.parametrize("strategy", layouts("central_node*"), indirect=True)


def rank_of(strategy: Any) -> int:
    """Return the rank among those of the strategy."""
    ids = strategy.extended.local_replica_ids
    return int(ids[0] // len(ids))


def ranks_of(strategy: Any) -> int:
    return int(strategy.num_replicas_in_sync // len(strategy.extended.local_replica_ids))


def needs_several_ranks(strategy: Any) -> None:
    if ranks_of(strategy) == 1:
        pytest.skip("the nodes of this session have one rank each")


def slices(values: Any, indices: Any) -> Any:
    return mpidist.IndexedSlices(np.asarray(values), np.asarray(indices))


# Variables ----------------------------------------------------------------------------------------------------------


@CENTRAL
@pytest.mark.parametrize("aggregation", [SUM, MEAN, FIRST], ids=lambda a: a.name)
def test_synchronization_means_nothing(strategy: Any, aggregation: Any) -> None:
    ids = np.arange(strategy.num_replicas_in_sync)
    combined = {SUM: ids.sum(), MEAN: ids.mean(), FIRST: 0.0}[aggregation]
    for synchronization in (ON_WRITE, ON_READ):
        variable = make_variable(strategy, 5.0, synchronization, aggregation)
        assert variable.synchronization == ON_WRITE
        assert variable.trainable == (synchronization == ON_WRITE)
        fill(strategy, variable, float)
        same(variable.numpy(), combined)
        assert all(strategy.experimental_local_results(strategy.run(lambda v=variable: float(v) == combined)))
        for value in (4.0, 6.0):
            variable.assign_add(value)
        same(variable.numpy(), combined + 10.0)


@CENTRAL
def test_on_read_without_aggregation(strategy: Any) -> None:
    variable = make_variable(strategy, np.zeros(2), ON_READ, NONE)
    variable.assign([1.0, 2.0])
    same(variable.numpy(), [1.0, 2.0])
    if strategy.num_replicas_in_sync > 1:
        with pytest.raises((ValueError, mpidist.PeerError), match="aggregation="):
            strategy.run(lambda: variable.assign(np.ones(2)))
    same(variable.numpy(), [1.0, 2.0])


@CENTRAL
def test_one_copy(strategy: Any) -> None:
    variable = make_variable(strategy, np.zeros(3), name="w")
    (component,) = variable.values
    assert component.name == "w"
    assert component.container is variable
    assert variable.devices == strategy.extended.parameter_devices == ("cpu:0",)
    assert strategy.extended.value_container(component) is variable
    assert not np.asarray(variable).flags.writeable
    assert ("SharedComponent" in repr(component)) == (ranks_of(strategy) > 1)


@CENTRAL
@pytest.mark.parametrize("dtype", ["float16", "int8", "bool", "complex128", "float64"])
def test_shapes_and_dtypes(strategy: Any, dtype: str) -> None:
    for shape in ((), (0, 3), (2, 3), (20_000,)):
        value = (np.arange(np.prod(shape, dtype=int)) % 100).reshape(shape).astype(dtype)
        variable = make_variable(strategy, value)
        same(variable.numpy(), value)
        assert (variable.dtype, variable.shape) == (value.dtype, shape)
        variable.assign(np.ones(shape, dtype))
        same(variable.numpy(), np.ones(shape, dtype))
    transposed = make_variable(strategy, np.arange(6.0).reshape(2, 3).T)
    same(transposed.numpy(), np.arange(6.0).reshape(2, 3).T)


@CENTRAL
def test_scatter_in_replicas_and_between_them(strategy: Any) -> None:
    n = strategy.num_replicas_in_sync
    table = make_variable(strategy, np.zeros((n + 1, 2)), ON_READ, SUM)
    strategy.run(lambda: table.scatter_add(slices(np.ones((2, 2)), [replica_id(), replica_id() + 1])))
    expected = np.full((n + 1, 2), 2.0)
    expected[[0, n]] = 1.0
    same(table.numpy(), expected)
    table.scatter_sub(slices([[1.0, 1.0]], [n]))
    expected[n] = 0.0
    same(table.numpy(), expected)


@CENTRAL
def test_deepcopy_has_memory_of_its_own(strategy: Any) -> None:
    variable = make_variable(strategy, np.array([1.0, 2.0]), aggregation=SUM, name="v")
    twin = copy.deepcopy(variable)
    twin.assign_add([1.0, 1.0])
    same(variable.numpy(), [1.0, 2.0])
    same(twin.numpy(), [2.0, 3.0])
    assert (twin.name, twin.aggregation) == ("v", SUM)


@CENTRAL
def test_values_that_lie_in_variables(strategy: Any) -> None:
    one, other = make_variable(strategy, np.arange(4.0)), make_variable(strategy, np.ones(4))
    one.assign(other)
    same(one.numpy(), np.ones(4))
    other.assign(np.arange(4.0))
    other.assign(np.asarray(other)[::-1])
    same(other.numpy(), np.arange(4.0)[::-1])
    one.assign_add(one)
    same(one.numpy(), np.full(4, 2.0))


# update() -----------------------------------------------------------------------------------------------------------


@CENTRAL
def test_update_is_called_once_on_one_value(strategy: Any) -> None:
    n, local = strategy.num_replicas_in_sync, len(strategy.extended.local_replica_ids)
    variable = make_variable(strategy, 1.0)
    mine = per_replica(strategy, lambda i: float(i))
    total = strategy.extended.reduce_to("SUM", mine, variable)
    assert not isinstance(total, mpidist.DistributedValues)
    calls: list[Any] = []

    def fn(component: Any, value: Any, *, plain: str) -> Any:
        calls.append((component, plain))
        component.assign_add(value)
        return float(value)

    assert strategy.extended.update(variable, fn, args=(total,), kwargs={"plain": "p"}) == sum(range(n))
    assert calls == [(variable.values[0], "p")]
    assert strategy.extended.update(variable, lambda c: c.assign_sub(1.0)) is variable
    assert strategy.extended.update(variable, lambda c: 5, group=False) == (5,)
    same(variable.numpy(), float(sum(range(n))))
    mirrored = strategy.extended.reduce_to("SUM", mine, mine)
    if local > 1:
        with pytest.raises(ValueError, match=rf"of {local} replicas .* has one copy"):
            strategy.extended.update(variable, fn, args=(mirrored,), kwargs={"plain": ""})


@CENTRAL
def test_update_in_a_merge_function(strategy: Any) -> None:
    variable = make_variable(strategy, 1.0)

    def apply(merged: Any, gradient: Any) -> None:
        total = merged.extended.reduce_to("SUM", gradient, variable)
        merged.extended.update(variable, lambda v, g: v.assign_sub(0.5 * np.asarray(g)), args=(total,))

    strategy.run(lambda: mpidist.get_replica_context().merge_call(apply, args=(1.0 + 2 * replica_id(),)))
    n = strategy.num_replicas_in_sync
    same(variable.numpy(), 1.0 - 0.5 * n * n)


@CENTRAL
def test_what_belongs_to_no_variable_is_updated_once(strategy: Any) -> None:
    calls: list[int] = []
    assert strategy.extended.update_non_slot(None, lambda x: calls.append(x) or 3, args=(1,)) == 3
    assert strategy.extended.update_non_slot(None, lambda: 3, group=False) == (3,)
    assert calls == [1]
    assert strategy.extended.non_slot_devices([]) == ("cpu:0",)


# Training -----------------------------------------------------------------------------------------------------------


@CENTRAL
def test_gradients_are_applied_once(strategy: Any) -> None:
    """Example 23: 1 - 0.1 * (1 + 3) on two replicas; by the first rank alone, where there are several."""
    n = strategy.num_replicas_in_sync
    updates: list[str] = []

    class Counting(mpidist.optimizers.SGD):
        def update_variable(self, variable: Any, *rest: Any) -> None:
            updates.append(variable.name)
            super().update_variable(variable, *rest)

    with strategy.scope():
        weight = mpidist.Variable(1.0, name="weight", constraint=lambda value: np.maximum(value, -50.0))
        optimizer = Counting(0.1)
    strategy.run(lambda: optimizer.apply_gradients([(np.array(1.0 + 2 * replica_id()), weight)]))
    np.testing.assert_allclose(weight.numpy(), 1.0 - 0.1 * n * n)
    assert updates == (["weight"] if rank_of(strategy) == 0 else [])
    optimizer.apply_gradients([(np.array(1000.0), weight)])
    same(weight.numpy(), -50.0)
    same(optimizer.iterations.numpy(), 2)


@CENTRAL
def test_gradients_that_come_as_they_are_computed(strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mpidist.training.gradients.BUCKET_BYTES", 100)
    with strategy.scope():
        weights = [mpidist.Variable(np.zeros(40)) for _ in range(5)]
        optimizer = mpidist.optimizers.SGD(1.0)

    def gradients() -> Any:
        for number, weight in enumerate(weights):
            yield np.full(40, float(number)), weight

    for _ in range(2):
        strategy.run(lambda: optimizer.apply_gradients(gradients()))
    for number, weight in enumerate(weights):
        same(weight.numpy(), np.full(40, -2.0 * number * strategy.num_replicas_in_sync))


@CENTRAL
def test_a_metric_has_one_total(strategy: Any) -> None:
    n = strategy.num_replicas_in_sync
    with strategy.scope():
        mean = mpidist.metrics.Mean()

    def step() -> Any:
        mean.update_state([float(replica_id()), 2.0])
        return mean.result()

    expected = (sum(range(n)) + 2.0 * n) / (2 * n)
    for result in strategy.experimental_local_results(strategy.run(step)):
        assert result == pytest.approx(expected)
    mean.update_state(100.0)  # across replicas it counts once
    assert mean.result() == pytest.approx((2 * n * expected + 100.0) / (2 * n + 1))


# What goes wrong ----------------------------------------------------------------------------------------------------


@ON_RANKS
@pytest.mark.min_ranks(2)
def test_an_error_on_one_rank_reaches_all(strategy: Any) -> None:
    needs_several_ranks(strategy)
    rank = rank_of(strategy)
    variable = make_variable(strategy, np.zeros(2), aggregation=SUM)
    calls = [
        lambda: variable.assign(np.zeros(2 + rank)),
        lambda: variable.assign_add("text" if rank else 1.0 + np.zeros(2)),
        lambda: variable.assign(np.zeros(2) if rank == 0 else mpidist.experimental.ValueContext),
        lambda: variable.scatter_add(slices([1.0], [5 if rank else 0])),
        lambda: strategy.run(lambda: variable.assign(np.zeros(2 + rank))),
        lambda: strategy.extended.update(variable, lambda c: c.assign(np.zeros(2 + rank))),
        lambda: strategy.extended.update(variable, lambda c: c.assign(np.zeros(2)) if rank == 0 else 1 // 0),
    ]
    errors = mpidist.PeerError if rank != 1 else (ValueError, TypeError, IndexError, ZeroDivisionError)
    for call in calls:
        # On more than two ranks several are wrong alike; those that are say so themselves.
        with pytest.raises(errors if rank < 2 else Exception):
            call()
    same(variable.numpy(), np.zeros(2))
    variable.assign([3.0, 4.0])
    same(variable.numpy(), [3.0, 4.0])


@ON_RANKS
@pytest.mark.min_ranks(2)
def test_an_error_of_the_rank_that_writes_reaches_all(strategy: Any) -> None:
    needs_several_ranks(strategy)
    with strategy.scope():
        weight = mpidist.Variable(np.zeros(2), constraint=lambda value: 1 // 0)
        optimizer = mpidist.optimizers.SGD(1.0)
    with pytest.raises(ZeroDivisionError if rank_of(strategy) == 0 else mpidist.PeerError):
        strategy.run(lambda: optimizer.apply_gradients([(np.ones(2), weight)]))
    weight.assign(np.ones(2))
    same(weight.numpy(), np.ones(2))


@ON_RANKS
@pytest.mark.min_ranks(2)
@pytest.mark.own_strategy  # ranks that made different numbers of variables cannot make any more
def test_ranks_that_do_different_things(strategy: Any) -> None:
    needs_several_ranks(strategy)
    first = rank_of(strategy) == 0
    one, other = (make_variable(strategy, np.zeros(2), name="twin") for _ in range(2))
    differing = [
        lambda: (one if first else other).assign(np.ones(2)),
        lambda: one.assign(np.ones(2)) if first else one.assign_add(np.ones(2)),
        lambda: one.scatter_add(slices([1.0], [0])) if first else one.scatter_sub(slices([1.0], [0])),
        lambda: make_variable(strategy, np.zeros(2), aggregation=SUM if first else MEAN),
        lambda: make_variable(strategy, 0.0) if first else one.assign(np.ones(2)),
        lambda: strategy.reduce("SUM", 1.0, axis=None) if first else one.assign(np.ones(2)),
    ]
    for call in differing:
        with pytest.raises(mpidist.MismatchError, match="variable 'twin'|variable 'Variable'"):
            call()
    same(one.numpy(), np.zeros(2))
    one.assign(np.ones(2))
    same(one.numpy(), np.ones(2))


@ON_RANKS
@pytest.mark.min_ranks(2)
@pytest.mark.own_strategy
def test_no_room(strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_several_ranks(strategy)
    with monkeypatch.context() as patch:
        patch.setattr(memory, "free_bytes", lambda: 1 << 20)
        with pytest.raises(MemoryError, match=r"variable 'w'.*/dev/shm has no room for 80000 bytes.*--shm-size"):
            make_variable(strategy, np.zeros(10_000), name="w")
    same(make_variable(strategy, np.ones(10_000), name="w").numpy(), np.ones(10_000))


@ON_RANKS
@pytest.mark.own_strategy
def test_after_close(strategy: Any) -> None:
    variable = make_variable(strategy, np.arange(3.0))
    strategy.close()
    same(variable.numpy(), np.arange(3.0))
    if ranks_of(strategy) > 1:
        with pytest.raises(RuntimeError, match="CentralStorageStrategy can no longer be used: it has been closed"):
            variable.assign(np.zeros(3))


# Devices ------------------------------------------------------------------------------------------------------------


def alone(*arguments: Any, **more: Any) -> CentralStorageStrategy:
    from mpi4py import MPI

    return CentralStorageStrategy(*arguments, communicator=MPI.COMM_SELF, **more)


def test_where_variables_are() -> None:
    for compute, parameter, expected in (
        (["cpu:0", "cpu:1"], None, "cpu:0"),
        (["cpu:3"], None, "cpu:3"),
        (["cpu:0", "cpu:1"], "CPU:7", "cpu:7"),
        (None, None, "cpu:0"),
    ):
        with alone(compute, parameter) as strategy:
            assert strategy.extended.parameter_devices == (expected,)
            assert make_variable(strategy, 1.0).devices == (expected,)
            assert strategy.num_replicas_in_sync == len(compute or [0])


def test_variables_of_gpus(fake_gpus: Any) -> None:
    with alone(["gpu:0", "gpu:1"]) as strategy:
        assert strategy.extended.parameter_devices == ("cpu:0",)
        weight = make_variable(strategy, fake_gpus.zeros(3))
        assert isinstance(weight.value(), np.ndarray)
        optimizer = mpidist.optimizers.SGD(1.0)
        strategy.run(lambda: optimizer.apply_gradients([(fake_gpus.full(3, replica_id() + 1.0), weight)]))
        same(weight.numpy(), np.full(3, -3.0))
    with alone(["gpu:1"]) as strategy:
        weight = make_variable(strategy, np.zeros(3))
        assert (weight.device, weight.value().device.id) == ("gpu:1", 1)
    with alone(["gpu:0", "gpu:1"], "gpu:1") as strategy:
        assert make_variable(strategy, np.zeros(3)).value().device.id == 1


def test_wrong_devices() -> None:
    for wrong, error in (([], ValueError), ("cpu:0", TypeError), (["cpu:0", "CPU:0"], ValueError)):
        with pytest.raises(error):
            alone(wrong)
    for parameter, error in ((0, TypeError), ("tpu:0", ValueError), ("/job:ps/task:0/cpu:0", ValueError)):
        with pytest.raises(error, match="device is"):
            alone(None, parameter)
    with pytest.raises((DeviceError, ValueError)):
        alone(None, "gpu:99")


@pytest.mark.min_ranks(2)
def test_a_gpu_for_the_variables_of_several_ranks(fake_gpus: Any) -> None:
    from mpi4py import MPI

    with pytest.raises(ValueError, match="which share memory of the host"):
        CentralStorageStrategy(parameter_device="gpu:0", communicator=MPI.COMM_WORLD)


def test_copies_of_the_strategy() -> None:
    with alone(["cpu:0", "cpu:1"], "cpu:5") as strategy:
        twin = copy.deepcopy(strategy)
        assert twin.extended.parameter_devices == ("cpu:5",)
        assert len(make_variable(twin, 1.0, aggregation=SUM).values) == 1


def test_the_v1_form() -> None:
    from mpi4py import MPI

    strategy = mpidist.v1.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"], communicator=MPI.COMM_SELF)
    with strategy:
        same(strategy.reduce("SUM", strategy.run(lambda: 1.0)), 2.0)
        assert len(make_variable(strategy, 1.0).values) == 1


@CENTRAL
def test_checkpoints_of_the_manager(strategy: Any, tmp_path: Path) -> None:
    with strategy.scope():
        weight = mpidist.Variable(np.zeros(3), name="w")
        optimizer = mpidist.optimizers.Adam(0.1)
        count = mpidist.metrics.Sum()
    checkpoint = mpidist.Checkpoint(w=weight, optimizer=optimizer, count=count)
    manager = mpidist.CheckpointManager(checkpoint, tmp_path, max_to_keep=2)
    seen = []
    for _ in range(3):
        strategy.run(lambda: (optimizer.apply_gradients([(np.ones(3), weight)]), count.update_state(1.0)))
        manager.save()
        seen.append((weight.numpy(), count.result()))
    strategy.run(lambda: optimizer.apply_gradients([(np.ones(3), weight)]))
    manager.restore_or_initialize()
    same(weight.numpy(), seen[-1][0])
    assert count.result() == seen[-1][1]
    same(optimizer.iterations.numpy(), 3)
