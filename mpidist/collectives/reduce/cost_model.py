"""The cost model of an all-reduce on several nodes, and the measurement of its parameters.

Each inter-node algorithm lists the rounds of its busiest rank, and ``mpidist.tune`` measures the network. The time of
a round is the latency of a message, the processor time for each message, and the time of the bytes on the link, which
all rails of a node share (the model of Hockney, doi:10.1016/S0167-8191(06)80021-9, with an overhead). Slices overlap,
so the slowest of three sets the pace: the link, the processor, or the latency of a slice divided by the slices in
flight. The model needs no MPI, so ``python -m benchmarks predict`` uses it for clusters of any size.

All ranks compare sums and products of the same numbers. IEEE 754 rounds these identically everywhere, so all ranks
choose the same algorithm without a message.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from mpidist.arrays.dtypes import Array, DType
from mpidist.collectives.mpi.exchange import agreed_minimum
from mpidist.collectives.mpi.mpi_types import message, tag_of
from mpidist.collectives.mpi.waiting import Comm, Steps, until_all_done, until_done
from mpidist.collectives.node.core import SMALL_BETWEEN_NODES
from mpidist.collectives.node.node import LANES_BETWEEN_NODES, SLICE_BYTES_BETWEEN_NODES, Node

# Smaller slices are not worth a message to each node.
SMALLEST_SLICE_BETWEEN_NODES = 64 << 10
# Prefer the size that keeps at most the lanes in flight. Other sizes must be predicted at least 5 % faster.
_WORTH_WHILE = 1.05


class Network(NamedTuple):
    """The costs of messages between nodes and of work inside them, as ``mpidist.tune`` measures them."""

    latency: float  # seconds of an empty message to another node, without the overhead
    overhead: float  # seconds of the processor for each message that is sent and received
    bandwidth: float  # bytes per second from each node to the next, by all its rails
    far_bandwidth: float  # the same to the node halfway around. Oversubscribed switches lower it
    rail_bandwidth: float  # bytes per second of a single rank
    reduce: float  # seconds to combine a byte with another
    copy: float  # seconds to copy a byte inside a node
    meeting: float  # seconds of a barrier of the ranks of a node
    exchange: float  # seconds of a round of the handshake between the node leaders


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
"""Measured by ``mpidist.tune`` on four virtual hosts with two ranks each.

They ran on one 2-core x86-64 machine, connected at 1 Gbit/s. Times on a real cluster are shorter. The choice depends
only on the ratios of the costs, which differ less.
"""


class Rail:
    """The ranks with the same local rank on each node, which exchange slices.

    ``position`` is the index of this rank in ``ranks``. ``wire_dtype`` is the dtype of sums in transit, if they are
    rounded.
    """

    def __init__(self, comm: Comm, ranks: list[int], position: int, wire_dtype: DType | None = None) -> None:
        self._comm, self._ranks, self._position, self._wire_dtype = comm, ranks, position, wire_dtype

    def _exchange(self, received: Mapping[int, Array], sent: Mapping[int, Array], chunk: int) -> Steps[None]:
        """Receive and send arrays by position on the rail, except this rank's own. ``chunk`` selects the tag."""
        comm, ranks, me, tag = self._comm, self._ranks, self._position, tag_of(chunk)
        requests = [comm.Irecv(self._message(array), ranks[at], tag) for at, array in received.items() if at != me]
        requests += [comm.Isend(self._message(array), ranks[at], tag) for at, array in sent.items() if at != me]
        yield from until_all_done(requests)

    def _message(self, array: Array) -> Any:
        return message(array)


# Rounds ---------------------------------------------------------------------------------------------------------------


class Round(NamedTuple):
    """A number of equal rounds of an inter-node algorithm, as the busiest rank runs them."""

    times: int  # number of rounds, one after the other
    messages: int  # messages in each: sent or received, whichever is more
    elements: int  # elements in each: sent or received, whichever is more
    reduced: int  # elements combined in each
    is_far: bool  # whether messages go to other nodes than the next one


# Returns the rounds of an inter-node algorithm for a number of nodes and of elements.
Cost = Callable[[int, int], Sequence[Round]]


