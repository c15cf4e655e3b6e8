"""The cost model of an all-reduce on several nodes.

Each way between nodes says what its busiest rank does, in rounds; ``mpidist.tune`` measures the network. A round takes
the latency of a message, the time of a processor for each message, and that of the bytes on the link, which the rails
of a node share (the model of Hockney, doi:10.1016/S0167-8191(06)80021-9, with an overhead). Slices are under way
together: the wire, the processor, or the latencies of a slice, of which only so many are under way, set the pace,
whichever takes longest. Nothing here needs MPI: ``python -m benchmarks predict`` asks about nodes that are not there.

All ranks compare sums and products of the same numbers, which IEEE 754 rounds alike everywhere: all choose the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from mpidist.collectives.node.core import SMALL_BETWEEN_NODES
from mpidist.collectives.node.node import LANES_BETWEEN_NODES, SLICE_BYTES_BETWEEN_NODES

# Between nodes less than this is not worth a message to each of them.
SMALLEST_SLICE_BETWEEN_NODES = 64 << 10
# Slices of which no more than the lanes are on their way do well everywhere; others have to promise so much more.
_WORTH_WHILE = 1.05


class Network(NamedTuple):
    """The costs of messages between nodes and of work inside them, as ``mpidist.tune`` measures them."""

    latency: float
    """Seconds from one node to another, of a message without bytes, beside the overhead."""
    overhead: float
    """Seconds of the processor for each message that is sent and received."""
    bandwidth: float
    """Bytes per second out of each node to the next, by all its rails."""
    far_bandwidth: float
    """The same, each node sending to the one half-way round: less where switches are oversubscribed."""
    rail_bandwidth: float
    """Bytes per second that one rank reaches alone."""
    reduce: float
    """Seconds to combine a byte with another."""
    copy: float
    """Seconds to copy a byte inside a node."""
    meeting: float
    """Seconds in which the ranks of a node meet."""
    exchange: float
    """Seconds of a round of the handshake, between the first ranks of nodes."""


SHIPPED_NETWORK = Network(
    latency=140e-6,
    overhead=90e-6,
    bandwidth=120e6,
    far_bandwidth=118e6,
    rail_bandwidth=120e6,
    reduce=0.09e-9,
    copy=0.08e-9,
    meeting=25e-6,
    exchange=40e-6,
)
"""Of virtual hosts at 1 Gbit/s, measured by ``mpidist.tune``.

