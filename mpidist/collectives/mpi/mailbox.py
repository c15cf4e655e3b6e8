"""Mailbox: small messages between ranks beside their collectives, which nobody has to wait for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from mpidist.collectives.mpi.waiting import all_done
from mpidist.topology import import_mpi
from mpidist.topology.faults import says_rank_is_lost

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")


class Mailbox:
    """Pickled messages of at most a few KiB; none of its calls waits.

    Args:
        comm: The communicator.
        tag: Of the messages (see ``mpidist.core.message_tags``).
        on_loss: Called in place of a call that fails as a rank is lost; by default the call raises MPI's error.
    """

    def __init__(self, comm: MPI.Intracomm, tag: int, on_loss: Callable[[Exception], object] | None = None) -> None:
        self._comm, self._tag, self._on_loss = comm, tag, on_loss
        self._sending: list[MPI.Request] = []

    def send(self, rank: int, content: object) -> None:
        """Send a message (MPI_Isend); it is kept until it has left."""
        self._unless_lost(lambda: self._sending.append(self._comm.isend(content, rank, self._tag)), None)

    def received(self) -> Iterator[tuple[int, Any]]:
        """Yield the source and the content of each message that has come."""
        while (message := self._unless_lost(self._next, None)) is not None:
            yield message

    def all_sent(self) -> bool:
        """Return whether all messages have left, or never will."""
        return self._unless_lost(lambda: all_done(self._sending), True)

    def _next(self) -> tuple[int, Any] | None:
        status = import_mpi().Status()
        if not self._comm.iprobe(tag=self._tag, status=status):
            return None
        return status.Get_source(), self._comm.recv(source=status.Get_source(), tag=self._tag)

    def _unless_lost(self, call: Callable[[], T], otherwise: T) -> T:
        try:
            return call()
        except import_mpi().Exception as error:
            if self._on_loss is None or not says_rank_is_lost(error):
                raise
            self._on_loss(error)
            return otherwise
