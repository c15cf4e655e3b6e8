"""Reading the datasets of an interleave in threads; their elements come in the order of one thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any

from mpidist.input.parallel_calls import ending

Opener = Callable[[], Iterator[Any]]
Block = tuple[list[Any], "Exception | None"]


class _Reading:
    """One dataset that is open, of which a thread reads one block ahead."""

    def __init__(self, opener: Opener, size: int, threads: ThreadPoolExecutor) -> None:
        self._opener: Opener | None = opener
        self._elements: Iterator[Any] = iter(())
        self._size = size
        self._threads = threads
        self.go_on()

    def go_on(self) -> None:
        """Let a thread read the next block."""
        self._values: list[Any] = []
        self._block: Future[None] = self._threads.submit(self._read)

    def take(self) -> Block:
        """Return the block, and the error that came after it; not to be held here, as its traceback holds this."""
        block = self._block
        del self._block
        error = block.exception()
        if error is not None and not isinstance(error, Exception):
            raise error
        return self._values, error

    def _read(self) -> None:
        if self._opener is not None:
            self._elements, self._opener = self._opener(), None
        self._values.extend(islice(self._elements, self._size))


class _Failed:
    """Stands in for a dataset that the input could not name."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def take(self) -> Block:
        """Return no elements, and the error."""
        return [], self._error


def interleave_in_threads(
    openers: Iterable[Opener], cycle_length: int, block_length: int, threads: ThreadPoolExecutor, ahead: int
) -> Iterator[Any]:
    """Yield ``block_length`` elements of each of ``cycle_length`` datasets in turn; see ``Interleaved``.

    Of each dataset that is open a block is read ahead, and so is the first block of the ``ahead`` datasets that come
    next. Ends ``threads``.

    Args:
        openers: For each dataset a function, called in a thread, that returns its elements.
        cycle_length: How many datasets are open at a time.
        block_length: How many elements come from one before it is the turn of the next.
        threads: Where they are read.
        ahead: How many more are opened before it is their turn.
    """
    coming = _opened(openers, block_length, threads, ahead)
    cycle: list[_Reading | _Failed | None] = [None] * cycle_length
    place = empty_places = 0
    with ending(threads):
        while empty_places < cycle_length:
            reading = cycle[place] or next(coming, None)
            empty_places = empty_places + 1 if reading is None else 0
            if reading is not None:
                values, error = reading.take()
                cycle[place] = None
                if isinstance(reading, _Reading) and error is None and len(values) == block_length:
                    reading.go_on()
                    cycle[place] = reading
                yield from values
                if error is not None:
                    try:
                        raise error
                    finally:
                        del error, reading  # the traceback holds this frame
            place = (place + 1) % cycle_length


def _opened(
    openers: Iterable[Opener], size: int, threads: ThreadPoolExecutor, ahead: int
) -> Iterator[_Reading | _Failed]:
    """Yield the datasets, ``ahead`` of which are being opened; an error of the input comes in its turn."""
    source = iter(openers)
    waiting: deque[_Reading | _Failed] = deque()
    more = True
    while True:
        while more and len(waiting) <= ahead:
            try:
                waiting.append(_Reading(next(source), size, threads))
            except StopIteration:
                more = False
            except Exception as error:
                more = False
                waiting.append(_Failed(error))
        if not waiting:
            return
        yield waiting.popleft()
