"""Channel: one private MPI communicator, on which this rank runs collectives in order.

It opens each collective with a handshake, announces errors of one rank to the others, and shuts down together with
them. Its Executor runs the collectives, which are generators of steps (see ``mpidist.collectives.mpi.waiting``).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from mpidist.collectives.channel import shutdown
from mpidist.collectives.channel.connections import check_descriptors, open_connections
from mpidist.collectives.channel.executor import Executor
from mpidist.collectives.channel.handshake import FAILED, SHUT_DOWN, Handshake, Start
from mpidist.collectives.channel.mismatch import FOR_COMMUNICATORS, Advice
from mpidist.collectives.channel.observers import OTHERS, Chunk, Observers
from mpidist.collectives.channel.operation import Description, Operation, describe
from mpidist.collectives.channel.progress import progress
from mpidist.collectives.mpi.communicator_names import next_name, ranks_in_job
from mpidist.collectives.mpi.exchange import COMMON_ERRORS, MessageCount, drain
from mpidist.collectives.mpi.waiting import Comm, Steps, drive
from mpidist.collectives.node.node import Node
from mpidist.core import settings
from mpidist.core.concurrency import Deadline
from mpidist.core.errors import PeerError, RankLostError
from mpidist.core.message_tags import DATA_OF_PROGRAMS, HEADS_OF_PROGRAMS
from mpidist.core.text import tell_user, user_call_site
from mpidist.topology import import_mpi
from mpidist.topology.exit import revoking
from mpidist.topology.start import duplicate, limited

T = TypeVar("T")


class SharedErrors:
    """A block for work of this rank before a collective. Its errors are announced to the other ranks.

    The rank that fails raises its own error. The others raise PeerError at their next call.
    """

    def __init__(self, channel: Channel, doing: str) -> None:
        self._channel, self._doing = channel, doing

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception):
            self._channel.announce(error, self._doing)


open_channels: list[Channel] = []
"""The channels of this process that are not closed."""
# Channels that lost a rank.
_lost_channels: list[Channel] = []
# How long a rank holds its own error back until it has announced it.
_FAILURE_SECONDS = 2.0
# Set on an error that has been announced.
_ANNOUNCED = "_mpidist_announced"
_log = logging.getLogger("mpidist")


class Channel:
    """Collectives in order on a duplicate of an MPI communicator (collective).

    ``owner`` names the owner in messages, on every rank alike. Only its ranks share ``name``, which is made of their
    numbers by default.
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
        self.executor = Executor(owner, self.comm, self.node, self.handshake, self.observers, self.timeout)
        self.at_exit: list[Callable[[], None]] = []
        """Functions to call if the program ends without closing it. They must not communicate with other ranks."""
        self.message_counts: list[MessageCount] = []
        """Counts of its point-to-point messages. All must arrive before the communicator is freed."""
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
        """Whether collectives can still run on it."""
        return not self.executor.reason and not self.handshake.has_left

    def run(self, operation: Operation[T]) -> T:
        """Run a collective and return its result (see ``Executor.run``)."""
        if self.observers.issued:
            self._tell_issued(operation)
        return self.executor.run(operation)

    def start(self, operation: Operation[T]) -> Operation[T]:
        """Start a collective and return it (see ``Executor.start``)."""
        operation.is_async = True
        if self.observers.issued:
            self._tell_issued(operation)
        return self.executor.start(operation)

    def _tell_issued(self, operation: Operation[T]) -> None:
        with SharedErrors(self, f"an observer of {operation.text}"):
            for tell in self.observers.issued:
                tell(operation)

    # Inside the steps of a collective ---------------------------------------------------------------------------

    def open(self, description: Description, start: Start | None = None) -> Steps[None]:
        """Open a collective with a handshake. ``start`` begins a call of the core in the same exchange."""
        current = self.executor.current
        for enter in self.observers.phase:
            enter(current, OTHERS)
        if not self.handshake.begin(description.id, current, start):
            yield from self.handshake.finish(description.text, current)
        if not self.node.is_alone:
            self.executor.met_at = time.perf_counter_ns()
        for tell in self.observers.met:
            tell(current)

    def resume(self, description: Description) -> Steps[None]:
        """Finish the handshake of a call that the fast path has begun."""
        yield from self.handshake.finish(description.text, self.executor.current)
        for tell in self.observers.met:
            tell(self.executor.current)

    def phase(self, name: str) -> None:
        """Notify observers that a phase of the collective begins."""
        for tell in self.observers.phase:
            tell(self.executor.current, name)

    def tell_chunk(self, event: str, number: int, start: int, nbytes: int) -> None:
        """Notify observers of a chunk."""
        for tell in self.observers.chunk:
            tell(self.executor.current, Chunk(event, number, start, nbytes))

    # Errors of one rank -----------------------------------------------------------------------------------------

    def announce(self, error: Exception, doing: str) -> None:
        """Send an error to the other ranks instead of this rank's next collective. Each error is sent once."""
        has_listeners = self.size > 1 and self.is_usable
        if not has_listeners or isinstance(error, COMMON_ERRORS) or hasattr(error, _ANNOUNCED):
            return
        setattr(error, _ANNOUNCED, True)
        call_site = user_call_site()
        notice = self.handshake.notify(FAILED, f"raised {type(error).__name__}: {error}", call_site)
        telling = Operation(notice, describe("telling the other ranks", f"{type(error).__name__} in {doing}"))
        telling.is_async, telling.call_site = True, call_site
        # Observers see only its beginning, because one of them may have failed.
        self.executor.start(telling)
        try:
            self.executor.complete(telling, _FAILURE_SECONDS)
        except TimeoutError:
            # The others are busy. The notice waits for their next call, or for the end of this program.
            return

    # The end ----------------------------------------------------------------------------------------------------

    def close(self, free_first: Callable[[], None], before: Steps[None] | None = None) -> bool:
        """Finish all works and ``before``, call ``free_first``, and free the communicator (collective).

        Returns False if it was closed or has failed before.
        """
        if self not in open_channels or not self.is_usable:
            # A failed channel is freed at the end of the program, when it is known which ranks arrived.
            return False
        closing = describe("close")
        self.run(Operation(self._closing(closing, before), closing))
        self._remove()
        self.executor.close()
        if self.size > 1:
            self._drain()
        free_first()
        self.node.close()
        self.comm.Free()
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

    def _remove(self) -> None:
        open_channels.remove(self)
        for tell in self.observers.closed:
            try:
                tell()
            except Exception:
                # The other ranks free their part, too, and wait for this one.
                _log.exception("mpidist: an observer of the %s failed when it was closed", self.owner)

    def lose(self) -> None:
        """Fail for good after the loss of a rank (local)."""
        self.executor.revoke()
        self.executor.fail("a rank was lost", RankLostError("a rank was lost"))
        self._remove()
        self.executor.close()
        # Windows, requests and buffers stay, because freeing them needs the lost rank.
        _lost_channels.append(self)

    def shut_down(self) -> Steps[None]:
        """Finish all works, and notify the other ranks that this program has ended."""
        yield from self.executor.finish()
        # A work may have found that the others have shut down.
        if not self.handshake.has_left:
            yield from self.handshake.notify(SHUT_DOWN, "has left the program", "its end")


