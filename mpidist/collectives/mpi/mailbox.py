"""Mailbox: small messages between ranks beside their collectives, which nobody has to wait for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from mpidist.collectives.mpi.waiting import all_done
from mpidist.core.concurrency import Deadline, wait_until
from mpidist.core.errors import CollectiveTimeoutError
from mpidist.topology import import_mpi
from mpidist.topology.exit import says_rank_is_lost
from mpidist.topology.start import finish

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")


_NAPS_SECONDS = (1e-5, 1e-3)


class MessageCount:
    """The number of messages sent to each rank, and received. One thread at a time counts."""

    def __init__(self) -> None:
        self.sent: Counter[int] = Counter()
        self.received = 0


def drain(comm: MPI.Intracomm, counts: Sequence[MessageCount], doing: str) -> list[tuple[int, int]]:
    """Receive and drop the messages that are still in flight, before ``comm`` is freed (collective).

    No rank may send any more. MPI wants every message received. Open MPI gives the number of a freed communicator to
    the next one, where a late message counts as one of the first: all later ones then wait forever.

    Args:
        comm: The communicator.
        counts: All counts of messages on it.
        doing: The purpose, for the report of a long wait.

    Returns:
        Source and tag of each message.
    """
    mpi, rank = import_mpi(), comm.Get_rank()
    most_sent = np.array([sum(sum(count.sent.values()) for count in counts)])
    finish(comm.Iallreduce(mpi.IN_PLACE, most_sent, mpi.MAX), comm, doing)
    if not most_sent[0]:
        return []
    sent, expected = np.zeros(comm.Get_size(), np.int64), np.zeros(1, np.int64)
    for count in counts:
        for dest, number in count.sent.items():
            sent[dest] += number
    finish(comm.Ireduce_scatter_block(sent, expected), comm, doing)
    missing = int(expected[0]) - sum(count.received for count in counts)
    dropped: list[tuple[int, int]] = []
    status = mpi.Status()

    def are_all_received() -> bool:
        while len(dropped) < missing and (message := comm.Improbe(status=status)) is not None:
            message.Recv([np.empty(status.Get_count(mpi.BYTE), np.uint8), mpi.BYTE])
            dropped.append((status.Get_source(), status.Get_tag()))
        return len(dropped) >= missing

    deadline = Deadline(None, lambda waited: CollectiveTimeoutError(doing, 0, waited, rank))
    wait_until(are_all_received, deadline, *_NAPS_SECONDS)
    return dropped


class Mailbox:
    """Pickled messages of at most a few KiB; none of its calls waits.

    Args:
        comm: The communicator.
        tag: Of the messages (see ``mpidist.core.message_tags``).
        on_loss: Called in place of a call that fails as a rank is lost; by default the call raises MPI's error.
    """

    def __init__(self, comm: MPI.Intracomm, tag: int, on_loss: Callable[[Exception], object] | None = None) -> None:
        self._comm, self._tag, self._on_loss = comm, tag, on_loss
        self.count = MessageCount()
        self._sending: list[MPI.Request] = []

    def send(self, rank: int, content: object) -> None:
        """Send a message (MPI_Isend); it is kept until it has left."""
        self._unless_lost(lambda: self._send(rank, content), None)

    def received(self) -> Iterator[tuple[int, Any]]:
        """Yield the source and the content of each message that has come."""
        while (message := self._unless_lost(self._next, None)) is not None:
            yield message

    def all_sent(self) -> bool:
        """Return whether all messages have left, or never will."""
        return self._unless_lost(lambda: all_done(self._sending), True)

    def _send(self, rank: int, content: object) -> None:
        self._sending.append(self._comm.isend(content, rank, self._tag))
        self.count.sent[rank] += 1

    def _next(self) -> tuple[int, Any] | None:
        status = import_mpi().Status()
        if not self._comm.iprobe(tag=self._tag, status=status):
            return None
        content = self._comm.recv(source=status.Get_source(), tag=self._tag)
        self.count.received += 1
        return status.Get_source(), content

    def _unless_lost(self, call: Callable[[], T], otherwise: T) -> T:
        try:
            return call()
        except import_mpi().Exception as error:
            if self._on_loss is None or not says_rank_is_lost(error):
                raise
            self._on_loss(error)
            return otherwise
