"""Channel: one private MPI communicator, on which this rank carries out collectives one after the other.

What is here is the same for every collective: order, deadlines, reports, errors that other ranks must learn of, and
the end of the program. What a collective does is given as steps (see ``mpidist.collectives.waiting``).
"""

from __future__ import annotations

import atexit
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from mpidist.collectives.handshake import FAILED, LEFT, Handshake, plan_id
from mpidist.collectives.node import Node
from mpidist.collectives.progress import progress
from mpidist.collectives.trace import WatchedHandshake, watch
from mpidist.collectives.waiting import Deadline, Steps, drive
from mpidist.collectives.work import Work
from mpidist.core import settings
from mpidist.core.callsite import user_call_site
from mpidist.core.errors import AlgorithmError, CollectiveTimeoutError, MismatchError, PeerError
from mpidist.topology import import_mpi
from mpidist.topology.patience import duplicate

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")

# A rank that failed on its own tells the others, but does not keep its error back for longer than this.
_FAILURE_SECONDS = 2.0
# Works that were submitted and never waited for: beyond this many the oldest is finished first.
_MOST_WORKS = 256
# How long a rank that leaves after a timeout waits for the others to catch up, so that MPI can end in order.
_EXIT_SECONDS = 5.0
# Set on an error that the other ranks have been told of.
_ANNOUNCED = "_mpidist_announced"
_open: list[Channel] = []
# A forked child has not left, and must not say so on its parent's communicators.
os.register_at_fork(after_in_child=_open.clear)


def open_channels() -> list[Channel]:
    """Return the channels of this process that have not been closed."""
    return list(_open)


