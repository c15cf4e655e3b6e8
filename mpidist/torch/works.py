"""Works of torch.distributed, and their futures, which complete on mpidist's progress thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mpidist.collectives.channel.operation import Work
from mpidist.collectives.channel.progress import progress
from mpidist.core.concurrency import Stopwatch, is_own_thread
from mpidist.torch.foreign import Foreign
from mpidist.torch.ordering import HOST_ORDER, Order

if TYPE_CHECKING:
    from torch import Tensor

_TorchWork: Foreign = dist.Work
_NO_LIMIT = timedelta(0)
# Ranks that go through the same backward pass are not further apart.
LONGEST_START_SECONDS = 0.02
# Of a tensor that takes longer than it takes another rank to come.
LARGE_BYTES = 1 << 20


class DoneWork(_TorchWork):
    """The work of a collective that was carried out at once.

    Args:
        tensors: With the result.
        order: Of the call.
    """

    def __init__(self, tensors: list[Tensor], order: Order = HOST_ORDER) -> None:
        _TorchWork.__init__(self)
        self._tensors, self._order = tensors, order
        # Whoever asks for it later may be on another stream.
        self._future = self._made_future() if order.has_streams else None

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Return True."""
        if self._future is not None:
            self._future.wait()
        return True

    def synchronize(self) -> None:
        """Wait for the result."""
        self.wait()

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def is_success(self) -> bool:
        """Return True."""
        return True

    def exception(self) -> None:
        """Return None."""

    def result(self) -> list[Tensor]:
        """Return the tensors with the result."""
        return self._tensors

    def source_rank(self) -> int:
        """Raise RuntimeError: it is of no message."""
        return _checked_source(None)

    _source_rank = source_rank

    def get_future(self) -> Foreign:
        """Return a future with the tensors."""
        return self._made_future() if self._future is None else self._future

    def _made_future(self) -> Foreign:
        future = self._order.future()
        future.set_result(self._tensors)
        return future


