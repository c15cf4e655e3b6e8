"""Ranks that ask for different things all get the same readable error, and go on."""

from __future__ import annotations

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
WIDE = np.zeros(6)


def everywhere(make: Call) -> Call:
    """Call ``make`` in every replica of this rank."""
    return lambda strategy: strategy.run(lambda: make(mpidist.get_replica_context()))


LAYOUTS = pytest.mark.parametrize("strategy", layouts("multi_worker-*", "central_node-1local"), indirect=True)


@pytest.fixture
def rank(strategy: Any) -> Iterator[int]:
    yield local_ids(strategy)[0] // len(local_ids(strategy))
    # Usable afterwards: the same call on all ranks works.
    total = strategy.reduce("SUM", strategy.run(lambda: np.ones(2)), axis=None)
    same(total, np.full(2, float(strategy.num_replicas_in_sync)))


def one_replica() -> Any:
    return mpidist.get_replica_context().all_reduce("SUM", WIDE)


def other_replica() -> Any:
    return mpidist.get_replica_context().all_reduce("MAX", WIDE)


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
