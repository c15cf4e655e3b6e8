"""Executor: runs the operations of one channel in order, with deadlines."""

from __future__ import annotations

import errno
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, NoReturn, TypeVar

from mpidist.collectives.channel import shutdown
from mpidist.collectives.channel.fast_path import ChannelLock, FastPath
from mpidist.collectives.channel.handshake import Handshake
from mpidist.collectives.channel.observers import Observers
from mpidist.collectives.channel.operation import LocalChanges, Operation, describe
from mpidist.collectives.channel.progress import progress
from mpidist.collectives.mpi.exchange import is_common
from mpidist.collectives.mpi.waiting import Comm, Steps, drive
from mpidist.collectives.node.core import LOST, WAITING, WRITE_SECONDS
from mpidist.collectives.node.node import Node
from mpidist.core import settings
from mpidist.core.concurrency import Deadline, Stopwatch
from mpidist.core.errors import CollectiveTimeoutError, MismatchError, PeerError, RankLostError, shared_error
from mpidist.core.text import numbered_ranks, tell_user, user_call_site
from mpidist.topology.exit import can_go_on, revoke, says_rank_is_lost

T = TypeVar("T")

# With more pending works than this, the oldest is finished first.
_MOST_WORKS = 256
DEADLOCKED = "its ranks waited for one another in different communicators"
_ABORTED = "this rank has aborted it"
_INTERRUPTED = "a collective was interrupted by an error of a signal handler"
# How long abort() waits for another thread's step.
_ABORT_SECONDS = 0.1


class ChannelStatus(NamedTuple):
    """The status of a rank on a channel."""

    issued: int  # number of collectives so far
    number: int  # of the current or last collective
    text: str  # its description
    waits: bool  # whether the rank is in it
    seconds: float  # since its beginning
    ended: bool  # whether the program has ended


