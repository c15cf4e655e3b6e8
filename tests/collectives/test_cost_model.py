"""The cost model: the ways that it takes on networks and numbers of nodes of all kinds."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpidist.collectives.reduce import algorithms  # noqa: F401  # registers the algorithms
from mpidist.collectives.reduce.cost_model import (
    SHIPPED_NETWORK,
    SMALLEST_SLICE_BETWEEN_NODES,
    Network,
    fastest,
    hierarchical_seconds,
    leaders_seconds,
    recursive_doubling,
)
from mpidist.collectives.reduce.registry import AlgorithmEntry, wire_algorithms

pytestmark = pytest.mark.one_rank

KiB, MiB = 1 << 10, 1 << 20
COSTS = wire_algorithms.costs
# All nodes are as near, or switches carry a quarter of what nodes can send.
FLAT = SHIPPED_NETWORK._replace(far_bandwidth=SHIPPED_NETWORK.bandwidth)
OVERSUBSCRIBED = SHIPPED_NETWORK._replace(far_bandwidth=SHIPPED_NETWORK.bandwidth / 4)
networks = st.builds(
    Network,
    latency=st.floats(1e-7, 1e-3),
    overhead=st.floats(1e-7, 1e-4),
    bandwidth=st.floats(1e6, 1e11),
    far_bandwidth=st.floats(1e6, 1e11),
    rail_bandwidth=st.floats(1e6, 1e11),
    reduce=st.floats(1e-11, 1e-8),
    copy=st.floats(1e-11, 1e-8),
    meeting=st.floats(1e-7, 1e-3),
    exchange=st.floats(1e-7, 1e-3),
)


def way(nodes: int, nbytes: int, network: Network = SHIPPED_NETWORK, rails: int = 8) -> str:
    return fastest(COSTS, nodes, rails, nbytes, network).name


@pytest.mark.parametrize("nodes", [64, 100, 1250])
@pytest.mark.parametrize("nbytes", [4 * KiB, 64 * KiB, MiB, 64 * MiB])
def test_many_nodes_take_few_rounds(nodes: int, nbytes: int) -> None:
    assert way(nodes, nbytes) == "halving_doubling"


@pytest.mark.parametrize("nodes", [4, 6, 16])
def test_few_nodes_far_apart_use_a_ring(nodes: int) -> None:
    assert way(nodes, 64 * MiB, OVERSUBSCRIBED) == "ring"
    assert way(nodes, 64 * MiB, FLAT) != "ring"
    assert way(nodes, 4 * KiB, OVERSUBSCRIBED) != "ring"


@given(st.integers(2, 2000), st.integers(1, 64), networks, st.sampled_from(sorted(COSTS)))
def test_more_bytes_take_no_less_time(nodes: int, rails: int, network: Network, name: str) -> None:
    for seconds in (
        lambda nbytes: hierarchical_seconds(COSTS[name], nodes, rails, nbytes, 1 << 20, network),
        lambda nbytes: leaders_seconds(nodes, rails, nbytes, network),
    ):
        times = [seconds(64 << power) for power in range(21)]
        assert all(later >= sooner * (1 - 1e-9) for sooner, later in pairwise(times))


@given(st.integers(2, 2000), st.integers(1, 64), st.integers(0, 1 << 30), networks)
def test_the_fastest_is_no_slower_than_any(nodes: int, rails: int, nbytes: int, network: Network) -> None:
    best = fastest(COSTS, nodes, rails, nbytes, network)
    assert best == fastest(dict(reversed(COSTS.items())), nodes, rails, nbytes, network)
    assert SMALLEST_SLICE_BETWEEN_NODES <= best.slice_bytes <= MiB
    for cost in COSTS.values():
        for slice_bytes in (64 * KiB, MiB):
            assert best.seconds <= 1.05 * hierarchical_seconds(cost, nodes, rails, nbytes, slice_bytes, network)


def test_leaders_fold_to_a_power_of_two() -> None:
    for nodes, rounds in ((2, 1), (3, 3), (4, 2), (5, 4), (8, 3), (9, 5), (1024, 10), (1250, 12)):
        assert sum(each.times for each in recursive_doubling(nodes, 100)) == rounds
    small, large = (leaders_seconds(16, 2, nbytes, SHIPPED_NETWORK) for nbytes in (8, 16 * KiB))
    assert small < large < hierarchical_seconds(COSTS["ring"], 16, 2, 16 * KiB, MiB, SHIPPED_NETWORK)


def test_a_way_without_a_cost_is_refused() -> None:
    with pytest.raises(ValueError, match="inter-node algorithm 'star' has no cost, .* Pass cost="):
        wire_algorithms.register(AlgorithmEntry("star", object, ("between_nodes",)))


def test_the_documentation_shows_the_choices() -> None:
    text = (Path(__file__).parents[2] / "docs" / "tuning.md").read_text("utf-8")
    head, _, *rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text[text.index("| nodes | 4 KiB") :].splitlines()
        if line.startswith("|")
    ]
    for nodes, *cells in rows:
        for size, cell in zip(head[1:], cells, strict=True):
            number, unit = size.split()
            best = fastest(COSTS, int(nodes), 8, int(number) * {"KiB": KiB, "MiB": MiB}[unit], SHIPPED_NETWORK)
            assert cell == f"`{best.name}` {1e3 * best.seconds:.3g} ms"
