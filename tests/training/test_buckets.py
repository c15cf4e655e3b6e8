"""Gradients in buckets: the same numbers as in one go, started while others are still being computed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.optimizers import SGD
from mpidist.training import gradients as buckets
from tests.support.ranks.layouts import per_replica

SHAPES = [(40, 25), (25,), (25, 10), (10,), (7, 3, 2)]


def gradients_of(replica: int) -> list[np.ndarray]:
    return [np.random.default_rng([replica, i]).standard_normal(shape) for i, shape in enumerate(SHAPES)]


def trained(strategy: mpidist.Strategy, lazily: bool) -> list[np.ndarray]:
    with strategy.scope():
        variables = [mpidist.Variable(np.ones(shape)) for shape in SHAPES]
        optimizer = SGD(0.1, momentum=0.9)

    def step(gradients: Any) -> None:
        pairs = list(zip(gradients, variables, strict=True))[::-1]
        optimizer.apply_gradients((pair for pair in pairs) if lazily else pairs)

    for _ in range(3):
        strategy.run(step, (per_replica(strategy, gradients_of),))
    assert int(np.asarray(optimizer.iterations)) == 3
    return [variable.numpy() for variable in variables]


@pytest.mark.parametrize("lazily", [False, True])
@pytest.mark.parametrize("bucket_bytes", [1, 2000, 5000])
def test_buckets_give_the_same_bits(
    strategy: mpidist.Strategy, monkeypatch: pytest.MonkeyPatch, lazily: bool, bucket_bytes: int
) -> None:
    if strategy.num_replicas_in_sync > 2:
        expected = trained(strategy, lazily=False)
        close = np.testing.assert_allclose
    else:
        # The sum of two does not depend on the order, so neither on the bucket.
        expected = trained(strategy, lazily=False)
        close = np.testing.assert_array_equal
    monkeypatch.setattr(buckets, "BUCKET_BYTES", bucket_bytes)
    for one, other in zip(trained(strategy, lazily), expected, strict=True):
        close(one, other)


def test_a_bucket_starts_before_the_next_gradient_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "BUCKET_BYTES", 1)
    happened = []

    class Handle:
        def __init__(self, value: dict[str, Any]) -> None:
            self.value = value

        def wait(self) -> dict[str, Any]:
            happened.append("wait")
            return self.value

    class Context:
        num_replicas_in_sync = 2

        def all_reduce_async(self, op: mpidist.ReduceOp, value: dict[str, Any]) -> Handle:
            happened.append(f"start {op.name}")
            return Handle(value)

        def all_reduce(self, op: mpidist.ReduceOp, value: Any) -> Any:
            raise AssertionError("all have been started")

    def computed(v: mpidist.Variable) -> Iterator[tuple[np.ndarray, mpidist.Variable]]:
        for i in range(2):
            happened.append(f"compute {i}")
            yield np.ones(3), v

    with mpidist.OneDeviceStrategy("cpu:0").scope():
        v = mpidist.Variable(np.ones(3))
        context: Any = Context()
        assert [len(gradients) for gradients, _ in buckets.in_buckets(context, computed(v))] == [1, 1]
    assert happened == ["compute 0", "start SUM", "compute 1", "start SUM", "wait", "wait"]


def test_a_generator_is_checked_as_it_goes(strategy: mpidist.Strategy) -> None:
    with strategy.scope():
        v = mpidist.Variable(np.ones(3))
    optimizer = SGD(0.1)

    def nothing() -> None:
        optimizer.apply_gradients((None, w) for w in [v])

    def wrong_shape() -> None:
        optimizer.apply_gradients((np.ones(4), w) for w in [v])

    with pytest.raises(ValueError, match="only None"):
        strategy.run(nothing)
    with pytest.raises(ValueError, match=r"shape \(4,\)"):
        strategy.run(wrong_shape)
    np.testing.assert_array_equal(v.numpy(), 1.0)
