"""Loss scaling: numeric examples, and that replicas' losses add up to the global mean."""

from __future__ import annotations

import numpy as np
import pytest

import mpidist
from mpidist.training.losses import compute_average_loss, global_count, scale_regularization_loss
from tests.support.ranks.layouts import layouts, per_replica

pytestmark = pytest.mark.counts


def test_example_22() -> None:
    assert compute_average_loss([2.0, 3.0], global_batch_size=4) == 1.25
    assert compute_average_loss([4.0, 5.0], global_batch_size=4) == 2.25
    assert compute_average_loss([2.0, 3.0], sample_weight=[1.0, 0.0], global_batch_size=4) == 0.5
    assert compute_average_loss([2.0, 3.0], global_batch_size=0) == 0


@pytest.mark.parametrize("strategy", layouts("mirrored-2local"), indirect=True)
def test_the_global_batch_is_the_local_one_times_the_replicas(strategy: mpidist.Strategy) -> None:
    losses = strategy.run(lambda: compute_average_loss([2, 3]))
    assert strategy.experimental_local_results(losses) == (1.25, 1.25)
    weighted = strategy.run(lambda: compute_average_loss([2.0, 3.0], [1.0, 0.0]))
    assert strategy.experimental_local_results(weighted) == (0.5, 0.5)


def test_replicas_add_up_to_the_mean_over_uneven_batches(strategy: mpidist.Strategy) -> None:
    batches = per_replica(strategy, lambda i: np.arange(float(i + i % 2)))
    count = strategy.num_replicas_in_sync

    def step(losses: np.ndarray) -> object:
        return compute_average_loss(losses, global_batch_size=global_count(losses))

    everything = np.concatenate([np.arange(float(i + i % 2)) for i in range(count)])
    expected = everything.mean() if everything.size else 0.0
    assert strategy.reduce("SUM", strategy.run(step, args=(batches,)), axis=None) == pytest.approx(expected)


def test_regularization_counts_once_over_all_replicas(strategy: mpidist.Strategy) -> None:
    parts = strategy.run(lambda: scale_regularization_loss([1.0, 2.0, 3.0]))
    assert strategy.experimental_local_results(parts)[0] == 6.0 / strategy.num_replicas_in_sync
    assert strategy.reduce("SUM", parts, axis=None) == pytest.approx(6.0)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
@pytest.mark.parametrize("weight", [None, 0.5, np.float64(0.5)])
def test_the_result_has_the_dtype_of_the_losses(dtype: str, weight: object) -> None:
    assert compute_average_loss(np.ones(3, dtype), weight, global_batch_size=np.int32(3)).dtype == dtype
    assert scale_regularization_loss(np.ones(3, dtype)).dtype == dtype


def test_half_precision_is_summed_in_float32() -> None:
    assert compute_average_loss(np.full(70_000, 1.0, np.float16), global_batch_size=70_000) == 1


def test_weights_of_examples_and_of_steps() -> None:
    losses = np.ones((2, 3))
    assert compute_average_loss(losses, [1.0, 0.0], 2) == 1.5
    assert compute_average_loss(losses, [[1.0], [0.0]], 2) == 1.5
    assert compute_average_loss(losses, np.ones((2, 3)), 2) == 3.0
    assert compute_average_loss([1.0, 1.0], [[1.0], [0.0]], 2) == 0.5
    with pytest.raises(ValueError, match=r"sample_weight of shape \(3,\) does not broadcast"):
        compute_average_loss([1.0, 1.0], [1.0, 1.0, 1.0], 2)


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="scalar"):
        compute_average_loss(1.0)
    with pytest.raises(ValueError, match="0 or more"):
        compute_average_loss([1.0], global_batch_size=-1)
    with pytest.raises(TypeError, match="whole number"):
        compute_average_loss([1.0], global_batch_size=2.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one whole number"):
        compute_average_loss([1.0], global_batch_size=[2])  # type: ignore[arg-type]


@pytest.mark.parametrize("strategy", layouts("mirrored-*", "one_device"), indirect=True)
def test_cross_replica_context(strategy: mpidist.Strategy) -> None:
    with strategy.scope():
        with pytest.raises(RuntimeError, match="global_batch_size"):
            compute_average_loss([1.0])
        assert compute_average_loss([1.0], global_batch_size=2) == 0.5
        with pytest.raises(RuntimeError, match="cross-replica context"):
            scale_regularization_loss(1.0)
        with pytest.raises(RuntimeError, match="cross-replica context"):
            global_count([1])
