"""Clipping by the global norm, and accumulation over several batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.optimizers import SGD, GradientAccumulator, aggregate_gradients, clip_by_global_norm
from tests.support.ranks.layouts import layouts, per_replica

pytestmark = pytest.mark.counts


def test_clipping() -> None:
    sparse = mpidist.IndexedSlices(np.array([[1.0], [1.0]]), [5, 5])
    given = [np.array([3.0, 4.0], np.float32), None, sparse]
    clipped, norm = clip_by_global_norm(given, 1.0)
    assert norm == pytest.approx(np.sqrt(25 + 4))  # rows at one position count as their sum
    np.testing.assert_allclose(clipped[0], np.array([3, 4]) / np.sqrt(29), rtol=1e-6)
    assert clipped[0].dtype == np.float32
    assert clipped[1] is None
    np.testing.assert_allclose(clipped[2].values, [[2 / np.sqrt(29)]])
    np.testing.assert_array_equal(given[0], [3, 4])


def test_small_gradients_are_not_scaled_up() -> None:
    clipped, norm = clip_by_global_norm([np.array([0.3, 0.4])], 1.0)
    np.testing.assert_array_equal(clipped[0], [0.3, 0.4])
    assert norm == pytest.approx(0.5)
    assert clip_by_global_norm([], 1.0) == ([], 0.0)
    assert clip_by_global_norm([np.zeros(2)], 1.0)[0][0].tolist() == [0, 0]


def test_half_precision_does_not_overflow() -> None:
    clipped, norm = clip_by_global_norm([np.full(4, 60_000, np.float16)], 1.0)
    assert norm == pytest.approx(119_904, rel=1e-3)
    np.testing.assert_allclose(clipped[0], 0.5, rtol=1e-2)


def test_a_norm_that_is_not_finite_shows() -> None:
    clipped, norm = clip_by_global_norm([np.array([np.inf, 1.0]), np.array(1.0)], 1.0)
    assert np.isinf(norm)
    assert np.isnan(clipped[0]).all()
    assert np.isnan(clipped[1])


@pytest.mark.parametrize("clip_norm", [0, -1, float("nan")])
def test_a_wrong_clip_norm(clip_norm: float) -> None:
    with pytest.raises(ValueError, match="clip_norm"):
        clip_by_global_norm([np.ones(1)], clip_norm)


@pytest.mark.parametrize("strategy", layouts("mirrored-2local", "one_device"), indirect=True)
def test_gradients_of_replicas_are_summed_in_replica_context_only(strategy: mpidist.Strategy) -> None:
    with strategy.scope():
        v = mpidist.Variable(1.0)
        with pytest.raises(RuntimeError, match=r"inside strategy\.run"):
            aggregate_gradients([(1.0, v)])
        with pytest.raises(RuntimeError, match=r"inside strategy\.run"):
            GradientAccumulator(2).add([1.0])


def test_accumulation(strategy: mpidist.Strategy) -> None:
    with strategy.scope():
        v = mpidist.Variable([0.0, 0.0])
    optimizer, accumulator = SGD(1.0), GradientAccumulator(steps=3)

    def step(gradient: np.ndarray) -> bool:
        return accumulator.apply_gradients(optimizer, [(gradient, v)])

    updated, n = [], strategy.num_replicas_in_sync
    for t in range(7):
        done = strategy.run(step, args=(per_replica(strategy, lambda i, t=t: np.array([t, i], float)),))
        updated += [all(strategy.experimental_local_results(done))]
    assert updated == [False, False, True, False, False, True, False]
    ids = n * (n - 1) / 2
    np.testing.assert_allclose(v.numpy(), [-n * sum(range(6)), -6 * ids])
    assert optimizer.iterations.numpy() == 2
    rest = strategy.run(accumulator.flush)
    for replica_id, sums in zip(
        strategy.extended.local_replica_ids, strategy.experimental_local_results(rest), strict=True
    ):
        np.testing.assert_array_equal(sums[0], [6.0, replica_id])
    assert strategy.run(accumulator.flush) is None


def test_accumulation_of_sparse_and_missing_gradients() -> None:
    accumulator = GradientAccumulator(2)
    array, rows, indices = np.ones(2), np.ones(1), np.array([3])
    assert accumulator.add([None, array, mpidist.IndexedSlices(rows, indices)]) is None
    # The caller uses its arrays again.
    array[:], rows[:], indices[:] = 7, 7, 0
    sums: Any = accumulator.add([None, None, mpidist.IndexedSlices([2.0], [3])])
    assert sums[0] is None
    np.testing.assert_array_equal(sums[1], [1, 1])
    np.testing.assert_array_equal(sums[2].coalesce().values, [3.0])


def test_wrong_accumulation() -> None:
    with pytest.raises(ValueError, match="steps is 0"):
        GradientAccumulator(0)
    accumulator = GradientAccumulator(3)
    accumulator.add([np.ones(2)])
    with pytest.raises(ValueError, match="expected 1, as before"):
        accumulator.add([np.ones(2), np.ones(2)])
    with pytest.raises(ValueError, match="shape"):
        accumulator.add([np.ones(3)])