class Executor:
    """Runs the operations of one channel, one at a time, also in the background. ``owner`` names its owner."""

    def __init__(
        self,
        owner: str,
        comm: Comm,
        node: Node,
        handshake: Handshake,
        observers: Observers,
        timeout: float,
    ) -> None:
        self._owner = owner
        self._comms = comm, node.comm
        self._rank, self._size = comm.Get_rank(), comm.Get_size()
        self._core = node.core
        self._handshake = handshake
        self._observers = observers
        self._timeout = timeout
        self._warn_after: float = settings.WARN_AFTER.read()
        self._works: deque[Operation[object]] = deque()
        self.reason = ""
        """Reason why no more operations can run. Empty until the channel is closed or fails."""
        # The remaining steps of a failed collective. This rank runs them when its program ends.
        self._unfinished: Steps[object] | None = None
        # Error that cut off an exchange: MPI_Finalize would hang. Its frames hold buffers to which MPI may still write.
        self._cut_off: BaseException | None = None
        # Error of abort(), which ends the call in which another thread waits.
        self._aborted: PeerError | None = None
        self._changes: LocalChanges | None = None
        self.fast = FastPath(node, self._may_use_fast_path)
        observers.changed = self.fast.update
        self._lock = ChannelLock(self.fast)
        self._issued = self._nbytes = 0
        # Stands for no operation, so that finished ones and their arrays are freed.
        self._nothing = Operation(_no_steps(), describe("nothing"))
        self.current: Operation[object] = self._nothing
        # Nanoseconds between the arrival of all ranks and the end of operations, if there are several nodes.
        self.moved = self.met_at = 0
        # Number and text of the last operation that the program has waited for, and the start of that wait.
        self._last = (0, "")
        self._since = 0.0
        self._waits = False
        # Whether a thread of the program waits for a work, and so advances all of them.
        self._completes = self._has_ended = False
        self.fast.update()
        also_moved.append(self.move)

    @property
    def issued(self) -> int:
        """Number of operations and fast-path calls so far."""
        return self._issued + self.fast.count

    @property
    def nbytes(self) -> int:
        """Bytes of their inputs."""
        return self._nbytes + self.fast.nbytes

    def local_changes(self) -> LocalChanges:
        """Return the local changes of this rank since the last operation. The next one compares them."""
        changes = self._changes = self._changes or LocalChanges()
        self.fast.update()
        return changes

    def _may_use_fast_path(self) -> bool:
        return not (
            self._works
            or self._changes is not None
            or self.reason
            or self._handshake.has_left
            or self._observers.see_calls
        )

    # Called by the program --------------------------------------------------------------------------------------

    def run(self, operation: Operation[T]) -> T:
        """Run an operation after the pending works, and return its result."""
        with self._lock:
            self.check_usable(operation.is_resumed)
            self._number(operation)
            while self._works:
                self._finish_oldest()
            if self._observers.see_steps:
                operation.steps = self._observed(operation, operation.steps)
            result = self._drive(operation.steps, operation, operation.timeout or self._timeout)
            if operation.fast_call is not None and self._may_use_fast_path():
                self.fast.cache(operation.fast_call, operation)
        return operation.finished(result)

    def start(self, operation: Operation[T]) -> Operation[T]:
        """Start an operation and return it; works run in the order of their start."""
        operation.timeout = operation.timeout or self._timeout
        operation.start(self)
        operation.fast_call = None  # only blocking calls take the fast path
        with self._lock:
            self.check_usable()
            self._number(operation)
            if self._works or self._observers.see_steps:
                # Behind other works, observers may be added before its first step.
                operation.steps = self._observed(operation, operation.steps)
            self._works.append(operation)
            while len(self._works) > _MOST_WORKS:
                self._finish_oldest()
            self._step_oldest()
            if not operation.is_done and operation.call_site is None:
                # Other threads cannot run its steps before the lock is released.
                operation.call_site = user_call_site()
        if not operation.is_done and self._size > 1:
            progress.watch(self.move)
        return operation

    def _number(self, operation: Operation[object]) -> None:
        self._issued += 1
        self._nbytes += operation.description.nbytes
        operation.number = self._issued + self.fast.see()
        if self._changes is not None:
            operation.changes, self._changes = self._changes.settled(), None

    def advance(self) -> None:
        """Run the next step of the oldest unfinished work."""
        with self._lock:
            self.check_usable()
            self._step_oldest()

    def wait_for(self, operation: Operation[object], timeout: float | None) -> None:
        """Run works in order until ``operation`` is done, for at most ``timeout`` seconds."""
        start = time.perf_counter_ns()
        try:
            self.complete(operation, timeout)
        finally:
            for tell in self._observers.waited:
                tell(operation, start)

    def complete(self, operation: Operation[object], timeout: float | None) -> None:
        """Run works as in `wait_for`, unseen by observers."""
        with self._lock:
            self._completes = True
            try:
                if timeout is None or timeout >= operation.timeout:
                    while self._works and not operation.is_done:
                        self._finish_oldest()
                elif not operation.is_done:
                    self._poll(operation, timeout)
            finally:
                self._completes = False
                if self._works:
                    progress.wake()

    def _poll(self, operation: Operation[object], timeout: float) -> None:
        operation.timeout -= timeout
        late = f"{operation.text} is not done after {timeout} s. It continues, and you may wait for it again"
        report = partial(self._report, operation)
        drive(
            self._polling(operation),
            lambda: Deadline(report, lambda _: TimeoutError(late), timeout, self._warn_after, move_works),
        )

    # Called by any thread ---------------------------------------------------------------------------------------

    def oldest_work(self) -> Operation[object] | None:
        """Return the work that runs next, or None."""
        try:
            return self._works[0]
        except IndexError:
            return None

    def move(self) -> Operation[object] | None:
        """Run a step of the oldest work unless another thread does. Return the next work."""
        if self._works:
            self._lock.try_step(self._step_oldest)
        # While the program itself advances the works, a thread that passes by has nothing to do.
        return None if self._completes else self.oldest_work()

    def status(self) -> ChannelStatus:
        """Return the status of this rank."""
        (number, text), waits, fast = self._last, self._waits, self.fast.last()
        if fast is not None:
            number, text = self.issued, fast.text
        seconds = time.monotonic() - self._since
        work = self.oldest_work()
        if not waits and work is not None:
            number, text, waits = work.number, work.text, self.move in progress.watched
            seconds = time.monotonic() - work.started_at
        return ChannelStatus(self.issued, number, text, waits, seconds, self._has_ended)

    def waiting(self) -> list[tuple[int, str]]:
        """Return number and text of the operation in which the program waits, if any."""
        return [self._last] if self._waits else []

    def abort(self) -> None:
        """End the operations of this rank with an error, in all threads.

        At the end of the program, this rank finishes its part of them as far as other ranks have arrived.
        """
        if not self.reason:
            self._aborted = PeerError(f"this {self._owner} can no longer be used: {_ABORTED}")
            self.fail(_ABORTED)
        # A thread that holds the lock longer waits in an operation. It ends all operations at its next check.
        self._lock.try_step(self._step_oldest, _ABORT_SECONDS)

    # The end ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Leave the background progress, because all ranks close the channel."""
        also_moved.remove(self.move)
        progress.forget(self.move)
        self.reason = self.reason or "it has been closed"
        # After the reason, because a thread that releases the channel in between would enable the fast path again.
        self.fast.lock()

    def disown(self) -> None:
        """Refuse all operations in a forked child, which lacks the holder of the lock."""
        self._lock = ChannelLock(self.fast)
        self._core = None  # the parent still uses it
        self.fail(shutdown.FORKED)
        also_moved.remove(self.move)

    def finish(self) -> Steps[None]:
        """Finish all works at the program's end, as far as the other ranks take part."""
        # Threads that wait in an operation may still finish it.
        self._has_ended = True
        abort_job = partial(shutdown.abort_job, self._rank)
        if not self._lock.take_for_good(shutdown.EXIT_SECONDS):
            abort_job("a thread was still in one of its collectives when the program ended")
        if self._cut_off is not None or self.fast.is_abandoned:
            abort_job(self.reason or _INTERRUPTED)
        try:
            stopwatch = Stopwatch()
            for _ in self._unfinished or ():
                if stopwatch.seconds > shutdown.EXIT_SECONDS:
                    abort_job(self.reason)
                yield
        except OSError:  # another rank has failed in the same collective
            abort_job(self.reason)
        except (MismatchError, PeerError):
            pass  # The caller had its error. All ranks have now taken part in the exchange.
        while self._works:
            work = self.current = self._works[0]
            stopwatch = Stopwatch()
            while not self._handshake.has_left and not work.step():
                if stopwatch.seconds > work.timeout:
                    abort_job(f"the other ranks never called {work.text}, which it started at {work.call_site}")
                yield
            if not work.is_done:
                left = numbered_ranks(self._handshake.has_left)
                work.fail(PeerError(f"{left} left the program before this collective"))
            self._works.popleft()
        self.current = self._nothing

    # Inside, while the lock is held -----------------------------------------------------------------------------

    def _observed(self, operation: Operation[object], steps: Steps[T]) -> Steps[T]:
        """Run the steps of an operation, and notify observers."""
        for tell in self._observers.began:
            tell(operation)
        try:
            result = yield from steps
        except GeneratorExit:  # the program ends during the operation, so observers see no end
            raise
        except BaseException as error:
            operation.error = error
            self._tell_end(operation)
            raise
        else:
            self._tell_end(operation)
            return result

    def _tell_end(self, operation: Operation[object]) -> None:
        try:
            for tell in self._observers.ended:
                tell(operation)
        finally:
            operation.error = None

    def _add_moved(self) -> None:
        if self.met_at:
            self.moved += time.perf_counter_ns() - self.met_at
            self.met_at = 0

    def _step_oldest(self) -> None:
        if not self._works:
            return
        work = self._works[0]
        if self._aborted is not None:
            self.fail(_ABORTED, self._aborted, unfinished=_stepping(work))
            return
        self.current = work
        try:
            if work.step():
                self._works.popleft()
                self._add_moved()
        except BaseException as error:
            self.fail_in(work.text, error)
        finally:
            self.current = self._nothing

    def _finish_oldest(self) -> None:
        self.check_usable()
        work = self._works[0]
        self._drive(_stepping(work), work, work.timeout)
        self._works.popleft()

    def _polling(self, work: Operation[object]) -> Steps[None]:
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
            # Small collectives need only one step.
            next(steps)
            return drive(steps, partial(self._deadline, steps, operation, timeout))
        except StopIteration as stop:
            result: T = stop.value
            return result
        except BaseException as error:
            # A common error may come from another channel's work. This channel's call is then unfinished.
            is_unfinished = self._core is not None and self._core.state in WAITING and not self.reason
            if is_common(error) and not is_unfinished:
                raise
            self.fail_in(operation.text, error)
        finally:
            self._waits = False
            self.current = self._nothing
            self._add_moved()

    def _deadline(self, steps: Steps[object], operation: Operation[object], timeout: float) -> Deadline:
        def meanwhile() -> None:
            if self._aborted is not None:
                self.fail(_ABORTED, self._aborted, unfinished=steps)
                raise self._aborted
            move_works()
            for ask in self._observers.waits:
                error = ask(operation)
                if error is not None:
                    self.fail(DEADLOCKED, error, unfinished=steps)
                    raise error

        report, expired = partial(self._report, operation), partial(self._expired, steps, operation)
        return Deadline(report, expired, timeout, self._warn_after, meanwhile)

    def _report(self, operation: Operation[object], waited: float) -> str | None:
        """Return the report of a long wait, or None if an observer reports it."""
        if any([tells(operation) for tells in self._observers.tells]):
            return None
        return (
            f"rank {self._rank} of {self._size} has waited {waited:.0f} s for the other ranks in {operation.text}, its "
            f"collective number {operation.number}, at {operation.call_site or user_call_site()}"
        )

    # Failing ----------------------------------------------------------------------------------------------------

    def fail(
        self,
        reason: str,
        error: BaseException | None = None,
        *,
        unfinished: Steps[object] | None = None,
        cut_off: BaseException | None = None,
    ) -> None:
        """Run no more operations. The first reason counts. Works end with ``error``. Without an error they stay.

        ``unfinished`` is the rest of a collective, which this rank finishes at its end. ``cut_off`` is an error that
        cut off an exchange with other ranks.
        """
        is_first = not self.reason
        self.reason = self.reason or reason
        self._unfinished, self._cut_off = unfinished or self._unfinished, cut_off or self._cut_off
        self.fast.update()
        # The caller may use its arrays as soon as it has the error.
        writing = self._core.abandon(WRITE_SECONDS) if is_first and self._core is not None else []
        if writing:
            tell_user(
                f"{numbered_ranks(writing)} of this node did not stop writing within {WRITE_SECONDS:g} s. Do not "
                "reuse the arrays of the last collective. Restart the job"
            )
        if error is not None:
            for work in self._works:
                work.fail(error)
            self._works.clear()

    def _expired(self, steps: Steps[object], operation: Operation[object], waited: float) -> CollectiveTimeoutError:
        """Fail at the deadline of an operation, and return the error of all works."""
        reason = f"an earlier collective, {operation.text}, did not finish within its deadline"
        self.fail(reason, unfinished=steps)
        found = [explain(operation) for explain in self._observers.explanation]
        report, printing_rank = next((each for each in found if each is not None), (None, self._rank))
        more_time = self._handshake.advice.time
        error = CollectiveTimeoutError(operation.text, operation.number, waited, self._rank, report, more_time)
        self.fail(reason, error)
        # Every waiting rank has the same report.
        return shared_error(error, prints=self._rank == printing_rank)

    def fail_in(self, text: str, error: BaseException) -> NoReturn:
        """Fail after an error inside the collective ``text``, and raise the error for the program."""
        # Signal handlers may raise an OSError too, so its type alone does not mean that the core failed.
        is_lost = self._core is not None and self._core.state == LOST
        no_access = error if isinstance(error, OSError) and is_lost else None
        has_ended = no_access is not None and no_access.errno == errno.ESRCH
        is_rank_lost = says_rank_is_lost(error) or (has_ended and can_go_on())
        if is_rank_lost:
            failed: BaseException = RankLostError(f"a rank was lost while rank {self._rank} was in {text}: {error}")
            reason = str(failed)
        elif no_access is not None:
            advice = "Restart the job" if has_ended else "Set MPIDIST_READ_NEIGHBOURS=0"
            cause = "a rank of this node has ended" if has_ended else "cannot access the memory of another rank"
            failed = PeerError(f"{text} failed: {cause} ({no_access.strerror}). {advice}")
            reason = str(failed)
        else:  # a signal handler, a KeyboardInterrupt or lack of memory cut off an exchange
            reason = f"{text} was interrupted by {type(error).__name__}"
            failed = RuntimeError(f"{reason}, before this collective was done")
        failed.__cause__ = error
        self.fail(reason, failed, cut_off=error)
        if is_rank_lost:
            self.revoke()
        raise failed if isinstance(failed, PeerError) else error

    def revoke(self) -> None:
        """End the waits of the other ranks after the loss of a rank."""
        for comm in self._comms:
            revoke(comm)

    def check_usable(self, is_resumed: bool = False) -> None:
        """Raise an error if no more operations can run."""
        if self.fast.is_abandoned and not is_resumed:
            self.fail(_INTERRUPTED)
        if self.reason:
            raise RuntimeError(f"this {self._owner} can no longer be used: {self.reason}")
        if self._handshake.has_left:
            left = numbered_ranks(self._handshake.has_left)
            raise PeerError(f"this {self._owner} can no longer be used: {left} left the program")


also_moved: list[Callable[[], object]] = []
"""Functions that advance the works of the open channels of this process, and its messages."""


def move_works() -> None:
    """Advance all works and messages. Ranks may wait for them in different orders."""
    for move in list(also_moved):
        move()


def _no_steps() -> Steps[None]:
    yield from ()


def _stepping(work: Operation[object]) -> Steps[None]:
    while not work.step():
        yield
