"""Executor: carries out the operations of one channel in order, with deadlines."""

from __future__ import annotations

import errno
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, NoReturn, TypeVar

from mpidist.collectives.channel import shutdown
from mpidist.collectives.channel.handshake import Handshake
from mpidist.collectives.channel.observers import Observers
from mpidist.collectives.channel.operation import Operation, describe
from mpidist.collectives.channel.progress import progress
from mpidist.collectives.channel.short_calls import ChannelLock, ShortCalls
from mpidist.collectives.channel.tally import Tally
from mpidist.collectives.channel.work import Work
from mpidist.collectives.mpi.agreed import is_common
from mpidist.collectives.mpi.waiting import Comm, Steps, drive
from mpidist.collectives.node.core import LOST, WRITE_SECONDS, Core
from mpidist.core import settings
from mpidist.core.concurrency import Deadline, Stopwatch
from mpidist.core.errors import CollectiveTimeoutError, PeerError, RankLostError, shared_error
from mpidist.core.text import numbered_ranks, tell_user, user_call_site
from mpidist.topology.exit import can_go_on, says_rank_is_lost

T = TypeVar("T")

# Works that were submitted and never waited for: beyond this many the oldest is finished first.
_MOST_WORKS = 256
DEADLOCKED = "its ranks waited for one another in different communicators"
_ABORTED = "this rank has aborted it"
# So long may another thread have the lock for one step.
_ABORT_SECONDS = 0.1
# Those of the open channels of this process.
_executors: list[Executor] = []


