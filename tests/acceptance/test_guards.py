"""Every public method against the four rows of the table of contexts and against a foreign strategy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mpidist
from tests.acceptance.checks import scope_or_nothing
from tests.support.ranks.layouts import layouts

REPLICATED = ("mirrored-*", "mirrored_node-*", "multi_worker-*", "central*", "one_device")


def _dataset(_: Any = None) -> Any:
    return mpidist.Dataset.range(8).batch(8)


# Legal in the strategy's own cross-replica context and where no strategy is active; nowhere else.
CROSS_REPLICA: dict[str, Callable[[Any, Any], Any]] = {
    "run": lambda s, v: s.run(lambda: None),
    "reduce": lambda s, v: s.reduce("MEAN", 1.0, axis=None),
    "gather": lambda s, v: s.gather(np.zeros(2), axis=0),
    "experimental_distribute_dataset": lambda s, v: s.experimental_distribute_dataset(_dataset()),
    "distribute_datasets_from_function": lambda s, v: s.distribute_datasets_from_function(_dataset),
    "reduce_to": lambda s, v: s.extended.reduce_to("MEAN", 1.0, "cpu:0"),
    "batch_reduce_to": lambda s, v: s.extended.batch_reduce_to("MEAN", [(1.0, "cpu:0")]),
    "broadcast_to": lambda s, v: s.extended.broadcast_to(np.ones(2), "cpu:0"),
    "call_for_each_replica": lambda s, v: s.extended.call_for_each_replica(lambda: None),
}

OWN = pytest.mark.parametrize("strategy", layouts(*REPLICATED), indirect=True)


@pytest.fixture
def variable(strategy: Any) -> Any:
    with strategy.scope():
        return mpidist.Variable(0.0)


@pytest.mark.parametrize("inside", [False, True], ids=["no_scope", "scope"])
def test_allowed_in_cross_replica_context_and_without_a_strategy(strategy: Any, variable: Any, inside: bool) -> None:
    # One test for all methods: a row of the table is one rule.
    for name, call in CROSS_REPLICA.items():
        if name == "gather" and strategy.num_replicas_in_sync > 1:
            continue  # a plain value is no per-replica value; gather has tests of its own
        with scope_or_nothing(strategy, inside or name == "call_for_each_replica"):
            call(strategy, variable)


@OWN
def test_refused_in_replica_context(strategy: Any, variable: Any) -> None:
    accepted: list[str] = []

    def replica() -> None:
        for name, call in CROSS_REPLICA.items():
            try:
                call(strategy, variable)
            except RuntimeError as error:
                if "replica" not in str(error):
                    accepted.append(f"{name}: the message names no context: {error}")
            else:
                accepted.append(name)

    strategy.run(replica)
    assert accepted == []


@OWN
def test_refused_under_another_strategy(strategy: Any, variable: Any) -> None:
    accepted: list[str] = []

    def call_all(place: str) -> None:
        for name, call in CROSS_REPLICA.items():
            try:
                call(strategy, variable)
            except RuntimeError as error:
                if "OneDeviceStrategy" not in str(error):
                    accepted.append(f"{name} {place}: the message does not name the other strategy: {error}")
            else:
                accepted.append(f"{name} {place}")

    other = mpidist.OneDeviceStrategy("cpu:0")
    with other.scope():
        call_all("in its scope")
    other.run(lambda: call_all("in its run"))
    assert accepted == []


@OWN
def test_allowed_in_merge_fn_and_refused_in_the_update_of_another(strategy: Any, variable: Any) -> None:
    def merge(merged: Any) -> None:
        merged.reduce("MEAN", 1.0, axis=None)
        merged.extended.reduce_to("MEAN", 1.0, "cpu:0")
        merged.extended.batch_reduce_to("MEAN", [(1.0, "cpu:0")])
        merged.extended.update(variable, lambda c: c.assign_add(1.0))
        with merged.scope():
            pass

    def replica() -> None:
        mpidist.get_replica_context().merge_call(merge)

    strategy.run(replica)
    assert float(variable.numpy()) == 1.0


@OWN
def test_update_in_replica_context_goes_through_merge_call(strategy: Any, variable: Any) -> None:
    strategy.run(lambda: strategy.extended.update(variable, lambda c: c.assign_add(2.0)))
    assert all(float(component.numpy()) == 2.0 for component in variable.values)


@OWN
def test_update_under_another_strategy_is_refused(strategy: Any, variable: Any) -> None:
    with mpidist.OneDeviceStrategy("cpu:0").scope(), pytest.raises(RuntimeError, match="OneDeviceStrategy"):
        strategy.extended.update(variable, lambda c: c.assign_add(2.0))


@OWN
def test_colocate_vars_with_needs_the_scope(strategy: Any, variable: Any) -> None:
    with pytest.raises(RuntimeError, match=r"with strategy\.scope\(\)"), strategy.extended.colocate_vars_with(variable):
        pass
    colocated = strategy.extended.colocate_vars_with
    with strategy.scope(), colocated(variable), colocated(variable):
        slot = mpidist.Variable(1.0)
    assert slot.values[0].device == variable.values[0].device
    foreign = mpidist.Variable(0.0)
    with strategy.scope(), pytest.raises(ValueError), strategy.extended.colocate_vars_with(foreign):
        pass


REPLICA_ONLY: dict[str, Callable[[Any], Any]] = {
    "merge_call": lambda c: c.merge_call(lambda s: None),
    "all_reduce": lambda c: c.all_reduce("SUM", 1.0),
    "all_reduce_async": lambda c: c.all_reduce_async("SUM", 1.0),
    "all_gather": lambda c: c.all_gather(np.zeros(1), axis=0),
}


@OWN
@pytest.mark.parametrize("name", REPLICA_ONLY)
def test_replica_context_methods_outside_their_replica(strategy: Any, name: str) -> None:
    contexts: list[Any] = []
    nested: list[str] = []
    call = REPLICA_ONLY[name]

    def merge(_: Any, context: Any) -> None:
        # Inside merge_fn one is in cross-replica context, so a nested merge_call is illegal too.
        try:
            call(contexts[0])
        except RuntimeError as error:
            nested.append(str(error))

    def replica() -> None:
        context = mpidist.get_replica_context()
        contexts.append(context)
        context.merge_call(merge, args=(None,))

    strategy.run(replica)
    assert len(nested) == 1
    assert "replica" in nested[0]
    with pytest.raises(RuntimeError, match="replica"):
        call(contexts[0])
    with strategy.scope(), pytest.raises(RuntimeError, match="replica"):
        call(contexts[0])
    with mpidist.OneDeviceStrategy("cpu:0").scope(), pytest.raises(RuntimeError):
        call(contexts[0])

    def in_another_strategys_replica() -> None:
        with pytest.raises(RuntimeError):
            call(contexts[0])

    mpidist.OneDeviceStrategy("cpu:0").run(in_another_strategys_replica)


@OWN
def test_local_methods_work_in_every_row(strategy: Any, variable: Any) -> None:
    """They combine nothing, so no context is wrong for them."""
    with strategy.scope():
        assert strategy.experimental_local_results(5) == (5,)
        assert strategy.extended.variable_created_in_scope(variable)
    assert strategy.experimental_local_results(5) == (5,)
    strategy.run(lambda: strategy.num_replicas_in_sync)


@OWN
def test_everything_of_cross_replica_context_works_in_merge_fn_and_in_an_update(strategy: Any, variable: Any) -> None:
    n = strategy.num_replicas_in_sync
    totals: list[Any] = []

    def reduce_ids() -> Any:
        def one() -> Any:
            return mpidist.get_replica_context().all_reduce("SUM", 1)

        assert all(part == n for part in strategy.experimental_local_results(strategy.run(one)))
        ids = strategy.run(lambda: mpidist.get_replica_context().replica_id_in_sync_group)
        totals.append(int(strategy.reduce("SUM", ids, axis=None)))

    strategy.run(lambda: mpidist.get_replica_context().merge_call(lambda s: reduce_ids()))
    strategy.extended.update(variable, lambda component: reduce_ids())
    assert totals == [sum(range(n))] * (1 + len(variable.values))


@OWN
def test_the_strategy_cannot_be_set_and_input_not_taken_inside_run(strategy: Any) -> None:
    iterator = iter(strategy.experimental_distribute_dataset(_dataset()))

    def replica() -> None:
        with pytest.raises(RuntimeError, match="scope"):
            mpidist.experimental_set_strategy(None)
        with pytest.raises(ValueError, match="next"):
            next(iterator)

    strategy.run(replica)
