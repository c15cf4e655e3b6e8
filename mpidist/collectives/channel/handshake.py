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
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from mpidist.collectives.channel.changes import LocalChanges
from mpidist.collectives.channel.mismatch import Advice, mismatch_text, news_text, printing_ranks
from mpidist.collectives.channel.operation import plan_id
from mpidist.collectives.mpi.exchange import gather_objects
from mpidist.collectives.mpi.waiting import Steps, until_done
from mpidist.collectives.node.core import MISMATCH, WAITING
from mpidist.collectives.node.node import Node
from mpidist.core.errors import MismatchError, PeerError, shared_error
from mpidist.core.text import user_call_site
from mpidist.topology import import_mpi

if TYPE_CHECKING:
    from mpi4py import MPI

_ID_BITS = 40
FAILED, SHUT_DOWN = "failed", "left"
"""Notices that a rank sends in place of a plan."""

Start = Callable[[int], None]
"""Begins a call of the core with the id of the handshake."""


class _ByReduction:
    """Exchange of ids without a native core."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        mpi = import_mpi()
        self._size = comm.Get_size()
        # The sum of all ids must be an exact float64.
        self._mask = (1 << min(_ID_BITS, 52 - math.ceil(math.log2(self._size)))) - 1
        self._mine, self._sum = np.zeros(1), np.zeros(1)
        spec = ([self._mine, 1, mpi.DOUBLE], [self._sum, 1, mpi.DOUBLE])
        self._start: Callable[[], MPI.Request] = partial(comm.Iallreduce, *spec)
        self._persistent: MPI.Prequest | None = None
        self._request: MPI.Request
        with suppress(NotImplementedError):
            # A persistent request costs half as much per call. Not every MPI library has it.
            self._persistent = self._request = comm.Allreduce_init(*spec)

    def begin(self, identity: int) -> None:
        """Send this rank's id."""
        self._mine[0] = identity & self._mask
        if self._persistent is None:
            self._request = self._start()
        else:
            self._persistent.Start()

    def finish(self) -> Steps[None]:
        """Yield until all ids have arrived."""
        yield from until_done(self._request)

    def all_agree(self, identity: int) -> bool:
        """Return whether all ranks sent this id."""
        agreed: bool = self._sum[0] == (identity & self._mask) * self._size
        return agreed

    def free(self) -> None:
        """Free the MPI request."""
        if self._persistent is not None:
            self._persistent.Free()


class Handshake:
    """The handshakes on one communicator.

    Attributes:
        advice: Advice for errors.
        changes: Local changes that the next handshake compares.
        has_left: Ranks that have shut down: no exchange is possible any more.
    """

    def __init__(self, comm: MPI.Intracomm, node: Node, advice: Advice) -> None:
        self._comm, self.advice = comm, advice
        self._core = node.core
        self._reduction = _ByReduction(comm) if self._core is None else None
        self._is_over = True
        self._identity = 0
        self.changes: LocalChanges | None = None
        self.has_left: list[int] = []

    def free(self) -> None:
        """Free the MPI request, before the communicator is freed."""
        if self._reduction is not None:
            self._reduction.free()

    def begin(self, identity: int, start: Start | None = None) -> bool:
        """Begin a handshake; return whether it is over. If not, ``finish`` must follow (collective)."""
        if self.changes is not None:
            identity ^= self.changes.checksum
        self._identity = identity
        core = self._core
        if core is None:
            assert start is None, "without a core, data move after the handshake"
            assert self._reduction is not None
            self._reduction.begin(identity)
            self._is_over = False
            return False
        (start or core.meet)(identity)
        self._is_over = core.state not in WAITING
        if self._is_over and core.state != MISMATCH:
            self.changes = None
            return True
        return False

    def _finish(self) -> Steps[bool]:
        """Yield until all ids have arrived; return whether they are equal."""
        if self._core is not None:
            if not self._is_over:
                yield from self._core.go_on()
            return self._core.state != MISMATCH
        assert self._reduction is not None
        yield from self._reduction.finish()
        return self._reduction.all_agree(self._identity)

    def resume(self) -> None:
        """Let ``finish`` finish a handshake that the fast path has begun."""
        self._is_over = False

    def finish(self, text: str, call_site: str | None) -> Steps[None]:
        """Finish the handshake of ``begin``.

        Raises:
            MismatchError: Another rank made another call.
            PeerError: Another rank failed before its call, or has shut down.
        """
        all_agree = yield from self._finish()
        changes, self.changes = self.changes, None
        if not all_agree:
            yield from self._compare(text if changes is None else f"{text}, after {changes.text}", call_site)

    def notify(self, kind: str, text: str, call_site: str) -> Steps[None]:
        """Send a notice instead of a plan: ``FAILED`` or ``SHUT_DOWN``. Ranks with a plan raise PeerError."""
        identity, self.changes = plan_id(kind), None
        if self.begin(identity):
            return
        if not (yield from self._finish()):
            everyone = yield from gather_objects(self._comm, (kind, text, call_site))
            self._note_left(everyone)

    def _note_left(self, everyone: list[tuple[str, str, str]]) -> None:
        self.has_left = [rank for rank, (kind, _, _) in enumerate(everyone) if kind == SHUT_DOWN]

    def _compare(self, text: str, call_site: str | None) -> Steps[None]:
        mine = ("plan", text, call_site or user_call_site())
        everyone = yield from gather_objects(self._comm, mine)
        self._note_left(everyone)
        news = news_text(everyone)
        prints = self._comm.Get_rank() in printing_ranks(everyone)
        if news:
            remedy = f". {self.advice.calls}" if self.has_left else ""
            text = f"rank {self._comm.Get_rank()} was in {text} (at {mine[2]}) when {news}{remedy}"
            raise shared_error(PeerError(text), prints)
        calls = {rank: text for rank, (_, text, _) in enumerate(everyone)}
        raise shared_error(MismatchError(mismatch_text(everyone, self.advice), calls), prints)