def lose_all() -> None:
    """Fail all open channels after the loss of a rank."""
    for channel in list(open_channels):
        channel.lose()
    for channel in _lost_channels:
        channel.node.end_writers()


def _shut_down_all() -> bool:
    """Notify the other ranks of all open channels that this program has ended.

    Returns whether all ranks of the job have ended, which is unknown if their communicators are closed.
    """
    progress.stop()
    several = [channel for channel in open_channels if channel.size > 1]
    try:
        if several and shutdown.mpi_runs():
            rank = several[0].rank
            # Without a deadline, because the programs of the other ranks may continue for hours.
            report = f"rank {rank} has ended its program, and waits for the other ranks to end theirs"
            drive(_together([channel.shut_down() for channel in several]), lambda: Deadline(lambda _: report))
            ranks_in_world = import_mpi().COMM_WORLD.Get_size()
            return any(channel.size == ranks_in_world and not channel.handshake.has_left for channel in several)
        return False
    finally:
        for channel in open_channels:
            for act in channel.at_exit:
                act()
        open_channels.clear()


def _together(all_steps: Sequence[Steps[None]]) -> Steps[None]:
    left = list(all_steps)
    while left:
        left = [steps for steps in left if next(steps, left) is not left]
        yield


def _disown_all() -> None:
    for channel in open_channels:
        channel.executor.disown()
    open_channels.clear()
    _lost_channels.clear()


shutdown.at_shutdown(_shut_down_all)
os.register_at_fork(after_in_child=_disown_all)
