"""mpidist.jax.all_reduce, with and without jit, and its gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpidist

pytestmark = [pytest.mark.jax, pytest.mark.filterwarnings("default")]


@pytest.fixture
def all_reduce(jax: Any) -> Any:
    return mpidist.jax.all_reduce


def tree(jax: Any) -> Any:
    """What this rank gives: two dtypes, an empty array and a number."""
    jnp = jax.numpy
    mine = mpidist.rank() + 1
    return {
        "w": jnp.arange(6.0).reshape(2, 3) * mine,
        "n": (jnp.array([mine, 7]), mine),
        "none": [None, jnp.ones((0, 2))],
    }


@pytest.mark.parametrize("is_jitted", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("op", ["SUM", "MEAN", "MIN", "MAX", "PROD"])
def test_every_operation(jax: Any, all_reduce: Any, op: str, is_jitted: bool) -> None:
    def reduce(value: Any) -> Any:
        return all_reduce(op, value)

    given = tree(jax)
    found = (jax.jit(reduce) if is_jitted else reduce)(given)
    assert jax.tree.structure(found) == jax.tree.structure(given)
    combine = {"SUM": np.sum, "MEAN": np.mean, "MIN": np.min, "MAX": np.max, "PROD": np.prod}[op]
    ranks = np.arange(mpidist.size()) + 1
    np.testing.assert_allclose(
        found["w"], combine([np.arange(6.0).reshape(2, 3) * r for r in ranks], axis=0), rtol=1e-6
    )
    np.testing.assert_allclose(found["n"][0], combine([[r, 7] for r in ranks], axis=0), rtol=1e-6)
    np.testing.assert_allclose(found["n"][1], combine(ranks), rtol=1e-6)
    assert found["none"][1].shape == (0, 2)
    assert all(isinstance(leaf, jax.Array) for leaf in (found["w"], found["n"][0], found["none"][1]))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8", "complex64"])
def test_dtypes(jax: Any, all_reduce: Any, dtype: str) -> None:
    value = jax.numpy.full(5, mpidist.rank() + 1, dtype)
    for found in (all_reduce("SUM", value), jax.jit(lambda x: all_reduce("SUM", x))(value)):
        assert found.dtype == dtype
        assert np.asarray(found, "complex64").tolist() == [mpidist.size() * (mpidist.size() + 1) / 2] * 5
    with pytest.raises(TypeError, match="SUM of bool is not defined"):
        jax.jit(lambda x: all_reduce("SUM", x))(jax.numpy.array([True]))
    assert jax.jit(lambda x: all_reduce("BOR", x))(jax.numpy.array([mpidist.rank() == 0, False])).tolist() == [
        True,
        False,
    ]


@pytest.mark.parametrize("is_jitted", [False, True], ids=["eager", "jit"])
def test_gradients_are_those_of_the_sum_of_all_losses(jax: Any, all_reduce: Any, is_jitted: bool) -> None:
    mine, n = mpidist.rank() + 1, mpidist.size()
    total = n * (n + 1) / 2

    def loss(x: Any, op: str) -> Any:
        reduced = all_reduce(op, {"x": x, "count": jax.numpy.int32(2)})
        return mine * (reduced["x"] ** 2).sum()

    gradient = jax.grad(loss)
    if is_jitted:
        gradient = jax.jit(gradient, static_argnums=1)
    x = jax.numpy.array([1.0, 3.0]) * mine
    sums = np.array([1.0, 3.0]) * total
    np.testing.assert_allclose(gradient(x, "SUM"), 2 * sums * total, rtol=1e-6)
    np.testing.assert_allclose(gradient(x, "MEAN"), 2 * sums / n * total / n, rtol=1e-6)
    with pytest.raises(TypeError, match="all_reduce MAX has no gradient here, SUM and MEAN have"):
        gradient(x, "MAX")
    # What stands behind stop_gradient needs none.
    assert jax.grad(lambda x: (x * all_reduce("MAX", jax.lax.stop_gradient(x))).sum())(x).tolist() == [n, 3 * n]


def test_gradient_twice(jax: Any, all_reduce: Any) -> None:
    def loss(x: Any) -> Any:
        return all_reduce("SUM", x) ** 3

    n = mpidist.size()
    # The first is n * 3 (n x)^2, summed over the ranks as the second takes it.
    second = jax.jit(jax.grad(jax.grad(loss)))(jax.numpy.float32(1.0))
    assert float(second) == 6 * n**3


def test_vmap_reduces_the_whole_batch(jax: Any, all_reduce: Any) -> None:
    rows = jax.numpy.arange(6.0).reshape(3, 2) * (mpidist.rank() + 1)
    factor = mpidist.size() * (mpidist.size() + 1) / 2

    def loss(x: Any, weight: Any) -> Any:
        both = all_reduce("SUM", (x, weight))
        return (both[0] * both[1]).sum()

    for fn in (jax.vmap(loss, (0, None)), jax.jit(jax.vmap(loss, (0, None)))):
        np.testing.assert_allclose(fn(rows, 2.0), np.arange(6.0).reshape(3, 2).sum(1) * factor * 2 * mpidist.size())
    gradients = jax.vmap(jax.grad(lambda x: all_reduce("SUM", x).sum()))(rows)
    assert gradients.tolist() == [[mpidist.size()] * 2] * 3


def test_in_order_within_loops(jax: Any, all_reduce: Any) -> None:
    def body(carry: Any, x: Any) -> Any:
        carry = all_reduce("MEAN", carry + x)
        return carry, all_reduce("SUM", x)

    xs = jax.numpy.arange(5.0) + mpidist.rank()
    carry, sums = jax.jit(lambda xs: jax.lax.scan(body, jax.numpy.float32(0), xs))(xs)
    expected = np.arange(5.0) + (mpidist.size() - 1) / 2
    np.testing.assert_allclose(carry, expected.sum(), rtol=1e-6)
    np.testing.assert_allclose(sums, expected * mpidist.size(), rtol=1e-6)


def test_in_a_strategy_it_is_that_of_the_replica(jax: Any, all_reduce: Any) -> None:
    from mpi4py import MPI

    @jax.jit
    def reduce(w: Any) -> Any:
        # Large enough for JAX to take a thread of its own.
        return all_reduce("SUM", jax.numpy.tanh(w @ w)).mean()

    w = jax.numpy.ones((600, 600))
    with mpidist.MirroredStrategy(["cpu:0"], communicator=MPI.COMM_SELF) as alone:
        assert float(alone.run(reduce, (w,))) == 1
        assert float(reduce(w)) == mpidist.size()
        with alone.scope():
            assert float(reduce(w)) == mpidist.size()
    with mpidist.MultiWorkerMirroredStrategy() as strategy:
        assert float(strategy.run(reduce, (w,))) == mpidist.size()


def test_several_replicas_of_a_rank(jax: Any, all_reduce: Any) -> None:
    with mpidist.MultiWorkerMirroredStrategy(devices=["cpu:0", "cpu:1"]) as strategy:
        found = strategy.run(lambda: all_reduce("SUM", jax.numpy.ones(2)))
        assert [each.tolist() for each in strategy.experimental_local_results(found)] == [
            [2.0 * mpidist.size()] * 2
        ] * 2
        with pytest.raises(
            RuntimeError, match="2 replicas on this rank, which take turns.*between two jitted functions"
        ):
            strategy.run(jax.jit(lambda: all_reduce("SUM", jax.numpy.ones(2) + mpidist.rank())))


@pytest.mark.min_ranks(2)
def test_a_mismatch_names_the_lines_of_the_program(jax: Any) -> None:
    reduce = jax.jit(lambda x: mpidist.jax.all_reduce("SUM", x))
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"(?s)float32\(1,\).*test_reduction.py:.*float32\(2,\)"):
        reduce(jax.numpy.ones(mpidist.rank() % 2 + 1))


@pytest.mark.min_ranks(2)
def test_a_mismatch_does_not_advise_a_strategy(all_reduce: Any) -> None:
    with pytest.raises(mpidist.MismatchError, match=r"`if mpidist\.rank\(\) == 0:`"):
        if mpidist.rank() == 0:
            all_reduce("SUM", 1.0)
        all_reduce("MAX", 1.0)


def test_another_reduction_in_a_jitted_function(jax: Any) -> None:
    def reduce(x: Any) -> Any:
        return mpidist.get_replica_context().all_reduce("SUM", {"w": x})

    with pytest.raises(TypeError, match="no value while JAX traces a function.*Use mpidist.jax.all_reduce there"):
        jax.jit(reduce)(1.0)


@pytest.mark.one_rank
def test_where_jax_has_started_before(jax: Any, all_reduce: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from mpidist.jax import startup

    monkeypatch.setattr(startup._Status, "is_in_order", False)
    with pytest.raises(RuntimeError, match="before mpidist.jax was imported.*JAX_CPU_ENABLE_ASYNC_DISPATCH=0"):
        jax.jit(lambda x: all_reduce("SUM", x))(1.0)
    assert all_reduce("SUM", 1.0) == 1.0
