"""Channel: one private MPI communicator, on which this rank carries out collectives one after the other.

What is here is the same for every collective: order, deadlines, reports, and errors that other ranks must learn of.
What a collective does is given as steps (see ``mpidist.collectives.mpi.waiting``).
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from mpidist.collectives.channel.announcing import COMMON_ERRORS, announce
from mpidist.collectives.channel.channel_lock import Turn
from mpidist.collectives.channel.connections import Acquaintance, open_ways
from mpidist.collectives.channel.handshake import LEFT, Handshake, plan_id
from mpidist.collectives.channel.progress import progress
from mpidist.collectives.channel.shutdown import (
    EXIT_SECONDS,
    FORKED,
    abandoned_channels,
    abort_job,
    carry_through,
    check_not_forked,
    open_channels,
    see_to_the_end,
)
from mpidist.collectives.channel.tally import Tally
from mpidist.collectives.channel.work import Work
from mpidist.collectives.mpi.communicator_names import next_name, ranks_in_job
from mpidist.collectives.mpi.descriptors import check_descriptors
from mpidist.collectives.mpi.waiting import Deadline, Steps, drive
from mpidist.collectives.node.node import Node
from mpidist.collectives.watch.deadlock import Lookout, note_thread
from mpidist.collectives.watch.guard import Guard, Standing
from mpidist.collectives.watch.side_thread import side_thread
from mpidist.collectives.watch.trace import WatchedHandshake, watch
from mpidist.core import settings
from mpidist.core.callsite import user_call_site
from mpidist.core.errors import CollectiveTimeoutError, MismatchError, PeerError, RankLostError
from mpidist.topology.faults import revoke, revoking, says_rank_is_lost
from mpidist.topology.patience import duplicate

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")

# Works that were submitted and never waited for: beyond this many the oldest is finished first.
_MOST_WORKS = 256
_CROSSED = "its ranks waited for one another in different communicators"


class Channel:
    """Carries out collectives on a duplicate of an MPI communicator (collective).

    Args:
        comm: The communicator to duplicate.
        timeout: Seconds before a collective is given up; ``MPIDIST_TIMEOUT`` by default.
        owner: What it is part of, for messages; the same on every rank.
        name: By which all its ranks know it, and no other; made of their numbers by default. One that is given here is
            of a channel of mpidist's own, whose collectives are not traced.

    Attributes:
        comm: The duplicate.
        issued: How many collectives this rank has issued on it.
        node: Its node of this rank.
        handshake: With which every collective on it begins.
        guard: What ranks tell one another of it; None for one rank, or where there can be no thread for that.
        trace: What watches its collectives; None where nothing is to be seen.
        at_exit: Called at the end of a program that has not closed it, after the last exchange with other ranks.
    """

    def __init__(
        self, comm: MPI.Intracomm, timeout: float | None, owner: str = "Communicator", name: str | None = None
    ) -> None:
        check_not_forked()
        self.owner = owner
        self.comm: MPI.Intracomm = duplicate(comm, f"making a {owner}")
        self.node = self._make_node()
        self.rank: int = self.comm.Get_rank()
        self.size: int = self.comm.Get_size()
        self.name = name or next_name(ranks_in_job(self.comm))
        self.trace = watch(self.comm, self.name) if name is None else None
        self.handshake = (
            Handshake(self.comm, self.node.board)
            if self.trace is None
            else WatchedHandshake(self.comm, self.node.board, self.trace)
        )
        self.timeout: float = timeout or settings.TIMEOUT.read()
        self._warn_after: float = settings.WARN_AFTER.read()
        self._queue: deque[Work] = deque()
        self._turn = Turn()
        # Collectives are counted as they are issued; the one that is carried out, or was last, and since when.
        self.issued = 0
        self._last = (0, "", 0.0)
        self._waits = False
        self._has_ended = False
        self.at_exit: list[Callable[[], None]] = []
        self.tally: Tally | None = None
        """What this rank has done by itself since the last collective, if anything."""
        self.unusable: str | None = None
        self._given_up: Steps[Any] | None = None
        self._interrupted: BaseException | None = None
        self.guard: Guard | None = None
        if self.size > 1 and settings.GUARD.read() and side_thread.is_allowed():
            acquaintance = Acquaintance(self.rank, self.node.ranks)
            self.guard = Guard(self.comm, self.name, acquaintance, self._standing, self._on_crossing)
            side_thread.watch(self.guard)
        open_channels.append(self)
        see_to_the_end()

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

    def run(self, steps: Steps[T], text: str, timeout: float | None = None) -> T:
        """Carry out a collective, after those that were submitted, and return its result.

        Args:
            steps: What to do.
            text: What it is, for reports.
            timeout: Seconds before it is given up; that of the channel by default.

        Raises:
            CollectiveTimeoutError: It took longer; the channel can no longer be used.
            RuntimeError: The channel was closed or has given up before, or is in use by another thread.
            PeerError: Another rank has failed or left.
        """
        if self.trace is not None:
            steps = self.trace.blocking(steps, text)
        if self.tally is not None:
            steps = self._with_tally(steps)
        with self._turn:
            self._check_usable()
            self.issued = number = self.issued + 1
            while self._queue:
                self._finish_oldest()
            return self._drive(steps, text, number, timeout or self.timeout, None)

    def submit(self, steps: Steps[Any], text: str, call_site: str, timeout: float | None = None) -> Work:
        """Start a collective, to be carried out in the order of submission, and return its handle."""
        if self.tally is not None:
            steps = self._with_tally(steps)
        make = Work if self.trace is None else self.trace.work
        work = make(self, steps, text, call_site, timeout or self.timeout)
        with self._turn:
            self._check_usable()
            self.issued = work.number = self.issued + 1
            self._queue.append(work)
            while len(self._queue) > _MOST_WORKS:
                self._finish_oldest()
            self._step_oldest()
        if not work.is_done and self.size > 1:
            progress.watch(self)
        return work

    def _with_tally(self, steps: Steps[T]) -> Steps[T]:
        """Return ``steps`` that open with what there is to compare: now, whenever they are carried out."""
        tally, self.tally = self.tally, None

        def opened() -> Steps[T]:
            self.handshake.tally = tally
            return (yield from steps)

        return opened()

    def advance(self) -> None:
        """Move the oldest unfinished work one step forward."""
        with self._turn:
            self._check_usable()
            self._step_oldest()

    def oldest_work(self) -> Work | None:
        """Return the work that is carried out next, None if there is none."""
        try:
            return self._queue[0]
        except IndexError:
            return None

    def move(self) -> None:
        """Move the oldest work one step on, unless another thread is doing so; an error settles all works."""
        if self._turn.take_if_free():
            try:
                self._step_oldest()
            finally:
                self._turn.give_back()

    def complete(self, work: Work, timeout: float | None) -> None:
        """Carry out works in order until ``work`` is done, for at most ``timeout`` seconds."""
        if work.is_done:
            return
        with self._turn:
            if timeout is None or timeout >= work.timeout - work.waited:
                while self._queue and not work.is_done:
                    self._finish_oldest()
            elif not work.is_done:
                work.waited += timeout
                drive(
                    self._polling(work),
                    lambda: Deadline(
                        timeout,
                        self._warn_after,
                        lambda waited: self._warn(work.text, work.number, waited, work.call_site),
                        lambda _: _raise_still_running(work, timeout),
                        self._move_others,
                    ),
                )

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
        announce(self, error, doing)

    def close(self, free_first: Callable[[], None], before: Steps[None] | None = None) -> bool:
        """Finish what is on its way, and ``before``, call ``free_first`` and free the communicator (collective).

        Returns:
            Whether it did; not the second time, nor where it was unusable already.
        """
        if self not in open_channels or self.unusable is not None or self.handshake.left:
            # What was given up is dealt with at the end of the program, where it is known whether the others came.
            return False
        self.run(self._closing(before), "close")
        open_channels.remove(self)
        progress.forget(self)
        if self.guard is not None:
            side_thread.forget(self.guard)
        free_first()
        self.handshake.free()
        self.node.close()
        self.comm.Free()
        self.unusable = "it has been closed"
        return True

    def _closing(self, before: Steps[None] | None) -> Steps[None]:
        yield from self.handshake.open(plan_id("close"), "close", None)
        if before is not None:
            yield from before

    # Inside, while it is this thread's turn ---------------------------------------------------------------------

    def _step_oldest(self) -> None:
        if not self._queue:
            return
        work = self._queue[0]
        try:
            if work.step():
                self._queue.popleft()
        except BaseException as error:
            if says_rank_is_lost(error):
                self._lose(error, work.text)
            self._interrupt(error, work.text)
            raise

    def _finish_oldest(self) -> None:
        self._check_usable()
        work = self._queue[0]
        timeout = max(work.timeout - work.waited, 0.0)
        self._drive(self._stepping(work), work.text, work.number, timeout, work.call_site)
        self._queue.popleft()

    def _stepping(self, work: Work) -> Steps[None]:
        while not work.step():
            yield

    def _polling(self, work: Work) -> Steps[None]:
        while not work.is_done:
            self._check_usable()
            self._step_oldest()
            yield

    def disown(self) -> None:
        """Take no part from now on, in a forked child, which lacks the thread that may hold the lock."""
        self._turn = Turn()
        self.unusable = FORKED

    def _finish_queue(self) -> Steps[None]:
        """Carry out what the program has started and not waited for, as far as the other ranks take part."""
        while self._queue:
            work = self._queue[0]
            give_up = time.monotonic() + max(work.timeout - work.waited, 0.0)
            while not self.handshake.left and not work.step():
                if time.monotonic() > give_up:
                    abort_job(self.rank, f"the other ranks have not come to {work.text}, started at {work.call_site}")
                yield
            if not work.is_done:
                work.settle(PeerError(f"ranks {self.handshake.left} left the program before they came to it"))
            self._queue.popleft()

    def _drive(self, steps: Steps[T], text: str, number: int, timeout: float, call_site: str | None) -> T:
        self._last = (number, text, time.monotonic())
        self._waits = True
        try:
            # What small collectives need no more than.
            next(steps)
            return drive(steps, partial(self._deadline, steps, text, number, timeout, call_site))
        except StopIteration as stop:
            value: T = stop.value
            return value
        except COMMON_ERRORS:
            # All ranks raise these together, or the channel has been given up already.
            raise
        except ProcessLookupError as error:
            self._interrupt(error, text)
            raise PeerError(f"{self.unusable}: {error}") from error
        except BaseException as error:
            if says_rank_is_lost(error):
                self._lose(error, text)
            self._interrupt(error, text)
            raise
        finally:
            self._waits = False

    def _deadline(self, steps: Steps[Any], text: str, number: int, timeout: float, call_site: str | None) -> Deadline:
        note_thread()
        lookout = None if self.guard is None else Lookout(self.guard, number, self.name)

        def meanwhile() -> None:
            self._move_others()
            crossing = None if lookout is None else lookout.check()
            if crossing is not None:
                self._give_up(steps, _CROSSED)
                error = MismatchError(crossing)
                self._settle_all(error)
                raise error

        return Deadline(
            timeout,
            self._warn_after,
            lambda waited: self._warn(text, number, waited, call_site),
            lambda waited: self._expire(steps, text, number, waited),
            meanwhile,
        )

    def _move_others(self) -> None:
        """Move the works of other channels on: the ranks may wait for works of several in different orders."""
        for channel in open_channels:
            if channel is not self and channel.oldest_work() is not None:
                channel.move()

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

    def abandon(self) -> None:
        """Give it up for good, without a word to the other ranks but that (local)."""
        self._revoke()
        self.unusable = self.unusable or "a rank was lost"
        self._settle_all(RankLostError(self.unusable))
        progress.forget(self)
        if self.guard is not None:
            side_thread.forget(self.guard)
        open_channels.remove(self)
        # Windows, requests and buffers stay: none of them can be freed without the rank that is lost.
        abandoned_channels.append(self)

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

    def _warn(self, text: str, number: int, waited: float, call_site: str | None) -> None:
        """Say that a collective takes long: one rank for all, or, where nobody can ask the others, each for itself."""
        if self.guard is not None:
            self.guard.print_report(number)
            return
        print(
            f"mpidist: rank {self.rank} of {self.size} has waited {waited:.0f} s for the other ranks in {text}, "
            f"its collective number {number}, at {call_site or user_call_site()}",
            file=sys.stderr,
            flush=True,
        )

    def _give_up(self, steps: Steps[Any], reason: str) -> None:
        # Requests are still open, and MPI may write to their buffers: the communicator is never used again,
        # and the buffers are kept.
        self._given_up = steps
        self.unusable = reason

    def _expire(self, steps: Steps[Any], text: str, number: int, waited: float) -> None:
        self._give_up(steps, f"an earlier collective, {text}, did not finish within its deadline")
        report = None if self.guard is None else self.guard.report(number)
        error = CollectiveTimeoutError(text, number, waited, self.rank, report)
        self._settle_all(error)
        raise error

    def _on_crossing(self) -> None:
        # A rank that is about to wait in it finds out there.
        if not self._waits:
            self.unusable = _CROSSED

    def waiting(self) -> list[tuple[int, str]]:
        """Return number and text of the collective that the program waits in, if it does; called in another thread."""
        number, text, _ = self._last
        return [(number, text)] if self._waits else []

    def _standing(self) -> Standing:
        """Return what this rank is doing; called in another thread."""
        number, text, began = self._last
        seconds = time.monotonic() - began
        waits = self._waits
        work = self.oldest_work()
        if not waits and work is not None:
            number, text, waits = work.number, work.text, progress.moves(self)
            seconds = time.monotonic() - work.began
        return Standing(self.issued, number, text, waits, seconds, self._has_ended)

    def _check_usable(self) -> None:
        if self.unusable is not None:
            raise RuntimeError(f"this {self.owner} can no longer be used: {self.unusable}")
        if self.handshake.left:
            raise PeerError(f"this {self.owner} can no longer be used: ranks {self.handshake.left} left the program")

    def leave(self) -> Steps[None]:
        """Finish what is on its way and tell the others that this rank's program has ended."""
        self._has_ended = True
        if not self._turn.take_for_good(EXIT_SECONDS):
            abort_job(self.rank, "a thread was still in one of its collectives when the program ended")
        if self._interrupted is not None:
            abort_job(self.rank, self.unusable)
        if self._given_up is not None:
            yield from carry_through(self._given_up, lambda: abort_job(self.rank, self.unusable))
        yield from self._finish_queue()
        # Only now: a work may have found that the others have left, who will not hear anything more.
        if not self.handshake.left:
            yield from self.handshake.signal(LEFT, "has left the program", "its end")


def _raise_still_running(work: Work, timeout: float) -> None:
    raise TimeoutError(f"{work.text} is not done after {timeout} s; it goes on, and may be waited for again")
