"""Pytrees of JAX, of Flax, Equinox, optax and of the program, where mpidist takes structures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.core import nest
from tests.jax.models import equinox_model, flax_state

pytestmark = [pytest.mark.jax, pytest.mark.filterwarnings("default")]


@pytest.fixture
def point(jax: Any) -> Any:
    """A class that only the program knows, with a leaf and a setting."""

    class Point:
        def __init__(self, x: Any, name: str) -> None:
            self.x, self.name = x, name

    jax.tree_util.register_pytree_node(Point, lambda p: ((p.x,), p.name), lambda name, parts: Point(parts[0], name))
    return Point


def test_leaves_are_those_of_jax(jax: Any, point: Any) -> None:
    tree = {"state": flax_state(), "own": [point({"a": None, "b": 2.0}, "p")], "net": equinox_model()}
    assert nest.flatten(tree) == jax.tree.leaves(tree)
    doubled = nest.map_structure(lambda leaf: leaf if callable(leaf) else 2 * leaf, tree)
    assert jax.tree.structure(doubled) == jax.tree.structure(tree)
    assert (doubled["own"][0].x["b"], doubled["own"][0].name) == (4.0, "p")
    assert nest.pack_like(tree["own"], [7])[0].x == {"a": None, "b": 7}
    paths = [path for path, _ in nest.flatten_with_path(tree["own"])]
    assert paths == ["[0]['0/b']"]
    # Nothing of it has changed: the same object, as those that change in place need it.
    assert nest.map_structure(lambda leaf: leaf, tree["state"]) is tree["state"]


def test_through_run_and_reductions(jax: Any, point: Any) -> None:
    with mpidist.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"]) as strategy:
        n = strategy.num_replicas_in_sync

        def step(given: Any) -> Any:
            mine = mpidist.get_replica_context().replica_id_in_sync_group
            tree = jax.tree.map(lambda leaf: leaf * (mine + 1), given)
            return tree, mpidist.get_replica_context().all_reduce("SUM", tree)

        given = {"own": point(jax.numpy.ones(2), "p"), "state": flax_state().opt_state}
        mine, summed = strategy.run(step, (given,))
        reduced = strategy.reduce("SUM", mine, axis=None)
        for found in (reduced["own"].x, strategy.experimental_local_results(summed["own"].x)[1]):
            assert isinstance(found, jax.Array)
            assert found.tolist() == [n * (n + 1) / 2] * 2
        again = strategy.run(lambda tree: tree["own"].x.sum(), (mine,))
        assert [float(x) for x in strategy.experimental_local_results(again)] == [
            2.0 * (i + 1) for i in strategy.extended.local_replica_ids
        ]


def test_through_a_communicator(jax: Any) -> None:
    import equinox

    state = jax.tree.map(jax.numpy.asarray, flax_state())
    gradient = equinox.filter(equinox_model(), equinox.is_array)
    with mpidist.Communicator() as comm:
        for tree in (state, gradient):
            found = comm.all_reduce("SUM", tree)
            assert jax.tree.structure(found) == jax.tree.structure(tree)
            for mine, summed in zip(jax.tree.leaves(tree), jax.tree.leaves(found), strict=True):
                assert (type(summed), summed.dtype) == (type(mine), mine.dtype)
                np.testing.assert_allclose(summed, np.asarray(mine) * comm.size, rtol=1e-6)
        with pytest.raises(TypeError, match=r"layers/1.* is of type .*; expected a number"):
            comm.all_reduce("SUM", equinox_model())


def test_results_may_go_where_others_may(jax: Any) -> None:
    """As an array that JAX has made itself, on no device in particular; one that was put somewhere stays there."""
    with mpidist.Communicator() as comm:
        assert not comm.all_reduce("SUM", jax.numpy.ones(2)).committed
        placed = jax.device_put(np.ones(2, "float32"), jax.devices()[0])
        assert comm.all_reduce("SUM", placed).sharding == placed.sharding
        assert comm.all_reduce("SUM", jax.numpy.ones(2, "bfloat16")).dtype == "bfloat16"


def test_a_replica_that_changes_a_module_in_place(jax: Any) -> None:
    from flax import nnx

    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))

    def step(given: Any) -> None:
        given.bias[...] = given.bias[...] + 1

    with mpidist.MultiWorkerMirroredStrategy(devices=["cpu:0"]) as strategy:
        strategy.run(step, (model,))
    assert model.bias[...].tolist() == [1.0, 1.0]
