"""Models and states of the libraries around JAX; each call makes them anew."""

from __future__ import annotations

from typing import Any

import pytest


def flax_state(seed: int = 0, steps: int = 0) -> Any:
    """A TrainState of Flax with an optimizer of optax, after some steps."""
    for name in ("jax", "flax", "optax"):
        pytest.importorskip(name, reason=f"{name} is missing: pip install flax optax")
    import jax
    import optax
    from flax import linen
    from flax.training.train_state import TrainState

    optimizer = optax.chain(optax.clip(1.0), optax.inject_hyperparams(optax.adam)(learning_rate=0.1 * (seed + 1)))
    params = linen.Dense(3).init(jax.random.key(seed), jax.numpy.ones((1, 2)))["params"]
    state = TrainState.create(apply_fn=None, params=params, tx=optimizer)
    for _ in range(steps):
        state = state.apply_gradients(grads=state.params)
    return state


def equinox_model(seed: int = 0) -> Any:
    """A model as Equinox's documentation writes one: layers and functions in a list, a number, a setting."""
    for name in ("jax", "equinox"):
        pytest.importorskip(name, reason=f"{name} is missing: pip install equinox")
    import equinox
    import jax

    class Net(equinox.Module):  # type: ignore[misc, name-defined]
        layers: list[Any]
        scale: float
        name: str = equinox.field(static=True)

    first, second = jax.random.split(jax.random.key(seed))
    layers = [equinox.nn.Linear(2, 3, key=first), jax.nn.relu, equinox.nn.Linear(3, 1, use_bias=False, key=second)]
    return Net(layers, 0.5 + seed, f"net {seed}")
