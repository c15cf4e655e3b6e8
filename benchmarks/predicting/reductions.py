"""Reductions: the time, bytes and algorithm of an all-reduce on so many nodes, by the library's own cost model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from benchmarks.predicting.recording import slices_of
from mpidist.collectives.node.node import SLICE_BYTES_BETWEEN_NODES
from mpidist.collectives.reduce.cost_model import (
    Cost,
    Network,
    Way,
    fastest,
    hierarchical_seconds,
    leaders_seconds,
    recursive_doubling,
    recursive_halving,
    rounds_seconds,
)
from mpidist.collectives.reduce.registry import SHIPPED, look_up, wire_algorithms

LEADERS = "leaders"


class Prediction(NamedTuple):
    """One all-reduce."""

    nodes: int
    ranks_per_node: int
    nbytes: int
    """Of the message on each rank."""
    algorithm: str
    """A way between nodes, or ``leaders``."""
    slice_bytes: int
    """Of each slice between nodes; of the message with ``leaders``."""
    seconds: float
    """From the call to the result."""
    sent: int
    """Bytes that leave the node that sends most, the handshake's not counted."""


def predicted(
    network: Network, nodes: int, ranks_per_node: int, nbytes: int, algorithm: str | None = None, *, plain: bool = False
) -> Prediction:
    """Return how long an all-reduce takes.

    Args:
        network: The costs.
        nodes, ranks_per_node: Where the ranks are, as many on each.
        nbytes: Of the message on each rank.
        algorithm: A way between nodes, or ``leaders``; by default the one that the library takes where its table is
            the shipped one.
        plain: As other libraries have these algorithms: without a handshake, and what a rank sends in one piece.

    Raises:
        ValueError: There is no such way.
    """
    names = [LEADERS, *sorted(wire_algorithms.costs)]
    if algorithm not in (None, *names):
        raise ValueError(f"algorithm is {algorithm!r}; expected one of {', '.join(names)}")
    if plain:
        network = network._replace(meeting=0.0)
    name = algorithm or look_up(SHIPPED.several_nodes, nbytes)
    if name == LEADERS:
        seconds = leaders_seconds(nodes, ranks_per_node, nbytes, network)
        sent = _sent_by_leader(network, nodes, nbytes)
        return Prediction(nodes, ranks_per_node, nbytes, LEADERS, nbytes, seconds, sent)
    return _in_slices(network, nodes, ranks_per_node, nbytes, algorithm, plain)


def _sent_by_leader(network: Network, nodes: int, nbytes: int) -> int:
    quick = network._replace(latency=network.exchange, overhead=0.0)
    ways = (recursive_doubling(nodes, nbytes), recursive_halving(nodes, nbytes))
    rounds = min(ways, key=lambda way: rounds_seconds(way, 1, quick))
    return sum(each.times * each.elements for each in rounds)


def _in_slices(network: Network, nodes: int, rails: int, nbytes: int, algorithm: str | None, plain: bool) -> Prediction:
    every = wire_algorithms.costs
    costs = every if algorithm is None else {algorithm: every[algorithm]}
    if nodes == 1:
        # There is no way between nodes: what is left is the work in one.
        seconds = hierarchical_seconds(lambda *_: [], 1, rails, nbytes, SLICE_BYTES_BETWEEN_NODES, network)
        return Prediction(1, rails, nbytes, "in the node", 0, seconds, 0)
    choose = _fastest_in_one_piece if plain else fastest
    way = choose(costs, nodes, rails, nbytes, network)
    slices = slices_of(nbytes, rails, way.slice_bytes)
    sent = sum(each.times * each.elements for each in every[way.name](nodes, slices.nbytes))
    return Prediction(nodes, rails, nbytes, way.name, slices.nbytes, way.seconds, rails * slices.number * sent)


def _fastest_in_one_piece(costs: Mapping[str, Cost], nodes: int, rails: int, nbytes: int, network: Network) -> Way:
    silent, share = network._replace(exchange=0.0), -(-nbytes // rails)
    ways = [
        Way(name, share, hierarchical_seconds(costs[name], nodes, rails, nbytes, share, silent))
        for name in sorted(costs)
    ]
    return min(ways, key=lambda way: way.seconds)


def reduction_seconds(
    network: Network, nodes: int, ranks_per_node: int, algorithm: str | None = None, *, plain: bool = False
) -> Callable[[int], float]:
    """Return the function that gives the time of an all-reduce of so many bytes there; see :func:`predicted`."""
    return lambda nbytes: predicted(network, nodes, ranks_per_node, nbytes, algorithm, plain=plain).seconds
