"""The speed of messages between ranks, measured for a moment each.

Pairs inside nodes come first, then pairs of neighbouring nodes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from mpidist.cli.doctor_facts.facts import LinkSpeed
from mpidist.cli.doctor_facts.timed_messages import meet, wait_for
from mpidist.core.message_tags import DOCTOR_PING

if TYPE_CHECKING:
    from mpi4py import MPI

_SMALL_BYTES = 8
_LARGE_BYTES = 4 << 20
_FIRST_PINGS, _PINGS = 20, 200
# About how long large messages are sent for, and how many at most.
_SECONDS, _MOST_MESSAGES = 0.1, 64
# A measurement is of several messages.
_MEETING_FACTOR = 5
Pair = tuple[int, int]


def pairs_inside(nodes: Sequence[Sequence[int]]) -> list[Pair]:
    """Return the first two ranks of every node that has as many.

    >>> pairs_inside([[0, 2], [1], [3, 4, 5]])
    [(0, 2), (3, 4)]
    """
    return [(ranks[0], ranks[1]) for ranks in nodes if len(ranks) > 1]


def rounds_between(nodes: Sequence[Sequence[int]]) -> list[list[Pair]]:
    """Return the first ranks of neighbouring nodes, in rounds of disjoint pairs.

    >>> rounds_between([[0], [1], [2]]), rounds_between([[0, 1], [2, 3]])
    ([[(0, 1)], [(1, 2)], [(0, 2)]], [[(0, 2)]])
    """
    firsts = [ranks[0] for ranks in nodes]
    hops = list(pairwise(firsts))
    closing = [(firsts[0], firsts[-1])] if len(firsts) > 2 else []
    return [round_ for round_ in (hops[0::2], hops[1::2], closing) if round_]


def measured(
    comm: MPI.Intracomm, pairs: Sequence[Pair], hosts: Sequence[str], between_nodes: bool, seconds: float
) -> LinkSpeed | None:
    """Measure all ``pairs`` at the same time (collective). The first rank of a pair gets the link.

    Args:
        comm: All ranks.
        pairs: Each rank at most once.
        hosts: By rank.
        between_nodes: Whether they are on different nodes.
        seconds: How long a message is waited for.

    Raises:
        NoAnswerError: A message did not come in time.
    """
    rank = comm.Get_rank()
    mine = next((pair for pair in pairs if rank in pair), None)
    link = None
    if mine is not None:
        peer = mine[1] if rank == mine[0] else mine[0]
        doing = f"measuring between {hosts[rank]} and {hosts[peer]}"
        latency, speed = _Measurement(comm, peer, rank == mine[0], seconds, doing).run()
        if rank == mine[0]:
            link = LinkSpeed(mine, (hosts[mine[0]], hosts[mine[1]]), between_nodes, latency, speed)
    meet(comm, _MEETING_FACTOR * seconds, "which measure")
    return link


class _Measurement:
    """One side of a pair."""

    def __init__(self, comm: MPI.Intracomm, peer: int, begins: bool, seconds: float, doing: str) -> None:
        self._comm, self._peer, self._begins = comm, peer, begins
        self._seconds, self._doing = seconds, doing
        self._small, self._large = bytearray(_SMALL_BYTES), bytearray(_LARGE_BYTES)

    def run(self) -> tuple[float, float]:
        """Return a small message's seconds and large ones' bytes per second, both one way."""
        self._ping_pong(_FIRST_PINGS)
        latency = self._ping_pong(_PINGS)
        self._stream(1)
        count = self._agreed(max(1, min(_MOST_MESSAGES, int(_SECONDS / self._stream(1)))))
        return latency, _LARGE_BYTES * count / self._stream(count)

    def _ping_pong(self, count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            if self._begins:
                self._send(self._small)
                self._receive(self._small)
            else:
                self._receive(self._small)
                self._send(self._small)
        return (time.perf_counter() - start) / count / 2

    def _stream(self, count: int) -> float:
        """Send so many large messages, and return the time until the other side confirms."""
        start = time.perf_counter()
        for _ in range(count):
            if self._begins:
                self._send(self._large)
            else:
                self._receive(self._large)
        self._agreed(0)
        return time.perf_counter() - start

    def _agreed(self, number: int) -> int:
        """Return the number of the side that begins, after an answer of the other side."""
        told = bytearray(number.to_bytes(_SMALL_BYTES, "little"))
        if self._begins:
            self._send(told)
            self._receive(self._small)
            return number
        self._receive(told)
        self._send(self._small)
        return int.from_bytes(told, "little")

    def _send(self, content: bytearray) -> None:
        wait_for(self._comm.Isend(content, self._peer, DOCTOR_PING), self._peer, self._seconds, self._doing)

    def _receive(self, content: bytearray) -> None:
        wait_for(self._comm.Irecv(content, self._peer, DOCTOR_PING), self._peer, self._seconds, self._doing)


def in_use(before: dict[str, int], after: dict[str, int], least: int) -> tuple[str, ...]:
    """Return the interfaces that moved at least ``least`` bytes in between.

    >>> in_use({"eth0": 10, "ib0": 0}, {"eth0": 15, "ib0": 100}, 50)
    ('ib0',)
    """
    return tuple(name for name in sorted(after) if after[name] - before.get(name, 0) >= least)


LEAST_BYTES = _LARGE_BYTES
"""The least that an interface has moved if messages of a measurement took it."""
