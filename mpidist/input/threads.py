"""The threads of a pass: those that read ahead, and those that call functions.

A thread that reads ahead only runs the iterator, so there is no MPI call in it. Thread and user meet in two queues:
``ready`` carries elements, ``permits`` says how many more may be read. They are SimpleQueues because a ReadAhead may be
finalised, and so end its thread, in the middle of any other line of any thread; conditions would not bear that.

Results of several threads keep the order of their input.
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
from weakref import WeakSet

from mpidist.core.concurrency import mark_own_thread
from mpidist.topology import allowed_cores

T = TypeVar("T")
S = TypeVar("S")

AUTOTUNE = -1
"""Where a number of calls or elements is asked for, leaves it to mpidist (tf.data.AUTOTUNE)."""

# Shares of a batch per thread: more than one, as some elements take longer than others.
_SHARES = 4
_NOTHING = object()
# How long a process that ends waits for elements that are just being read.
_EXIT_SECONDS = 5.0


class _ReadingThread(threading.Thread):
    """The thread of a ReadAhead.

    It must not know the ReadAhead, which could then never be finalised.
    """

    def __init__(self, open_source: Callable[[], Iterator[object]], size: int) -> None:
        super().__init__(name="mpidist-read-ahead", daemon=True)
        self.ready: SimpleQueue[tuple[bool, Any]] = SimpleQueue()  # (True, element) ... (False, error or None)
        self.permits: SimpleQueue[None] = SimpleQueue()
        for _ in range(size):
            self.permits.put(None)
        self.closed = False
        self._open_source = open_source

    def run(self) -> None:
        """Read elements, then tell the end or the error."""
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
                del element  # it is not kept alive while this thread waits
        except BaseException as error:  # whatever it is, the ReadAhead raises it
            end = error
        # Generators are closed here, in the thread that ran them, before anyone hears of the end.
        source = iter(())
        del self._open_source
        self.ready.put((False, end))
        del end  # its traceback holds this frame
        _running.discard(self)

    def request_end(self) -> None:
        """Make the thread end after its present element. object thread may call it at any time."""
        self.closed = True
        self.permits.put(None)

    def end(self, seconds: float | None = None) -> None:
        """End the thread, and wait for that, for at most ``seconds``."""
        self.request_end()
        if self.ident is not None and self is not threading.current_thread():
            self.join(seconds)

    def is_over(self) -> bool:
        """Return whether the thread has ended, or never will start."""
        return self.closed if self.ident is None else not self.is_alive()


_running: set[_ReadingThread] = set()
# A forked child has none of these threads, and their queues may be locked.
os.register_at_fork(after_in_child=_running.clear)


@atexit.register
def _end_at_exit() -> None:
    """End the threads that the program leaves.

    One that runs on while Python goes away can crash it.
    """
    limit = monotonic() + _EXIT_SECONDS
    for thread in list(_running):
        thread.end(max(0.0, limit - monotonic()))


class ReadAhead(Iterator[T], Generic[T]):
    """The elements of an iterator, of which a thread keeps up to ``size`` ready.

    The thread starts with the first ``next``. It ends with the elements, with an error, which ``next`` raises
    with the traceback that it has from the thread, with :meth:`close`, and when nobody holds this object any
    more.

    Args:
        open_source: Called in the thread; returns the iterator.
        size: The largest number of elements kept ready, at least 1.

    >>> list(ReadAhead(lambda: iter("abc"), 2))
    ['a', 'b', 'c']
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
        thread.ready.put((False, None))  # for whoever asks again
        thread.join()
        try:
            # Closing cancels calls that the thread waits for, which then ends with an error.
            raise StopIteration if value is None or thread.closed else value
        finally:
            del value  # its traceback holds this frame

    def has_ready(self) -> bool:
        """Return whether ``next`` would not wait.

        An element, the end or an error is there then.
        """
        return not self.thread.closed and not self.thread.ready.empty()

    def close(self) -> None:
        """End the thread after its present element, and wait for that."""
        self.thread.end()

    def __del__(self) -> None:
        self.thread.request_end()


class Readers:
    """The threads of one pass, which end together."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: list[_ReadingThread] = []
        self._pools: WeakSet[ThreadPoolExecutor] = WeakSet()
        self._closed = False

    def open(self, open_source: Callable[[], Iterator[T]], size: int) -> ReadAhead[T]:
        """Return an iterator whose next ``size`` elements a thread keeps ready.

        It has no elements if the pass is closed.
        """
        reader = ReadAhead(open_source, size)
        with self._lock:
            self._threads = [thread for thread in self._threads if not thread.is_over()]
            self._threads.append(reader.thread)
            closed = self._closed
        if closed:
            reader.close()
        return reader

    def workers(self, count: int) -> ThreadPoolExecutor:
        """Return up to ``count`` threads for calls of functions.

        They end with the pass, or when nobody holds them.
        """
        pool = ThreadPoolExecutor(count, "mpidist-call")
        with self._lock:
            self._pools.add(pool)
            closed = self._closed
        if closed:
            pool.shutdown()
        return pool

    def close(self, wait: bool = True) -> None:
        """End all threads, each after its present element or call.

        Args:
            wait: Return when they have ended.
        """
        with self._lock:
            self._closed = True
            threads, self._threads = self._threads, []
            pools = list(self._pools)
        for thread in threads:
            thread.request_end()
        # A thread that waits for a call that has not begun gets an error.
        for pool in pools:
            pool.shutdown(wait=False, cancel_futures=True)
        if not wait:
            return
        for thread in threads:
            thread.end()
        for pool in pools:
            pool.shutdown()


def checked_calls(num_parallel_calls: int | None) -> int:
    """Return the number of calls at once: 1 for None, that of cores for -1.

    -1 is tf.data.AUTOTUNE.

    Raises:
        ValueError: Below 1, and not -1.

    >>> checked_calls(None), checked_calls(3)
    (1, 3)
    """
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
    """End ``threads`` after the block, a part of a generator.

    No call begins any more.
    """
    dropped = False
    try:
        yield
    except GeneratorExit:
        dropped = True
        raise
    finally:
        # Nobody waits where a generator is only dropped, which may happen in the middle of any other line.
        threads.shutdown(wait=not dropped, cancel_futures=True)


def taken_ahead(items: Iterable[T], count: int) -> Iterator[T]:
    """Yield items that are taken ``count`` items ahead. An error comes in its turn."""
    waiting: deque[T] = deque()
    failure: Exception | None = None
    try:
        for item in items:
            waiting.append(item)
            del item  # it is not kept alive once it has been given
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
    """Yield ``fn`` of each item, with up to ``calls`` calls at once.

    They run while the caller works on a result. Items are taken in the caller's thread. Errors, of the items too, come
    in their turn. Ends ``threads``.
    """
    with ending(threads):
        for call in taken_ahead((threads.submit(fn, item) for item in items), calls):
            yield call.result()


def map_batch(fn: Callable[[T], S], items: Sequence[T], threads: ThreadPoolExecutor, calls: int) -> list[S]:
    """Return ``fn`` of each item, called in up to ``calls`` threads.

    Raises the error of the first item that failed.
    """
    size = max(1, -(-len(items) // (calls * _SHARES)))

    def share(start: int) -> list[S]:
        return [fn(item) for item in items[start : start + size]]

    under_way = deque(threads.submit(share, start) for start in range(0, len(items), size))
    results: list[S] = []
    try:
        while under_way:
            results += under_way.popleft().result()
    finally:
        for future in under_way:
            future.cancel()
    return results
