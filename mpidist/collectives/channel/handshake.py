"""The handshake: the exchange that opens every collective and compares the calls of the ranks.

Each call of a communicator, of any kind, begins with one exchange of the same few numbers. One of them is the id
of the caller's plan, a hash of operation, shapes, dtypes and options. All ranks see at the same point whether all
passed the same id; if not they exchange descriptions of their calls, and raise the same error. The data that follow
therefore always have the size that everybody expects.

Ranks exchange through the cores of their nodes, and data may begin to move in the same call. Without a native core
one reduction of MPI does it: if all ranks passed the same id the sum is that id times the number of ranks; a rank that
passed another one makes the sum differ from that which *every* rank expects (with two different ids always; with three
or more but for a chance of one in 2**40, up to 4096 ranks).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from mpidist.collectives.channel.mismatch import Advice, mismatch_text, news_text, printing_ranks
from mpidist.collectives.channel.operation import plan_id
from mpidist.collectives.channel.tally import Tally
from mpidist.collectives.mpi.objects import gather_equal_objects
from mpidist.collectives.mpi.waiting import Steps, until_done
from mpidist.collectives.node.core import MISMATCH, Core
from mpidist.collectives.node.node import Node
from mpidist.core.errors import MismatchError, PeerError, shared_error
from mpidist.core.text import user_call_site
from mpidist.topology import import_mpi

if TYPE_CHECKING:
    from mpi4py import MPI

_ID_BITS = 40
# News of a rank in place of a plan.
FAILED = "failed"
LEFT = "left"


# Begins a call of the core with an identity.
Start = Callable[[int], None]


class _ByCore:
    """The exchange through the cores of the nodes; data may go with it.

    Args:
        core: Of this rank's node.
    """

    def __init__(self, core: Core) -> None:
        self._core = core

    def begin(self, identity: int, start: Start | None) -> bool:
        """Send this rank's id; return whether those of all others are there (collective).

        Args:
            identity: The id.
            start: Begins a call of the core, in place of a mere meeting.
        """
        (start or self._core.meet)(identity)
        return not self._core.waits

    def rest(self) -> Steps[None]:
        """Yield until those of all others are there."""
        yield from self._core.go_on()

    def all_agree(self, identity: int) -> bool:
        """Return whether all ranks sent this identity."""
        return self._core.state != MISMATCH

    def free(self) -> None:
        """Free nothing: the core is the node's."""


class _ByReduction:
    """The exchange without a native core, with the methods of ``_ByCore``.

    MPI_Allreduce_init, or MPI_Iallreduce where the library lacks it.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        mpi = import_mpi()
        self._size = comm.Get_size()
        # The sum of all ids has to be an exact float64.
        self._mask = (1 << min(_ID_BITS, 52 - math.ceil(math.log2(self._size)))) - 1
        self._mine, self._sum = np.zeros(1), np.zeros(1)
        spec = ([self._mine, 1, mpi.DOUBLE], [self._sum, 1, mpi.DOUBLE])
        self._start: Callable[[], MPI.Request] = partial(comm.Iallreduce, *spec)
        self._persistent: MPI.Prequest | None = None
        self._request: MPI.Request
        with suppress(NotImplementedError):
            # One request for ever costs half of a new one per call.
            self._persistent = self._request = comm.Allreduce_init(*spec)

    def begin(self, identity: int, start: Start | None) -> bool:
        assert start is None, "what moves by messages begins after the meeting"
        self._mine[0] = identity & self._mask
        if self._persistent is None:
            self._request = self._start()
        else:
            self._persistent.Start()
        return False

    def rest(self) -> Steps[None]:
        yield from until_done(self._request)

    def all_agree(self, identity: int) -> bool:
        agreed: bool = self._sum[0] == (identity & self._mask) * self._size
        return agreed

    def free(self) -> None:
        if self._persistent is not None:
            self._persistent.Free()


class Handshake:
    """The opening exchange on one communicator.

    Args:
        comm: The private communicator.
        node: The node of this rank.
        advice: Advice for errors.
    """

    def __init__(self, comm: MPI.Intracomm, node: Node, advice: Advice) -> None:
        self._comm, self.advice = comm, advice
        self._exchange = _ByReduction(comm) if node.core is None else _ByCore(node.core)
        self._is_over = True
        self._identity = 0
        self.tally: Tally | None = None
        """The changes that are compared in the next opening."""
        # Ranks that have ended their program: nothing can be exchanged any more.
        self.left: list[int] = []

    def free(self) -> None:
        """Free its MPI request, before the communicator is freed."""
        self._exchange.free()

    def begin(self, identity: int, start: Start | None = None) -> bool:
        """Begin to meet the other ranks; return whether all have come (collective).

        If not, ``finish`` has to follow.

        Args:
            identity: The id of this rank's description.
            start: Begins a call of the node's core with the identity of the exchange.
        """
        if self.tally is not None:
            identity ^= self.tally.identity
        self._identity = identity
        self._is_over = self._exchange.begin(identity, start)
        if self._is_over and self._exchange.all_agree(identity):
            self.tally = None
            return True
        return False

    def has_begun(self) -> None:
        """Take note that a short call has begun a meeting, which ``finish`` is to finish."""
        self._is_over = False

    def finish(self, text: str, call_site: str | None) -> Steps[None]:
        """Meet the other ranks, after ``begin``.

        Args:
            text: Description of this rank's call.
            call_site: Line of the user's program; None finds it on the stack when it is needed.

        Raises:
            MismatchError: Another rank is about to do something else.
            PeerError: Another rank failed on its way here.
        """
        if not self._is_over:
            yield from self._exchange.rest()
        tally, self.tally = self.tally, None
        if not self._exchange.all_agree(self._identity):
            yield from self._compare(text if tally is None else f"{text}, after {tally.text}", call_site)

    def signal(self, kind: str, text: str, call_site: str) -> Steps[None]:
        """Take part with news of this rank; ranks that have a plan raise PeerError (collective).

        Args:
            kind: ``FAILED`` or ``LEFT``.
            text: The news, as in "rank 3 ...".
            call_site: Line of the user's program.
        """
        identity, self.tally = plan_id(kind), None
        if self.begin(identity):
            return
        if not self._is_over:
            yield from self._exchange.rest()
        if not self._exchange.all_agree(identity):
            everyone = yield from gather_equal_objects(self._comm, (kind, text, call_site))
            self._note_left(everyone)

    def _note_left(self, everyone: list[tuple[str, str, str]]) -> None:
        self.left = [rank for rank, (kind, _, _) in enumerate(everyone) if kind == LEFT]

    def _compare(self, text: str, call_site: str | None) -> Steps[None]:
        mine = ("plan", text, call_site or user_call_site())
        everyone = yield from gather_equal_objects(self._comm, mine)
        self._note_left(everyone)
        prints = self._comm.Get_rank() in printing_ranks(everyone)
        news = news_text(everyone)
        if news:
            remedy = f". {self.advice.calls}" if self.left else ""
            error = PeerError(f"rank {self._comm.Get_rank()} was in {text} (at {mine[2]}) when {news}{remedy}")
            raise shared_error(error, prints)
        calls = {rank: text for rank, (_, text, _) in enumerate(everyone)}
        raise shared_error(MismatchError(mismatch_text(everyone, self.advice), calls), prints)
