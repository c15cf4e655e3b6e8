"""Dispatcher: the queue of one coordinator's functions, and the thread that sends them to workers.

The thread receives the results, too. All coordinators of a process share its workers.
"""

from __future__ import annotations

import itertools
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from mpidist.collectives.channel.shutdown import abort_job
from mpidist.collectives.mpi.waiting import Naps
from mpidist.core import message_tags, settings
from mpidist.core.concurrency import start_daemon
from mpidist.core.errors import RankLostError
from mpidist.core.text import error_text, tell_user
from mpidist.parameter_server.link import Link
from mpidist.parameter_server.messages import CALL, RESULT, STOP, ByteExchange
from mpidist.parameter_server.names import Names
from mpidist.parameter_server.pickling import Find, PickledError, unpack
from mpidist.parameter_server.remote_value import PerWorkerValues, Recipe, with_remote_traceback
from mpidist.topology.exit import says_rank_is_lost

# Functions that may wait for a worker before schedule() waits, as in TensorFlow.
QUEUE_LENGTH = 256 << 10


@dataclass(eq=False)
class Closure:
    """A scheduled function.

    Attributes:
        name: For messages.
        payload: Function and arguments, packed.
        uses: The workers' own values that it needs, which are kept that long.
        future: Gets its result.
    """

    name: str
    payload: bytes
    uses: frozenset[PerWorkerValues]
    future: Future[Any]


def with_all_used(uses: Iterable[PerWorkerValues]) -> frozenset[PerWorkerValues]:
    """Return workers' own values together with those that they are built of."""
    found = set(uses)
    for values in uses:
        found |= with_all_used(values.uses)
    return frozenset(found)


class _Worker:
    """One worker and the function that it carries out."""

    def __init__(self, link: Link, rank: int) -> None:
        self.name = f"{link.tasks[rank]} (rank {rank})"
        self.exchange = ByteExchange(link.comm, rank, message_tags.TO_WORKER, message_tags.FROM_WORKER)
        # The numbers of its own values, and those of them that it may drop.
        self.knows: set[int] = set()
        self.drops: list[int] = []
        self.closed: list[int] = []
        self.closure: Closure | None = None
        self.since = 0.0
        self.moves: Iterator[None] | None = None


