"""Channel: one private MPI communicator, on which this rank carries out collectives one after the other.

What is here is the same for every collective: order, deadlines, events for observers, and errors that other ranks must
learn of. What a collective does is given as steps (see ``mpidist.collectives.mpi.waiting``).
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

from mpidist.collectives.channel import shutdown
from mpidist.collectives.channel.channel_lock import ChannelLock
from mpidist.collectives.channel.connections import open_ways
from mpidist.collectives.channel.description import Description, describe
from mpidist.collectives.channel.handshake import FAILED, LEFT, Handshake
from mpidist.collectives.channel.observers import OTHERS, Chunk, Observers
from mpidist.collectives.channel.operation import Operation
from mpidist.collectives.channel.progress import progress
from mpidist.collectives.channel.tally import Tally
from mpidist.collectives.channel.work import Work
from mpidist.collectives.mpi.agreed import as_common, is_common
from mpidist.collectives.mpi.communicator_names import next_name, ranks_in_job
from mpidist.collectives.mpi.descriptors import check_descriptors
from mpidist.collectives.mpi.waiting import Steps, drive
from mpidist.collectives.node.node import Node
from mpidist.core import settings
from mpidist.core.callsite import user_call_site
from mpidist.core.deadline import Deadline
from mpidist.core.errors import CollectiveTimeoutError, PeerError, RankLostError
from mpidist.topology.faults import revoke, revoking, says_rank_is_lost
from mpidist.topology.limited_calls import duplicate

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")

open_channels: list[Channel] = []
"""The channels of this process that have not been closed."""
# Given up with a rank that was lost.
_abandoned_channels: list[Channel] = []
# Works that were submitted and never waited for: beyond this many the oldest is finished first.
_MOST_WORKS = 256
# A rank that failed on its own tells the others, but does not keep its error back for longer than this.
_FAILURE_SECONDS = 2.0
DEADLOCKED = "its ranks waited for one another in different communicators"


class Status(NamedTuple):
    """What one rank is doing on a channel.

    Attributes:
        issued: How many collectives it has issued.
        number: Of the collective it is in, or was in last; they are counted as they are issued.
        text: What that is.
        waits: Whether it is in it.
        seconds: How long it has been in it, or since it began with it.
        ended: Whether its program has come to its end.
    """

    issued: int
    number: int
    text: str
    waits: bool
    seconds: float
    ended: bool


class Channel:
    """Carries out collectives on a duplicate of an MPI communicator (collective).

    Args:
        comm: The communicator to duplicate.
        timeout: Seconds before a collective is given up; ``MPIDIST_TIMEOUT`` by default.
        owner: What it is part of, for messages; the same on every rank.
        name: By which all its ranks know it, and no other; made of their numbers by default.

    Attributes:
        comm: The duplicate.
        issued: How many collectives this rank has issued on it.
        node: Its node of this rank.
        handshake: With which every collective on it begins.
        observers: What looks on at its collectives.
        current: The operation that is being carried out.
        at_exit: Called at the end of a program that has not closed it, after the last exchange with other ranks.
        tally: What this rank has changed by itself since the last collective, if anything.
        unusable: Why no more collectives can be carried out on it, if so.
    """

    def __init__(
        self, comm: MPI.Intracomm, timeout: float | None, owner: str = "Communicator", name: str | None = None
    ) -> None:
        shutdown.check_not_forked()
        self.owner = owner
        self.comm: MPI.Intracomm = duplicate(comm, f"making a {owner}")
        self.node = self._make_node()
        self.rank: int = self.comm.Get_rank()
        self.size: int = self.comm.Get_size()
        self.name = name or next_name(ranks_in_job(self.comm))
        self.handshake = Handshake(self.comm, self.node.board)
        self.observers = Observers()
        self.timeout: float = timeout or settings.TIMEOUT.read()
        self._warn_after: float = settings.WARN_AFTER.read()
        self._queue: deque[Work] = deque()
        self._lock = ChannelLock()
        self.issued = 0
        # In place of an operation where there is none: one that was carried out is not kept, nor what it holds.
        self._nothing: Operation[Any] = Operation(_no_steps(), describe("nothing"))
        self.current = self._nothing
        # Number and text of the last operation that the program has waited for.
        self._last = (0, "")
        # Since when the program has waited for the last operation that it waited for, and whether it still does.
        self._since = 0.0
        self._waits = False
        self._has_ended = False
        self.at_exit: list[Callable[[], None]] = []
        self.tally: Tally | None = None
        self.unusable: str | None = None
        self._given_up: Steps[Any] | None = None
        self._interrupted: BaseException | None = None
        open_channels.append(self)
        shutdown.see_to_the_end()

    def _make_node(self) -> Node:
        with revoking(self.comm):
            try:
                check_descriptors(self.comm)
            except (OSError, PeerError):
                self.comm.Free()
                raise
            node = Node(self.comm)
            open_ways(self.comm, node.ranks)
            return node

    def __repr__(self) -> str:
        return f"<channel of a {self.owner}, rank {self.rank} of {self.size}>"

    @property
    def is_usable(self) -> bool:
        """Whether collectives on it can still take place."""
        return self.unusable is None and not self.handshake.left

    def run(self, operation: Operation[T]) -> T:
        """Carry out a collective, after those that were submitted, and return its result.

        Raises:
            CollectiveTimeoutError: It took longer than its deadline; the channel can no longer be used.
            RuntimeError: The channel was closed or has given up before, or is in use by another thread.
            PeerError: Another rank has failed or left.
        """
        operation.tally, self.tally = self.tally, None
        for tell in self.observers.issued:
            tell(operation)
        with self._lock:
            self._check_usable()
            self.issued = operation.number = self.issued + 1
            while self._queue:
                self._finish_oldest()
            steps = operation.steps
            if operation.tally is not None or self.observers.see_steps:
                steps = self._opened(operation)
            result = self._drive(steps, operation, operation.timeout or self.timeout)
        return operation.finished(result)

    def submit(self, operation: Operation[Any]) -> Work:
        """Start a collective, to be carried out in the order of submission, and return its handle."""
        operation.is_work = True
        if operation.call_site is None:
            operation.call_site = user_call_site()
        operation.tally, self.tally = self.tally, None
        for tell in self.observers.issued:
            tell(operation)
        steps, timeout = self._opened(operation), operation.timeout or self.timeout
        work = Work(operation, steps, timeout, self.advance, self.complete)
        with self._lock:
            self._check_usable()
            self.issued = operation.number = self.issued + 1
            self._queue.append(work)
            while len(self._queue) > _MOST_WORKS:
                self._finish_oldest()
            self._step_oldest()
        if not work.is_done and self.size > 1:
            progress.watch(self.move)
        return work

    def _opened(self, operation: Operation[Any]) -> Steps[Any]:
        """Return the steps of an operation so that its tally travels with the first and observers see them."""
        self.current = operation
        if operation.tally is not None:
            self.handshake.tally = operation.tally
        for tell in self.observers.began:
            tell(operation)
        try:
            result = yield from operation.steps
        except GeneratorExit:  # the program ends while it is on its way: it has no end that observers could see
            raise
        except BaseException as error:
            operation.error = error
            self._tell_end(operation)
            raise
        else:
            self._tell_end(operation)
            return result
        finally:
            self.current = self._nothing

    def _tell_end(self, operation: Operation[Any]) -> None:
        try:
            for tell in self.observers.ended:
                tell(operation)
        finally:
            operation.error = None

    # Inside the steps of a collective ---------------------------------------------------------------------------

    def open(self, description: Description) -> Steps[None]:
        """Meet the other ranks, of which all are to be about to do the same (collective).

        Raises:
            MismatchError: Another rank is about to do something else.
            PeerError: Another rank failed on its way here.
        """
        if not self.begin(description):
            yield from self.finish(description)

    def begin(self, description: Description) -> bool:
        """Begin what ``open`` does; whether it is done already. If not, ``finish`` has to follow."""
        if self.observers.phase:
            self.phase(OTHERS)
        is_done = self.handshake.begin(description.id)
        if is_done and self.observers.met:
            self._tell_met()
        return is_done

    def finish(self, description: Description) -> Steps[None]:
        """Do what is left of ``open``, with the same argument."""
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
        """What is to be told of each chunk (see ``Chunk``), None where nobody looks at chunks."""
        return self._tell_chunk if self.observers.chunk else None

    def _tell_chunk(self, *fields: Any) -> None:
        for tell in self.observers.chunk:
            tell(self.current, Chunk(*fields))

    # Works ------------------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Move the oldest unfinished work one step forward."""
        with self._lock:
            self._check_usable()
            self._step_oldest()

    def oldest_work(self) -> Work | None:
        """Return the work that is carried out next, None if there is none."""
        try:
            return self._queue[0]
        except IndexError:
            return None

    def move(self) -> Work | None:
        """Move the oldest work one step on, unless another thread does; an error settles all. Return the next work."""
        if self._queue and self._lock.take_if_free():
            try:
                self._step_oldest()
            finally:
                self._lock.give_back()
        return self.oldest_work()

    def complete(self, work: Work, timeout: float | None) -> None:
        """Carry out works in order until ``work`` is done, for at most ``timeout`` seconds."""
        if work.is_done:
            return
        start = time.perf_counter_ns()
        try:
            with self._lock:
                self._complete(work, timeout)
        finally:
            for tell in self.observers.waited:
                tell(work.operation, start)

    def _complete(self, work: Work, timeout: float | None) -> None:
        if timeout is None or timeout >= work.timeout - work.waited:
            while self._queue and not work.is_done:
                self._finish_oldest()
        elif not work.is_done:
            work.waited += timeout
            drive(
                self._polling(work),
                lambda: Deadline(
                    lambda waited: self._report(work.operation, waited),
                    lambda _: TimeoutError(
                        f"{work.operation.text} is not done after {timeout} s; it goes on, and may be waited for again"
                    ),
                    timeout,
                    self._warn_after,
                    self._move_others,
                ),
            )

    # Errors of one rank -----------------------------------------------------------------------------------------

    @contextmanager
    def shared_errors(self, doing: str) -> Iterator[None]:
        """Run a block of rank-local work before a collective, so that an error in it reaches every rank.

        The rank that fails raises its own error; the others raise PeerError at their next call.

        Args:
            doing: What the block does, for the report.
        """
        try:
            yield
        except Exception as error:
            self.announce(error, doing)
            raise

    def announce(self, error: Exception, doing: str) -> None:
        """Tell the other ranks of an error that this rank is about to raise in place of its next collective.

        Errors that the ranks have in common already, and one that was announced before, are left alone.

        Args:
            error: The error.
            doing: What was being done, for the report.
        """
        nobody_listens = self.size == 1 or not self.is_usable
        if nobody_listens or is_common(error):
            return
        as_common(error)
        call_site = user_call_site()
        news = self.handshake.signal(FAILED, f"raised {type(error).__name__}: {error}", call_site)
        text = f"telling the other ranks of {type(error).__name__} in {doing}"
        work = self.submit(Operation(news, describe(text)))
        try:
            with self._lock:
                self._complete(work, _FAILURE_SECONDS)
        except TimeoutError:
            # They are busy. The news waits in the queue for their next call, or for the end of this program.
            return

    # The end ----------------------------------------------------------------------------------------------------

    def close(self, free_first: Callable[[], None], before: Steps[None] | None = None) -> bool:
        """Finish what is on its way, and ``before``, call ``free_first`` and free the communicator (collective).

        Returns:
            Whether it did; not the second time, nor where it was unusable already.
        """
        if self not in open_channels or not self.is_usable:
            # What was given up is dealt with at the end of the program, where it is known whether the others came.
            return False
        closing = describe("close")
        self.run(Operation(self._closing(closing, before), closing))
        self._forget()
        free_first()
        self.handshake.free()
        self.node.close()
        self.comm.Free()
        self.unusable = "it has been closed"
        return True

    def _closing(self, closing: Description, before: Steps[None] | None) -> Steps[None]:
        yield from self.open(closing)
        if before is not None:
            yield from before

    def _forget(self) -> None:
        open_channels.remove(self)
        progress.forget(self.move)
        for tell in self.observers.closed:
            tell()

    def abandon(self) -> None:
        """Give it up for good, without a word to the other ranks but that (local)."""
        self._revoke()
        self.unusable = self.unusable or "a rank was lost"
        self._settle_all(RankLostError(self.unusable))
        self._forget()
        # Windows, requests and buffers stay: none of them can be freed without the rank that is lost.
        _abandoned_channels.append(self)

    def disown(self) -> None:
        """Take no part from now on, in a forked child, which lacks the thread that may hold the lock."""
        self._lock = ChannelLock()
        self.unusable = shutdown.FORKED

    def leave(self) -> Steps[None]:
        """Finish what is on its way and tell the others that this rank's program has ended."""
        self._has_ended = True
        if not self._lock.take_for_good(shutdown.EXIT_SECONDS):
            shutdown.abort_job(self.rank, "a thread was still in one of its collectives when the program ended")
        if self._interrupted is not None:
            shutdown.abort_job(self.rank, self.unusable)
        if self._given_up is not None:
            yield from shutdown.carry_through(self._given_up, lambda: shutdown.abort_job(self.rank, self.unusable))
        yield from self._finish_queue()
        # Only now: a work may have found that the others have left, who will not hear anything more.
        if not self.handshake.left:
            yield from self.handshake.signal(LEFT, "has left the program", "its end")

    def _finish_queue(self) -> Steps[None]:
        """Carry out what the program has started and not waited for, as far as the other ranks take part."""
        while self._queue:
            work = self._queue[0]
            give_up = time.monotonic() + max(work.timeout - work.waited, 0.0)
            while not self.handshake.left and not work.step():
                if time.monotonic() > give_up:
                    what = f"{work.operation.text}, started at {work.operation.call_site}"
                    shutdown.abort_job(self.rank, f"the other ranks have not come to {what}")
                yield
            if not work.is_done:
                work.settle(PeerError(f"ranks {self.handshake.left} left the program before they came to it"))
            self._queue.popleft()

    # What others may ask, from any thread -----------------------------------------------------------------------

    def status(self) -> Status:
        """Return what this rank is doing on it."""
        (number, text), waits = self._last, self._waits
        seconds = time.monotonic() - self._since
        work = self.oldest_work()
        if not waits and work is not None:
            number, text, waits = work.operation.number, work.operation.text, self.move in progress.watched
            seconds = time.monotonic() - work.began
        return Status(self.issued, number, text, waits, seconds, self._has_ended)

    def waiting(self) -> list[tuple[int, str]]:
        """Return number and text of the operation that the program waits in, if it does."""
        return [self._last] if self._waits else []

    def refuse(self, reason: str) -> None:
        """Carry out no more collectives; a program that waits in one is let find out there."""
        if not self._waits:
            self.unusable = reason

    # Inside, while the lock is held -----------------------------------------------------------------------------

    def _step_oldest(self) -> None:
        if not self._queue:
            return
        work = self._queue[0]
        try:
            if work.step():
                self._queue.popleft()
        except BaseException as error:
            self._lose_or_interrupt(error, work.operation.text)
            raise

    def _finish_oldest(self) -> None:
        self._check_usable()
        work = self._queue[0]
        self._drive(self._stepping(work), work.operation, max(work.timeout - work.waited, 0.0))
        self._queue.popleft()

    def _stepping(self, work: Work) -> Steps[None]:
        while not work.step():
            yield

    def _polling(self, work: Work) -> Steps[None]:
        while not work.is_done:
            self._check_usable()
            self._step_oldest()
            yield

    def _drive(self, steps: Steps[Any], operation: Operation[Any], timeout: float) -> Any:
        self.current = operation
        self._last, self._since = (operation.number, operation.description.text), time.monotonic()
        self._waits = True
        try:
            # What small collectives need no more than.
            next(steps)
            return drive(steps, partial(self._deadline, steps, operation, timeout))
        except StopIteration as stop:
            return stop.value
        except BaseException as error:
            if is_common(error):
                raise
            self._lose_or_interrupt(error, operation.text)
            if isinstance(error, ProcessLookupError):
                raise PeerError(f"{self.unusable}: {error}") from error
            raise
        finally:
            self._waits = False
            self.current = self._nothing

    def _deadline(self, steps: Steps[Any], operation: Operation[Any], timeout: float) -> Deadline:
        def meanwhile() -> None:
            self._move_others()
            for ask in self.observers.waits:
                error = ask(operation)
                if error is not None:
                    self._give_up(steps, DEADLOCKED)
                    self._settle_all(error)
                    raise error

        return Deadline(
            lambda waited: self._report(operation, waited),
            lambda waited: self._expired(steps, operation, waited),
            timeout,
            self._warn_after,
            meanwhile,
        )

    def _move_others(self) -> None:
        """Move the works of other channels on: the ranks may wait for works of several in different orders."""
        for channel in open_channels:
            if channel is not self:
                channel.move()

    def _lose_or_interrupt(self, error: BaseException, text: str) -> None:
        """Give the channel up for an error that the other ranks do not have."""
        if says_rank_is_lost(error):
            self._lose(error, text)
        self._interrupt(error, text)

    def _lose(self, error: BaseException, text: str) -> NoReturn:
        """Give the communicator up, on all its ranks: one of them is lost."""
        lost = RankLostError(f"a rank was lost while rank {self.rank} was in {text}: {error}")
        self.unusable = str(lost)
        # MPI may still write to what is on its way.
        self._interrupted = error
        self._settle_all(lost)
        self._revoke()
        raise lost from error

    def _revoke(self) -> None:
        for comm in (self.comm, self.node.comm):
            revoke(comm)

    def _interrupt(self, error: BaseException, text: str) -> None:
        # A signal handler, a KeyboardInterrupt or lack of memory broke in between messages. The frames that the
        # traceback holds own buffers that MPI may still write to, so it is kept.
        self._interrupted = error
        self.unusable = f"{text} was interrupted by {type(error).__name__}"
        settled = RuntimeError(f"{self.unusable}, before this collective was done")
        settled.__cause__ = error
        self._settle_all(settled)

    def _settle_all(self, error: BaseException) -> None:
        for work in self._queue:
            work.settle(error)
        self._queue.clear()

    def _report(self, operation: Operation[Any], waited: float) -> str | None:
        """Return that a collective takes long; None where an observer has the ranks asked, and one speaks for all."""
        if any([tells(operation) for tells in self.observers.tells]):
            return None
        return (
            f"rank {self.rank} of {self.size} has waited {waited:.0f} s for the other ranks in {operation.text}, its "
            f"collective number {operation.number}, at {operation.call_site or user_call_site()}"
        )

    def _give_up(self, steps: Steps[Any], reason: str) -> None:
        # Requests are still open, and MPI may write to their buffers: the communicator is never used again,
        # and the buffers are kept.
        self._given_up = steps
        self.unusable = reason

    def _expired(self, steps: Steps[Any], operation: Operation[Any], waited: float) -> CollectiveTimeoutError:
        """Give a collective up at its deadline, and return the error of all works."""
        self._give_up(steps, f"an earlier collective, {operation.text}, did not finish within its deadline")
        found = [explain(operation) for explain in self.observers.explanation]
        report = next((text for text in found if text is not None), None)
        error = CollectiveTimeoutError(operation.text, operation.number, waited, self.rank, report)
        self._settle_all(error)
        return error

    def _check_usable(self) -> None:
        if self.unusable is not None:
            raise RuntimeError(f"this {self.owner} can no longer be used: {self.unusable}")
        if self.handshake.left:
            raise PeerError(f"this {self.owner} can no longer be used: ranks {self.handshake.left} left the program")


def _no_steps() -> Steps[None]:
    """Yield nothing: the steps of an operation before the first."""
    yield from ()


def abandon_all() -> None:
    """Give all channels up that have not been closed, as a rank was lost."""
    for channel in list(open_channels):
        channel.abandon()


def _leave_all() -> None:
    """Tell the other ranks of all open channels that this program has ended, once they have ended theirs.

    How long the other programs still run is their own affair, so this wait has no deadline, only a report.
    """
    progress.stop()
    several = [channel for channel in open_channels if channel.size > 1]
    try:
        if several and shutdown.mpi_runs():
            rank = several[0].rank
            report = f"rank {rank} has ended its program, and waits for the other ranks to end theirs"
            drive(_together([channel.leave() for channel in several]), lambda: Deadline(lambda _: report))
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
        channel.disown()
    open_channels.clear()


shutdown.farewell(_leave_all)
os.register_at_fork(after_in_child=_disown_all)
