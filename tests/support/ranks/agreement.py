"""Messages between the ranks of a test session: polled, on a private communicator, never waiting for ever."""

from __future__ import annotations

import itertools
import sys
import time
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from mpi4py import MPI


class Agreement:
    """A private duplicate of the world on which the ranks tell each other how a test went.

    Args:
        world: The communicator of all ranks; duplicated (collective).
        say: Prints a line for a human, whatever pytest captures.
    """

    def __init__(self, world: MPI.Comm, say: Callable[[str], None]) -> None:
        self._comm = world.Dup()
        self._say = say
        self.rank: int = self._comm.rank
        self.size: int = self._comm.size

    def exchange(self, tag: int, text: str, what: str, report_at: float, abort_at: float) -> list[str]:
        """Give every rank every rank's ``text`` (collective).

        Args:
            tag: Number of what the ranks are at; it must be the same on all.
            text: This rank's contribution; one round of tiny messages where all are empty.
            what: Description of what the ranks are at, for messages.
            report_at: Time (``time.monotonic``) at which to name the ranks that have not come.
            abort_at: Time at which the job is ended.

        Returns:
            The texts by rank.
        """
        payload = np.frombuffer(text.encode(), np.uint8)
        headers = self._headers(np.array([tag, payload.size], np.int64), what, report_at, abort_at)
        if any(headers[:, 0] != tag):
            self.abort(f"the ranks are in different tests; rank {self.rank} of {self.size} is at {what}")
        lengths = headers[:, 1]
        if not lengths.any():
            return [""] * self.size
        gathered = np.empty(int(lengths.sum()), np.uint8)
        starts = np.concatenate([[0], np.cumsum(lengths)])
        requests = [self._comm.Iallgatherv(payload, (gathered, (lengths, starts[:-1])))]
        self._wait(requests, [-1], what, report_at, abort_at)
        pieces = itertools.pairwise(starts)
        return [gathered[begin:end].tobytes().decode() for begin, end in pieces]

    def _headers(self, mine: np.ndarray, what: str, report_at: float, abort_at: float) -> np.ndarray:
        """Exchange one row per rank, rank by rank, so that those that have not come can be named."""
        rows = np.empty((self.size, mine.size), mine.dtype)
        rows[self.rank] = mine
        others = [rank for rank in range(self.size) if rank != self.rank]
        sends = [self._comm.Isend(mine, rank) for rank in others]
        receives = [self._comm.Irecv(rows[rank], rank) for rank in others]
        self._wait(receives, others, what, report_at, abort_at)
        self._wait(sends, others, what, report_at, abort_at)
        return rows

    def _wait(
        self, requests: list[MPI.Request], ranks: list[int], what: str, report_at: float, abort_at: float
    ) -> None:
        reported = False
        while True:
            done = [request.Test() for request in requests]
            if all(done):
                return
            now = time.monotonic()
            missing = [rank for rank, here in zip(ranks, done, strict=True) if not here]
            if now > report_at and not reported:
                reported = True
                self._say(f"rank {self.rank} of {self.size} waits: rank {missing} has not finished {what}")
            if now > abort_at:
                self.abort(f"rank {missing} never finished {what}; rank {self.rank} ends the job")
            time.sleep(0.0002)

    def abort(self, why: str) -> None:
        """Say why and end all ranks."""
        self._say(why)
        sys.stdout.flush()
        sys.stderr.flush()
        self._comm.Abort(3)

    def close(self) -> None:
        """Free the communicator (collective)."""
        self._comm.Free()
