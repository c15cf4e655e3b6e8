"""Channel: one private MPI communicator, on which this rank carries out collectives in order.

It opens each collective, spreads errors of one rank, and ends with the other ranks; its ``Executor`` carries the
collectives out. They are given as steps (see ``mpidist.collectives.mpi.waiting``).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from mpidist.collectives.channel import shutdown
from mpidist.collectives.channel.connections import check_descriptors, open_connections
from mpidist.collectives.channel.executor import Executor
from mpidist.collectives.channel.handshake import FAILED, LEFT, Handshake, Start
from mpidist.collectives.channel.mismatch import FOR_COMMUNICATORS, Advice
from mpidist.collectives.channel.observers import OTHERS, Chunk, Observers
from mpidist.collectives.channel.operation import Description, Operation, describe
from mpidist.collectives.channel.progress import progress
from mpidist.collectives.channel.work import Work
from mpidist.collectives.mpi.agreed import COMMON_ERRORS
from mpidist.collectives.mpi.communicator_names import next_name, ranks_in_job
from mpidist.collectives.mpi.mailbox import MessageCount, drain
from mpidist.collectives.mpi.waiting import Comm, Steps, drive
from mpidist.collectives.node.node import Node
from mpidist.core import settings
from mpidist.core.concurrency import Deadline
from mpidist.core.errors import PeerError
from mpidist.core.message_tags import DATA_OF_PROGRAMS, HEADS_OF_PROGRAMS
from mpidist.core.text import tell_user, user_call_site
from mpidist.topology import import_mpi
from mpidist.topology.exit import revoke, revoking
from mpidist.topology.start import duplicate, limited

T = TypeVar("T")

open_channels: list[Channel] = []
"""The channels of this process that have not been closed."""
# Given up with a rank that was lost.
_abandoned_channels: list[Channel] = []
# A rank that failed on its own tells the others, but does not keep its error back for longer than this.
_FAILURE_SECONDS = 2.0
# Set on an error that the other ranks have been told of.
_ANNOUNCED = "_mpidist_announced"
_log = logging.getLogger("mpidist")


class Channel:
    """Collectives in order on a duplicate of an MPI communicator (collective).

    Args:
        comm: The communicator to duplicate.
        timeout: Seconds before a collective is given up; ``MPIDIST_TIMEOUT`` by default.
        owner: Name of its owner, for messages; the same on every rank.
        name: By which all its ranks know it, and no other; made of their numbers by default.
        advice: Advice for errors, that fits the programs of the owner.

    Attributes:
        comm: The duplicate.
        node: Its node of this rank.
        handshake: With which every collective on it begins.
        observers: They see its collectives.
        executor: It carries them out.
        timeout: See above.
        at_exit: Called at the end of a program that has not closed it, after the last exchange with other ranks.
    """

    def __init__(
        self,
        comm: Comm,
        timeout: float | None,
        owner: str = "Communicator",
        name: str | None = None,
        advice: Advice = FOR_COMMUNICATORS,
    ) -> None:
        shutdown.check_not_forked()
        self.owner = owner
        self.comm: Comm = duplicate(comm, f"making a {owner}")
        self.node = self._make_node()
        self.rank: int = self.comm.Get_rank()
        self.size: int = self.comm.Get_size()
        self.name = name or next_name(ranks_in_job(self.comm))
        self.handshake = Handshake(self.comm, self.node, advice)
        self.observers = Observers()
        self.timeout: float = timeout or settings.TIMEOUT.read()
        self.executor = Executor(
            owner, self.comm, self.node.core, self.handshake, self.observers, self.timeout, self._revoke
        )
        self.at_exit: list[Callable[[], None]] = []
        # Of the messages between two ranks, which must all be received before the communicator is freed.
        self.message_counts: list[MessageCount] = []
        open_channels.append(self)
        shutdown.install()

    def _make_node(self) -> Node:
        with revoking(self.comm), limited(f"making a {self.owner}"):
            try:
                check_descriptors(self.comm)
            except (OSError, PeerError):
                self.comm.Free()
                raise
            node = Node(self.comm)
            open_connections(self.comm, node.ranks)
            return node

    def __repr__(self) -> str:
        return f"<channel of a {self.owner}, rank {self.rank} of {self.size}>"

    @property
    def is_usable(self) -> bool:
        """Whether collectives on it can still take place."""
        return self.executor.unusable is None and not self.handshake.left

    @property
    def current(self) -> Operation[object]:
        """The operation that is being carried out."""
        return self.executor.current

    def run(self, operation: Operation[T]) -> T:
        """Carry out a collective and return its result (see ``Executor.run``)."""
        if self.observers.issued:
            self._tell_issued(operation)
        return self.executor.run(operation)

    def submit(self, operation: Operation[T]) -> Work[T]:
        """Start a collective and return its handle (see ``Executor.submit``)."""
        operation.is_work = True
        if operation.call_site is None:
            operation.call_site = user_call_site()
        if self.observers.issued:
            self._tell_issued(operation)
        return self.executor.submit(operation)

    def _tell_issued(self, operation: Operation[T]) -> None:
        with self.shared_errors(f"an observer of {operation.text}"):
            for tell in self.observers.issued:
                tell(operation)

    # Inside the steps of a collective ---------------------------------------------------------------------------

    def open(self, description: Description, start: Start | None = None) -> Steps[None]:
        """Meet the other ranks, all about to do the same (collective).

        Args:
            description: What this rank is about to do.
            start: See ``Handshake.begin``.

        Raises:
            MismatchError: Another rank is about to do something else.
            PeerError: Another rank failed on its way here.
        """
        if not self.begin(description, start):
            yield from self.finish(description)

    def begin(self, description: Description, start: Start | None = None) -> bool:
        """Begin the meeting of ``open``; return whether it is over. If not, ``finish`` has to follow."""
        if self.observers.phase:
            self.phase(OTHERS)
        is_done = self.handshake.begin(description.id, start)
        if is_done and self.observers.met:
            self._tell_met()
        return is_done

    def finish(self, description: Description) -> Steps[None]:
        """Finish the meeting of ``begin``, with the same argument."""
        yield from self.handshake.finish(description.text, self.current.call_site)
        self._tell_met()

    def _tell_met(self) -> None:
        for tell in self.observers.met:
            tell(self.current)

    def phase(self, name: str) -> None:
        """Tell observers that a phase of the collective begins."""
        for tell in self.observers.phase:
            tell(self.current, name)

    @property
    def tell_chunk(self) -> Callable[[str, int, int, int], None] | None:
        """The function to be told of each chunk, if any observer looks at chunks."""
        return self._tell_chunk if self.observers.chunk else None

    def _tell_chunk(self, event: str, number: int, start: int, nbytes: int) -> None:
        for tell in self.observers.chunk:
            tell(self.current, Chunk(event, number, start, nbytes))

    # Errors of one rank -----------------------------------------------------------------------------------------

    @contextmanager
    def shared_errors(self, doing: str) -> Iterator[None]:
        """Share an error in a block of rank-local work before a collective with all ranks.

        The rank that fails raises its own error; the others raise PeerError at their next call.

        Args:
            doing: The work of the block, for the report.
        """
        try:
            yield
        except Exception as error:
            self.announce(error, doing)
            raise

    def announce(self, error: Exception, doing: str) -> None:
        """Tell the other ranks of an error that replaces the next collective of this rank.

        Errors that the ranks have in common already, and one that was announced before, are left alone.

        Args:
            error: The error.
            doing: The work that failed, for the report.
        """
        nobody_listens = self.size == 1 or not self.is_usable
        if nobody_listens or isinstance(error, COMMON_ERRORS) or hasattr(error, _ANNOUNCED):
            return
        setattr(error, _ANNOUNCED, True)
        call_site = user_call_site()
        news = self.handshake.signal(FAILED, f"raised {type(error).__name__}: {error}", call_site)
        telling = Operation(news, describe("telling the other ranks", f"{type(error).__name__} in {doing}"))
        telling.is_work, telling.call_site, self.executor.tally = True, call_site, None
        # Observers see it begin; one that failed when it was told of a call is not asked again.
        work = self.executor.submit(telling)
        try:
            self.executor.complete(work, _FAILURE_SECONDS)
        except TimeoutError:
            # They are busy. The news waits in the queue for their next call, or for the end of this program.
            return

    # The end ----------------------------------------------------------------------------------------------------

    def close(self, free_first: Callable[[], None], before: Steps[None] | None = None) -> bool:
        """Finish all works and ``before``, call ``free_first`` and free the communicator (collective).

        Returns:
            Whether it did; not the second time, nor where it was unusable already.
        """
        if self not in open_channels or not self.is_usable:
            # A channel that was given up is dealt with at the end of the program, when it is known who came.
            return False
        closing = describe("close")
        self.run(Operation(self._closing(closing, before), closing))
        self._forget()
        if self.size > 1:
            self._drain()
        free_first()
        self.handshake.free()
        self.node.close()
        self.comm.Free()
        self.executor.unusable = "it has been closed"
        return True

    def _drain(self) -> None:
        """Receive the messages in flight, and warn if the program left any unreceived."""
        dropped = drain(self.comm, self.message_counts, f"closing a {self.owner}")
        of_program = [(source, tag) for source, tag in dropped if HEADS_OF_PROGRAMS <= tag < DATA_OF_PROGRAMS]
        for source, tag in of_program[:1]:
            tell_user(
                f"rank {self.rank} closed a {self.owner} without receiving {len(of_program)} message(s), the first "
                f"from rank {source} with tag {tag - HEADS_OF_PROGRAMS}. Call recv() for each send()"
            )

    def _closing(self, closing: Description, before: Steps[None] | None) -> Steps[None]:
        yield from self.open(closing)
        if before is not None:
            yield from before

    def _forget(self) -> None:
        open_channels.remove(self)
        self.executor.stop()
        for tell in self.observers.closed:
            try:
                tell()
            except Exception:
                # The other ranks free their part, too, and wait for this one.
                _log.exception("mpidist: an observer of the %s failed when it was closed", self.owner)

    def _revoke(self) -> None:
        for comm in (self.comm, self.node.comm):
            revoke(comm)

    def abandon(self) -> None:
        """Give it up for good, and tell the other ranks no more than that (local)."""
        self._revoke()
        self.executor.abandon()
        self._forget()
        # Windows, requests and buffers stay: none of them can be freed without the rank that is lost.
        _abandoned_channels.append(self)

    def leave(self) -> Steps[None]:
        """Finish all works and tell the others that this rank's program has ended."""
        yield from self.executor.finish()
        # Only now: a work may have found that the others have left, who will not hear anything more.
        if not self.handshake.left:
            yield from self.handshake.signal(LEFT, "has left the program", "its end")


