"""The interface for library writers, in every layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.values import PerReplica
from tests.acceptance.checks import (
    MEAN,
    ON_READ,
    SUM,
    check_components,
    check_each,
    fill,
    is_default,
    is_single,
    local_ids,
    make_variable,
    num_workers,
    replica_id,
    same,
)
from tests.support.ranks.layouts import WITH_COPIES, layouts, per_replica

pytestmark = pytest.mark.counts

REPLICATED = ("mirrored-*", "mirrored_node-*", "multi_worker-*", "central*")
REFUSED = (ValueError, TypeError, AssertionError)


def test_reduce_to_every_kind_of_destination(strategy: Any) -> None:
    n = strategy.num_replicas_in_sync
    value = per_replica(strategy, lambda i: np.array([i, 1.0]))
    variable = make_variable(strategy, np.zeros(2))
    total = np.array([sum(range(n)), n])
    for destination in (variable, "cpu:0", "/cpu:0", "CPU:0", "host", value, np.zeros(2)):
        result = strategy.extended.reduce_to("SUM", value, destination)
        for part in strategy.experimental_local_results(result):
            same(part, total)
        same(np.asarray(result), total)
    assert not isinstance(strategy.extended.reduce_to("SUM", value, "cpu:0"), mpidist.DistributedValues)
    results = strategy.experimental_local_results(strategy.extended.reduce_to("SUM", value, variable))
    assert len(results) == len(variable.values)
    check_components(strategy, variable, lambda _: np.zeros(2))
    same(np.asarray(strategy.extended.reduce_to("mean", value, variable)), total / n)


def test_reduce_to_follows_the_rules_of_reduce_for_plain_values(strategy: Any) -> None:
    n, workers = strategy.num_replicas_in_sync, num_workers(strategy)
    same(np.asarray(strategy.extended.reduce_to("MEAN", 5.0, "cpu:0")), 5.0)
    same(np.asarray(strategy.extended.reduce_to("SUM", 0, "cpu:0")), 0)
    if workers > 1 or n == 1:
        same(np.asarray(strategy.extended.reduce_to("SUM", 5.0, "cpu:0")), 5.0 * workers)
    else:
        with pytest.raises(ValueError):
            strategy.extended.reduce_to("SUM", 5.0, "cpu:0")


def test_reduce_to_wrong_arguments(strategy: Any) -> None:
    value = per_replica(strategy, lambda i: 1.0)
    for destinations in ([], ["cpu:0"], ("cpu:0",)):
        with pytest.raises(REFUSED):
            strategy.extended.reduce_to("SUM", value, destinations)
    with pytest.raises(REFUSED, match="ReduceOp"):
        strategy.extended.reduce_to(SUM, value, "cpu:0")
    if not is_single(strategy):
        with pytest.raises(ValueError, match="tpu:0"):
            strategy.extended.reduce_to("SUM", value, "tpu:0")


def test_reduce_to_of_a_nest(strategy: Any) -> None:
    n = strategy.num_replicas_in_sync
    nest = strategy.run(lambda: {"a": replica_id(), "b": [np.ones(2)]})
    result = strategy.extended.reduce_to("SUM", nest, "cpu:0")
    same(result, {"a": sum(range(n)), "b": [np.full(2, float(n))]})


def test_batch_reduce_to(strategy: Any) -> None:
    n = strategy.num_replicas_in_sync
    assert strategy.extended.batch_reduce_to("SUM", []) == []
    variable = make_variable(strategy, 0.0)
    dtypes = (np.float32, np.int64, np.float32, np.float64)
    pairs = [
        (per_replica(strategy, lambda i, d=d, k=k: np.full(k + 1, i + k, d)), variable if k % 2 else "cpu:0")
        for k, d in enumerate(dtypes)
    ]
    for size in (0, 4, 1 << 20):
        options = mpidist.experimental.CommunicationOptions(bytes_per_pack=size)
        results = strategy.extended.batch_reduce_to("SUM", pairs, options)
        assert len(results) == len(pairs)
        for k, (dtype, result) in enumerate(zip(dtypes, results, strict=True)):
            assert np.asarray(result).dtype == dtype
            same(np.asarray(result), np.full(k + 1, sum(i + k for i in range(n))))
    for bad in ([pairs[0][0]], [(pairs[0][0],)], [(pairs[0][0], "cpu:0", 1)], pairs[0][0]):
        with pytest.raises((ValueError, TypeError)):
            strategy.extended.batch_reduce_to("SUM", bad)


@pytest.mark.parametrize("strategy", layouts(*WITH_COPIES), indirect=True)
def test_update_resolves_arguments_and_groups_results(strategy: Any) -> None:
    ids = local_ids(strategy)
    variable = make_variable(strategy, np.zeros(2), ON_READ, SUM)
    value = per_replica(strategy, lambda i: float(i))
    total = strategy.extended.reduce_to("SUM", value, variable)
    seen: list[Any] = []

    def fn(component: Any, mine: float, whole: Any, plain: Any, *, key: float) -> Any:
        assert not isinstance(whole, mpidist.DistributedValues)
        seen.append((mine, plain, key))
        component.assign_add(np.full(2, float(np.asarray(whole))))
        return mine + 1

    arguments = {"args": (value, total, "plain"), "kwargs": {"key": value}}
    grouped = strategy.extended.update(variable, fn, **arguments)
    assert seen == [(float(i), "plain", float(i)) for i in ids]
    check_each(strategy, grouped, lambda i: i + 1.0)
    single = strategy.extended.update(variable, fn, **arguments, group=False)
    if is_default(strategy):
        single = (single,) if not isinstance(single, (list, tuple)) else single
    assert tuple(single) == tuple(i + 1.0 for i in ids)
    check_components(strategy, variable, lambda _: np.full(2, 2.0 * sum(range(strategy.num_replicas_in_sync))))


def test_update_with_a_per_replica_raises(strategy: Any) -> None:
    variable = make_variable(strategy, 1.0, name="w")
    value = PerReplica(local_ids(strategy), local_ids(strategy))
    calls: list[Any] = []
    for where, given in (
        (r"args\[0\]", {"args": (value,)}),
        (r"args\[0\]\['a'\]\[1\]", {"args": ({"a": [1.0, value]},)}),
        (r"kwargs\['x'\]\[0\]", {"kwargs": {"x": (value, 2)}}),
    ):
        with pytest.raises(ValueError, match=f"'w' received a PerReplica as {where}.*reduce_to"):
            strategy.extended.update(variable, lambda *a, **k: calls.append((a, k)), **given)
        with pytest.raises(ValueError, match=rf"update_non_slot\(\) received a PerReplica as {where}.*reduce_to"):
            strategy.extended.update_non_slot(variable, lambda *a, **k: calls.append((a, k)), **given)
    assert not calls
    check_components(strategy, variable, lambda _: 1.0)
    strategy.reduce("MEAN", strategy.run(lambda: 1.0), axis=None)


@pytest.mark.parametrize("strategy", layouts(*WITH_COPIES), indirect=True)
def test_update_of_an_equal_sum_in_replica_context(strategy: Any) -> None:
    variable = make_variable(strategy, 0.0)
    if is_default(strategy):
        return

    def step() -> None:
        total = mpidist.get_replica_context().all_reduce("SUM", np.float64(1.0))
        strategy.extended.update(variable, lambda c, x: c.assign_add(x), args=(total,))

    strategy.run(step)
    check_components(strategy, variable, lambda _: float(strategy.num_replicas_in_sync))


def test_update_returns_the_variable_its_function_returns(strategy: Any) -> None:
    variable = make_variable(strategy, 1.0)
    result = strategy.extended.update(variable, lambda c: c.assign(3.0))
    same(np.asarray(result), 3.0)
    check_components(strategy, variable, lambda _: 3.0)


@pytest.mark.parametrize("strategy", layouts(*REPLICATED), indirect=True)
def test_update_refuses_what_is_not_its_own(strategy: Any) -> None:
    foreign = make_variable(mpidist.OneDeviceStrategy("cpu:0"), 0.0)
    for bad in (foreign, 3.0, np.zeros(2)):
        with pytest.raises((ValueError, TypeError, RuntimeError)):
            strategy.extended.update(bad, lambda c: None)


@pytest.mark.parametrize("strategy", layouts(*WITH_COPIES), indirect=True)
def test_variables_inside_an_update_are_the_component(strategy: Any) -> None:
    """In update context reading or assigning a distributed variable acts on that component."""
    counter = make_variable(strategy, 0.0, ON_READ, SUM)
    fill(strategy, counter, lambda i: i + 1.0)
    target = make_variable(strategy, 0.0)
    reads: list[Any] = []

    def fn(component: Any) -> None:
        reads.append(float(np.asarray(counter)))
        counter.assign_add(10.0)
        component.assign(5.0)

    strategy.extended.update(target, fn)
    assert reads == [i + 1.0 for i in local_ids(strategy)]
    check_components(strategy, counter, lambda i: i + 11.0)


def test_variables_and_their_strategy(strategy: Any) -> None:
    variable = make_variable(strategy, 0.0)
    assert strategy.extended.variable_created_in_scope(variable)
    foreign = make_variable(mpidist.OneDeviceStrategy("cpu:0"), 0.0)
    assert not strategy.extended.variable_created_in_scope(foreign)
    if not is_default(strategy):
        assert not strategy.extended.variable_created_in_scope(mpidist.Variable(0.0))
    for component in variable.values:
        assert strategy.extended.value_container(component) is variable
    assert strategy.extended.value_container(7) == 7
    containers: list[Any] = []
    strategy.extended.update(variable, lambda c: containers.append(strategy.extended.value_container(c)))
    assert all(container is variable for container in containers)


@pytest.mark.parametrize("strategy", layouts(*WITH_COPIES), indirect=True)
def test_read_var(strategy: Any) -> None:
    n = strategy.num_replicas_in_sync
    counter = make_variable(strategy, 0.0, ON_READ, MEAN)
    fill(strategy, counter, float)
    same(np.asarray(strategy.extended.read_var(counter)), sum(range(n)) / n)
    plain = make_variable(strategy, 4.0)
    same(np.asarray(strategy.extended.read_var(plain)), 4.0)
    check_each(strategy, strategy.run(lambda: np.asarray(strategy.extended.read_var(counter)).copy()), float)


def test_broadcast_to_takes_the_first_ranks_value(strategy: Any) -> None:
    variable = make_variable(strategy, 0.0)
    first = local_ids(strategy)[0]
    assert strategy.extended.broadcast_to(5, variable) == 5
    assert strategy.extended.broadcast_to(2.5, "cpu:0") == 2.5
    for destination in (variable, "cpu:0"):
        result = strategy.extended.broadcast_to(np.array([first, 1.0]), destination)
        for part in strategy.experimental_local_results(result):
            same(np.asarray(part), [0.0, 1.0])


def test_call_for_each_replica(strategy: Any) -> None:
    value = per_replica(strategy, lambda i: i)
    with strategy.scope():
        result = strategy.extended.call_for_each_replica(lambda x, *, y: x + y, args=(value,), kwargs={"y": 10})
    check_each(strategy, result, lambda i: i + 10)


def test_arrays_of_the_strategy(strategy: Any) -> None:
    empty = strategy.extended.empty((2, 3))
    for array in strategy.experimental_local_results(empty):
        assert (array.shape, array.dtype) == ((2, 3), np.float32)
    zeros = strategy.extended.zeros(4, "int64")
    check_each(strategy, zeros, lambda _: np.zeros(4))
    assert isinstance(zeros, mpidist.DistributedValues) == (len(local_ids(strategy)) > 1)


def test_dir_lists_what_programs_use(strategy: Any) -> None:
    extended = strategy.extended
    assert extended.num_replicas_in_sync == strategy.num_replicas_in_sync
    assert {"reduce_to", "update", "empty", "num_replicas_in_sync"} < set(dir(extended))
    assert "shared_errors" not in dir(extended)