class Way(NamedTuple):
    """An inter-node algorithm with its slice size and the predicted seconds of the whole all-reduce."""

    name: str
    slice_bytes: int
    seconds: float


def recursive_doubling(nodes: int, count: int) -> list[Round]:
    """Return the rounds of ``leaders`` for small data: all elements, to nodes at doubling distances."""
    doubling = [Round(1, 1, count, count, is_far=step > 0) for step in range(nodes.bit_length() - 1)]
    return _folded(nodes, count) + doubling


def recursive_halving(nodes: int, count: int) -> list[Round]:
    """Return the rounds of ``leaders`` for larger data: half the elements each time, and back."""
    parts = [(step, -(-count // (2 << step))) for step in range(nodes.bit_length() - 1)]
    halving = [Round(1, 1, part, part, is_far=step > 0) for step, part in parts]
    return _folded(nodes, count) + halving + [each._replace(reduced=0) for each in reversed(halving)]


def _folded(nodes: int, count: int) -> list[Round]:
    # Nodes beyond a power of two send their data to another node first, and receive the result last.
    return [Round(2, 1, count, count, is_far=True)] if nodes & (nodes - 1) else []


# Prediction -----------------------------------------------------------------------------------------------------------


def rounds_seconds(rounds: Sequence[Round], rails: int, network: Network) -> float:
    """Predict the seconds of a slice between nodes while all rails send. The rounds count bytes."""
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
    """Predict the seconds of a two-level all-reduce, from the handshake to the result."""
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
    """Predict the seconds of a handshake of all ranks."""
    return leaders_seconds(nodes, 1, 0, network)


def leaders_seconds(nodes: int, per_node: int, nbytes: int, network: Network) -> float:
    """Predict the seconds of ``leaders``: one handshake with data, or several for larger data."""
    parts = max(1, -(-nbytes // SMALL_BETWEEN_NODES))
    each = -(-nbytes // parts)
    in_node = each * (per_node * network.reduce + network.copy)
    return parts * (network.meeting + in_node + min(_exchange_seconds(nodes, each, network)))


def _exchange_seconds(nodes: int, nbytes: int, network: Network) -> list[float]:
    """Predict the seconds of recursive doubling and of recursive halving between the leaders."""
    quick = network._replace(latency=network.exchange, overhead=0.0)
    return [rounds_seconds(cost(nodes, nbytes), 1, quick) for cost in (recursive_doubling, recursive_halving)]


def halved_from(nodes: int, network: Network) -> int:
    """Return the least bytes for which ``leaders`` uses recursive halving: less data, twice the rounds.

    >>> halved_from(4, SHIPPED_NETWORK._replace(exchange=15e-6)), halved_from(2, SHIPPED_NETWORK)
    (7168, 65537)
    """
    for nbytes in range(1 << 10, SMALL_BETWEEN_NODES + 1, 1 << 10):
        doubling, halving = _exchange_seconds(nodes, nbytes, network)
        if halving < doubling:
            return nbytes
    return SMALL_BETWEEN_NODES + 1


def _seconds_per_byte(each: Round, rails: int, network: Network) -> float:
    link = network.far_bandwidth if each.is_far else network.bandwidth
    return max(rails / link, 1 / network.rail_bandwidth)


def fastest(
    costs: Mapping[str, Cost],
    nodes: int,
    rails: int,
    nbytes: int,
    network: Network,
    limit: int = SLICE_BYTES_BETWEEN_NODES,
    smallest: int = SMALLEST_SLICE_BETWEEN_NODES,
) -> Way:
    """Choose the fastest inter-node algorithm and its slices of ``smallest`` to ``limit`` bytes."""
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


# Measurement ----------------------------------------------------------------------------------------------------------

# Each cost is the median of this number of repetitions.
_REPETITIONS = 5
_ROUNDS, _SMALL_BYTES, _MANY = 20, 8, 8
# Grow large messages until they take this long, so that latencies and clock resolution do not matter.
_AT_LEAST_SECONDS, _LARGE, _FIRST_BYTES, _MOST_BYTES = 10e-3, 4, 64 << 10, 4 << 20
_WORK_BYTES = 1 << 20
# A difference of two measurements may be zero or negative, but costs must be positive.
_LEAST_SECONDS = 1e-7


def measure_network(comm: Comm, node: Node) -> Steps[Network]:
    """Measure the costs between several nodes, the same on every rank (collective)."""
    seconds = partial(_message_seconds, comm, node)
    # One message at a time shows the latency, and many small ones show the processor time of each.
    one = yield from seconds(1, _SMALL_BYTES)
    many = yield from seconds(_MANY, _SMALL_BYTES)
    overhead = max((many - one) / (_MANY - 1), _LEAST_SECONDS)
    nbytes = _FIRST_BYTES
    while (near := (yield from seconds(_LARGE, nbytes))) < _AT_LEAST_SECONDS and nbytes < _MOST_BYTES:
        nbytes *= 2
    half = len(node.ranks) // 2
    far = near if half == 1 else (yield from seconds(_LARGE, nbytes, distance=half))
    alone = near if node.rails == 1 else (yield from seconds(_LARGE, nbytes, rails=1))
    source, target = np.ones(_WORK_BYTES // 4, np.float32), np.ones(_WORK_BYTES // 4, np.float32)
    reduce = yield from _median(comm, lambda: _done(lambda: np.add(target, source, out=target)))
    copy = yield from _median(comm, lambda: _done(lambda: np.copyto(target, source)))
    meeting = yield from _median(comm, lambda: _barrier(comm, node, of_all=False), _ROUNDS)
    everyone = yield from _median(comm, lambda: _barrier(comm, node, of_all=True), _ROUNDS)
    exchanges = sum(each.times for each in recursive_doubling(len(node.ranks), 0))
    return Network(
        latency=max(one - overhead, _LEAST_SECONDS),
        overhead=overhead,
        bandwidth=node.rails * _LARGE * nbytes / near,
        far_bandwidth=node.rails * _LARGE * nbytes / far,
        rail_bandwidth=_LARGE * nbytes / alone,
        reduce=reduce / _WORK_BYTES,
        copy=copy / _WORK_BYTES,
        meeting=meeting,
        exchange=max((everyone - meeting) / exchanges, _LEAST_SECONDS),
    )


def _message_seconds(
    comm: Comm, node: Node, messages: int, nbytes: int, distance: int = 1, rails: int | None = None
) -> Steps[float]:
    """Measure concurrent messages from each node to the one at a distance (collective)."""
    count, me = messages if node.rank < (rails or node.rails) else 0, node.topology.node_index
    sent, received = np.zeros((count, nbytes), np.uint8), np.zeros((count, nbytes), np.uint8)

    def exchange() -> Steps[None]:
        requests = []
        for k in range(count):
            source, dest = [node.ranks[(me + step) % len(node.ranks)][node.rank] for step in (-distance, distance)]
            requests.append(comm.Irecv(message(received[k]), source, tag_of(k)))
            requests.append(comm.Isend(message(sent[k]), dest, tag_of(k)))
        for request in requests:
            yield from until_done(request)

    return (yield from _median(comm, exchange, _ROUNDS if nbytes == _SMALL_BYTES else 1))


def _median(comm: Comm, act: Callable[[], Steps[None]], rounds: int = 1) -> Steps[float]:
    """Return the median time of an action on the slowest rank (collective)."""
    times = []
    for _ in range(1 + _REPETITIONS):
        yield from until_done(comm.Ibarrier())
        start = time.perf_counter()
        # Short actions need several rounds, because ranks do not leave a barrier at the same time.
        for _ in range(rounds):
            yield from act()
        slowest = yield from agreed_minimum(comm, -int(1e9 * (time.perf_counter() - start)))
        times.append(max(-slowest / 1e9, _LEAST_SECONDS))
    # The first repetition allocates memory and opens connections.
    return float(np.median(times[1:])) / rounds


def _barrier(comm: Comm, node: Node, of_all: bool) -> Steps[None]:
    """Wait for the ranks of the node, or for all, as the handshake does."""
    if node.core is None:
        yield from until_done((comm if of_all else node.comm).Ibarrier())
    elif of_all:
        node.core.meet(0)
        yield from node.core.go_on()
    else:
        yield from node.core.meeting()


def _done(work: Callable[[], object]) -> Steps[None]:
    work()
    yield from ()
