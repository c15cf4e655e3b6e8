"""PerReplica, Mirrored, regroup, select_replica and IndexedSlices."""

from __future__ import annotations

import operator
from collections import namedtuple
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.values import Mirrored, PerReplica, regroup, select_replica
from tests.acceptance.checks import local_ids, make_variable, same
from tests.support.ranks.layouts import layouts, per_replica

pytestmark = pytest.mark.counts

Pair = namedtuple("Pair", "left right")

USES_AS_ARRAY = {
    "add": lambda v: v + 1,
    "radd": lambda v: 1 + v,
    "multiply by an array": lambda v: np.ones(2) * v,
    "negate": operator.neg,
    "compare": lambda v: v < 1,
    "asarray": np.asarray,
    "ufunc": np.exp,
    "function": np.sum,
    "matmul": lambda v: np.ones((2, 2)) @ v,
    "bool": bool,
    "len": len,
    "iterate": list,
    "index": lambda v: v[0],
    "float": float,
    "int": int,
    "contains": lambda v: 1 in v,
}


@pytest.mark.parametrize("use", USES_AS_ARRAY)
def test_a_per_replica_is_no_array(use: str) -> None:
    value = PerReplica([np.ones(2), np.zeros(2)])
    with pytest.raises(ValueError) as info:
        USES_AS_ARRAY[use](value)
    text = str(info.value)
    assert all(word in text for word in ("run", "reduce", "local_results"))


@pytest.mark.parametrize("strategy", layouts("mirrored*", "multi_worker-*", "central*"), indirect=True)
def test_a_captured_per_replica_is_this_replicas_value(strategy: Any) -> None:
    captured = per_replica(strategy, lambda i: np.array([i, 2.0]))
    n = strategy.num_replicas_in_sync
    variable = make_variable(strategy, [0.0, 0.0], aggregation=mpidist.VariableAggregation.SUM)

    def replica() -> Any:
        context = mpidist.get_replica_context()
        own = np.array([context.replica_id_in_sync_group, 2.0])
        same(captured + 1, own + 1)
        same(np.ones(2) - captured, 1 - own)
        same(captured * captured, own * own)
        same(np.maximum(captured, 1.0), np.maximum(own, 1.0))
        same(captured @ captured, own @ own)
        same(np.asarray(captured, np.float32), own.astype(np.float32))
        same(captured == own, [True, True])
        same(captured[1], 2.0)
        same(np.stack(list(captured)), own)
        same(captured.sum(), own.sum())
        assert (len(captured), captured.shape, f"{captured[1]:.1f}") == (2, (2,), "2.0")
        same(context.all_reduce("SUM", {"x": captured})["x"], [n * (n - 1) / 2, 2.0 * n])
        same(context.all_gather(captured, axis=0), np.stack([np.arange(n), np.full(n, 2.0)], 1).ravel())
        variable.assign_add(captured)
        return mpidist.compute_average_loss(captured, global_batch_size=2 * n)

    losses = strategy.run(replica)
    same(variable.numpy(), [n * (n - 1) / 2, 2.0 * n])
    same(strategy.reduce("SUM", losses, axis=None), (n * (n - 1) / 2 + 2 * n) / (2 * n))
    with pytest.raises(ValueError, match="used as one array"):
        captured + 1
    with strategy.scope(), pytest.raises(ValueError, match="used as one array"):
        np.asarray(captured)


@pytest.mark.parametrize("strategy", layouts("mirrored-2local"), indirect=True)
def test_a_captured_per_replica_of_other_objects(strategy: Any) -> None:
    captured = per_replica(strategy, lambda i: "abc"[i:])
    assert not hasattr(captured, "upper")
    assert strategy.run(lambda: captured.upper() + captured).values == ("ABCabc", "BCbc")
    too_few = PerReplica([1])
    with pytest.raises(ValueError, match="PerReplica value of 1 replicas"):
        strategy.run(lambda: too_few + 1)


def test_per_replica_attributes() -> None:
    value = PerReplica([1, 2], replica_ids=(4, 5))
    assert isinstance(value, mpidist.DistributedValues)
    assert value.values == (1, 2)
    assert value.replica_ids == (4, 5)
    assert repr(value) == "PerReplica:{4: 1, 5: 2}"


def test_mirrored_is_an_array() -> None:
    value = Mirrored([np.array([1.0, 2.0]), np.array([1.0, 2.0])])
    same(np.asarray(value), [1.0, 2.0])
    same(value + 1, [2.0, 3.0])
    same(2 * value, [2.0, 4.0])
    same(np.ones(2) - value, [0.0, -1.0])
    same(np.exp(value), np.exp([1.0, 2.0]))
    same(value[1], 2.0)
    assert value.shape == (2,)
    assert value.dtype == np.float64
    assert len(value.values) == 2


