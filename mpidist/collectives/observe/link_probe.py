"""The search for slow links between nodes, when moving data takes much of a job's time and no rank is late.

A slow link slows down a collective for all ranks alike. So rank 0 exchanges bursts of small messages with the first
rank of each other node, one node after the other, and compares the rates of all directions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from mpidist.collectives.rpc import Endpoint, Handlers, ServiceThread

# Small enough for MPI's eager messages, so that no thread waits for the rest of a message.
_BLOCK_BYTES, _BLOCKS = 7000, 128
_BURST_SECONDS = 3.0
MOST_NODES = 64
"""Larger jobs are not probed, because the probe of each node takes milliseconds of rank 0."""


class LinkTimes(NamedTuple):
    """Seconds of a burst from rank 0 to a rank, and back."""

    rank: int
    there: float
    back: float


Hear = Callable[[list[LinkTimes]], object]


def rate_of(seconds: float) -> float:
    """Return the bytes per second of a burst."""
    return _BLOCK_BYTES * (_BLOCKS - 1) / seconds


class LinkProbe:
    """Sends and answers the bursts of one endpoint, in the service thread."""

    def __init__(self, rank: int, service: ServiceThread) -> None:
        self.handlers: Handlers = {"burst": lambda _, *args: self._receive(*args)}
        self.endpoint: Endpoint | None = None
        self._rank, self._service = rank, service
        self._began: dict[int, float] = {}
        # On rank 0: the rank whose burst it awaits, and the results.
        self._awaited = -1
        self._results: list[LinkTimes] = []

    def start(self, ranks: Sequence[int], hear: Hear) -> None:
        """Exchange bursts with ``ranks`` in turn, and pass the results to ``hear``."""
        if self._awaited != -1:  # another probe is running
            hear([])
            return
        self._results = []
        self._next(iter(ranks), hear)

    def _next(self, ranks: Iterator[int], hear: Hear) -> None:
        rank = next(ranks, None)
        if rank is None:
            self._awaited = -1
            hear(self._results)
            return
        known, deadline = len(self._results), time.monotonic() + _BURST_SECONDS

        def wait() -> None:
            if len(self._results) > known or time.monotonic() > deadline:
                self._next(ranks, hear)
            else:
                self._service.later(0.0, wait)

        self._awaited = rank
        self._send(rank, 0.0)
        self._service.later(0.0, wait)

    def _send(self, rank: int, seconds: float) -> None:
        assert self.endpoint is not None
        for block in range(_BLOCKS):
            self.endpoint.notify(rank, "burst", self._rank, block, seconds, bytes(_BLOCK_BYTES))

    def _receive(self, source: int, block: int, seconds: float, _: bytes) -> None:
        self._service.hurry()
        now = time.perf_counter()
        if block == 0:
            self._began[source] = now
        elif block == _BLOCKS - 1:
            took = now - self._began.pop(source, now)
            if source == self._awaited:
                self._results.append(LinkTimes(source, seconds, took))
            else:
                self._send(source, took)
