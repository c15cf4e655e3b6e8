"""Axes, operations, dtypes, nests and special inputs of reduce and gather, in every layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpidist
from tests.acceptance.checks import local_ids, num_workers, replica_id, same
from tests.support.ranks.layouts import layouts, per_replica

pytestmark = [pytest.mark.nodes, pytest.mark.counts]

FAILURES = (ValueError, mpidist.PeerError)


def test_operations_by_member_and_by_name_in_any_case(strategy: Any) -> None:
    n = strategy.num_replicas_in_sync
    value = per_replica(strategy, lambda i: i + 1.0)
    numbers = np.arange(1.0, n + 1)
    expected = {"SUM": numbers.sum(), "MEAN": numbers.mean(), "MIN": 1.0, "MAX": float(n), "PROD": numbers.prod()}
    for name, result in expected.items():
        for op in (name, name.lower(), name.capitalize(), mpidist.ReduceOp[name]):
            same(strategy.reduce(op, value, axis=None), result)


@pytest.mark.parametrize("strategy", layouts("mirrored-[12]local", "multi_worker-*", "default"), indirect=True)
def test_other_operations_along_an_axis(strategy: Any) -> None:
    n = strategy.num_replicas_in_sync
    tables = [np.array([[i + 2.0, -i], [1.0, 3.0]]) for i in range(n)]
    value = per_replica(strategy, tables)
    every = np.concatenate(tables)
    same(strategy.reduce("MIN", value, axis=0), every.min(axis=0))
    same(strategy.reduce("MAX", value, axis=0), every.max(axis=0))
    same(strategy.reduce("PROD", value, axis=0), every.prod(axis=0))


def test_wrong_operations(strategy: Any) -> None:
    value = per_replica(strategy, lambda i: 1.0)
    with pytest.raises(ValueError, match=r"'PRODUCT'.*SUM"):
        strategy.reduce("PRODUCT", value, axis=None)
    for bad in (None, 1, mpidist.VariableAggregation.SUM, np.add):
        with pytest.raises(TypeError, match="ReduceOp"):
            strategy.reduce(bad, value, axis=None)


def test_v1_strategies_need_no_axis() -> None:
    with mpidist.v1.OneDeviceStrategy("cpu:0") as strategy:
        same(strategy.reduce("SUM", 2.0), 2.0)


def test_wrong_axes(strategy: Any) -> None:
    value = per_replica(strategy, lambda i: np.zeros((2, 3)))
    for axis in (2, -3, 17):
        with pytest.raises(FAILURES, match=str(axis)):
            strategy.reduce("SUM", value, axis=axis)
        with pytest.raises(FAILURES, match=str(axis)):
            strategy.reduce("MEAN", value, axis=axis)
    with pytest.raises(FAILURES, match="5"):
        strategy.reduce("MEAN", value, axis=(0, 5))
    with pytest.raises(FAILURES):
        strategy.reduce("SUM", per_replica(strategy, lambda i: 1.0), axis=0)
    for axis in ([0], "0", 1.0, {0}):
        with pytest.raises(TypeError, match="axis"):
            strategy.reduce("MEAN", value, axis=axis)


def test_negative_and_tuple_axes(strategy: Any) -> None:
    n = strategy.num_replicas_in_sync
    blocks = [np.arange(24.0).reshape(2, 3, 4) + i for i in range(n)]
    value = per_replica(strategy, blocks)
    for axis in (0, 1, 2, -1, -2, -3, (0, 1), (-1, 0), (0, 1, 2)):
        total = sum(block.sum(axis=axis) for block in blocks)
        count = blocks[0].size / blocks[0].sum(axis=axis).size * n
        np.testing.assert_allclose(strategy.reduce("SUM", value, axis=axis), total, rtol=1e-14)
        np.testing.assert_allclose(strategy.reduce("MEAN", value, axis=axis), total / count, rtol=1e-14)


def test_integers(strategy: Any) -> None:
    n = strategy.num_replicas_in_sync
    for dtype in (np.int8, np.int32, np.int64, np.uint16):
        value = per_replica(strategy, lambda i, d=dtype: np.array([i, i + 1], d))
        total = sum(np.array([i, i + 1]) for i in range(n))
        summed = strategy.reduce("SUM", value, axis=None)
        assert np.asarray(summed).dtype == dtype
        same(summed, total)
        mean = np.asarray(strategy.reduce("MEAN", value, axis=None))
        assert mean.dtype == (dtype if n == 1 else np.float64)
        same(mean, total / n)
        mean = np.asarray(strategy.reduce("MEAN", value, axis=0))
        assert mean.dtype == np.float64
        same(mean, total.sum() / (2 * n))


def test_halves_are_summed_in_single_precision(strategy: Any) -> None:
    n = strategy.num_replicas_in_sync
    parts = [np.array([2048.0 if i == 0 else 1.0, 0.1], np.float16) for i in range(n)]
    value = per_replica(strategy, parts)
    total = np.sum([part.astype(np.float32) for part in parts], axis=0, dtype=np.float32)
    summed = np.asarray(strategy.reduce("SUM", value, axis=None))
    assert summed.dtype == np.float16
    same(summed, total.astype(np.float16))
    mean = np.asarray(strategy.reduce("MEAN", value, axis=None))
    assert mean.dtype == np.float16
    same(mean, (total / n).astype(np.float16))
    ones = per_replica(strategy, lambda i: np.ones(4096, np.float16))
    same(strategy.reduce("SUM", ones, axis=0), np.float16(4096 * n))
    same(strategy.reduce("MEAN", ones, axis=0), np.float16(1))


def test_a_mean_over_many_halves_has_the_right_value(strategy: Any) -> None:
    """The sum, 80,000 and more, is beyond float16; the mean is not."""
    value = per_replica(strategy, lambda i: np.full(40_000, 2.0, np.float16))
    same(strategy.reduce("MEAN", value, axis=0), np.float16(2))


def test_python_numbers_are_double_precision(strategy: Any) -> None:
    n = strategy.num_replicas_in_sync
    floats = strategy.reduce("SUM", per_replica(strategy, lambda i: 1 + 2.0**-40), axis=None)
    assert np.asarray(floats).dtype == np.float64
    same(floats, n * (1 + 2.0**-40))
    whole = strategy.reduce("SUM", per_replica(strategy, lambda i: 2**40), axis=None)
    assert np.asarray(whole).dtype == np.int64
    same(whole, n * 2**40)


def test_mirrored_values(strategy: Any) -> None:
    from mpidist.values import Mirrored

    count = len(local_ids(strategy))
    value = Mirrored([np.array([1.0, 2.0]) for _ in range(count)])
    same(strategy.reduce("MEAN", value, axis=None), [1.0, 2.0])
    if strategy.num_replicas_in_sync > 1:
        with pytest.raises((ValueError, AssertionError)):
            strategy.reduce("SUM", value, axis=None)


def test_nests_are_reduced_leaf_by_leaf(strategy: Any) -> None:
    n = strategy.num_replicas_in_sync
    nest = strategy.run(lambda: {"a": np.full(2, replica_id()), "b": [1.0, (2 * replica_id(),)]})
    ids = sum(range(n))
    same(strategy.reduce("SUM", nest, axis=None), {"a": np.full(2, ids), "b": [float(n), (2 * ids,)]})


def test_replicas_that_differ_in_shape_or_dtype(strategy: Any) -> None:
    n = strategy.num_replicas_in_sync
    if n == 1:
        return
    for make in (
        lambda i: np.zeros(2 + i % 2),
        lambda i: np.zeros((2, 2)) if i % 2 else np.zeros(4),
        lambda i: np.zeros(2, np.float32 if i % 2 else np.float64),
        lambda i: np.zeros(2, np.int32 if i % 2 else np.float32),
    ):
        with pytest.raises(FAILURES):
            strategy.reduce("SUM", per_replica(strategy, make), axis=None)
    same(strategy.reduce("SUM", per_replica(strategy, lambda i: 1), axis=None), n)


def test_gather_of_uneven_and_empty_parts(strategy: Any) -> None:
    n = strategy.num_replicas_in_sync
    for axis in (0, 1, -1):
        shapes = [tuple(i % 3 if d == axis % 2 else 2 for d in range(2)) for i in range(n)]
        parts = [np.full(shape, i, np.float32) for i, shape in enumerate(shapes)]
        gathered = strategy.gather(per_replica(strategy, parts), axis=axis)
        assert gathered.dtype == np.float32
        same(gathered, np.concatenate(parts, axis))
    same(strategy.gather(per_replica(strategy, lambda i: np.zeros((0, 2))), axis=0), np.zeros((0, 2)))
    flags = [np.array([i % 2 == 0]) for i in range(n)]
    same(strategy.gather(per_replica(strategy, flags), axis=0), np.concatenate(flags))


def test_gather_refusals(strategy: Any) -> None:
    n = strategy.num_replicas_in_sync
    slices = mpidist.IndexedSlices(np.ones((1, 2)), np.array([0]), (4, 2))
    with pytest.raises(NotImplementedError):
        strategy.gather(strategy.run(lambda: slices), axis=0)
    if n > 1:
        for make, axis in (
            (lambda i: np.zeros((1,) * (1 + i % 2)), 0),
            (lambda i: np.zeros((1, 2 + i % 2)), 0),
            (lambda i: np.zeros(2, np.float32 if i % 2 else np.float64), 0),
            (lambda i: np.zeros(2), 1),
            (lambda i: np.zeros(2), -2),
            (lambda i: 1.0, 0),
        ):
            with pytest.raises(FAILURES):
                strategy.gather(per_replica(strategy, make), axis=axis)
    same(strategy.gather(per_replica(strategy, lambda i: np.array([i])), axis=0), np.arange(n))
    messages: list[str] = []

    def replica() -> None:
        with pytest.raises(RuntimeError) as info:
            strategy.gather(np.zeros(1), axis=0)
        messages.append(str(info.value))

    if strategy is not mpidist.get_strategy():
        strategy.run(replica)
        assert all("all_gather" in message for message in messages)


def test_plain_values_of_ranks_are_gathered_once_per_rank(strategy: Any) -> None:
    """A plain value belongs to the rank, as what run returns with one local replica."""
    workers, ids = num_workers(strategy), local_ids(strategy)
    if len(ids) == 1:
        parts = [np.full(w + 1, w) for w in range(workers)]
        same(strategy.gather(parts[ids[0]], axis=0), np.concatenate(parts))