def test_regroup_recurses_and_keeps_types() -> None:
    class Marked(dict):  # type: ignore[type-arg]
        pass

    one = {"a": [1.0, (2.0,)], "p": Pair(3.0, None), "s": "text", "m": Marked(x=1.5)}
    two = {"a": [4.0, (5.0,)], "p": Pair(6.0, None), "s": "text", "m": Marked(x=2.5)}
    grouped = regroup([one, two])
    assert grouped["a"][0].values == (1.0, 4.0)
    assert isinstance(grouped["a"][1], tuple)
    assert grouped["a"][1][0].values == (2.0, 5.0)
    assert isinstance(grouped["p"], Pair)
    assert grouped["p"].left.values == (3.0, 6.0)
    assert grouped["p"].right is None
    assert grouped["s"] == "text"
    assert isinstance(grouped["m"], Marked)
    assert select_replica(0, grouped) == one
    assert select_replica(1, grouped) == two


def test_regroup_of_one_replica_and_always_wrap() -> None:
    assert regroup([5]) == 5
    assert regroup([5], always_wrap=True).values == (5,)
    assert regroup([None, None], always_wrap=True).values == (None, None)


def test_regroup_refuses_structures_that_differ() -> None:
    for one, two in (
        ([1, 2], [1]),
        ([1], (1,)),
        ({"a": 1}, {"b": 1}),
        ({"a": 1}, {"a": 1, "b": 2}),
        ([1], 1),
        (Pair(1, 2), (1, 2)),
    ):
        with pytest.raises((ValueError, AssertionError, TypeError)):
            regroup([one, two])


def test_regroup_of_the_components_of_a_variable(strategy: Any) -> None:
    variable = make_variable(strategy, 1.0)
    assert regroup(list(variable.values)) is variable or len(variable.values) == 1
    assert regroup([variable] * 2) is variable


@pytest.mark.parametrize("strategy", layouts("mirrored*", "multi_worker-*", "central*"), indirect=True)
def test_distributed_values_hold_the_local_part(strategy: Any) -> None:
    value = per_replica(strategy, lambda i: {"nest": np.full(2, i)})
    for i, part in zip(local_ids(strategy), strategy.experimental_local_results(value), strict=True):
        same(part, {"nest": np.full(2, i)})
    plain = per_replica(strategy, lambda i: i)
    assert isinstance(plain, PerReplica)
    assert plain.replica_ids == local_ids(strategy)
    same_object = object()
    assert isinstance(per_replica(strategy, lambda i: same_object), PerReplica)


def test_indexed_slices() -> None:
    slices = mpidist.IndexedSlices(np.array([[1.0, 2.0], [3.0, 4.0], [10.0, 20.0]]), np.array([2, 0, 2]), (4, 2))
    dense = np.array([[3.0, 4.0], [0, 0], [11.0, 22.0], [0, 0]])
    same(slices.to_dense(), dense)
    together = slices.coalesce()
    assert sorted(together.indices.tolist()) == [0, 2]
    same(together.to_dense(), dense)
    assert slices.dense_shape == (4, 2)
    with pytest.raises(ValueError, match="dense_shape"):
        mpidist.IndexedSlices(np.ones(1), np.array([0])).to_dense()
    with pytest.raises(ValueError):
        mpidist.IndexedSlices(np.ones((2, 1)), np.array([0]), (4, 1))
    with pytest.raises((ValueError, TypeError)):
        mpidist.IndexedSlices(np.ones(1), np.array([0.5]), (4,))
    with pytest.raises((ValueError, IndexError)):
        mpidist.IndexedSlices(np.ones(1), np.array([7]), (4,)).to_dense()
    empty = mpidist.IndexedSlices(np.zeros((0, 2)), np.zeros(0, np.int64), (4, 2))
    same(empty.to_dense(), np.zeros((4, 2)))


def test_reduction_of_indexed_slices(strategy: Any) -> None:
    n = strategy.num_replicas_in_sync

    def make(i: int) -> Any:
        return mpidist.IndexedSlices(np.full((i % 2, 1), i + 1.0), np.full(i % 2, i), (n, 1))

    value = strategy.run(lambda: make(mpidist.get_replica_context().replica_id_in_sync_group))
    dense = sum(make(i).to_dense() for i in range(n))
    for op, divisor in (("SUM", 1), ("MEAN", n)):
        result = strategy.extended.reduce_to(op, value, "cpu:0")
        assert isinstance(result, mpidist.IndexedSlices)
        assert len(result.indices) == n // 2
        same(result.to_dense(), dense / divisor)
