"""The costs of messages between nodes, measured on the ranks at hand.

All rails send at once, from each node to the next, as the ways between nodes do, through the same calls. One message
at a time shows the latency, many small ones the time of the processor for each, large ones the bandwidth.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

from mpidist.arrays.dtypes import Array
from mpidist.collectives.mpi.exchange import agreed_minimum
from mpidist.collectives.mpi.waiting import Comm, Steps, pause, until_done
from mpidist.collectives.node.node import Node
from mpidist.collectives.reduce.cost_model import Network, recursive_doubling
from mpidist.collectives.reduce.registry import Rail

# Of each figure the median of so many.
_REPETITIONS = 5
_ROUNDS, _SMALL_BYTES, _MANY = 20, 8, 8
# Large messages are made larger until they take so long, that latencies and clocks do not count.
_AT_LEAST_SECONDS, _LARGE, _FIRST_BYTES, _MOST_BYTES = 10e-3, 4, 64 << 10, 4 << 20
_WORK_BYTES = 1 << 20
# No cost is zero: a difference of two measures may be.
_LEAST_SECONDS = 1e-7


class _Probe(Rail):
    """Messages from each node to another, as far on for all.

    Args:
        comm: All ranks.
        node: The node of this rank, one of several.
    """

    def __init__(self, comm: Comm, node: Node) -> None:
        rail = [ranks[node.rank] if node.rank < node.rails else -1 for ranks in node.ranks]
        super().__init__(comm, rail, node.topology.node_index)
        self._node = node

    def seconds(self, messages: int, nbytes: int, distance: int = 1, rails: int | None = None) -> Steps[float]:
        """Return the seconds of a round in which messages go to another node (collective).

        Args:
            messages: Under way at once.
            nbytes: Of each.
            distance: How many nodes on.
            rails: Ranks of a node that send; by default all that have a rail.
        """
        takes_part = self._node.rank < (self._node.rails if rails is None else rails)
        buffers = [
            (np.zeros(nbytes, np.uint8), np.zeros(nbytes, np.uint8)) for _ in range(messages if takes_part else 0)
        ]
        rounds = _ROUNDS if nbytes == _SMALL_BYTES else 1
        return (yield from _median(self._comm, lambda: self._passed(buffers, distance), rounds))

    def _passed(self, buffers: Sequence[tuple[Array, Array]], distance: int) -> Steps[None]:
        n, me = len(self._ranks), self._position
        to, of = (me + distance) % n, (me - distance) % n
        left = [self._exchange({of: into}, {to: sent}, k) for k, (sent, into) in enumerate(buffers)]
        looks = 0
        while left:
            going = [steps for steps in left if next(steps, left) is not left]
            looks = 0 if len(going) < len(left) else looks + 1
            left = going
            pause(self._comm, looks)
            yield

    def large(self) -> Steps[int]:
        """Return the bytes of messages that take long enough."""
        nbytes = _FIRST_BYTES
        while nbytes < _MOST_BYTES and (yield from self.seconds(_LARGE, nbytes)) < _AT_LEAST_SECONDS:
            nbytes *= 2
        return nbytes


def measured_network(comm: Comm, node: Node) -> Steps[Network]:
    """Return the costs between the nodes of a communicator, the same on every rank (collective).

    Args:
        comm: The communicator.
        node: Its node of this rank, one of several.
    """
    probe, half = _Probe(comm, node), max(1, len(node.ranks) // 2)
    one = yield from probe.seconds(1, _SMALL_BYTES)
    many = yield from probe.seconds(_MANY, _SMALL_BYTES)
    overhead = max((many - one) / (_MANY - 1), _LEAST_SECONDS)
    nbytes = yield from probe.large()
    near = yield from probe.seconds(_LARGE, nbytes)
    far = near if half == 1 else (yield from probe.seconds(_LARGE, nbytes, half))
    alone = near if node.rails == 1 else (yield from probe.seconds(_LARGE, nbytes, rails=1))
    source, target = np.ones(_WORK_BYTES // 4, np.float32), np.ones(_WORK_BYTES // 4, np.float32)
    reduce = yield from _median(comm, lambda: _done(lambda: np.add(target, source, out=target)))
    copy = yield from _median(comm, lambda: _done(lambda: np.copyto(target, source)))
    meeting = yield from _median(comm, lambda: _meeting(comm, node, of_all=False), _ROUNDS)
    everyone = yield from _median(comm, lambda: _meeting(comm, node, of_all=True), _ROUNDS)
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


def _median(comm: Comm, act: Callable[[], Steps[None]], rounds: int = 1) -> Steps[float]:
    """Return the median time of an act, each time that of the slowest rank (collective).

    Short ones are done in rounds, as ranks do not leave a barrier at the same time.
    """
    times = []
    for _ in range(1 + _REPETITIONS):
        yield from until_done(comm.Ibarrier())
        start = time.perf_counter()
        for _ in range(rounds):
            yield from act()
        slowest = yield from agreed_minimum(comm, -int(1e9 * (time.perf_counter() - start)))
        times.append(max(-slowest / 1e9, _LEAST_SECONDS))
    # The first brings memory and connections about.
    return statistics.median(times[1:]) / rounds


def _meeting(comm: Comm, node: Node, of_all: bool) -> Steps[None]:
    """Meet the ranks of the node, or all, as the handshake does."""
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
