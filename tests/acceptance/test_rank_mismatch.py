"""Ranks that ask for different things all get the same readable error, and go on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.values import PerReplica
from tests.acceptance.checks import local_ids, make_variable, same
from tests.support.ranks.layouts import layouts, per_replica

pytestmark = [pytest.mark.nodes, pytest.mark.counts, pytest.mark.min_ranks(2)]

Call = Callable[[Any], Any]
WIDE, TALL, LONG = np.zeros(6), np.zeros((2, 3)), np.zeros(7)
SQUARE = np.zeros((3, 3))
SINGLE = np.zeros(6, np.float32)


def everywhere(make: Call) -> Call:
    """Call ``make`` in every replica of this rank."""
    return lambda strategy: strategy.run(lambda: make(mpidist.get_replica_context()))


# What rank 0 calls and what the others call, in one line of code each, and words of both sides.
PAIRS: dict[str, tuple[Call, Call, tuple[str, str]]] = {
    "shape": (
        everywhere(lambda c: c.all_reduce("SUM", WIDE)),
        everywhere(lambda c: c.all_reduce("SUM", LONG)),
        ("6", "7"),
    ),
    "number of dimensions": (
        everywhere(lambda c: c.all_reduce("SUM", WIDE)),
        everywhere(lambda c: c.all_reduce("SUM", TALL)),
        ("6", "2, 3"),
    ),
    "op": (
        everywhere(lambda c: c.all_reduce("SUM", WIDE)),
        everywhere(lambda c: c.all_reduce("MEAN", WIDE)),
        ("SUM", "MEAN"),
    ),
    "MIN against MAX of a number": (
        everywhere(lambda c: c.all_reduce("MIN", 1.0)),
        everywhere(lambda c: c.all_reduce("MAX", 1.0)),
        ("MIN", "MAX"),
    ),
    "structure": (
        everywhere(lambda c: c.all_reduce("SUM", {"a": WIDE, "b": WIDE})),
        everywhere(lambda c: c.all_reduce("SUM", [WIDE, WIDE])),
        ("", ""),
    ),
    "keys": (
        everywhere(lambda c: c.all_reduce("SUM", {"a": WIDE, "b": WIDE})),
        everywhere(lambda c: c.all_reduce("SUM", {"a": WIDE, "c": WIDE})),
        ("", ""),
    ),
    "method": (
        everywhere(lambda c: c.all_reduce("SUM", WIDE)),
        everywhere(lambda c: c.all_gather(WIDE, axis=0)),
        ("reduce", "gather"),
    ),
    "dtype of all_gather": (
        everywhere(lambda c: c.all_gather(WIDE, axis=0)),
        everywhere(lambda c: c.all_gather(SINGLE, axis=0)),
        ("float64", "float32"),
    ),
    "op of reduce": (
        lambda s: s.reduce("SUM", per_replica(s, lambda i: WIDE), axis=None),
        lambda s: s.reduce("MEAN", per_replica(s, lambda i: WIDE), axis=None),
        ("SUM", "MEAN"),
    ),
    "axis or none": (
        lambda s: s.reduce("SUM", per_replica(s, lambda i: SQUARE), axis=0),
        lambda s: s.reduce("SUM", per_replica(s, lambda i: SQUARE[0]), axis=None),
        ("", ""),
    ),
    "other dimensions of gather": (
        lambda s: s.gather(per_replica(s, lambda i: np.zeros((1, 2))), axis=0),
        lambda s: s.gather(per_replica(s, lambda i: np.zeros((1, 3))), axis=0),
        ("2", "3"),
    ),
    "length of a batch": (
        lambda s: s.extended.batch_reduce_to("SUM", [(per_replica(s, lambda i: WIDE), "cpu:0")] * 2),
        lambda s: s.extended.batch_reduce_to("SUM", [(per_replica(s, lambda i: WIDE), "cpu:0")] * 3),
        ("", ""),
    ),
}

LAYOUTS = pytest.mark.parametrize("strategy", layouts("multi_worker-*", "central_node-1local"), indirect=True)


@pytest.fixture
def rank(strategy: Any) -> Iterator[int]:
    yield local_ids(strategy)[0] // len(local_ids(strategy))
    # Usable afterwards: the same call on all ranks works.
    total = strategy.reduce("SUM", strategy.run(lambda: np.ones(2)), axis=None)
    same(total, np.full(2, float(strategy.num_replicas_in_sync)))


@LAYOUTS
@pytest.mark.parametrize("what", PAIRS)
def test_both_sides_are_shown_on_all_ranks(strategy: Any, rank: int, what: str) -> None:
    ours, theirs, words = PAIRS[what]
    with pytest.raises(mpidist.MismatchError) as info:
        (ours if rank == 0 else theirs)(strategy)
    text = str(info.value)
    for word in words:
        assert word in text
    with mpidist.Communicator() as comm:
        assert set(comm.all_gather_object(text)) == {text}


def one_side(strategy: Any) -> Any:
    return strategy.reduce("SUM", per_replica(strategy, lambda i: WIDE), axis=None)


def other_side(strategy: Any) -> Any:
    return strategy.reduce("SUM", per_replica(strategy, lambda i: LONG), axis=None)


def one_replica() -> Any:
    return mpidist.get_replica_context().all_reduce("SUM", WIDE)


def other_replica() -> Any:
    return mpidist.get_replica_context().all_reduce("MAX", WIDE)


@LAYOUTS
def test_the_lines_of_user_code_are_shown(strategy: Any, rank: int) -> None:
    for call, sides in (
        (lambda: (one_side if rank == 0 else other_side)(strategy), (one_side, other_side)),
        (lambda: strategy.run(one_replica if rank == 0 else other_replica), (one_replica, other_replica)),
    ):
        with pytest.raises(mpidist.MismatchError) as info:
            call()
        for side in sides:
            assert f"{os.path.basename(__file__)}:{side.__code__.co_firstlineno + 1}" in str(info.value)


@LAYOUTS
def test_calls_in_another_order(strategy: Any, rank: int) -> None:
    value = per_replica(strategy, lambda i: np.ones((2, 2)))
    calls: list[Call] = [lambda s: s.reduce("SUM", value, axis=None), lambda s: s.gather(value, axis=0)]
    for call in calls if rank == 0 else reversed(calls):
        with pytest.raises(mpidist.MismatchError):
            call(strategy)


@LAYOUTS
def test_mismatches_after_many_equal_calls(strategy: Any, rank: int) -> None:
    """Once a plan is agreed a step costs nothing; the check must still be there."""
    for _ in range(5):
        strategy.run(one_replica)
    with pytest.raises(mpidist.MismatchError):
        strategy.run(one_replica if rank == 0 else other_replica)
    for _ in range(2):
        strategy.run(one_replica)


@LAYOUTS
def test_variables_that_differ(strategy: Any, rank: int) -> None:
    values = ((np.zeros(2), np.zeros(3)), (np.zeros(2), np.zeros(2, np.float32)), (0, 0.0))
    for ours, theirs in values:
        with pytest.raises(mpidist.MismatchError):
            make_variable(strategy, ours if rank == 0 else theirs)
    variable = make_variable(strategy, np.zeros(2), aggregation=mpidist.VariableAggregation.SUM)
    with pytest.raises(mpidist.MismatchError):
        strategy.run(lambda: variable.assign(np.ones(2)) if rank == 0 else variable.assign_add(np.ones(2)))


@LAYOUTS
def test_an_error_on_one_rank_reaches_all(strategy: Any, rank: int) -> None:
    """Every rank gets an error of its own or a PeerError, and nobody waits."""
    local = len(local_ids(strategy))
    bad_dtype = np.array([object()]) if rank == 0 else np.zeros(1)
    variable = make_variable(strategy, np.zeros(2), aggregation=mpidist.VariableAggregation.SUM)
    calls: list[Call] = [
        lambda s: s.reduce("SUM", per_replica(s, lambda i: bad_dtype), axis=None),
        lambda s: s.gather(per_replica(s, lambda i: np.zeros(2)), axis=5 if rank == 0 else 0),
        everywhere(lambda c: c.all_gather(np.zeros(() if rank == 0 else 1), axis=0)),
        lambda s: s.run(lambda: variable.assign(np.zeros(3 if rank == 0 else 2))),
    ]
    if local > 1:
        calls += [
            lambda s: s.reduce("SUM", PerReplica([np.zeros(2 + k * (rank == 0)) for k in range(local)]), axis=None),
            lambda s: s.gather(PerReplica([np.zeros((1, 2 + k * (rank == 0))) for k in range(local)]), axis=0),
            everywhere(lambda c: c.all_reduce("SUM", np.zeros(2 + c.local_replica_id * (rank == 0)))),
            everywhere(lambda c: c.all_gather(np.zeros((1, 2 + c.local_replica_id * (rank == 0))), axis=0)),
        ]
    for call in calls:
        with pytest.raises((ValueError, TypeError) if rank == 0 else mpidist.PeerError):
            call(strategy)
        total = strategy.reduce("SUM", strategy.run(lambda: 1), axis=None)
        same(total, strategy.num_replicas_in_sync)
