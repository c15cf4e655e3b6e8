"""The layouts themselves: names, number of replicas, per_replica, at any number of ranks."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.ranks.layouts import LAYOUTS, Layout, _node_communicator, layouts, per_replica

pytestmark = [pytest.mark.nodes, pytest.mark.counts]


def test_the_names_tell_kind_and_local_replicas() -> None:
    assert [str(layout) for layout in LAYOUTS] == [
        "default",
        "one_device",
        "mirrored-1local",
        "mirrored-2local",
        "mirrored-3local",
        "mirrored-4local",
        "mirrored_node-1local",
        "mirrored_node-2local",
        "multi_worker-1local",
        "multi_worker-2local",
        "central-3local",
        "central_node-1local",
        "central_node-2local",
    ]


def test_patterns_choose_layouts() -> None:
    assert [parameter.id for parameter in layouts("*-2local", "default")] == [
        "default",
        "mirrored-2local",
        "mirrored_node-2local",
        "multi_worker-2local",
        "central_node-2local",
    ]
    assert len(layouts()) == len(LAYOUTS)


def test_a_pattern_without_a_match_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"no layout matches 'mirorred\*'; expected one of \['default'"):
        layouts("mirorred*")


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_number_of_replicas(layout: Layout) -> None:
    from mpi4py import MPI

    node = _node_communicator(MPI.COMM_WORLD)
    of_kind = {"mirrored_node": node.size, "central_node": node.size, "multi_worker": MPI.COMM_WORLD.size}
    ranks = of_kind.get(layout.kind, 1)
    node.Free()
    with layout.open() as strategy:
        assert strategy.num_replicas_in_sync == ranks * layout.local_replicas


def test_per_replica_puts_each_value_on_its_replica(strategy: Any) -> None:
    values = [10 * replica for replica in range(strategy.num_replicas_in_sync)]
    total = sum(values)
    assert strategy.reduce("SUM", per_replica(strategy, values), axis=None) == total
    assert strategy.reduce("SUM", per_replica(strategy, lambda replica: 10 * replica), axis=None) == total


def test_per_replica_wants_a_value_for_each_replica(strategy: Any) -> None:
    with pytest.raises(ValueError, match="expected one for each of"):
        per_replica(strategy, [])