class StartedWork(_TorchWork):
    """The work of a collective on its way.

    Args:
        work: Of the Communicator.
        finish: Brings its result into the tensors; it returns the rank that a message came from, if it was one.
        tensors: For the result.
        program: Held by the one thread of the program that waits.
        ended: Called when it has ended, in the thread that finds out.
        order: Of the call.
    """

    def __init__(
        self,
        work: Work[Any],
        finish: Callable[[Any], int | None],
        tensors: list[Tensor],
        program: threading.RLock,
        ended: Callable[[], None] | None,
        order: Order = HOST_ORDER,
    ) -> None:
        super().__init__()
        self._work, self._finish, self._tensors, self._program, self._ended = work, finish, tensors, program, ended
        self._order, self._future = order, order.future()
        self._stopwatch = Stopwatch()
        self._completing = threading.Lock()
        self._error: BaseException | None = None
        self._source: int | None = None
        self._is_over = False

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Return True once the result is in the tensors.

        On a GPU it is there for the stream that is current.
        """
        if not self._is_over:
            with self._program:
                self._end(timeout.total_seconds())
        if self._order.has_streams or not self._future.done():
            # The thread that has found the end is about to tell.
            self._future.wait()
        if self._error is not None:
            raise self._error
        return True

    def synchronize(self) -> None:
        """Wait for the result."""
        self.wait()

    def is_completed(self) -> bool:
        """Return whether it has ended, well or not; moves it forward."""
        if not self._is_over and self._program.acquire(blocking=False):
            try:
                if self._work.done():
                    self._end()
            finally:
                self._program.release()
        return self._is_over

    def is_success(self) -> bool:
        """Return whether it has ended well."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """Return the error that it has ended with, or None."""
        return self._error

    def result(self) -> list[Tensor]:
        """Return the tensors for the result."""
        return self._tensors

    def source_rank(self) -> int:
        """Return the rank that the message came from."""
        return _checked_source(self._source)

    _source_rank = source_rank

    def get_future(self) -> Foreign:
        """Return a future with the tensors, which completes on the progress thread."""
        # In C++, where DDP waits, an exception that Python sets is the result. That of a callback is an error.
        return self._future.then(self._checked_tensors)

    def _checked_tensors(self, _: Foreign) -> list[Tensor]:
        if self._error is not None:
            raise self._error
        return self._tensors

    def advance(self) -> bool:
        """Complete the future if the collective has ended, and return whether it has. Called by the progress thread."""
        if not self._is_over:
            if self._work.is_done:
                self._end(blocking=False)
            elif self._stopwatch.seconds > self._work.timeout:
                self._expire()
        return self._is_over

    def carry_on(self) -> None:
        """Wait for it a while.

        For where it would only take the core from the program later. It goes on in the background if another rank is
        late.
        """
        with contextlib.suppress(TimeoutError):
            self._end(LONGEST_START_SECONDS)

    def settle(self) -> None:
        """Wait until it has ended, well or not."""
        with self._program:
            self._end()

    def _expire(self) -> None:
        """Give the collective up at its deadline.

        Nobody watches that who waits for the future in C++.
        """
        if self._program.acquire(blocking=False):
            try:
                self._work.timeout = 0.0
                self._end(blocking=False)
            finally:
                self._program.release()

    def _end(self, seconds: float = 0.0, blocking: bool = True) -> None:
        """Wait for the result, bring it into the tensors, and complete the future.

        Args:
            seconds: If more than 0, the longest time to wait, after which TimeoutError is raised.
            blocking: Whether to wait for another thread that does the same.
        """
        if not self._completing.acquire(blocking=blocking):
            return
        with self._order.ending(self._work, self._finish, self._tensors):
            self._end_here(seconds)

    def _end_here(self, seconds: float) -> None:
        try:
            if self._is_over:
                return
            try:
                self._source = self._finish(self._result(seconds))
            except Exception as error:  # handed on by wait and by the future
                if isinstance(error, TimeoutError) and not self._work.is_done:
                    raise
                self._error = error
            self._is_over = True
        finally:
            self._completing.release()
        try:
            if self._ended is not None:
                self._ended()
        finally:
            # Others wait for it.
            self._future.set_result(self._tensors)

    def _result(self, seconds: float) -> Any:
        if seconds <= 0:
            return self._work.wait()
        try:
            return self._work.wait(seconds)
        except TimeoutError:
            if not self._work.is_done:
                raise
            # It has ended since, and this error was not its own.
            return self._work.wait()


def _checked_source(source: int | None) -> int:
    if source is None:
        raise RuntimeError("source_rank is there once a recv is done, and for no other operation")
    return source


class OpenWorks:
    """The started works of one group, which the progress thread completes."""

    def __init__(self) -> None:
        self._works: list[StartedWork] = []
        self._lock = threading.Lock()

    def add(self, work: StartedWork) -> None:
        """Have a work completed."""
        with self._lock:
            self._works.append(work)
        progress.watch(self.move)
        if self.move not in progress.watched or is_own_thread():
            # Whoever waits for the future in C++ would wait for ever: there is no progress thread, or it is this one,
            # in a function that was given to the future of an earlier work.
            work.settle()
            self.move()

    def move(self) -> StartedWork | None:
        """Complete the works that have ended, and return the oldest that has not."""
        # Messages end in any order.
        over = [work for work in list(self._works) if work.advance()]
        with self._lock:
            for work in over:
                if work in self._works:
                    self._works.remove(work)
            return self._works[0] if self._works else None

    def close(self) -> None:
        """Complete the works that are left, and have no more completed."""
        while self._works:
            work = self._works.pop()
            if not work.is_completed():
                work.settle()
        progress.forget(self.move)


class ManyWorks(_TorchWork):
    """The work of several collectives.

    Args:
        works: Of each.
        tensors: For all results.
        order: Of the calls.
    """

    def __init__(self, works: list[Foreign], tensors: list[Tensor], order: Order = HOST_ORDER) -> None:
        super().__init__()
        self._works, self._tensors, self._order = works, tensors, order

    def wait(self, timeout: timedelta = _NO_LIMIT) -> bool:
        """Return True once all results are in the tensors."""
        return all([work.wait(timeout) for work in self._works])

    def is_completed(self) -> bool:
        """Return whether all have ended."""
        return all([work.is_completed() for work in self._works])

    def is_success(self) -> bool:
        """Return whether all have ended well."""
        return all([work.is_success() for work in self._works])

    def result(self) -> list[Tensor]:
        """Return the tensors for all results."""
        return self._tensors

    def get_future(self) -> Foreign:
        """Return a future with the tensors, which completes with the last of the works."""
        futures, whole = [work.get_future() for work in self._works], self._order.future()

        def tell(_: Foreign) -> None:
            with self._order.ending():
                whole.set_result(self._tensors)

        # That of collect_all knows of no stream.
        torch.futures.collect_all(futures).then(tell)
        return whole.then(lambda _: [part for future in futures for part in future.value()])