class Channel:
    """Carries out collectives on a duplicate of an MPI communicator (collective).

    Args:
        comm: The communicator to duplicate.
        timeout: Seconds before a collective is given up; ``MPIDIST_TIMEOUT`` by default.

    Attributes:
        comm: The duplicate.
        node: Its node of this rank.
        handshake: With which every collective on it begins.
        trace: What watches its collectives; None where nothing is to be seen.
    """

    def __init__(self, comm: MPI.Intracomm, timeout: float | None) -> None:
        self.comm: MPI.Intracomm = duplicate(comm, "making a Communicator or a strategy")
        self.rank: int = self.comm.Get_rank()
        self.size: int = self.comm.Get_size()
        self.node = Node(self.comm)
        self.trace = watch(self.comm)
        self.handshake = (
            Handshake(self.comm, self.node.board)
            if self.trace is None
            else WatchedHandshake(self.comm, self.node.board, self.trace)
        )
        self.timeout: float = timeout or settings.TIMEOUT.read()
        self._warn_after: float = settings.WARN_AFTER.read()
        self._queue: deque[Work] = deque()
        self._turn = _Turn()
        self._calls = 0
        self.unusable: str | None = None
        self._given_up: Steps[Any] | None = None
        self._interrupted: BaseException | None = None
        _open.append(self)

    def __repr__(self) -> str:
        return f"<channel of a Communicator, rank {self.rank} of {self.size}>"

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
        with self._turn:
            self._check_usable()
            while self._queue:
                self._finish_oldest()
            return self._drive(steps, text, timeout or self.timeout, None)

    def submit(self, steps: Steps[Any], text: str, call_site: str, timeout: float | None = None) -> Work:
        """Start a collective, to be carried out in the order of submission, and return its handle."""
        make = Work if self.trace is None else self.trace.work
        work = make(self, steps, text, call_site, timeout or self.timeout)
        with self._turn:
            self._check_usable()
            self._queue.append(work)
            while len(self._queue) > _MOST_WORKS:
                self._finish_oldest()
            self._step_oldest()
        if not work.is_done and self.size > 1:
            progress.watch(self)
        return work

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
                        lambda waited: self._report(work.text, waited, work.call_site),
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
        is_common = isinstance(error, (AlgorithmError, MismatchError, PeerError, CollectiveTimeoutError))
        nobody_listens = self.size == 1 or self.unusable is not None or self.handshake.left
        if nobody_listens or is_common or hasattr(error, _ANNOUNCED):
            return
        setattr(error, _ANNOUNCED, True)
        call_site = user_call_site()
        news = self.handshake.signal(FAILED, f"raised {type(error).__name__}: {error}", call_site)
        work = self.submit(news, f"telling the other ranks of {type(error).__name__} in {doing}", call_site)
        try:
            self.complete(work, _FAILURE_SECONDS)
        except TimeoutError:
            # They are busy. The news waits in the queue for their next call, or for the end of this program.
            return

    def close(self, free_first: Callable[[], None]) -> None:
        """Finish what is on its way, call ``free_first`` and free the communicator (collective); once."""
        if self not in _open or self.unusable is not None or self.handshake.left:
            # What was given up is dealt with at the end of the program, where it is known whether the others came.
            return
        self.run(self.handshake.open(plan_id("close"), "close", None), "close")
        _open.remove(self)
        progress.forget(self)
        free_first()
        self.handshake.free()
        self.node.close()
        self.comm.Free()
        self.unusable = "it has been closed"

    # Inside, while it is this thread's turn ---------------------------------------------------------------------

    def _step_oldest(self) -> None:
        if not self._queue:
            return
        work = self._queue[0]
        try:
            if work.step():
                self._queue.popleft()
        except BaseException as error:
            self._interrupt(error, work.text)
            raise

    def _finish_oldest(self) -> None:
        self._check_usable()
        work = self._queue[0]
        self._drive(self._stepping(work), work.text, max(work.timeout - work.waited, 0.0), work.call_site)
        self._queue.popleft()

    def _stepping(self, work: Work) -> Steps[None]:
        while not work.step():
            yield

    def _polling(self, work: Work) -> Steps[None]:
        while not work.is_done:
            self._check_usable()
            self._step_oldest()
            yield

    def _after_queue(self, steps: Steps[None]) -> Steps[None]:
        while self._queue:
            if self._queue[0].step():
                self._queue.popleft()
            yield
        yield from steps

    def _drive(self, steps: Steps[T], text: str, timeout: float, call_site: str | None) -> T:
        self._calls += 1
        try:
            # What small collectives need no more than.
            next(steps)
            return drive(steps, partial(self._deadline, steps, text, timeout, call_site))
        except StopIteration as stop:
            value: T = stop.value
            return value
        except (AlgorithmError, MismatchError, PeerError, CollectiveTimeoutError):
            # All ranks raise these together, or the channel has been given up already.
            raise
        except ProcessLookupError as error:
            self._interrupt(error, text)
            raise PeerError(f"{self.unusable}: {error}") from error
        except BaseException as error:
            self._interrupt(error, text)
            raise

    def _deadline(self, steps: Steps[Any], text: str, timeout: float, call_site: str | None) -> Deadline:
        return Deadline(
            timeout,
            self._warn_after,
            lambda waited: self._report(text, waited, call_site),
            lambda waited: self._expire(steps, text, waited),
            self._move_others,
        )

    def _move_others(self) -> None:
        """Move the works of other channels on: the ranks may wait for works of several in different orders."""
        for channel in _open:
            if channel is not self and channel.oldest_work() is not None:
                channel.move()

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

    def _report(self, text: str, waited: float, call_site: str | None) -> str:
        return (
            f"mpidist: rank {self.rank} of {self.size} has waited {waited:.0f} s for the other ranks in {text}, "
            f"its collective number {self._calls}, at {call_site or user_call_site()}"
        )

    def _expire(self, steps: Steps[Any], text: str, waited: float) -> None:
        # Requests are still open, and MPI may write to their buffers: the communicator is never used again,
        # and the buffers are kept.
        self._given_up = steps
        self.unusable = f"an earlier collective, {text}, did not finish within its deadline"
        error = CollectiveTimeoutError(text, self._calls, waited, self.rank)
        self._settle_all(error)
        raise error

    def _check_usable(self) -> None:
        if self.unusable is not None:
            raise RuntimeError(f"this Communicator can no longer be used: {self.unusable}")
        if self.handshake.left:
            raise PeerError(f"this Communicator can no longer be used: ranks {self.handshake.left} left the program")

    # The end of the program -------------------------------------------------------------------------------------

    def _leave(self) -> Steps[None]:
        """Finish what is on its way and tell the others that this rank's program has ended."""
        if not self._turn.take_for_good(_EXIT_SECONDS):
            self.unusable = "a thread was still in one of its collectives when the program ended"
            self._abort_job()
        if self._interrupted is not None:
            self._abort_job()
        if self._given_up is not None:
            yield from _at_most(self._given_up, _EXIT_SECONDS, self._abort_job)
        if not self.handshake.left:
            yield from self._after_queue(self.handshake.signal(LEFT, "has left the program", "its end"))

    def _abort_job(self) -> None:
        # MPI_Finalize would wait for ever for the collective that was given up.
        print(f"mpidist: rank {self.rank} ends the job: {self.unusable}", file=sys.stderr, flush=True)
        import_mpi().COMM_WORLD.Abort(1)

    def _say_that_it_waits(self, _: float) -> str:
        return f"mpidist: rank {self.rank} has ended its program, and waits for the other ranks to end theirs"


