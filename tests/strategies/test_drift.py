"""Copies of variables that ranks change by themselves are compared at their next collective; on 2 and 3 ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

import mpidist

pytestmark = [pytest.mark.own_strategy, pytest.mark.counts, pytest.mark.nodes, pytest.mark.min_ranks(2)]

RANK = MPI.COMM_WORLD.Get_rank()
IS_LAST = MPI.COMM_WORLD.Get_size() - 1 == RANK


@pytest.fixture(name="strategy")
def _strategy() -> Any:
    with mpidist.MultiWorkerMirroredStrategy(devices=["cpu:0"]) as strategy:
        yield strategy


def weights(strategy: Any, count: int = 3, **options: Any) -> mpidist.Variable:
    with strategy.scope():
        return mpidist.Variable(np.zeros(count), name="weights", **options)


def scattered(variable: mpidist.Variable, number: float) -> None:
    variable.scatter_update(mpidist.IndexedSlices([number], [1], (3,)))


ACTS: dict[str, Callable[[Any, mpidist.Variable, float], Any]] = {
    "assign": lambda strategy, variable, number: variable.assign(np.full(3, number)),
    "assign_add": lambda strategy, variable, number: variable.assign_add(np.full(3, number)),
    "scatter_update": lambda strategy, variable, number: scattered(variable, number),
    "update": lambda strategy, variable, number: strategy.extended.update(
        variable, lambda v, x: v.assign(np.full(3, x)), args=(number,)
    ),
}
NEXT: dict[str, Callable[[Any], Any]] = {
    "reduce": lambda strategy: strategy.reduce("SUM", 1.0, axis=None),
    "large": lambda strategy: strategy.reduce("SUM", np.ones(100_000), axis=None),
    "async": lambda strategy: strategy.run(
        lambda: mpidist.get_replica_context().all_reduce_async("SUM", np.ones(9)).wait()
    ),
    "gather": lambda strategy: strategy.gather(np.ones((2, 2)), axis=0),
    "variable": lambda strategy: weights(strategy),
}


@pytest.mark.parametrize("act", ACTS)
@pytest.mark.parametrize("after", NEXT)
def test_what_differs_is_an_error_at_the_next_collective(strategy: Any, act: str, after: str) -> None:
    variable = weights(strategy)
    ACTS[act](strategy, variable, 2.0)
    NEXT[after](strategy)
    ACTS[act](strategy, variable, float(RANK))
    with pytest.raises(mpidist.MismatchError, match=r"(?s)variable 'weights' at .*test_drift\.py:\d+.*checksum"):
        NEXT[after](strategy)
    assert NEXT[after](strategy) is not None


def test_one_rank_alone(strategy: Any) -> None:
    variable = weights(strategy)
    if IS_LAST:
        variable.assign(np.ones(3))
    with pytest.raises(mpidist.MismatchError, match=r"assign outside of strategy\.run\(\) of variable 'weights'"):
        strategy.reduce("SUM", 1.0, axis=None)


def test_what_is_alike_is_no_error_whatever_is_under_way(strategy: Any) -> None:
    """A work that is started before an assignment says nothing of it, on whichever rank it is carried out later."""
    variable = weights(strategy)
    context = mpidist.get_replica_context

    def step() -> Any:
        return [context().all_reduce_async("SUM", np.full(n, 1.0)) for n in (5, 50_000)]

    for number in range(20):
        works = strategy.run(step)
        if IS_LAST:
            works[0].wait()
        variable.assign(np.full(3, number))
        more = strategy.run(step)
        for work in (*works, *more):
            assert work.wait()[0] == strategy.num_replicas_in_sync


def test_large_variables_are_told_apart_by_pieces(strategy: Any) -> None:
    variable = weights(strategy, 1_000_000)
    variable.assign(np.arange(1e6))
    strategy.reduce("SUM", 1.0, axis=None)
    variable.assign(np.arange(1e6) + RANK)
    with pytest.raises(mpidist.MismatchError, match="weights"):
        strategy.reduce("SUM", 1.0, axis=None)

    row = mpidist.IndexedSlices([float(RANK)], [300_000], (1_000_000,))
    variable.scatter_add(row)
    with pytest.raises(mpidist.MismatchError, match="SCATTER_ADD|scatter_add|ADD"):
        strategy.reduce("SUM", 1.0, axis=None)


def test_what_is_as_it_was_is_no_drift(strategy: Any) -> None:
    """The first rank may evaluate with other weights, if it puts its own back."""
    variable = weights(strategy)
    variable.assign(np.ones(3))
    if RANK == 0:
        kept = variable.numpy().copy()
        variable.assign(np.full(3, 7.0))
        variable.assign(kept)
    for _ in range(2):
        assert strategy.reduce("SUM", 1.0, axis=None) == strategy.num_replicas_in_sync
        if RANK == 0:
            variable.assign(np.full(3, 7.0))
            variable.assign(np.ones(3))


def test_copies_of_one_rank_are_its_own(strategy: Any) -> None:
    variable = weights(strategy)
    if RANK == 0:
        with strategy.scope():
            copy.deepcopy(variable).assign(np.ones(3))
    assert strategy.reduce("SUM", 1.0, axis=None) == strategy.num_replicas_in_sync


def test_copies_that_may_differ(strategy: Any) -> None:
    variable = weights(strategy, synchronization=mpidist.VariableSynchronization.ON_READ)
    variable.assign(np.full(3, float(RANK)))
    assert strategy.reduce("SUM", 1.0, axis=None) == strategy.num_replicas_in_sync


def test_changes_before_copies_differ_are_compared(strategy: Any) -> None:
    variable = weights(strategy)
    own = strategy.experimental_distribute_values_from_function(lambda _: np.full(3, float(RANK)))
    variable.assign(np.ones(3))
    variable.assign(own)
    assert strategy.run(lambda: mpidist.get_replica_context().all_reduce("SUM", 1)) == strategy.num_replicas_in_sync
    other = weights(strategy)
    other.assign(np.full(3, float(IS_LAST)))
    other.assign(own)
    with pytest.raises(mpidist.MismatchError, match="assign outside of strategy.run"):
        strategy.run(lambda: mpidist.get_replica_context().all_reduce("SUM", 1))


@pytest.mark.parametrize("inside", [True, False])
def test_schedules_that_differ(strategy: Any, inside: bool) -> None:
    variable = weights(strategy)
    with strategy.scope():
        optimizer = mpidist.optimizers.SGD(lambda step: 0.1 if step < 2 else 0.1 + 0.1 * IS_LAST)

    def apply() -> None:
        optimizer.apply_gradients([(np.ones(3), variable)])

    def step() -> None:
        if inside:
            strategy.run(apply)
        else:
            apply()

    step()
    step()
    with pytest.raises(mpidist.MismatchError, match=r"(?s)^(?=.*rate 0\.1\b)(?=.*rate 0\.2\b)"):
        step()


def test_an_error_of_one_rank_is_told_all_the_same(strategy: Any) -> None:
    variable = weights(strategy)
    variable.assign(np.ones(3))
    wanted = ValueError if IS_LAST else mpidist.PeerError
    with pytest.raises(wanted):
        strategy.reduce("SUM" if not IS_LAST else "SUMM", 1.0, axis=None)
    assert strategy.reduce("SUM", 1.0, axis=None) == strategy.num_replicas_in_sync