There were four, of two ranks each, on one 2-core x86-64 machine. Times on a real cluster are shorter; the choice
depends on their ratios alone, which differ less.
"""


class Round(NamedTuple):
    """Rounds of a way that are alike, as the rank has them that does most."""

    times: int
    """How many there are, one after the other."""
    messages: int
    """Sent in each, or received if those are more."""
    elements: int
    """Sent in each, or received if those are more."""
    reduced: int
    """Elements combined in each."""
    is_far: bool
    """Whether they go to other nodes than the next one."""


Cost = Callable[[int, int], Sequence[Round]]
"""Returns the rounds of a way, given the number of nodes and of elements."""


class Way(NamedTuple):
    """A way between nodes, with the slices for it."""

    name: str
    slice_bytes: int
    seconds: float
    """Of the whole all-reduce, as predicted."""


def recursive_doubling(nodes: int, count: int) -> list[Round]:
    """Return the rounds of ``leaders`` for small data, which all goes ever farther.

    >>> [(r.times, r.elements) for r in recursive_doubling(6, 100)]
    [(2, 100), (1, 100), (1, 100)]
    """
    doubling = [Round(1, 1, count, count, is_far=step > 0) for step in range(nodes.bit_length() - 1)]
    return _folded(nodes, count) + doubling


def recursive_halving(nodes: int, count: int) -> list[Round]:
    """Return the rounds of ``leaders`` for larger data, half as much each time, and back.

    >>> [(r.times, r.elements) for r in recursive_halving(4, 100)]
    [(1, 50), (1, 25), (1, 25), (1, 50)]
    """
    parts = [(step, -(-count // (2 << step))) for step in range(nodes.bit_length() - 1)]
    forth = [Round(1, 1, part, part, is_far=step > 0) for step, part in parts]
    return _folded(nodes, count) + forth + [each._replace(reduced=0) for each in reversed(forth)]


def _folded(nodes: int, count: int) -> list[Round]:
    """Return the rounds of nodes beyond a power of two, which hand theirs to another."""
    return [Round(2, 1, count, count, is_far=True)] if nodes & (nodes - 1) else []


# Seconds --------------------------------------------------------------------------------------------------------------


def rounds_seconds(rounds: Sequence[Round], rails: int, network: Network) -> float:
    """Return how long a slice takes between nodes, beside those of the other rails.

    Args:
        rounds: For a slice in bytes.
        rails: Of the node; all send at once.
        network: The costs.
    """
    return sum(
        each.times
        * (
            network.latency
            + each.messages * network.overhead
            + each.elements * _seconds_per_byte(each, rails, network)
            + each.reduced * network.reduce
        )
        for each in rounds
    )


def hierarchical_seconds(cost: Cost, nodes: int, rails: int, nbytes: int, slice_bytes: int, network: Network) -> float:
    """Return how long an all-reduce in two levels takes, from the handshake to the result.

    Args:
        cost: Of the way between nodes.
        nodes: Their number.
        rails: Ranks of a node, each of which reduces a part.
        nbytes: Of the message.
        slice_bytes: Of a slice, at most.
        network: The costs.
    """
    share = -(-nbytes // rails)
    number = max(1, -(-share // slice_bytes))
    each = -(-share // number)
    rounds = cost(nodes, each)
    # Each rank combines its slice of all ranks of the node, and copies the slices of all rails.
    in_node = each * rails * (network.reduce + network.copy) if rails > 1 else each * network.copy
    alone = rounds_seconds(rounds, rails, network)
    wire = sum(r.times * r.elements * _seconds_per_byte(r, rails, network) for r in rounds)
    work = in_node + sum(r.times * (r.messages * network.overhead + r.reduced * network.reduce) for r in rounds)
    pace = max(wire, work, alone / LANES_BETWEEN_NODES)
    return handshake_seconds(nodes, network) + in_node + alone + (number - 1) * pace


def handshake_seconds(nodes: int, network: Network) -> float:
    """Return how long all ranks take to see that all make the same call."""
    return leaders_seconds(nodes, 1, 0, network)


def leaders_seconds(nodes: int, per_node: int, nbytes: int, network: Network) -> float:
    """Return how long ``leaders`` takes: a handshake with data, or several for larger ones.

    Args:
        nodes: Their number.
        per_node: Ranks of a node.
        nbytes: Of the message.
        network: The costs.
    """
    parts = max(1, -(-nbytes // SMALL_BETWEEN_NODES))
    each = -(-nbytes // parts)
    in_node = each * (per_node * network.reduce + network.copy)
    between = min(_exchange_seconds(way, nodes, each, network) for way in (recursive_doubling, recursive_halving))
    return parts * (network.meeting + in_node + between)


def _exchange_seconds(way: Cost, nodes: int, nbytes: int, network: Network) -> float:
    return rounds_seconds(way(nodes, nbytes), 1, network._replace(latency=network.exchange, overhead=0.0))


def halved_from(nodes: int, network: Network) -> int:
    """Return the bytes from which ``leaders`` takes recursive halving.

    That sends less data, in twice as many rounds.

    >>> halved_from(4, SHIPPED_NETWORK._replace(exchange=15e-6)), halved_from(2, SHIPPED_NETWORK)
    (7168, 65537)
    """
    sizes = range(1 << 10, SMALL_BETWEEN_NODES + 1, 1 << 10)
    seconds = {
        way: [_exchange_seconds(way, nodes, nbytes, network) for nbytes in sizes]
        for way in (recursive_doubling, recursive_halving)
    }
    pairs = zip(sizes, seconds[recursive_doubling], seconds[recursive_halving], strict=True)
    return next((nbytes for nbytes, doubling, halving in pairs if halving < doubling), SMALL_BETWEEN_NODES + 1)


def _seconds_per_byte(each: Round, rails: int, network: Network) -> float:
    link = network.far_bandwidth if each.is_far else network.bandwidth
    return max(rails / link, 1 / network.rail_bandwidth)


# Choosing -------------------------------------------------------------------------------------------------------------


def fastest(
    costs: Mapping[str, Cost],
    nodes: int,
    rails: int,
    nbytes: int,
    network: Network,
    limit: int = SLICE_BYTES_BETWEEN_NODES,
    smallest: int = SMALLEST_SLICE_BETWEEN_NODES,
) -> Way:
    """Return the fastest way between nodes and its slices, the same on every rank.

    Args:
        costs: The ways, by name.
        nodes: Their number.
        rails: Ranks of a node that reduce slices.
        nbytes: Of the message.
        network: The costs.
        limit: Bytes of a slice, at most.
        smallest: Bytes of a slice, at least.
    """
    sizes = [limit]
    while sizes[-1] // 2 >= smallest:
        sizes.append(sizes[-1] // 2)
    usual = next((size for size in sizes if size * LANES_BETWEEN_NODES * rails <= nbytes), sizes[-1])
    ways = [
        Way(name, size, hierarchical_seconds(costs[name], nodes, rails, nbytes, size, network))
        for name in sorted(costs)
        for size in sizes
    ]
    return min(ways, key=lambda way: way.seconds * (1.0 if way.slice_bytes == usual else _WORTH_WHILE))
