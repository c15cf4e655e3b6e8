"""Pytrees in checkpoints: new ones take their place when they are restored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mpidist
from tests.jax.models import equinox_model, flax_state

pytestmark = [pytest.mark.jax, pytest.mark.filterwarnings("default")]


@pytest.fixture
def saving() -> Any:
    with mpidist.MultiWorkerMirroredStrategy() as strategy, strategy.scope():
        yield strategy


def assert_equal_leaves(jax: Any, found: Any, expected: Any) -> None:
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if not callable(one):
            assert type(one) is type(other)
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("options", [{}, {"sharded": True}, {"async_save": True}], ids=["plain", "sharded", "async"])
def test_trees_of_flax_equinox_and_optax(jax: Any, saving: Any, options: Any, tmp_path: Path) -> None:
    import equinox
    import optax
    from flax.core import FrozenDict

    def made(seed: int, steps: int) -> dict[str, Any]:
        model = equinox_model(seed)
        return {
            "state": flax_state(seed, steps),
            "model": model,
            "opt_state": optax.adam(0.1).init(equinox.filter(model, equinox.is_array)),
            "frozen": FrozenDict({"a": {"b": jax.numpy.full(2, seed)}}),
            "in_dict": {"tree": [equinox_model(seed).layers[0]]},
        }

    checkpoint = mpidist.Checkpoint(**made(0, 2))
    path = checkpoint.save(tmp_path / "ckpt", **options)
    checkpoint.wait()
    fresh = mpidist.Checkpoint(**made(1, 0))
    before = fresh.state
    fresh.restore(path).assert_consumed()
    for name in made(0, 0):
        assert_equal_leaves(jax, getattr(fresh, name), getattr(checkpoint, name))
    assert (fresh.state.step, before.step) == (2, 0)
    # Settings are those of the program.
    assert (fresh.model.scale, fresh.model.name) == (0.5, "net 1")
    if saving.extended.should_checkpoint:
        manifest = json.loads((Path(path) / "manifest.json").read_text())
        assert {"state/params/kernel", "state/opt_state/1/count", "model/layers/0/weight"} <= manifest["tensors"].keys()
        assert manifest["values"] == {"state/step": 2, "model/scale": 0.5}


def test_what_does_not_fit_is_named(jax: Any, saving: Any, tmp_path: Path) -> None:
    path = mpidist.Checkpoint(state=flax_state()).save(tmp_path / "ckpt")
    other = flax_state().replace(params={"kernel": jax.numpy.ones((2, 4)), "bias": jax.numpy.ones(3)})
    with pytest.raises(ValueError, match=r"'state/params/kernel' has shape \(2, 3\).* and shape \(2, 4\)"):
        mpidist.Checkpoint(state=other).restore(path)
    with pytest.raises(TypeError, match=r"key_data"):
        mpidist.Checkpoint(key=jax.random.key(0)).save(tmp_path / "key")


@pytest.mark.one_rank
def test_trees_in_attributes(jax: Any, tmp_path: Path) -> None:
    class Trainer:
        def __init__(self, seed: int) -> None:
            self.state, self.histories = flax_state(seed, seed), {"a": [jax.numpy.full(2, seed)]}

    trainer, fresh = Trainer(3), Trainer(0)
    path = mpidist.Checkpoint(trainer=trainer).save(tmp_path / "ckpt")
    mpidist.Checkpoint(trainer=fresh).restore(path).assert_consumed()
    assert_equal_leaves(jax, (fresh.state, fresh.histories), (trainer.state, trainer.histories))
