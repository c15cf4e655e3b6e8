"""What makes copies of variables drift apart is found: other settings, or other gradients outside of run, on a rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.core.errors import MismatchError
from mpidist.optimizers import SGD, Adam

pytestmark = [pytest.mark.counts, pytest.mark.min_ranks(2)]


@pytest.fixture
def strategy() -> Any:
    with mpidist.MultiWorkerMirroredStrategy() as made:
        yield made


def rank_of(strategy: Any) -> int:
    return int(strategy.extended.communicator.rank)


def test_learning_rates_that_differ_from_the_beginning(strategy: Any) -> None:
    with strategy.scope():
        v, optimizer = mpidist.Variable(0.0), SGD(0.1 * (rank_of(strategy) + 1))
    with pytest.raises(MismatchError, match=r"(?s)SGD\(learning_rate=0\.1, .*SGD\(learning_rate=0\.2, "):
        strategy.run(lambda: optimizer.apply_gradients([(1.0, v)]))
    assert v.numpy() == 0.0


@pytest.mark.parametrize("name", ["learning_rate", "beta_1"])
def test_a_setting_that_one_rank_changes(strategy: Any, name: str) -> None:
    with strategy.scope():
        v, optimizer = mpidist.Variable(0.0), Adam(0.1)

    def step() -> None:
        strategy.run(lambda: optimizer.apply_gradients([(1.0, v)]))

    step()
    setattr(optimizer, name, 0.5)  # on all
    step()
    before = v.numpy()
    if rank_of(strategy) == 0:
        setattr(optimizer, name, 0.25)
    with pytest.raises(MismatchError, match=f"{name}=0.25"):
        step()
    assert v.numpy() == before


@pytest.mark.parametrize("replicas", [1, 2])
def test_unsummed_gradients_inside_run_raise(replicas: int) -> None:
    with mpidist.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"][:replicas]) as strategy:
        with strategy.scope():
            v, optimizer = mpidist.Variable(np.zeros(3)), SGD(0.5)

        def step(own: float, of_rank: float) -> None:
            context = mpidist.get_replica_context()
            assert context is not None
            replica = context.replica_id_in_sync_group
            gradient = np.full(3, 1.0 + own * (replica % replicas) + of_rank * (replica // replicas))
            optimizer.apply_gradients([(gradient, v)], experimental_aggregate_gradients=False)

        strategy.run(step, args=(0.0, 0.0))
        with pytest.raises(MismatchError, match="must be the same on all ranks: their checksum is"):
            strategy.run(step, args=(0.0, 1.0))
        np.testing.assert_array_equal(v.numpy(), [-0.5] * 3)
        if replicas > 1:
            with pytest.raises(ValueError, match=r"differ between the replicas of this rank.*Pass sums"):
                strategy.run(step, args=(1.0, 0.0))


def test_gradients_of_each_rank_outside_of_run(strategy: Any) -> None:
    with strategy.scope():
        v, table = mpidist.Variable(np.zeros(3)), mpidist.Variable(np.zeros((4, 2)))
        optimizer = SGD(0.5)
    same = mpidist.IndexedSlices(np.ones((1, 2)), np.array([2]), (4, 2))
    optimizer.apply_gradients([(np.ones(3), v), (same, table)])
    own = np.full(3, float(rank_of(strategy)))
    with pytest.raises(MismatchError, match="must be the same on all ranks: their checksum is"):
        optimizer.apply_gradients([(own, v)])
    np.testing.assert_array_equal(v.numpy(), [-0.5] * 3)
