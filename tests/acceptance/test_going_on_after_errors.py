"""A program that catches an error goes on in step, or every rank learns of it."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

import numpy as np
import pytest

import mpidist
from tests.support.ranks.layouts import layouts


def context() -> Any:
    return mpidist.get_replica_context()


@pytest.mark.parametrize("strategy", layouts("mirrored-2local", "multi_worker-2local"), indirect=True)
def test_a_replica_that_reduces_in_finally_after_another_failed(strategy: Any) -> None:
    first = strategy.extended.local_replica_ids[0]

    def step() -> None:
        if context().replica_id_in_sync_group != first:
            raise ValueError("a bad batch")
        try:
            context().all_reduce("SUM", 1.0)
        finally:
            context().all_reduce("SUM", 1.0)

    with pytest.raises(ValueError, match="a bad batch"):
        strategy.run(step)


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("strategy", layouts("multi_worker*"), indirect=True)
def test_an_error_in_the_step_of_one_rank_is_announced(strategy: Any) -> None:
    is_odd = strategy.extended.local_replica_ids[0] == 0

    def step() -> Any:
        if is_odd:
            raise ValueError("a bad batch")
        return context().all_reduce("SUM", 1.0)

    with pytest.raises((ValueError, mpidist.PeerError), match="a bad batch"):
        strategy.run(step)
    n = strategy.num_replicas_in_sync
    for result in strategy.experimental_local_results(strategy.run(lambda: context().all_reduce("SUM", 2.0))):
        assert result == 2 * n


@pytest.mark.min_ranks(2)
def test_an_error_in_a_with_block_is_announced(request: pytest.FixtureRequest) -> None:
    from mpi4py import MPI

    is_odd = MPI.COMM_WORLD.rank == 1
    strategy = mpidist.MultiWorkerMirroredStrategy()
    with pytest.raises((ValueError, mpidist.PeerError), match="lost"), strategy:
        if is_odd:
            raise ValueError("lost")
        strategy.run(lambda: context().all_reduce("SUM", 1.0))
    strategy.close()


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("strategy", layouts("multi_worker-1local", "central_node-1local"), indirect=True)
def test_a_mismatch_advises_should_checkpoint(strategy: Any) -> None:
    with pytest.raises(mpidist.MismatchError, match="`if strategy.extended.should_checkpoint:`"):
        if mpidist.rank() == 0:
            strategy.reduce("SUM", 1.0, axis=None)
        else:
            strategy.gather(np.ones(3), axis=0)


@pytest.mark.min_ranks(2)
@pytest.mark.parametrize("strategy", layouts("multi_worker*"), indirect=True)
def test_variables_in_another_order_on_another_rank(strategy: Any) -> None:
    with strategy.scope():
        variables = [mpidist.Variable(np.zeros(3), name=name) for name in "ab"]
        optimizer = mpidist.optimizers.SGD(1.0)
        optimizer.build(variables)
    in_order = strategy.extended.local_replica_ids[0] == 0
    pairs = list(zip([np.ones(3), np.full(3, 100.0)], variables, strict=True))
    with pytest.raises(mpidist.MismatchError, match="000000 a.*000001 b"):
        strategy.run(lambda: optimizer.apply_gradients(pairs if in_order else pairs[::-1]))


@pytest.mark.parametrize("op", ["MIN", "MAX"])
def test_an_empty_replica_does_not_decide_a_minimum(strategy: Any, op: str) -> None:
    for dtype in (np.float32, np.int16):
        value = strategy.experimental_distribute_values_from_function(
            lambda ctx, d=dtype: np.arange(3, 3 + ctx.replica_id_in_sync_group * 0 + 2, dtype=d)[
                : 0 if ctx.replica_id_in_sync_group else 2
            ]
        )
        result = strategy.reduce(op, value, axis=0)
        assert result == (3 if op == "MIN" else 4)


def test_dicts_of_other_classes_pass_through_run(strategy: Any) -> None:
    given = defaultdict(list, a=1.0)
    for result in strategy.experimental_local_results(strategy.run(lambda d: d, args=(given,))):
        assert isinstance(result, defaultdict)
        assert result.default_factory is list
        assert dict(result) == {"a": 1.0}
    ordered = strategy.run(lambda: OrderedDict(b=1.0, a=2.0))
    assert list(ordered) == ["b", "a"]


def test_a_variable_does_not_keep_the_array_it_came_from() -> None:
    initial = np.ones(1000)
    variable = mpidist.Variable(initial)
    assert variable.initial_value is initial
    del initial
    with pytest.raises(RuntimeError, match="is gone"):
        _ = variable.initial_value
    assert mpidist.Variable(2.5).initial_value == 2.5


def test_small_results_do_not_keep_large_ones() -> None:
    with mpidist.Communicator() as comm:
        small, large = comm.all_reduce("SUM", [np.ones(3), np.ones(100_000)])
    assert small.base is None
    assert large.size == 100_000


def test_formatting_a_variable_and_a_per_replica_value() -> None:
    assert f"{mpidist.Variable(2.5):.2f}" == "2.50"
    with mpidist.MirroredStrategy(["cpu:0", "cpu:1"], communicator=_self()) as strategy:
        losses = strategy.run(lambda: 1.5)
        with pytest.raises(ValueError, match="strategy.reduce"):
            f"{losses:.2f}"
        with pytest.raises(ValueError, match="strategy.reduce"):
            _ = losses == 1.5
        assert not hasattr(losses, "shape")
        assert "PerReplica" in f"{losses}"


def _self() -> Any:
    from mpi4py import MPI

    return MPI.COMM_SELF
