"""Losses of PyTorch and JAX stay theirs, with their gradients, also with a regularizer and under jit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist import compute_average_loss, scale_regularization_loss
from tests.support.ranks.layouts import layouts

pytestmark = pytest.mark.torch


@pytest.fixture
def torch() -> Any:
    return pytest.importorskip("torch", reason="PyTorch is missing: pip install '.[torch]'")


@pytest.fixture
def jax() -> Any:
    return pytest.importorskip("jax", reason="JAX is missing: pip install jax")


@pytest.mark.parametrize("strategy", layouts("default", "mirrored-2local", "multi_worker-1local"), indirect=True)
def test_a_model_with_a_regularizer_learns(torch: Any, strategy: mpidist.Strategy) -> None:
    n = strategy.num_replicas_in_sync

    def step() -> Any:
        weight = torch.tensor([1.0, 2.0], requires_grad=True)
        losses = (weight * torch.tensor([[1.0, 1.0], [3.0, 5.0]])).sum(1)
        loss = compute_average_loss(losses) + scale_regularization_loss([weight.sum(), 2 * weight[0]])
        loss.backward()
        return weight.grad

    gradients = strategy.experimental_local_results(strategy.run(step))
    for gradient in gradients:
        expected = (np.array([4.0, 6.0]) / 2 + [3.0, 1.0]) / n
        np.testing.assert_allclose(gradient.numpy(), expected, rtol=1e-6)


def test_weights_dtypes_and_empty_batches(torch: Any) -> None:
    losses = torch.tensor([2.0, 3.0], dtype=torch.float16, requires_grad=True)
    for weight in ([1.0, 0.0], np.array([1.0, 0.0]), torch.tensor([[1.0], [0.0]])):
        average = compute_average_loss(losses, weight, global_batch_size=4)
        assert (average.dtype, average.shape, average.item()) == (torch.float16, (), 0.5)
    (gradient,) = torch.autograd.grad(average, losses)
    assert gradient.tolist() == [0.25, 0.0]
    assert compute_average_loss(torch.full((70_000,), 1.0, dtype=torch.bfloat16), global_batch_size=70_000).item() == 1
    assert compute_average_loss(torch.tensor([1, 2]), global_batch_size=2).dtype == torch.float64
    nothing = compute_average_loss(losses, global_batch_size=0)
    assert nothing.item() == 0
    assert torch.autograd.grad(nothing, losses)[0].tolist() == [0.0, 0.0]
    assert scale_regularization_loss(losses).item() == 5
    with pytest.raises(ValueError, match="a scalar; expected an array"):
        compute_average_loss(losses.sum())
    with pytest.raises(ValueError, match="does not broadcast against"):
        compute_average_loss(losses, torch.ones(3), global_batch_size=2)


def test_a_weight_alone_may_have_gradients(torch: Any) -> None:
    weight = torch.tensor([1.0, 3.0], requires_grad=True)
    compute_average_loss(np.array([2.0, 4.0]), weight, global_batch_size=2).backward()
    assert weight.grad.tolist() == [1.0, 2.0]


def test_weights_and_lists_of_any_kind(torch: Any) -> None:
    losses = torch.ones(4, requires_grad=True)
    frozen = np.arange(4.0)
    frozen.flags.writeable = False
    for weight in (np.arange(4.0)[::-1], np.arange(4.0).astype(">f4"), frozen, [0, 1, 2, 3], range(4)):
        assert compute_average_loss(losses, weight, global_batch_size=4).item() == 1.5
    assert compute_average_loss([0.1, 0.2], torch.ones(2), global_batch_size=1).dtype == torch.float64
    assert compute_average_loss([], torch.ones(1), global_batch_size=4).item() == 0
    nested = [[losses[0], losses[1]], [losses[2], 3 * losses[3]]]
    compute_average_loss(nested, global_batch_size=2).backward()
    assert losses.grad.tolist() == [0.5, 0.5, 0.5, 1.5]


def test_under_jit_and_grad(jax: Any) -> None:
    jnp = jax.numpy

    def loss(parameters: Any, rows: Any) -> Any:
        average = compute_average_loss((rows * parameters).sum(axis=1), [1.0, 2.0])
        return average + scale_regularization_loss([parameters.sum(), 2 * parameters[0]])

    value, gradient = jax.jit(jax.value_and_grad(loss))(jnp.array([1.0, 2.0]), jnp.array([[1.0, 1.0], [3.0, 5.0]]))
    assert float(value) == (3 + 2 * 13) / 2 + 3 + 2
    assert gradient.tolist() == [7 / 2 + 3, 11 / 2 + 1]
    assert compute_average_loss(jnp.ones(3, jnp.bfloat16), global_batch_size=3).dtype == jnp.bfloat16
    assert isinstance(compute_average_loss(jnp.ones(3), global_batch_size=0), jax.Array)