def abandon_all() -> None:
    """Give all channels up that have not been closed, as a rank was lost."""
    for channel in list(open_channels):
        channel.abandon()
    for channel in _abandoned_channels:
        channel.node.end_writers()


def _leave_all() -> bool:
    """Tell the other ranks of all open channels that this program has ended.

    How long the other programs still run is their own affair, so the wait for them has no deadline, only a report.
    Returns whether all ranks of the job have ended their programs. It is unknown if their communicators are closed.
    """
    progress.stop()
    several = [channel for channel in open_channels if channel.size > 1]
    try:
        if several and shutdown.mpi_runs():
            rank = several[0].rank
            report = f"rank {rank} has ended its program, and waits for the other ranks to end theirs"
            drive(_together([channel.leave() for channel in several]), lambda: Deadline(lambda _: report))
            ranks_in_world = import_mpi().COMM_WORLD.Get_size()
            return any(channel.size == ranks_in_world and not channel.handshake.left for channel in several)
        return False
    finally:
        for channel in open_channels:
            for act in channel.at_exit:
                act()
        open_channels.clear()


def _together(all_steps: Sequence[Steps[None]]) -> Steps[None]:
    going = list(all_steps)
    while going:
        going = [steps for steps in going if next(steps, going) is not going]
        yield


def _disown_all() -> None:
    for channel in open_channels:
        channel.executor.disown()
    open_channels.clear()
    _abandoned_channels.clear()


shutdown.at_the_end(_leave_all)
os.register_at_fork(after_in_child=_disown_all)
