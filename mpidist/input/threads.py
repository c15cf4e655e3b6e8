"""The threads of a pass: one reads ahead, others call functions. Results keep the order of their input.

A thread that reads ahead only advances the iterator and makes no MPI call. It shares two queues with its user:
``ready`` has elements, ``permits`` has one entry for each element that may be read. They are SimpleQueues, which are
reentrant, because a ReadAhead may be finalized at any line of any thread.
"""

from __future__ import annotations

import atexit
import operator
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from queue import SimpleQueue
from time import monotonic
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary, WeakSet

from mpidist.core.concurrency import mark_own_thread
from mpidist.topology import allowed_cores

T = TypeVar("T")
S = TypeVar("S")

AUTOTUNE = -1
"""Lets mpidist choose a number of calls or elements (tf.data.AUTOTUNE)."""

# Shares of a batch for each thread: more than one, because some elements take longer than others.
_SHARES = 4
_NOTHING = object()
# How long an exiting process waits for elements that are being read.
_EXIT_SECONDS = 5.0


class _ReadingThread(threading.Thread):
    """The thread of a ReadAhead. It does not hold the ReadAhead, which could then never be finalized."""

    def __init__(self, open_source: Callable[[], Iterator[object]], size: int) -> None:
        super().__init__(name="mpidist-read-ahead", daemon=True)
        self.ready: SimpleQueue[tuple[bool, Any]] = SimpleQueue()  # (True, element) ... (False, error or None)
        self.permits: SimpleQueue[None] = SimpleQueue()
        for _ in range(size):
            self.permits.put(None)
        self.closed = False
        self._open_source = open_source

    def run(self) -> None:
        """Read elements, then report the end or the error."""
        mark_own_thread()
        _running.add(self)
        end: BaseException | None = None
        try:
            source = self._open_source()
            while True:
                self.permits.get()
                element = _NOTHING if self.closed else next(source, _NOTHING)
                if element is _NOTHING:
                    break
                self.ready.put((True, element))
                del element  # do not keep it alive while this thread waits
        except BaseException as error:  # the ReadAhead raises it
            end = error
        # Generators are closed here, in the thread that ran them, before the end is reported.
        source = iter(())
        del self._open_source
        self.ready.put((False, end))
        del end  # its traceback holds this frame
        _running.discard(self)

    def request_end(self) -> None:
        """End the thread after its present element. Any thread may call it at any time."""
        self.closed = True
        self.permits.put(None)

    def end(self, seconds: float | None = None) -> None:
        """End the thread, and wait for it at most ``seconds``."""
        self.request_end()
        if self.ident is not None and self is not threading.current_thread():
            self.join(seconds)


_running: set[_ReadingThread] = set()
# A forked child has none of these threads, and their queues may be locked.
os.register_at_fork(after_in_child=_running.clear)


@atexit.register
def _end_at_exit() -> None:
    """End remaining threads, because a thread that runs during the interpreter's exit can crash it."""
    limit = monotonic() + _EXIT_SECONDS
    for thread in list(_running):
        thread.end(max(0.0, limit - monotonic()))


class ReadAhead(Iterator[T], Generic[T]):
    """An iterator whose next ``size`` elements a thread keeps ready.

    The thread starts with the first ``next``. It ends with the elements, an error, :meth:`close`, or with this object.
    ``next`` raises an error with the traceback of the thread.
    """

    def __init__(self, open_source: Callable[[], Iterator[T]], size: int) -> None:
        self.thread = _ReadingThread(open_source, size)

    def __next__(self) -> T:
        thread = self.thread
        if thread.closed:
            raise StopIteration
        if thread.ident is None:
            thread.start()
        found, value = thread.ready.get()
        if found:
            thread.permits.put(None)
            element: T = value
            return element
        thread.ready.put((False, None))  # for the next call
        thread.join()
        try:
            # close() cancels calls for which the thread waits, which then raise an error in it.
            raise StopIteration if value is None or thread.closed else value
        finally:
            del value  # its traceback holds this frame

    def has_ready(self) -> bool:
        """Return whether ``next`` would not wait."""
        return not self.thread.closed and not self.thread.ready.empty()

    def close(self) -> None:
        """End the thread after its present element, and wait for it."""
        self.thread.end()

    def __del__(self) -> None:
        self.thread.request_end()


