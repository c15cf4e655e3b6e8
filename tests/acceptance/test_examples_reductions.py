"""Numeric examples of reductions and gathers in every layout, generalised from two replicas by slow formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpidist
from tests.acceptance.checks import check_each, local_ids, num_workers, replica_id, same
from tests.support.ranks.layouts import layouts, per_replica

pytestmark = pytest.mark.counts

SEVERAL = pytest.mark.parametrize("strategy", layouts("mirrored-[234]local", "multi_worker-2local"), indirect=True)


def test_example_1_reduce_without_and_with_an_axis(strategy: Any) -> None:
    n = strategy.num_replicas_in_sync
    values = [np.arange(4 * i, 4 * i + 4) for i in range(n)]
    value = per_replica(strategy, values)
    same(strategy.reduce("SUM", value, axis=None), sum(values))
    same(strategy.reduce("SUM", value, axis=0), sum(range(4 * n)))
    same(strategy.reduce("MEAN", value, axis=None), sum(values) / n)
    same(strategy.reduce("MEAN", value, axis=0), sum(range(4 * n)) / (4 * n))


def test_example_2_uneven_shapes_have_the_right_denominator(strategy: Any) -> None:
    n = strategy.num_replicas_in_sync
    sizes = [4 if i % 2 == 0 else 2 for i in range(n)]
    rows = [np.arange(sum(sizes[:i]), sum(sizes[: i + 1]), dtype=float) for i in range(n)]
    value = per_replica(strategy, rows)
    every = np.concatenate(rows)
    same(strategy.reduce("MEAN", value, axis=0), every.sum() / every.size)
    same(strategy.reduce("SUM", value, axis=0), every.sum())
    tables = [np.ones((2, 3)) if i % 2 == 0 else np.full((1, 3), 4.0) for i in range(n)]
    value = per_replica(strategy, tables)
    table = np.concatenate(tables)
    same(strategy.reduce("MEAN", value, axis=0), table.mean(axis=0))
    same(strategy.reduce("MEAN", value, axis=(0, 1)), table.mean())
    same(strategy.reduce("MEAN", value, axis=-2), table.mean(axis=0))
    if n > 1:
        for axis in (None, -1):
            with pytest.raises((ValueError, mpidist.PeerError)):
                strategy.reduce("MEAN", value, axis=axis)
    same(strategy.reduce("SUM", per_replica(strategy, [1.0] * n), axis=None), float(n))


@SEVERAL
def test_example_2_as_it_stands(strategy: Any) -> None:
    n = strategy.num_replicas_in_sync
    value = per_replica(strategy, [np.array([0.0, 1, 2, 3]), np.array([4.0, 5])] + [np.zeros(0)] * (n - 2))
    same(strategy.reduce("MEAN", value, axis=0), 2.5)
    same(strategy.reduce("SUM", value, axis=0), 15.0)


def test_example_3_empty_replicas(strategy: Any) -> None:
    n = strategy.num_replicas_in_sync
    value = per_replica(strategy, [np.array([8.0])] + [np.zeros(0)] * (n - 1))
    same(strategy.reduce("MEAN", value, axis=0), 8.0)
    same(strategy.reduce("SUM", value, axis=0), 8.0)
    nothing = per_replica(strategy, [np.zeros(0)] * n)
    same(strategy.reduce("MEAN", nothing, axis=0), np.nan)
    same(strategy.reduce("SUM", nothing, axis=0), 0.0)
    wide = per_replica(strategy, [np.zeros((0, 3), np.float32)] * n)
    mean = strategy.reduce("MEAN", wide, axis=0)
    assert mean.dtype == np.float32
    same(mean, np.full(3, np.nan))


def test_example_4_plain_values_belong_to_the_rank(strategy: Any) -> None:
    n, workers = strategy.num_replicas_in_sync, num_workers(strategy)
    same(strategy.reduce("MEAN", 5.0, axis=None), 5.0)
    same(strategy.reduce("SUM", 0, axis=None), 0)
    if workers > 1:
        same(strategy.reduce("SUM", 1.0, axis=None), float(workers))
        same(strategy.reduce("MEAN", 1.0, axis=None), 1.0)
        mine = float(local_ids(strategy)[0])
        firsts = [float(w * (n // workers)) for w in range(workers)]
        same(strategy.reduce("SUM", mine, axis=None), sum(firsts))
        same(strategy.reduce("MEAN", mine, axis=None), sum(firsts) / workers)
    elif n == 1:
        same(strategy.reduce("SUM", 1.0, axis=None), 1.0)
    else:
        with pytest.raises(ValueError):
            strategy.reduce("SUM", 5.0, axis=None)
    mean = strategy.reduce("MEAN", per_replica(strategy, lambda i: i + 1), axis=None)
    same(mean, (n + 1) / 2)
    if n > 1:
        assert np.asarray(mean).dtype == np.float64


def test_example_5_all_reduce(strategy: Any) -> None:
    n = strategy.num_replicas_in_sync

    def replica() -> Any:
        context = mpidist.get_replica_context()
        identifier = context.replica_id_in_sync_group
        slices = mpidist.IndexedSlices(np.array([[1.0]]), np.array([0]), (5, 1))
        return {
            "sum": context.all_reduce("SUM", 1.0),
            "mean": context.all_reduce("MEAN", 1.0),
            "list": context.all_reduce("SUM", [1.0, 2.0]),
            "nest": context.all_reduce("SUM", {"a": identifier, "b": [identifier, 10]}),
            "ids": (context.all_reduce("SUM", identifier), context.all_reduce("MEAN", identifier)),
            "sparse": context.all_reduce("SUM", slices).to_dense(),
        }

    ids = sum(range(n))
    expected = {
        "sum": float(n),
        "mean": 1.0,
        "list": [1.0 * n, 2.0 * n],
        "nest": {"a": ids, "b": [ids, 10 * n]},
        "ids": (ids, ids / n),
        "sparse": np.array([[n], [0], [0], [0], [0]]),
    }
    check_each(strategy, strategy.run(replica), lambda _: expected)


def test_example_6_merge_call(strategy: Any) -> None:
    def step(three: int) -> Any:
        context = mpidist.get_replica_context()
        value = three + context.replica_id_in_sync_group
        total = context.merge_call(lambda s, v: s.reduce("SUM", v, axis=None), args=(value,))
        return total + value

    total = sum(3 + i for i in range(strategy.num_replicas_in_sync))
    check_each(strategy, strategy.run(step, args=(3,)), lambda i: total + 3 + i)


def test_example_7_gather(strategy: Any) -> None:
    n = strategy.num_replicas_in_sync
    columns = [np.full((2, 1), i) for i in range(n)]
    same(strategy.gather(per_replica(strategy, columns), axis=0), np.concatenate(columns))
    block = np.arange(6).reshape(1, 2, 3)
    for axis in (0, 1, 2, -1, -3):
        same(strategy.gather(per_replica(strategy, [block] * n), axis=axis), np.concatenate([block] * n, axis))
    uneven = [np.arange(i + 1).reshape(1, i + 1) for i in range(n)]
    value = per_replica(strategy, uneven)
    same(strategy.gather(value, axis=1), np.concatenate(uneven, 1))
    if n > 1:
        with pytest.raises((ValueError, mpidist.PeerError)):
            strategy.gather(value, axis=0)
        with pytest.raises((ValueError, mpidist.PeerError)):
            strategy.gather(per_replica(strategy, [1.0] * n), axis=0)
    same(strategy.gather(value, axis=1), np.concatenate(uneven, 1))


def test_example_8_all_gather_of_an_uneven_nest_and_its_gradient(strategy: Any) -> None:
    n = strategy.num_replicas_in_sync
    tables = [np.arange(2 * (i + 1)).reshape(i + 1, 2) + 10 * i for i in range(n)]

    def upstream(identifier: int) -> Any:
        return np.arange(n, dtype=float) + 100 * identifier

    def replica() -> Any:
        context = mpidist.get_replica_context()
        i = context.replica_id_in_sync_group
        gathered = context.all_gather({"a": np.array([i]), "b": tables[i]}, axis=0)
        gradient = context.all_reduce("SUM", upstream(i))[i : i + 1]
        return gathered, gradient

    gathered = {"a": np.arange(n), "b": np.concatenate(tables)}
    gradient = sum(upstream(i) for i in range(n))
    check_each(strategy, strategy.run(replica), lambda i: (gathered, gradient[i : i + 1]))


def test_constants_count_once_per_replica_in_every_layout(strategy: Any) -> None:
    """Identical numbers and arrays are not collapsed, so sums do not depend on the layout."""
    n = strategy.num_replicas_in_sync
    captured = np.array([1.0, 2.0])
    same(strategy.reduce("SUM", strategy.run(lambda: 1.0), axis=None), float(n))
    same(strategy.reduce("SUM", strategy.run(lambda: 1), axis=None), n)
    same(strategy.reduce("SUM", strategy.run(lambda: captured), axis=None), n * captured)
    same(strategy.reduce("SUM", strategy.run(lambda: captured), axis=0), n * 3.0)

    def merged(value: Any) -> Any:
        context = mpidist.get_replica_context()
        return context.merge_call(lambda s, v: s.reduce("SUM", v, axis=None), args=(value,))

    check_each(strategy, strategy.run(lambda: merged(1.0)), lambda _: float(n))
    check_each(strategy, strategy.run(lambda: merged(captured)), lambda _: n * captured)

    def returned_by_merge() -> Any:
        context = mpidist.get_replica_context()
        total = context.merge_call(lambda s, v: s.extended.reduce_to("SUM", v, "cpu:0"), args=(replica_id(),))
        return total, context.all_reduce("SUM", captured)

    check_each(strategy, strategy.run(returned_by_merge), lambda _: (sum(range(n)), n * captured))