class ChannelStatus(NamedTuple):
    """The activity of one rank on a channel.

    Attributes:
        issued: How many collectives it has issued.
        number: Of its present or last collective; they are counted as they are issued.
        text: Description of that collective.
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


class Executor:
    """Carries out the operations of one channel one at a time, now or later.

    Args:
        owner: Name of the channel's owner, for messages.
        comm: The communicator, for its rank and size.
        core: Of this rank's node.
        handshake: Of the channel.
        observers: Of the channel.
        timeout: Seconds before an operation is given up.
        revoke: Called when a rank is lost, to end the waits of the others.

    Attributes:
        current: The operation that is being carried out.
        short: The calls that are carried out without an operation.
        tally: The changes that this rank has made by itself since the last operation, if any.
    """

    def __init__(
        self,
        owner: str,
        comm: Comm,
        core: Core | None,
        handshake: Handshake,
        observers: Observers,
        timeout: float,
        revoke: Callable[[], None],
    ) -> None:
        self._owner = owner
        self._rank, self._size = comm.Get_rank(), comm.Get_size()
        self._core = core
        self._handshake = handshake
        self._observers = observers
        self._timeout = timeout
        self._warn_after: float = settings.WARN_AFTER.read()
        self._revoke = revoke
        self._works: deque[Work[object]] = deque()
        self._unusable: str | None = None
        self._tally: Tally | None = None
        self.short = ShortCalls(core, self._may_be_short)
        observers.changed = self.short.settle
        self._lock = ChannelLock(self.short)
        self._issued = self._nbytes = 0
        # In place of an operation where there is none: one that was carried out is not kept, nor its arrays.
        self._nothing = Operation(_no_steps(), describe("nothing"))
        self.current: Operation[object] = self._nothing
        # Number and text of the last operation that the program has waited for.
        self._last = (0, "")
        # Since when the program has waited for the last operation that it waited for, and whether it still does.
        self._since = 0.0
        self._waits = False
        # Whether a thread of the program waits for a work, and so moves all of them.
        self._completes = False
        self._has_ended = False
        self._given_up: Steps[object] | None = None
        self._interrupted: BaseException | None = None
        self._aborted: PeerError | None = None
        _executors.append(self)

    @property
    def issued(self) -> int:
        """How many operations and short calls this rank has issued."""
        return self._issued + self.short.count

    @property
    def nbytes(self) -> int:
        """Bytes of the values that this rank has passed into them."""
        return self._nbytes + self.short.nbytes

    @property
    def unusable(self) -> str | None:
        """Why no more operations can be carried out, if so."""
        return self._unusable

    @unusable.setter
    def unusable(self, reason: str) -> None:
        self._unusable = reason
        self.short.settle()
        if self._core is not None:
            # The caller of the collective that failed may use its arrays as soon as it has the error.
            writing = self._core.abandon(WRITE_SECONDS)
            if writing:
                tell_user(
                    f"{numbered_ranks(writing)} of this node did not stop writing within {WRITE_SECONDS:g} s. Do not "
                    "reuse the arrays of the last collective. Restart the job"
                )

    @property
    def tally(self) -> Tally | None:
        """The changes that this rank has made by itself since the last operation, if any."""
        return self._tally

    @tally.setter
    def tally(self, tally: Tally | None) -> None:
        self._tally = tally
        self.short.settle()

    def _may_be_short(self) -> bool:
        return not (
            self._works
            or self._tally is not None
            or self._unusable is not None
            or self._handshake.left
            or self._observers.see_calls
        )

    # Called by the program --------------------------------------------------------------------------------------

    def run(self, operation: Operation[T]) -> T:
        """Carry out an operation, after those that were submitted, and return its result.

        Raises:
            CollectiveTimeoutError: It took longer than its deadline; no more can be carried out.
            RuntimeError: The channel was closed or has given up before, or is in use by another thread.
            PeerError: Another rank has failed or left.
        """
        with self._lock:
            self.check_usable(operation.is_rest)
            self._number(operation)
            while self._works:
                self._finish_oldest()
            steps = operation.steps
            if operation.tally is not None or self._observers.see_steps:
                steps = self._observed(operation)
            result = self._drive(steps, operation, operation.timeout or self._timeout)
        return operation.finished(result)

    def submit(self, operation: Operation[T]) -> Work[T]:
        """Start an operation and return its handle; works are carried out in order of submission."""
        steps, timeout = self._observed(operation), operation.timeout or self._timeout
        work: Work[T] = Work(operation, steps, timeout, self.advance, self._wait_for)
        with self._lock:
            self.check_usable()
            self._number(operation)
            self._works.append(work)
            while len(self._works) > _MOST_WORKS:
                self._finish_oldest()
            self._step_oldest()
        if not work.is_done and self._size > 1:
            progress.watch(self.move)
        return work

    def _number(self, operation: Operation[object]) -> None:
        self.short.seen()
        self._issued += 1
        self._nbytes += operation.description.nbytes
        operation.number = self._issued + self.short.count
        operation.tally, self._tally = self._tally, None

    def advance(self) -> None:
        """Move the oldest unfinished work one step forward."""
        with self._lock:
            self.check_usable()
            self._step_oldest()

    def complete(self, work: Work[object], timeout: float | None) -> None:
        """Carry out works in order until ``work`` is done, for at most ``timeout`` seconds."""
        with self._lock:
            self._completes = True
            try:
                self._complete(work, timeout)
            finally:
                self._completes = False
                if self._works:
                    progress.wake()

    def _complete(self, work: Work[object], timeout: float | None) -> None:
        if timeout is None or timeout >= work.timeout - work.waited:
            while self._works and not work.is_done:
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

    def _wait_for(self, work: Work[object], timeout: float | None) -> None:
        """Complete a work, and tell observers of the wait."""
        if work.is_done:
            return
        start = time.perf_counter_ns()
        try:
            self.complete(work, timeout)
        finally:
            for tell in self._observers.waited:
                tell(work.operation, start)

    # Called by any thread ---------------------------------------------------------------------------------------

    def oldest_work(self) -> Work[object] | None:
        """Return the work that is carried out next, or None."""
        try:
            return self._works[0]
        except IndexError:
            return None

    def move(self) -> Work[object] | None:
        """Move the oldest work one step on, unless another thread does, and return the next.

        An error settles all works.
        """
        if self._works and self._lock.take_if_free():
            try:
                self._step_oldest()
            finally:
                self._lock.give_back()
        # Nothing is left to do for a thread that comes by while the program itself moves the works.
        return None if self._completes else self.oldest_work()

    def status(self) -> ChannelStatus:
        """Return the activity of this rank."""
        (number, text), waits, short = self._last, self._waits, self.short.last()
        if short is not None:
            number, text = self.issued, short.text
        seconds = time.monotonic() - self._since
        work = self.oldest_work()
        if not waits and work is not None:
            number, text, waits = work.operation.number, work.operation.text, self.move in progress.watched
            seconds = time.monotonic() - work.began
        return ChannelStatus(self.issued, number, text, waits, seconds, self._has_ended)

    def waiting(self) -> list[tuple[int, str]]:
        """Return number and text of the operation that the program waits in, if any."""
        return [self._last] if self._waits else []

    def refuse(self, reason: str) -> None:
        """Carry out no more operations; a program that waits in one learns the reason there."""
        if not self._waits:
            self.unusable = reason

    def abort(self) -> None:
        """End the operations of this rank with an error, in all threads; take no more.

        What other ranks wait for of it is finished when the program ends, as far as they have come by then.
        """
        if self.unusable is None:
            self._aborted = PeerError(f"this {self._owner} can no longer be used: {_ABORTED}")
            self.unusable = _ABORTED
        # A thread that has the lock for longer waits in an operation, and ends it and the works at its next look.
        if self._lock.take_if_free(_ABORT_SECONDS):
            try:
                self._step_oldest()
            finally:
                self._lock.give_back()

    # The end ----------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Take no part in the progress of works any more, as the channel is closed."""
        _executors.remove(self)
        progress.forget(self.move)
        self.short.lock()

    def abandon(self) -> None:
        """Give all works up, as a rank was lost."""
        self.unusable = self.unusable or "a rank was lost"
        self._settle_all(RankLostError(self.unusable))

    def disown(self) -> None:
        """Refuse all operations in a forked child, where the holder of the lock is missing."""
        self._lock = ChannelLock(self.short)
        self._core = None  # the parent still uses it
        self.unusable = shutdown.FORKED
        _executors.remove(self)

    def finish(self) -> Steps[None]:
        """Finish all works at the program's end, as far as the other ranks take part."""
        self._has_ended = True
        if not self._lock.take_for_good(shutdown.EXIT_SECONDS):
            shutdown.abort_job(self._rank, "a thread was still in one of its collectives when the program ended")
        if self.short.is_broken_off:
            self._break_off()
        if self._interrupted is not None:
            shutdown.abort_job(self._rank, self.unusable)
        if self._given_up is not None:
            yield from shutdown.finish_given_up(self._given_up, lambda: shutdown.abort_job(self._rank, self.unusable))
        while self._works:
            work = self._works[0]
            stopwatch, limit = Stopwatch(), max(work.timeout - work.waited, 0.0)
            while not self._handshake.left and not work.step():
                if stopwatch.seconds > limit:
                    what = f"{work.operation.text}, started at {work.operation.call_site}"
                    shutdown.abort_job(self._rank, f"the other ranks have not come to {what}")
                yield
            if not work.is_done:
                left = numbered_ranks(self._handshake.left)
                work.settle(PeerError(f"{left} left the program before they came to it"))
            self._works.popleft()

    # Inside, while the lock is held -----------------------------------------------------------------------------

    def _observed(self, operation: Operation[object]) -> Steps[object]:
        """Carry out the steps of an operation, its tally in the first; tell observers."""
        self.current = operation
        if operation.tally is not None:
            self._handshake.tally = operation.tally
        for tell in self._observers.began:
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

    def _tell_end(self, operation: Operation[object]) -> None:
        try:
            for tell in self._observers.ended:
                tell(operation)
        finally:
            operation.error = None

    def _step_oldest(self) -> None:
        if not self._works:
            return
        work = self._works[0]
        if self._aborted is not None:
            self._end_aborted(_stepping(work), self._aborted)
            return
        try:
            if work.step():
                self._works.popleft()
        except BaseException as error:
            self.lose_or_interrupt(error, work.operation.text)

    def _finish_oldest(self) -> None:
        self.check_usable()
        work = self._works[0]
        self._drive(_stepping(work), work.operation, max(work.timeout - work.waited, 0.0))
        self._works.popleft()

    def _polling(self, work: Work[object]) -> Steps[None]:
        while not work.is_done:
            if self._aborted is None:
                self.check_usable()
            self._step_oldest()
            yield

    def _drive(self, steps: Steps[T], operation: Operation[object], timeout: float) -> T:
        self.current = operation
        self._last, self._since = (operation.number, operation.description.text), time.monotonic()
        self._waits = True
        try:
            # All that small collectives need.
            next(steps)
            return drive(steps, partial(self._deadline, steps, operation, timeout))
        except StopIteration as stop:
            result: T = stop.value
            return result
        except BaseException as error:
            # A common error may come from another channel's work. This channel's call is then unfinished.
            is_unfinished = self._core is not None and self._core.waits and self.unusable is None
            if is_common(error) and not is_unfinished:
                raise
            self.lose_or_interrupt(error, operation.text)
        finally:
            self._waits = False
            self.current = self._nothing

    def _deadline(self, steps: Steps[object], operation: Operation[object], timeout: float) -> Deadline:
        def meanwhile() -> None:
            if self._aborted is not None:
                self._end_aborted(steps, self._aborted)
                raise self._aborted
            self._move_others()
            for ask in self._observers.waits:
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
        move_works(self)

    def _report(self, operation: Operation[object], waited: float) -> str | None:
        """Return the report of a long wait, or None where an observer reports it."""
        if any([tells(operation) for tells in self._observers.tells]):
            return None
        return (
            f"rank {self._rank} of {self._size} has waited {waited:.0f} s for the other ranks in {operation.text}, its "
            f"collective number {operation.number}, at {operation.call_site or user_call_site()}"
        )

    # Giving up --------------------------------------------------------------------------------------------------

    def _expired(self, steps: Steps[object], operation: Operation[object], waited: float) -> CollectiveTimeoutError:
        """Give an operation up at its deadline, and return the error of all works."""
        self._give_up(steps, f"an earlier collective, {operation.text}, did not finish within its deadline")
        found = [explain(operation) for explain in self._observers.explanation]
        report, printing_rank = next((each for each in found if each is not None), (None, self._rank))
        more_time = self._handshake.advice.time
        error = CollectiveTimeoutError(operation.text, operation.number, waited, self._rank, report, more_time)
        self._settle_all(error)
        return shared_error(error, prints=self._rank == printing_rank)

    def _give_up(self, steps: Steps[object], reason: str) -> None:
        # Requests are still open, and MPI may write to their buffers: the communicator is never used again,
        # and the buffers are kept.
        self._given_up = steps
        self.unusable = reason

    def _end_aborted(self, steps: Steps[object], error: PeerError) -> None:
        self._give_up(steps, _ABORTED)
        self._settle_all(error)

    def lose_or_interrupt(self, error: BaseException, text: str) -> NoReturn:
        """Fail the channel after an error in its call, and raise an error."""
        # Signal handlers may raise an OSError too, so its type alone does not mean that the core failed.
        no_access = isinstance(error, OSError) and self._core is not None and self._core.state == LOST
        has_ended = isinstance(error, OSError) and no_access and error.errno == errno.ESRCH
        if says_rank_is_lost(error) or (has_ended and can_go_on()):
            self._lose(error, text)
        # A signal handler, a KeyboardInterrupt or lack of memory broke in between messages. The frames that the
        # traceback holds own buffers that MPI may still write to, so it is kept.
        self._interrupted = error
        if isinstance(error, OSError) and no_access:
            advice = "Restart the job" if has_ended else "Set MPIDIST_READ_NEIGHBOURS=0"
            cause = "a rank of this node has ended" if has_ended else "cannot access the memory of another rank"
            failed = PeerError(f"{text} failed: {cause} ({error.strerror}). {advice}")
            self.unusable = str(failed)
            self._settle_all(failed)
            raise failed from error
        self.unusable = f"{text} was interrupted by {type(error).__name__}"
        settled = RuntimeError(f"{self.unusable}, before this collective was done")
        settled.__cause__ = error
        self._settle_all(settled)
        raise error

    def _break_off(self) -> None:
        """Give the channel up for a short call that nobody has carried on."""
        if self._interrupted is None:
            self.unusable = "a collective was interrupted by an error of a signal handler"
            self._interrupted = RuntimeError(self.unusable)

    def _lose(self, error: BaseException, text: str) -> NoReturn:
        """Give the communicator up, on all its ranks: one of them is lost."""
        lost = RankLostError(f"a rank was lost while rank {self._rank} was in {text}: {error}")
        self.unusable = str(lost)
        # MPI may still write to the buffers of open requests.
        self._interrupted = error
        self._settle_all(lost)
        self._revoke()
        raise lost from error

    def _settle_all(self, error: BaseException) -> None:
        for work in self._works:
            work.settle(error)
        self._works.clear()

    def check_usable(self, is_rest: bool = False) -> None:
        """Raise an error where nothing can be carried out any more."""
        if self.short.is_broken_off and not is_rest:
            self._break_off()
        if self.unusable is not None:
            raise RuntimeError(f"this {self._owner} can no longer be used: {self.unusable}")
        if self._handshake.left:
            left = numbered_ranks(self._handshake.left)
            raise PeerError(f"this {self._owner} can no longer be used: {left} left the program")


also_moved: list[Callable[[], object]] = []
"""Functions that move other works of this process on."""


def move_works(but: Executor | None = None) -> None:
    """Move the works of all channels on, and messages.

    Ranks may wait for them in different orders.
    """
    for executor in list(_executors):
        if executor is not but:
            executor.move()
    for move in list(also_moved):
        move()


def _no_steps() -> Steps[None]:
    """Yield nothing: the steps of an operation before the first."""
    yield from ()


def _stepping(work: Work[object]) -> Steps[None]:
    while not work.step():
        yield
