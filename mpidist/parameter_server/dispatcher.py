"""Dispatcher: the thread that sends the functions of all coordinators to workers.

Also the objects that stand for results (RemoteValue), and for the workers' own values (PerWorkerValues).
"""

from __future__ import annotations

import enum
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future, wait
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NoReturn, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

import numpy as np

from mpidist.collectives.channel.shutdown import abort_job
from mpidist.collectives.mpi.waiting import Naps, Steps
from mpidist.core import message_tags, nest, settings
from mpidist.core.concurrency import start_daemon
from mpidist.core.errors import RankLostError
from mpidist.core.text import error_text, tell_user
from mpidist.parameter_server.link import Link
from mpidist.parameter_server.pickling import Find, PickledError, unpack
from mpidist.parameter_server.transport import MessagePipe, PackedMessage
from mpidist.topology.exit import says_rank_is_lost

# Functions that may wait for a worker before schedule() waits, as in TensorFlow.
QUEUE_LENGTH = 256 << 10
Result = TypeVar("Result")
Recipe = tuple[int, bytes]
"""Number of a strategy, and a packed function that builds a value."""


class RemoteValueStatus(enum.Enum):
    """The progress of a scheduled function."""

    NOT_READY = "NOT_READY"
    ABORTED = "ABORTED"
    READY = "READY"