class _Turn:
    """Whose turn it is to carry out works: one thread of the program, or the thread that moves them on."""

    def __init__(self) -> None:
        self._program = threading.Lock()
        self._anyone = threading.Lock()

    def __enter__(self) -> None:
        if not self._program.acquire(blocking=False):
            raise RuntimeError(
                "two threads used one Communicator at the same time; collectives of one communicator are issued by one "
                "thread, in the same order on every rank"
            )
        try:
            self._anyone.acquire()
        except BaseException:  # a signal handler that raises while the other thread takes its step
            self._program.release()
            raise

    def take_for_good(self, seconds: float) -> bool:
        """Take the turn from all other threads; whether that worked within some seconds."""
        return self._program.acquire(timeout=seconds) and self._anyone.acquire(timeout=seconds)

    def __exit__(self, *_: object) -> None:
        self._anyone.release()
        self._program.release()

    def take_if_free(self) -> bool:
        return self._anyone.acquire(blocking=False)

    def give_back(self) -> None:
        self._anyone.release()


def _raise_still_running(work: Work, timeout: float) -> None:
    raise TimeoutError(f"{work.text} is not done after {timeout} s; it goes on, and may be waited for again")


def _at_most(steps: Steps[Any], seconds: float, otherwise: Callable[[], None]) -> Steps[None]:
    give_up = time.monotonic() + seconds
    try:
        for _ in steps:
            if time.monotonic() > give_up:
                otherwise()
            yield
    except (MismatchError, PeerError):
        # The caller had its CollectiveTimeoutError; all ranks have now taken part, which is what matters here.
        return


def _together(all_steps: Sequence[Steps[None]]) -> Steps[None]:
    going = list(all_steps)
    while going:
        going = [steps for steps in going if next(steps, going) is not going]
        yield


@atexit.register
def _leave_all() -> None:
    """Tell the other ranks that this program has ended, before MPI_Finalize waits for theirs in silence.

    A rank that leaves early, by sys.exit() for example, so gives the others a PeerError in their next collective.
    How long the other programs still run is their own affair, so this wait has no deadline, only a report.
    """
    progress.stop()
    several = [channel for channel in _open if channel.size > 1]
    if several and not import_mpi().Is_finalized():
        first = several[0]
        drive(
            _together([channel._leave() for channel in several]),
            lambda: Deadline(math.inf, first._warn_after, first._say_that_it_waits, lambda _: None),
        )
    _open.clear()