class Readers:
    """The threads of one pass, which end together."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: list[_ReadingThread] = []
        self._pools: WeakSet[ThreadPoolExecutor] = WeakSet()
        self._pool_of: WeakKeyDictionary[object, ThreadPoolExecutor] = WeakKeyDictionary()
        self._closed = False

    def open(self, open_source: Callable[[], Iterator[T]], size: int) -> ReadAhead[T]:
        """Return an iterator that reads ``size`` elements ahead. It is empty if the pass is closed."""
        reader = ReadAhead(open_source, size)
        with self._lock:
            running = [each for each in self._threads if (each.is_alive() if each.ident else not each.closed)]
            self._threads = [*running, reader.thread]
            closed = self._closed
        if closed:
            reader.close()
        return reader

    def workers(self, count: int) -> ThreadPoolExecutor:
        """Return up to ``count`` threads for calls of functions. They end with the pass or with the last reference."""
        pool = ThreadPoolExecutor(count, "mpidist-call")
        with self._lock:
            self._pools.add(pool)
            closed = self._closed
        if closed:
            pool.shutdown()
        return pool

    def workers_of(self, owner: object, count: int) -> ThreadPoolExecutor:
        """Return the threads of ``owner`` in this pass."""
        pool = self._pool_of.get(owner)
        if pool is None:
            pool = self._pool_of.setdefault(owner, self.workers(count))
        return pool

    def close(self, wait: bool = True) -> None:
        """End all threads, each after its present element or call."""
        with self._lock:
            self._closed = True
            threads, self._threads = self._threads, []
            pools = list(self._pools)
        for thread in threads:
            thread.request_end()
        # A thread that waits for a call that has not started gets an error.
        for pool in pools:
            pool.shutdown(wait=False, cancel_futures=True)
        if wait:
            for thread in threads:
                thread.end()
            for pool in pools:
                pool.shutdown()


def checked_calls(num_parallel_calls: int | None) -> int:
    """Return the number of calls at once. None means 1, AUTOTUNE the number of cores."""
    if num_parallel_calls is None:
        return 1
    calls = operator.index(num_parallel_calls)
    if calls == AUTOTUNE:
        return len(allowed_cores())
    if calls < 1:
        raise ValueError(
            f"num_parallel_calls is {calls}; expected 1 or more, -1 for as many as there are cores, or None to call in "
            "the thread that reads"
        )
    return calls


@contextmanager
def ending(threads: ThreadPoolExecutor) -> Iterator[None]:
    """End ``threads`` after the block of a generator, and cancel calls that have not started."""
    dropped = False
    try:
        yield
    except GeneratorExit:
        dropped = True
        raise
    finally:
        # A dropped generator does not wait, because that may happen at any line of any thread.
        threads.shutdown(wait=not dropped, cancel_futures=True)


def taken_ahead(items: Iterable[T], count: int) -> Iterator[T]:
    """Yield items that are taken ``count`` items ahead. An error is raised in its turn."""
    waiting: deque[T] = deque()
    failure: Exception | None = None
    try:
        for item in items:
            waiting.append(item)
            del item  # do not keep it alive after it has been yielded
            if len(waiting) > count:
                yield waiting.popleft()
    except Exception as error:
        failure = error
    while waiting:
        yield waiting.popleft()
    try:
        if failure is not None:
            raise failure
    finally:
        del failure  # its traceback holds this frame


def map_stream(fn: Callable[[T], S], items: Iterable[T], threads: ThreadPoolExecutor, calls: int) -> Iterator[S]:
    """Yield ``fn`` of each item, with ``calls`` calls ahead. The caller's thread takes items. Ends ``threads``."""
    with ending(threads):
        for call in taken_ahead((threads.submit(fn, item) for item in items), calls):
            yield call.result()


def map_batch(fn: Callable[[T], S], items: Sequence[T], threads: ThreadPoolExecutor, calls: int) -> list[S]:
    """Return ``fn`` of each item, called in up to ``calls`` threads. Raises the error of the first failed item."""
    size = max(1, -(-len(items) // (calls * _SHARES)))

    def share(start: int) -> list[S]:
        return [fn(item) for item in items[start : start + size]]

    futures = deque(threads.submit(share, start) for start in range(0, len(items), size))
    results: list[S] = []
    try:
        while futures:
            results += futures.popleft().result()
    finally:
        for future in futures:
            future.cancel()
    return results
