"""What a variable means where a value is taken, in every layout."""

from __future__ import annotations

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
    fill,
    is_central,
    make_variable,
    replica_id,
    same,
)
from tests.support.ranks.layouts import WITH_COPIES, layouts


def counter_of(strategy: Any, aggregation: Any = SUM) -> Any:
    """An ON_READ variable that holds [id + 1] on each replica."""
    counter = make_variable(strategy, np.zeros(1), ON_READ, aggregation)
    fill(strategy, counter, lambda i: np.array([i + 1.0]))
    return counter


def context() -> Any:
    return mpidist.get_replica_context()


@pytest.mark.parametrize("strategy", layouts(*WITH_COPIES), indirect=True)
def test_all_reduce_takes_the_local_component(strategy: Any) -> None:
    n = strategy.num_replicas_in_sync
    weights, counter = make_variable(strategy, np.array([1.0, 2.0])), counter_of(strategy)

    def replica() -> Any:
        return context().all_reduce("SUM", weights), context().all_reduce("SUM", {"c": counter, "one": 1.0})

    total = np.array([float(sum(range(1, n + 1)))])
    result = strategy.run(replica)
    check_each(strategy, result, lambda _: (n * np.array([1.0, 2.0]), {"c": total, "one": float(n)}))


@pytest.mark.parametrize("strategy", layouts("mirrored*", "multi_worker-*", "one_device", "central*"), indirect=True)
def test_the_result_of_a_reduction_is_no_variable(strategy: Any) -> None:
    """The default context alone hands values back as they are."""
    weights = make_variable(strategy, np.array([1.0, 2.0]))
    expected = strategy.num_replicas_in_sync * np.array([1.0, 2.0])
    result = strategy.run(lambda: context().all_reduce("SUM", weights))
    weights.assign(np.zeros(2))
    check_each(strategy, result, lambda _: expected)


@pytest.mark.parametrize("strategy", layouts(*WITH_COPIES), indirect=True)
def test_all_gather_takes_the_local_component(strategy: Any) -> None:
    n = strategy.num_replicas_in_sync
    for aggregation in (SUM, MEAN):
        counter = counter_of(strategy, aggregation)
        gathered = strategy.run(lambda c=counter: context().all_gather(c, axis=0))
        check_each(strategy, gathered, lambda _: np.arange(1.0, n + 1))
    weights = make_variable(strategy, np.array([1.0, 2.0]))
    gathered = strategy.run(lambda: context().all_gather(weights, axis=0))
    check_each(strategy, gathered, lambda _: np.tile([1.0, 2.0], n))


def test_gather_of_a_variable_has_a_part_of_every_replica(strategy: Any) -> None:
    n = strategy.num_replicas_in_sync
    same(strategy.gather(make_variable(strategy, np.array([1.0, 2.0])), axis=0), np.tile([1.0, 2.0], n))
    if not is_central(strategy):
        same(strategy.gather(counter_of(strategy), axis=0), np.arange(1.0, n + 1))


def test_reduce_of_a_variable(strategy: Any) -> None:
    n = strategy.num_replicas_in_sync
    weights = make_variable(strategy, np.array([1.0, 2.0]))
    same(strategy.reduce("MEAN", weights, axis=None), [1.0, 2.0])
    if not is_central(strategy):
        counter = counter_of(strategy)
        same(strategy.reduce("SUM", counter, axis=None), [float(sum(range(1, n + 1)))])
        same(strategy.reduce("MEAN", counter, axis=None), [sum(range(1, n + 1)) / n])
        same(strategy.reduce("SUM", counter, axis=0), float(sum(range(1, n + 1))))
    if n > 1:
        with pytest.raises((ValueError, AssertionError)):
            strategy.reduce("SUM", weights, axis=None)


def test_reduce_along_an_axis_of_a_variable_does_not_depend_on_the_layout(strategy: Any) -> None:
    """Equal on all replicas: a sum is n times it or ambiguous, nothing between."""
    n = strategy.num_replicas_in_sync
    weights = make_variable(strategy, np.array([1.0, 2.0]))
    same(strategy.reduce("MEAN", weights, axis=0), 1.5)
    try:
        total = strategy.reduce("SUM", weights, axis=0)
    except ValueError:
        assert n > 1
    else:
        same(total, 3.0 * n)


def test_variables_in_merge_fn(strategy: Any) -> None:
    n = strategy.num_replicas_in_sync
    counter, weights = counter_of(strategy), make_variable(strategy, np.array([1.0, 2.0]), aggregation=SUM)

    def merge(merged: Any, passed: Any, also: Any) -> Any:
        assert passed is counter
        assert also is weights
        read = passed.numpy()
        also.assign_add(np.ones(2))
        return read

    result = strategy.run(lambda: context().merge_call(merge, args=(counter, weights)))
    check_each(strategy, result, lambda _: np.array([float(sum(range(1, n + 1)))]))
    check_components(strategy, weights, lambda _: np.array([2.0, 3.0]))
    same(strategy.reduce("SUM", strategy.run(replica_id), axis=None), sum(range(n)))