class RemoteValue(Generic[Result]):
    """The future result of a scheduled function (tf.distribute.experimental.coordinator).

    Args:
        future: Future of the result, or of the error.
        wait_for: Waits for the future, with a report after a while.
    """

    def __init__(self, future: Future[Result], wait_for: Callable[[Future[Result]], None]) -> None:
        self._future = future
        self._wait_for = wait_for

    @property
    def status(self) -> RemoteValueStatus:
        """NOT_READY, READY, or ABORTED if the function failed or was cancelled."""
        if not self._future.done():
            return RemoteValueStatus.NOT_READY
        return RemoteValueStatus.READY if self._future.exception() is None else RemoteValueStatus.ABORTED

    def fetch(self) -> Result:
        """Wait for the result, and return it.

        Raises:
            CancelledError: An earlier function failed before this one was started.
            Exception: The function's error, with the worker's traceback as its cause.
        """
        self._wait_for(self._future)
        error = self._future.exception()
        if error is not None:
            # Without the frames of earlier calls that raised it.
            raise error.with_traceback(None)
        return self._future.result()

    def get(self) -> Result:
        """Return the result, as :meth:`fetch` does. It is in this process's memory already."""
        return self.fetch()

    def __repr__(self) -> str:
        return f"<RemoteValue {self.status.name}>"

    def _is_no_number(self, *_: object) -> NoReturn:
        raise TypeError(
            f"{self!r} was used as a number; it is the result of a scheduled function, which may be still to come: "
            "expected value.fetch(), which waits for it"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __rtruediv__ = _is_no_number
    __lt__ = __le__ = __gt__ = __ge__ = __neg__ = __abs__ = __float__ = __int__ = _is_no_number


def fetch(value: object) -> Any:
    """Replace the RemoteValues of a nest by their results, and wait for them."""
    return nest.map_structure(lambda leaf: leaf.fetch() if isinstance(leaf, RemoteValue) else leaf, value)


class PerWorkerValues:
    """A value of each worker. As an argument of a scheduled function it means the value of the worker that runs it.

    Workers keep it until the coordinator's program has no reference to it.

    Args:
        number: Number by which the workers know it.
        built_by: Recipe that builds it on a worker at the first use.
        uses: The other per-worker values that the recipe uses.
        iterate: Implementation of ``iter()``, for a dataset.
    """

    def __init__(
        self,
        number: int,
        built_by: Recipe,
        uses: frozenset[PerWorkerValues],
        iterate: Callable[[PerWorkerValues], PerWorkerValues] | None = None,
    ) -> None:
        self.number = number
        self.built_by = built_by
        self.uses = uses
        self._iterate = iterate

    def __next__(self) -> Any:
        raise NotImplementedError(
            "next() was called on the coordinator, where a PerWorkerValues has no value; pass it to "
            "coordinator.schedule(fn, args=(values,)), and call next() inside fn"
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.number}>"


class PerWorkerDataset(PerWorkerValues):
    """A dataset on each worker. ``iter()`` of it returns the iterators, one on each worker."""

    def __iter__(self) -> PerWorkerValues:
        assert self._iterate is not None
        return self._iterate(self)


def with_all_used(uses: Iterable[PerWorkerValues]) -> frozenset[PerWorkerValues]:
    """Return per-worker values together with the values that they use."""
    found = set(uses)
    for values in uses:
        found |= with_all_used(values.uses)
    return frozenset(found)


@dataclass(eq=False)
class Closure:
    """A scheduled function. ``payload`` is the packed call, ``uses`` its per-worker values."""

    name: str
    payload: bytes
    uses: frozenset[PerWorkerValues]
    future: Future[Any]


class _RemoteTraceback(Exception):
    """The traceback of an error on the worker, which is shown as its cause."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class _Worker:
    """A worker, and the function that it executes."""

    def __init__(self, link: Link, rank: int) -> None:
        self.name = link.name(rank)
        self.pipe = MessagePipe(link.comm, rank, message_tags.TO_WORKER, message_tags.FROM_WORKER)
        # Numbers of the per-worker values whose recipes it has, and entries of `Dispatcher.gone` that it knows.
        self.has: set[int] = set()
        self.entries = 0
        self.queue: FunctionQueue | None = None
        self.closure: Closure | None = None
        self.since = 0.0
        self.steps: Steps[None] | None = None


class Dispatcher:
    """The workers of a link, each of which executes one function at a time. Coordinators take turns."""

    def __init__(self, link: Link) -> None:
        self._link = link
        # Held to read or change queues and workers, and notified when functions end.
        self.changed = threading.Condition()
        self.workers = [_Worker(link, rank) for rank in link.workers[1:]]
        # One for each coordinator, the next one first.
        self.queues: deque[FunctionQueue] = deque()
        # The error that ended the thread.
        self.failure: Exception | None = None
        # For per-worker values.
        self.numbers = itertools.count()
        # Kind and number of each dropped value and closed strategy. The garbage collector appends in any thread.
        self.gone: list[tuple[str, int]] = []
        self.strategies: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self._is_stopping = False
        self._thread: threading.Thread | None = None
        link.before_leaving(self._stop)

    def open(self, strategy: int, find: Find) -> FunctionQueue:
        """Return a new queue. ``find`` returns the objects of the names in results."""
        queue = FunctionQueue(self, strategy, find)
        with self.changed:
            self.queues.append(queue)
        if self._thread is None:
            self._thread = start_daemon("coordinator", self._run)
        return queue

    def _stop(self) -> None:
        """Finish running functions, and stop the workers."""
        for queue in list(self.queues):
            queue.stop()
        with self.changed:
            self._is_stopping = True
            self.changed.notify_all()
        if self._thread is not None:
            self._thread.join()
        if self.failure is not None and self.workers:
            # The state of a worker's messages is unknown, so it cannot be stopped, and would wait forever.
            abort_job(self._link.rank, str(self.failure))
        for worker in self.workers:
            naps = Naps()
            try:
                worker.pipe.send(PackedMessage(None))
                while not worker.pipe.is_sent():
                    naps.take(is_busy=True)
            except Exception as error:
                if not says_rank_is_lost(error):
                    raise
            worker.pipe.close()

    # The thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        naps = Naps()
        try:
            while True:
                with self.changed:
                    self.changed.wait_for(lambda: self._is_stopping or any(not each.is_done for each in self.queues))
                    if self._is_stopping:
                        return
                    has_begun = self._hand_out()
                    busy = [worker for worker in self.workers if worker.closure is not None]
                if any([self._advance(worker) for worker in busy]) or has_begun:
                    naps.reset()
                else:
                    naps.take()
        except BaseException as error:  # all waiting threads raise it
            failure: Exception = RuntimeError(f"the coordinator cannot go on: {error_text(error)}")
            failure.__cause__ = error
            if isinstance(error, RankLostError):
                failure = error
            with self.changed:
                self.failure = failure
                for worker in self.workers:
                    if worker.closure is not None:
                        worker.closure.future.set_exception(failure)
                for queue in self.queues:
                    queue.cancel()

    def _hand_out(self) -> bool:
        """Send queued functions to idle workers. Return whether there were any. The lock is held."""
        has_begun = False
        for worker in self.workers:
            queue = next((queue for queue in self.queues if queue.waiting), None)
            if queue is None:
                break
            if worker.closure is None:
                self.queues.remove(queue)
                self.queues.append(queue)
                worker.queue, worker.closure, worker.since = queue, queue.waiting.popleft(), time.monotonic()
                worker.steps = self._execute(worker, queue, worker.closure)
                queue.running += 1
                has_begun = True
                if len(queue.waiting) == QUEUE_LENGTH - 1:
                    self.changed.notify_all()
        return has_begun

    def _advance(self, worker: _Worker) -> bool:
        """Advance a worker's messages. Return whether its function has ended."""
        assert worker.steps is not None
        assert worker.queue is not None
        try:
            next(worker.steps)
        except StopIteration:
            with self.changed:
                worker.queue.running -= 1
                if not worker.queue.running:
                    self.changed.notify_all()
                worker.closure = worker.steps = worker.queue = None
            return True
        except Exception as error:
            if not says_rank_is_lost(error):
                raise
            self._lose(worker)
            return True
        return False

    def _execute(self, worker: _Worker, queue: FunctionQueue, closure: Closure) -> Steps[None]:
        worker.pipe.expect()
        gone = self.gone[worker.entries :]
        worker.entries += len(gone)
        recipes = {values.number: values.built_by for values in closure.uses if values.number not in worker.has}
        worker.has.update(recipes)
        # As arrays, because `marshal` holds at most 2 GiB.
        built_in = {number: strategy for number, (strategy, _) in recipes.items()}
        packed = [closure.payload, *(recipe for _, recipe in recipes.values())]
        worker.pipe.send(
            PackedMessage((queue.strategy, gone, built_in), [np.frombuffer(each, np.uint8) for each in packed])
        )
        while not (worker.pipe.has_come() and worker.pipe.is_sent()):
            yield
        failure = worker.pipe.content
        if failure is None:
            try:
                closure.future.set_result(unpack(worker.pipe.arrays.pop().data, queue.find))
                return
            except Exception as caught:  # unpickling calls methods of the program's objects
                error: Exception = TypeError(
                    f"the result of {closure.name} cannot be unpickled by the coordinator: {error_text(caught)}"
                )
        else:
            pickled = PickledError(*failure)
            error = pickled.unpack(queue.find)
            error.__cause__ = _RemoteTraceback(f"{closure.name} on {worker.name}:\n{pickled.trace}")
        closure.future.set_exception(error)
        with self.changed:
            # Later functions may depend on the failed one.
            queue.error = queue.error or error
            queue.cancel()

    def _lose(self, worker: _Worker) -> None:
        """Remove a failed worker. Another one executes its function."""
        queue, closure = worker.queue, worker.closure
        assert queue is not None
        assert closure is not None
        with self.changed:
            self.workers.remove(worker)
            queue.running -= 1
            tell_user(f"{worker.name} was lost in {closure.name}; {len(self.workers)} workers are left")
            if not self.workers:
                error = RankLostError(
                    f"{worker.name}, the last worker, was lost in {closure.name}; start the job again and restore the "
                    "newest checkpoint"
                )
                closure.future.set_exception(error)
                raise error
            queue.waiting.appendleft(closure)
            if queue.error is not None:
                queue.cancel()
            self.changed.notify_all()


_dispatchers: WeakKeyDictionary[Link, Dispatcher] = WeakKeyDictionary()


def dispatcher_of(link: Link) -> Dispatcher:
    """Return the dispatcher of a link, created at the first call."""
    if link not in _dispatchers:
        _dispatchers[link] = Dispatcher(link)
    return _dispatchers[link]


class FunctionQueue:
    """The scheduled functions of one coordinator, in order."""

    def __init__(self, dispatcher: Dispatcher, strategy: int, find: Find) -> None:
        self._dispatcher = dispatcher
        self._changed = dispatcher.changed
        self.strategy = strategy
        self.find = find
        self.waiting: deque[Closure] = deque()
        self.running = 0
        # The first error since an error was raised.
        self.error: Exception | None = None
        self._is_closed = False

    @property
    def is_done(self) -> bool:
        """Whether no function is waiting or running. The lock is held."""
        return not (self.waiting or self.running)

    def put(self, closure: Closure) -> None:
        """Queue a function, and wait while the queue is full. Raise the error of an earlier function instead."""
        with self._changed:
            self._wait_until(self._can_put, "room in the queue")
            self.waiting.append(closure)
            self._changed.notify_all()

    def _can_put(self) -> bool:
        # After an error, running functions must end first.
        return self._is_closed or (len(self.waiting) < QUEUE_LENGTH if self.error is None else not self.running)

    def check_done(self) -> bool:
        """Return whether no function is waiting or running. If so, raise the error of a failed one."""
        with self._changed:
            self._check_alive()
            if self.is_done:
                self._raise_error()
            return self.is_done

    def join(self) -> None:
        """Wait until no function is waiting or running. Raise the error of a failed one."""
        with self._changed:
            self._wait_until(lambda: self.is_done, "the scheduled functions")

    def wait_for(self, future: Future[Any]) -> None:
        """Wait for a result or an error."""
        self._wait(lambda seconds: bool(wait([future], seconds).done), "a result")

    def cancel(
        self, reason: str = "an earlier function failed, so this one was not started. Schedule it again"
    ) -> None:
        """Cancel waiting functions. The lock is held."""
        while self.waiting:
            self.waiting.popleft().future.set_exception(CancelledError(reason))
        self._changed.notify_all()

    def stop(self) -> None:
        """Finish running functions, and cancel waiting ones. Print what the program did not ask for."""
        with self._changed:
            if self._is_closed:
                return
            self._is_closed = True
            problems = [f"{len(self.waiting)} scheduled functions were cancelled"] if self.waiting else []
            self.cancel("its strategy was closed, or mpidist.launch() returned, before it started")
            is_over = partial(self._changed.wait_for, lambda: not self.running or self._dispatcher.failure is not None)
            self._wait(is_over, "running functions, before its strategy is closed or the program ends")
            self._dispatcher.queues.remove(self)
        if self.error is not None:
            problems.append(f"a scheduled function raised {error_text(self.error)}")
        if problems:
            advice = "Call coordinator.join() before the strategy is closed or the program ends"
            tell_user(f"{' and '.join(problems)}. {advice}")

    def _wait_until(self, is_over: Callable[[], bool], what: str) -> None:
        """Wait, and raise the error of a failed function."""
        is_notified = partial(self._changed.wait_for, lambda: is_over() or self._dispatcher.failure is not None)
        self._wait(is_notified, what)
        self._check_alive()
        self._raise_error()

    def _raise_error(self) -> None:
        error, self.error = self.error, None
        if error is not None:
            raise error.with_traceback(None)

    def _check_alive(self) -> None:
        if self._dispatcher.failure is not None:
            raise self._dispatcher.failure.with_traceback(None)
        if self._is_closed and not self.error:
            raise RuntimeError(
                "the ParameterServerStrategy of this coordinator has been closed, or mpidist.launch() has returned. "
                "Call coordinator.schedule() and join() before"
            )

    def _wait(self, wait: Callable[[float], bool], what: str) -> None:
        """Call ``wait`` with a number of seconds until it returns True. Report each time that it does not."""
        start, warn_after = time.monotonic(), settings.WARN_AFTER.read()
        while not wait(warn_after):
            now = time.monotonic()
            lines = [
                f"the coordinator has waited {now - start:.0f} s for {what}; {len(self.waiting)} functions are queued"
            ]
            for worker in list(self._dispatcher.workers):
                closure = worker.closure
                doing = "is idle" if closure is None else f"has been in {closure.name} for {now - worker.since:.0f} s"
                lines.append(f"  {worker.name} {doing}")
            tell_user("\n".join(lines))
