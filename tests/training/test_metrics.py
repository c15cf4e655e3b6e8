"""Metrics: local updates, one global result in every layout."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.metrics import Accuracy, Mean, SparseCategoricalAccuracy, Sum
from tests.support.ranks.layouts import layouts, per_replica

pytestmark = pytest.mark.counts


def test_results_are_over_all_replicas(strategy: mpidist.Strategy) -> None:
    n = strategy.num_replicas_in_sync
    with strategy.scope():
        total, mean, accuracy = Sum(), Mean(), Accuracy()
    # Replica i has i values, the first one none.
    values = per_replica(strategy, lambda i: np.full(i, float(i)))

    def step(x: np.ndarray) -> None:
        total.update_state(x)
        mean.update_state(x)
        accuracy.update_state(np.arange(4), np.arange(4) % (len(x) + 1))

    for _ in range(2):
        strategy.run(step, args=(values,))
    count, value = sum(range(n)), sum(i * i for i in range(n))
    hits = sum(min(i + 1, 4) for i in range(n))
    assert total.result() == 2 * value
    assert mean.result() == (pytest.approx(value / count) if count else 0)
    assert accuracy.result() == pytest.approx(hits / (4 * n))
    inside = strategy.run(lambda: (total.result(), accuracy.result()))
    for results in strategy.experimental_local_results(inside):
        assert results == (2 * value, pytest.approx(hits / (4 * n)))
    for metric in (total, mean, accuracy):
        metric.reset_state()
        assert metric.result() == 0


def test_weights() -> None:
    mean, total = Mean(), Sum()
    mean.update_state([1.0, 3.0], sample_weight=[3, 1])
    mean.update_state(2.0)
    assert mean.result() == (3 + 3 + 2) / 5
    total.update_state([[1.0, 2.0], [3.0, 4.0]], sample_weight=[1, 0])
    assert total.result() == 3
    with pytest.raises(ValueError, match=r"sample_weight of shape \(3,\)"):
        mean.update_state([1.0, 2.0], [1, 2, 3])


def test_accuracy_compares_labels_of_one_shape() -> None:
    accuracy = Accuracy()
    accuracy.update_state([1, 2], [1, 3], sample_weight=[3, 1])
    assert accuracy.result() == 0.75
    with pytest.raises(ValueError, match="argmax"):
        accuracy.update_state([1, 2], [[0.1, 0.9], [0.3, 0.7]])


SCORES = [[0.1, 0.6, 0.3], [0.05, 0.95, 0.0], [0.4, 0.2, 0.4], [0.0, 0.0, 1.0]]


@pytest.mark.one_rank
@pytest.mark.parametrize(
    ("y_true", "weights", "expected"),
    [
        ([2, 1, 0, 0], None, 2 / 4),  # the first of equal scores counts
        ([2, 1, 0, 0], [0.7, 0.3, 0.0, 0.0], 0.3),
        ([[2], [1], [0], [0]], [1, 2, 3, 4], (2 + 3) / 10),
        ([2.0, 1.0, 1.0, 2.0], 5.0, 2 / 4),
    ],
)
def test_the_highest_score_of_true_classes(y_true: Any, weights: Any, expected: float) -> None:
    accuracy = SparseCategoricalAccuracy()
    accuracy.update_state(y_true, SCORES, weights)
    assert accuracy.result() == pytest.approx(expected)
    images = SparseCategoricalAccuracy(name="pixels", dtype="float32")
    twice = [weights, weights] if isinstance(weights, list) else weights
    assert images([y_true, y_true], [SCORES, SCORES], twice) == pytest.approx(expected)
    assert (images.result().dtype, images.variables[0].name) == (np.float32, "pixels/total")


@pytest.mark.one_rank
@pytest.mark.parametrize(("y_true", "y_pred"), [([0, 1], SCORES), (SCORES, SCORES), (0, 1.0), ([0], np.ones((1, 0)))])
def test_classes_that_do_not_fit_the_scores(y_true: Any, y_pred: Any) -> None:
    with pytest.raises(ValueError, match=r"y_true has shape .* and y_pred .*expected a class for each row"):
        SparseCategoricalAccuracy().update_state(y_true, y_pred)


def test_a_call_updates_and_returns_what_this_replica_has_come_to(strategy: mpidist.Strategy) -> None:
    with strategy.scope():
        mean = Mean()
    results = strategy.run(
        lambda i: (mean(i), mean([i + 2, i + 4], sample_weight=[1, 3])), args=(per_replica(strategy, float),)
    )
    everything = range(strategy.num_replicas_in_sync)

    def expected(ids: Any) -> tuple[float, float]:
        return sum(ids) / len(ids), sum(5 * i + 14 for i in ids) / (5 * len(ids))

    for i, result in zip(
        strategy.extended.local_replica_ids, strategy.experimental_local_results(results), strict=True
    ):
        assert result == pytest.approx(expected([i] if mean._has_copies else everything))
    assert mean.result() == pytest.approx(expected(everything)[1])


def test_a_call_of_one_replica_alone_sends_nothing(strategy: mpidist.Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    with strategy.scope():
        mean = Mean()
    if not mean._has_copies:
        return
    for owner, name in ((mpidist.ReplicaContext, "all_reduce"), (strategy.extended, "reduce_leaves")):
        monkeypatch.setattr(owner, name, lambda *_, **__: pytest.fail("the replicas communicated"))
    strategy.run(lambda: mean(1.0))


def test_what_a_metric_is_shown_as(strategy: mpidist.Strategy) -> None:
    with strategy.scope():
        metric = Mean(name="loss")
    assert repr(metric) == "<Mean 'loss'>"


def test_dtype_and_names() -> None:
    mean = Mean(name="loss", dtype="float32")
    mean.update_state(np.float32(0.1))
    assert mean.result().dtype == np.float32
    assert [v.name for v in mean.variables] == ["loss/total", "loss/count"]
    for variable in mean.variables:
        assert variable.synchronization == mpidist.VariableSynchronization.ON_READ
        assert variable.aggregation == mpidist.VariableAggregation.SUM


@pytest.mark.parametrize("strategy", layouts("mirrored-2local"), indirect=True)
def test_no_replica_is_meant_across_replicas(strategy: mpidist.Strategy) -> None:
    with strategy.scope():
        mean = Mean()
        with pytest.raises(ValueError, match="which copy"):
            mean.update_state(1.0)