class Workers:
    """The workers of a link. Several dispatchers share them, each from its own thread.

    Args:
        link: Connects with the workers.

    Attributes:
        lock: Held to claim, free or remove a worker.
        numbers: Numbers the workers' own values.
        dropped: Numbers of own values to drop. The garbage collector appends to it, in any thread.
        closed: Numbers of closed strategies.
        dispatchers: All dispatchers that use the workers.
        names: The names of each strategy of this process, by its number.
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self.known = [_Worker(link, rank) for rank in link.workers[1:]]
        self.lock = threading.Lock()
        self.numbers = itertools.count()
        self.dropped: deque[int] = deque()
        self.closed: deque[int] = deque()
        self.dispatchers: list[Dispatcher] = []
        self.names: WeakValueDictionary[int, Names] = WeakValueDictionary()
        # Dispatchers that have functions, in the order of their turns.
        self._turns: deque[Dispatcher] = deque()
        link.before_leaving(self.stop)

    def claim(self, dispatcher: Dispatcher, closure: Closure) -> _Worker | None:
        """Return an idle worker, which then has ``closure``.

        None if all are busy, or if it is another dispatcher's turn.
        """
        with self.lock:
            if not self.known:
                raise RankLostError("all workers were lost; start the job again and restore the newest checkpoint")
            if dispatcher not in self._turns:
                self._turns.append(dispatcher)
            worker = next((worker for worker in self.known if worker.closure is None), None)
            if worker is None or self._turns[0] is not dispatcher:
                return None
            self._turns.popleft()
            worker.closure = closure
            worker.since = time.monotonic()
            return worker

    def withdraw(self, dispatcher: Dispatcher) -> None:
        """Skip the turn of a dispatcher without functions."""
        with self.lock:
            if dispatcher in self._turns:
                self._turns.remove(dispatcher)

    def free(self, worker: _Worker) -> None:
        """Let other functions have ``worker``."""
        with self.lock:
            worker.closure = worker.moves = None

    def remove(self, worker: _Worker) -> int:
        """Remove a lost worker; return the number of those left."""
        with self.lock:
            self.known.remove(worker)
            return len(self.known)

    def news_for(self, worker: _Worker, closure: Closure) -> tuple[list[int], list[int], dict[int, Recipe]]:
        """Return the values and strategies that ``worker`` drops, and the recipes of new values."""
        with self.lock:
            while self.dropped:
                number = self.dropped.popleft()
                for each in self.known:
                    if number in each.knows:
                        each.knows.remove(number)
                        each.drops.append(number)
            while self.closed:
                strategy = self.closed.popleft()
                for each in self.known:
                    each.closed.append(strategy)
            drops, worker.drops = worker.drops, []
            closed, worker.closed = worker.closed, []
            new = {values.number: values.built_by for values in closure.uses if values.number not in worker.knows}
            worker.knows.update(new)
            return drops, closed, new

    def stop(self) -> None:
        """Stop all dispatchers, then all workers."""
        for dispatcher in list(self.dispatchers):
            dispatcher.stop()
        for worker in self.known:
            naps = Naps()
            try:
                for _ in chain(worker.exchange.send(STOP), worker.exchange.flush()):
                    naps.take(is_busy=True)
            except Exception as error:
                if not says_rank_is_lost(error):
                    raise
            worker.exchange.close()


_workers: WeakKeyDictionary[Link, Workers] = WeakKeyDictionary()


def workers_of(link: Link) -> Workers:
    """Return the workers of a link, made the first time."""
    if link not in _workers:
        _workers[link] = Workers(link)
    return _workers[link]


class Dispatcher:
    """The queue of scheduled functions, in order. Each worker executes one function at a time.

    Args:
        link: Connects with the workers.
        workers: The workers.
        strategy: The strategy's number on the link.
        find: Returns the object that a name in a result stands for.
    """

    def __init__(self, link: Link, workers: Workers, strategy: int, find: Find) -> None:
        self._link = link
        self._workers = workers
        self._strategy = strategy
        self._find = find
        self._mine: list[_Worker] = []
        self._queue: deque[Closure] = deque()
        self._running = 0
        self._error: Exception | None = None
        self._is_stopping = False
        self._cancelled = 0
        self._failure: Exception | None = None
        self._changed = threading.Condition()
        self._ended = threading.Event()
        self._thread = start_daemon("coordinator", self._run)
        workers.dispatchers.append(self)

    # What the program asks ------------------------------------------------------------------------------------

    def put(self, closure: Closure) -> None:
        """Queue a function; waits while the queue is full. Raises the error of an earlier one instead."""
        with self._changed:
            self._wait_until(self._can_put, "room in the queue")
            self._queue.append(closure)
            self._changed.notify_all()

    def is_done(self) -> bool:
        """Return whether nothing is queued or running. Raises the error of a function that failed once that is so."""
        with self._changed:
            self._check_alive()
            if self._queue or self._running:
                return False
            self._raise_error()
            return True

    def join(self) -> None:
        """Wait until nothing is queued or running; raise the error of a failed function."""
        with self._changed:
            self._wait_until(lambda: not self._queue and not self._running, "the scheduled functions")

    def wait_for(self, future: Future[Any]) -> None:
        """Wait for a result, which comes, or fails."""
        self._wait(lambda seconds: bool(wait([future], seconds).done), "a result")

    def stop(self) -> None:
        """Finish running functions, and cancel queued ones."""
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        self._wait(self._ended.wait, "running functions, before its strategy is closed or the program ends")
        self._thread.join()
        if self in self._workers.dispatchers:
            self._workers.dispatchers.remove(self)
            self._report_unjoined()
        if self._failure is not None and self._workers.known:
            # The state of a worker's exchange is unknown, so STOP cannot be sent, and the worker would wait forever.
            abort_job(self._link.rank, str(self._failure))

    def _report_unjoined(self) -> None:
        """Print errors and cancelled functions that the program did not ask for."""
        told = [f"{self._cancelled} scheduled functions were cancelled"] if self._cancelled else []
        if self._error is not None:
            told.append(f"a scheduled function raised {error_text(self._error)}")
        if told:
            advice = "Call coordinator.join() before the strategy is closed or the program ends"
            tell_user(f"{' and '.join(told)}. {advice}")

    def _can_put(self) -> bool:
        """Return whether the queue has room, or after an error whether nothing runs any more."""
        is_free = len(self._queue) < QUEUE_LENGTH if self._error is None else not self._running
        return self._is_stopping or is_free

    def _wait_until(self, is_so: Callable[[], bool], what: str) -> None:
        """Wait, and raise the error of a function that has failed."""
        self._wait(partial(self._changed.wait_for, lambda: is_so() or self._failure is not None), what)
        self._check_alive()
        self._raise_error()

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error.with_traceback(None)

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise self._failure.with_traceback(None)
        if self._is_stopping and not self._error:
            raise RuntimeError(
                "the ParameterServerStrategy of this coordinator has been closed, or mpidist.launch() has returned. "
                "Call coordinator.schedule() and join() before"
            )

    def _wait(self, wait: Callable[[float], bool], what: str) -> None:
        """Call ``wait`` with some seconds until it returns True; report each time it does not."""
        start, warn_after = time.monotonic(), settings.WARN_AFTER.read()
        while not wait(warn_after):
            self._report(time.monotonic() - start, what)

    def _report(self, waited: float, what: str) -> None:
        now = time.monotonic()
        lines = [f"the coordinator has waited {waited:.0f} s for {what}; {len(self._queue)} functions are queued"]
        for worker in list(self._workers.known):
            closure = worker.closure
            doing = "is idle" if closure is None else f"has been in {closure.name} for {now - worker.since:.0f} s"
            lines.append(f"  {worker.name} {doing}")
        tell_user("\n".join(lines))

    # The thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._dispatch()
        except BaseException as error:  # everybody who waits learns of it
            failure: Exception = RuntimeError(f"the coordinator cannot go on: {type(error).__name__}: {error}")
            failure.__cause__ = error
            if isinstance(error, RankLostError):
                failure = error
            with self._changed:
                self._failure = failure
                for worker in self._mine:
                    if worker.closure is not None:
                        worker.closure.future.set_exception(failure)
                self._cancel_queue()
        finally:
            self._ended.set()

    def _dispatch(self) -> None:
        naps = Naps()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._running or self._is_stopping)
                if self._is_stopping:
                    self._cancelled += len(self._queue)
                    self._cancel_queue("its strategy was closed, or mpidist.launch() returned, before it started")
                    if not self._running:
                        return
                has_begun = self._hand_out()
            if self._move() or has_begun:
                naps.reset()
            else:
                naps.take()

    def _hand_out(self) -> bool:
        """Give queued functions to idle workers, and return whether there were any. The lock is held."""
        has_begun = False
        while self._queue and (worker := self._workers.claim(self, self._queue[0])) is not None:
            worker.moves = self._execute(worker, self._queue.popleft())
            self._mine.append(worker)
            self._running += 1
            has_begun = True
            if len(self._queue) == QUEUE_LENGTH - 1:
                self._changed.notify_all()
        return has_begun

    def _move(self) -> bool:
        """Advance the workers' exchanges, and return whether one of them has finished."""
        has_finished = False
        for worker in list(self._mine):
            assert worker.moves is not None
            try:
                next(worker.moves)
            except StopIteration:
                has_finished = True
                self._finish(worker)
            except Exception as error:
                if not says_rank_is_lost(error):
                    raise
                has_finished = True
                self._lose(worker)
        return has_finished

    def _execute(self, worker: _Worker, closure: Closure) -> Iterator[None]:
        worker.exchange.expect()
        news = self._workers.news_for(worker, closure)
        yield from worker.exchange.send(CALL + pickle.dumps((self._strategy, *news, closure.payload)))
        while not worker.exchange.expected.Test():
            yield
        answer = yield from worker.exchange.receive()
        if answer[:1] == RESULT:
            try:
                closure.future.set_result(unpack(answer[1:], self._find))
                return
            except Exception as failure:  # unpickling runs the code of whatever it meets
                error: Exception = TypeError(
                    f"the result of {closure.name} cannot be unpickled by the coordinator: "
                    f"{type(failure).__name__}: {failure}"
                )
        else:
            pickled = PickledError(*pickle.loads(answer[1:]))
            error = with_remote_traceback(
                pickled.unpack(self._find), f"{closure.name} on {worker.name}:\n{pickled.trace}"
            )
        closure.future.set_exception(error)
        with self._changed:
            # The first error is the one that is raised; functions after it may depend on what it should have done.
            self._error = self._error or error
            self._cancel_queue()

    def _finish(self, worker: _Worker) -> None:
        with self._changed:
            self._mine.remove(worker)
            self._workers.free(worker)
            self._running -= 1
            if not self._running:
                self._changed.notify_all()

    def _lose(self, worker: _Worker) -> None:
        """Go on without a worker that is gone; another one carries its function out."""
        with self._changed:
            closure = worker.closure
            assert closure is not None
            self._mine.remove(worker)
            left = self._workers.remove(worker)
            self._running -= 1
            tell_user(f"{worker.name} was lost in {closure.name}; {left} workers are left")
            if not left:
                error = RankLostError(
                    f"{worker.name}, the last worker, was lost in {closure.name}; start the job again and restore the "
                    "newest checkpoint"
                )
                closure.future.set_exception(error)
                raise error
            self._queue.appendleft(closure)
            if self._error is not None:
                self._cancel_queue()
            self._changed.notify_all()

    def _cancel_queue(
        self, reason: str = "an earlier function failed, so this one was not started. Schedule it again"
    ) -> None:
        while self._queue:
            self._queue.popleft().future.set_exception(CancelledError(reason))
        self._workers.withdraw(self)
        self._changed.notify_all()
