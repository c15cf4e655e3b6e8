"""Calling a function in several threads of a pass at once; what comes out keeps the order of what goes in."""

from __future__ import annotations

import operator
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
S = TypeVar("S")

AUTOTUNE = -1
"""Where a number of calls or elements is asked for, leaves it to mpidist (tf.data.AUTOTUNE)."""

# Shares of a batch per thread: more than one, as some elements take longer than others.
_SHARES = 4


def checked_calls(num_parallel_calls: int | None) -> int:
    """Return how many calls may run at once: 1 for None, as many as there are cores for -1 (tf.data.AUTOTUNE).

    Raises:
        ValueError: Below 1, and not -1.

    >>> checked_calls(None), checked_calls(3)
    (1, 3)
    """
    if num_parallel_calls is None:
        return 1
    calls = operator.index(num_parallel_calls)
    if calls == AUTOTUNE:
        return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if calls < 1:
        raise ValueError(
            f"num_parallel_calls is {calls}; expected 1 or more, -1 for as many as there are cores, or None to call in "
            "the thread that reads"
        )
    return calls


@contextmanager
def ending(threads: ThreadPoolExecutor) -> Iterator[None]:
    """End ``threads`` after the block, a part of a generator, and let no call begin any more."""
    dropped = False
    try:
        yield
    except GeneratorExit:
        dropped = True
        raise
    finally:
        # Nobody waits where a generator is only dropped, which may happen in the middle of any other line.
        threads.shutdown(wait=not dropped, cancel_futures=True)


def map_stream(fn: Callable[[T], S], items: Iterable[T], threads: ThreadPoolExecutor, calls: int) -> Iterator[S]:
    """Yield ``fn`` of each item, with up to ``calls`` calls under way while the caller works on a result.

    Items are taken in the caller's thread. Errors, of the items too, come in their turn. Ends ``threads``.
    """
    source = iter(items)
    under_way: deque[Future[S]] = deque()
    more = True
    with ending(threads):
        while True:
            while more and len(under_way) <= calls:
                try:
                    under_way.append(threads.submit(fn, next(source)))
                except StopIteration:
                    more = False
                except Exception as error:
                    more = False
                    failed: Future[S] = Future()
                    failed.set_exception(error)
                    under_way.append(failed)
            if not under_way:
                return
            yield under_way.popleft().result()


def map_batch(fn: Callable[[T], S], items: Sequence[T], threads: ThreadPoolExecutor, calls: int) -> list[S]:
    """Return ``fn`` of each item, called in up to ``calls`` threads; raises the error of the first item that failed."""
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
