"""The search for slow links between nodes.

The probe runs when moving data takes much of a job's time and no rank is late. A slow link slows down a collective for
all ranks alike. So rank 0 exchanges bursts of small messages with the first rank of each other node, one node after
the other, and compares the times of both directions. A time is that of a burst and a short answer, or of a short
request and a burst. It is the shortest of some rounds, because a thread that waits for a core makes it longer, and
nothing makes it shorter.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from mpidist.collectives.rpc import Endpoint, Handlers, ServiceThread

# Small enough for MPI's eager messages, so that no thread waits for the rest of a message.
_BLOCK_BYTES, _BLOCKS, _ROUNDS = 7000, 64, 5
_ROUND_SECONDS = 3.0
MOST_NODES = 64
"""Larger jobs are not probed. Each node takes milliseconds of rank 0."""


class LinkTime(NamedTuple):
    """Seconds of a burst from rank 0 to another rank, or back."""

    seconds: float
    rank: int
    is_back: bool


def rate_of(seconds: float) -> float:
    """Return the bytes per second of a burst."""
    return _BLOCK_BYTES * _BLOCKS / seconds


Hear = Callable[[list[LinkTime]], object]


class LinkProbe:
    """Sends and answers the bursts of one endpoint, in the service thread."""

    def __init__(self, rank: int, service: ServiceThread) -> None:
        self.handlers: Handlers = {"burst": lambda _, *args: self._receive(*args)}
        self.endpoint: Endpoint | None = None
        self._rank, self._service = rank, service
        # On rank 0: the shortest time of each way while a probe runs, the number of the last round, and the last
        # round with an answer.
        self._shortest: dict[tuple[int, bool], float] | None = None
        self._round = self._answered = 0

    def start(self, ranks: Sequence[int], hear: Hear) -> None:
        """Exchange bursts with ``ranks`` in turn, and pass the results to ``hear``."""
        if self._shortest is not None:  # another probe is running
            hear([])
            return
        self._shortest = {}
        self._next(iter([(rank, way) for rank in ranks for way in (False, True) for _ in range(_ROUNDS)]), hear)

    def _next(self, rounds: Iterator[tuple[int, bool]], hear: Hear) -> None:
        following = next(rounds, None)
        if following is None:
            found, self._shortest = self._shortest or {}, None
            hear([LinkTime(seconds, *way) for way, seconds in found.items()])
            return
        rank, is_back = following
        began = time.perf_counter()
        self._round += 1

        def wait() -> None:
            took = time.perf_counter() - began
            if self._answered == self._round and self._shortest is not None:
                self._shortest[following] = min(took, self._shortest.get(following, took))
                self._next(rounds, hear)
            elif took > _ROUND_SECONDS or self.endpoint is None or not self.endpoint.is_open:
                # Silence is for hang reports, so the probe ends.
                self._shortest = {}
                self._next(iter(()), hear)
            else:
                self._service.later(0.0, wait)

        self._service.hurry()
        self._send(rank, self._round, *((1, _BLOCKS) if is_back else (_BLOCKS, 1)))
        self._service.later(0.0, wait)

    def _send(self, rank: int, number: int, blocks: int, answer: int) -> None:
        """Send blocks of a round. ``answer`` is the number of blocks that the receiver sends back."""
        assert self.endpoint is not None
        for block in range(blocks):
            is_last = block == blocks - 1
            self.endpoint.notify(rank, "burst", self._rank, number, is_last, answer, bytes(_BLOCK_BYTES))

    def _receive(self, source: int, number: int, is_last: bool, answer: int, _: bytes) -> None:
        self._service.hurry()
        if is_last and answer:
            self._send(source, number, answer, 0)
        elif is_last:
            self._answered = number
