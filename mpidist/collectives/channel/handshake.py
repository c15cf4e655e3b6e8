"""Handshake: the exchange that opens every collective and compares the calls of the ranks.

Each call begins with one exchange of an id, a hash of operation, shapes, dtypes and options. All ranks see at the same
point whether the ids are equal. If they differ, the ranks exchange their descriptions and raise the same error. So the
data that follow always have the size that every rank expects.

Ranks exchange ids through the cores of their nodes, and data may move in the same call. Without a native core, one MPI
reduction adds the ids up. The sum of equal ids is the id times the number of ranks. A different id changes the sum
that *every* rank expects: always with two ids, and with three or more except for a chance of one in 2**40 (up to 4096
ranks).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from mpidist.collectives.channel.mismatch import Advice, Told, mismatch_text, news_text, printing_ranks
from mpidist.collectives.channel.operation import Operation, plan_id
from mpidist.collectives.mpi.exchange import gather_objects
from mpidist.collectives.mpi.waiting import Steps, until_done
from mpidist.collectives.node.core import DONE, MISMATCH, NOT_YET, WAITING, Core
from mpidist.collectives.node.node import Node
from mpidist.core.errors import MismatchError, PeerError, shared_error
from mpidist.core.text import user_call_site
from mpidist.topology import import_mpi

if TYPE_CHECKING:
    from mpi4py import MPI

_ID_BITS = 40
FAILED, SHUT_DOWN = "failed", "left"
"""Notices that a rank sends instead of a plan."""

Start = Callable[[int], None]
"""Begins a call of the core with the id of the handshake."""


class _ByReduction:
    """Exchange of ids without a native core, with the same methods."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        mpi = import_mpi()
        self._size = comm.Get_size()
        # The sum of all ids must be an exact float64.
        self._mask = (1 << min(_ID_BITS, 52 - math.ceil(math.log2(self._size)))) - 1
        self._mine, self._sum = np.zeros(1), np.zeros(1)
        spec = ([self._mine, 1, mpi.DOUBLE], [self._sum, 1, mpi.DOUBLE])
        self._start: Callable[[], MPI.Request] = partial(comm.Iallreduce, *spec)
        self.waited = self._arrived = 0
        self.state = DONE

    def meet(self, identity: int) -> None:
        """Send this rank's id."""
        self._mine[0] = identity & self._mask
        self.state, self._arrived = NOT_YET, time.perf_counter_ns()
        self._request = self._start()

    def go_on(self) -> Steps[None]:
        """Yield until all ids have arrived. The state becomes MISMATCH if they differ."""
        yield from until_done(self._request)
        self.waited += time.perf_counter_ns() - self._arrived
        self.state = DONE if self._sum[0] == self._mine[0] * self._size else MISMATCH


class Handshake:
    """The handshakes on one communicator."""

    def __init__(self, comm: MPI.Intracomm, node: Node, advice: Advice) -> None:
        self._comm, self.advice = comm, advice
        self._core: Core | _ByReduction = node.core or _ByReduction(comm)
        self.has_left: list[int] = []
        """Ranks that have shut down: no exchange is possible any more."""

    @property
    def waited(self) -> int:
        """Nanoseconds in which this rank waited for others to arrive."""
        return self._core.waited

    def begin(self, identity: int, operation: Operation[object], start: Start | None = None) -> bool:
        """Begin a handshake, and return whether it is over. If not, ``finish`` must follow (collective)."""
        if operation.changes is not None:
            identity ^= operation.changes.checksum
        core = self._core
        (start or core.meet)(identity)
        if core.state in WAITING or core.state == MISMATCH:
            return False
        operation.changes = None
        return True

    def _all_agree(self) -> Steps[bool]:
        """Yield until all ids have arrived. Return whether they are equal."""
        yield from self._core.go_on()
        return self._core.state != MISMATCH

    def finish(self, text: str, operation: Operation[object]) -> Steps[None]:
        """Finish the handshake that ``begin`` or the fast path has begun.

        Raises MismatchError if another rank made another call, and PeerError if it has failed or shut down.
        """
        all_agree = yield from self._all_agree()
        changes, operation.changes = operation.changes, None
        if not all_agree:
            after = "" if changes is None else changes.text
            yield from self._compare(f"{text}, after {after}" if after else text, operation)

    def notify(self, kind: str, text: str, call_site: str) -> Steps[None]:
        """Send a notice instead of a plan: ``FAILED`` or ``SHUT_DOWN``. Ranks with a plan raise PeerError."""
        self._core.meet(plan_id(kind))
        if not (yield from self._all_agree()):
            yield from self._exchange((kind, text, call_site))

    def _exchange(self, mine: Told) -> Steps[list[Told]]:
        """Gather the calls and notices of all ranks."""
        everyone = yield from gather_objects(self._comm, mine)
        self.has_left = [rank for rank, (kind, _, _) in enumerate(everyone) if kind == SHUT_DOWN]
        return everyone

    def _compare(self, text: str, operation: Operation[object]) -> Steps[None]:
        # A started operation has its call site when its program has left the first step.
        mine = ("plan", text, operation.call_site or user_call_site())
        everyone = yield from self._exchange(mine)
        news = news_text(everyone)
        prints = self._comm.Get_rank() in printing_ranks(everyone)
        if news:
            remedy = f". {self.advice.calls}" if self.has_left else ""
            text = f"rank {self._comm.Get_rank()} was in {text} (at {mine[2]}) when {news}{remedy}"
            raise shared_error(PeerError(text), prints)
        calls = {rank: text for rank, (_, text, _) in enumerate(everyone)}
        raise shared_error(MismatchError(mismatch_text(everyone, self.advice), calls), prints)
