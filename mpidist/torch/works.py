"""Works of torch.distributed: collectives that are done, or in flight."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import chain
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from mpidist.collectives import Communicator
from mpidist.collectives.channel.operation import Work
from mpidist.collectives.channel.progress import progress
from mpidist.core.concurrency import Stopwatch, is_own_thread, start_daemon
from mpidist.core.errors import CollectiveTimeoutError, MismatchError, PeerError
from mpidist.core.options import CommunicationOptions
from mpidist.topology import cores_are_short
from mpidist.torch.tensors import HOST_ORDER, Finish, Order, memory_of, order_of

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import AllreduceOptions, BarrierOptions
    from torch.futures import Future

_log = logging.getLogger("mpidist")
# torch's value for a call without a timeout of its own.
_UNSET = timedelta(0)
# ReduceOps hash to their numbers. Comparing two takes as long as a small all-reduce.
SUM = hash(dist.ReduceOp.RedOpType.SUM)
_MESSAGES = ("send", "recv")
_autograd = torch.autograd
_is_profiling: Callable[[], bool] = _autograd._profiler_enabled

# If the progress thread has no core of its own, a large collective is waited for at once: backward hides nothing, and
# the thread would take the core from it later. If another rank is late, the collective continues in the background.
# Ranks in the same backward pass are not further apart than this.
BRIEF_WAIT_SECONDS = 0.02
# Transferring a tensor of this size takes longer than waiting for another rank.
LARGE_BYTES = 1 << 20


class _BaseWork(dist.Work):
    _tensors: list[Tensor]
    _error: BaseException | None = None
    _source: int | None = None

    def synchronize(self) -> None:
        """Wait for the result."""
        self.wait()

    def is_success(self) -> bool:
        """Return whether it has ended without an error."""
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        """Return its error, or None."""
        return self._error

    def result(self) -> list[Tensor]:
        """Return the tensors for the result."""
        return self._tensors

    def source_rank(self) -> int:
        """Return the rank that sent the message."""
        if self._source is None:
            raise RuntimeError("source_rank is known only for a recv that is done.")
        return self._source

    _source_rank = source_rank


class DoneWork(_BaseWork):
    """The work of a collective that was run at once."""

    def __init__(self, tensors: list[Tensor], order: Order = HOST_ORDER) -> None:
        dist.Work.__init__(self)
        self._tensors, self._order = tensors, order
        # A later caller may be on another stream.
        self._future = self._make_future() if order.device is not None else None

    def wait(self, timeout: timedelta = _UNSET) -> bool:
        """Return True."""
        if self._future is not None:
            self._future.wait()
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True

    def get_future(self) -> Future[list[Tensor]]:
        """Return a future with the tensors."""
        return self._make_future() if self._future is None else self._future

    def _make_future(self) -> Future[list[Tensor]]:
        future = self._order.future()
        future.set_result(self._tensors)
        return future


class StartedWork(_BaseWork):
    """The work of a collective in flight.

    One thread of the program at a time waits for a collective, holding ``program``. The thread that detects the end
    calls ``finish`` and ``ended``, and completes the future.
    """

    def __init__(
        self,
        work: Work[object],
        finish: Finish,
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
        self._is_over = False

    def wait(self, timeout: timedelta = _UNSET) -> bool:
        """Return True when the result is in the tensors. On a GPU, the current stream waits."""
        if not self._is_over:
            self.settle(timeout.total_seconds())
        if self._order.device is not None or not self._future.done():
            # Another thread has detected the end, and is about to complete the future.
            self._future.wait()
        if self._error is not None:
            raise self._error
        return True

    def is_completed(self) -> bool:
        """Return whether it has ended, with or without an error. Advances it."""
        if not self._is_over and self._program.acquire(blocking=False):
            try:
                if self._work.done():
                    self._end()
            finally:
                self._program.release()
        return self._is_over

    def get_future(self) -> Future[list[Tensor]]:
        """Return a future with the tensors, which the progress thread completes."""
        # In C++, where DDP waits, an exception that Python sets is the result. An exception of a callback is an error.
        return self._future.then(self._checked_tensors)

    def _checked_tensors(self, _: object) -> list[Tensor]:
        if self._error is not None:
            raise self._error
        return self._tensors

    def advance(self) -> bool:
        """Complete the future if the collective has ended or expired. Return whether it has. Never waits."""
        if not self._is_over:
            if self._work.is_done:
                self._end(blocking=False)
            elif self._stopwatch.seconds > self._work.timeout and self._program.acquire(blocking=False):
                # A thread that waits for the future in C++ has no deadline of its own.
                try:
                    self._work.timeout = 0.0
                    self._end(blocking=False)
                finally:
                    self._program.release()
        return self._is_over

    def settle(self, seconds: float = 0.0) -> None:
        """Wait until it has ended, with or without an error. With ``seconds``, TimeoutError is raised after them."""
        with self._program:
            self._end(seconds)

    def _end(self, seconds: float = 0.0, blocking: bool = True) -> None:
        """Wait for the result, copy it, and complete the future. Not ``blocking``: unless another thread does."""
        if not self._completing.acquire(blocking=blocking):
            return
        with self._order.ending(self._work, self._finish, self._tensors):
            try:
                if self._is_over:
                    return
                try:
                    self._source = self._finish(self._result(seconds))
                except Exception as error:  # raised by wait and by the future
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
                # Other threads wait for it.
                self._future.set_result(self._tensors)

    def _result(self, seconds: float) -> object:
        if seconds <= 0:
            return self._work.wait()
        try:
            return self._work.wait(seconds)
        except TimeoutError:
            if not self._work.is_done:
                raise
            # It has ended since. The error is this wait's, not the collective's.
            return self._work.wait()


class Calls:
    """Runs the collectives of one group: at once if torch waits, otherwise started.

    ``name`` is the backend's, for profilers. ``options`` are merged into the communicator's, and have the timeout that
    was set since. ``count`` is the number of collectives so far.
    """

    def __init__(self, comm: Communicator, name: str, options: CommunicationOptions | None) -> None:
        self._comm, self._name, self.options = comm, name, options
        self._program = threading.RLock()
        # The started works, which the progress thread completes.
        self._works: list[StartedWork] = []
        self._lock = threading.Lock()
        self.count = 0
        self._is_short_of_cores = cores_are_short(2)

    def sum_in_place(self, tensors: list[Tensor], opts: AllreduceOptions) -> DoneWork | None:
        """Run the most frequent call, a sum of one tensor in host memory. Return None for any other call."""
        if opts.asyncOp or len(tensors) > 1 or hash(opts.reduceOp) != SUM or opts.timeout > _UNSET:
            return None
        if self.options is not None or _is_profiling():
            return None
        array = memory_of(tensors[0])
        # A sum of bools is another operation.
        if array is None or array.dtype.kind == "b":
            return None
        with self._program:
            self.count += 1
            self._comm.all_reduce("SUM", array, out=array)
        return DoneWork([*tensors])

    def do(
        self,
        name: str,
        given: Sequence[Tensor],
        tensors: Sequence[Tensor],
        opts: BarrierOptions | None,
        finish: Finish,
        *args: object,
        event: str = "",
        **kwargs: object,
    ) -> DoneWork | StartedWork:
        """Run or start the Communicator's method ``name`` with ``args`` and ``kwargs``.

        ``given`` are the inputs, and ``tensors`` get the results. ``opts`` are torch's; messages have none, and are
        always started. ``event`` is the name for profilers, by default the method's.
        """
        is_message = name in _MESSAGES
        self.count += not is_message
        if opts is not None and opts.timeout > _UNSET:
            kwargs["options"] = self.options_within(opts.timeout)
        elif self.options is not None:
            kwargs["options"] = self.options
        order = order_of(chain(given, tensors))
        ended = _begin_event(f"{self._name}:{event or name}", given)
        # One thread of the program at a time runs collectives. Messages may run in several.
        program = threading.RLock() if is_message else self._program
        is_started = opts is None or opts.asyncOp
        work = None
        try:
            with program:
                with order.calling():
                    result = getattr(self._comm, f"{name}_async" if is_started else name)(*args, **kwargs)
                    if not is_started:
                        finish(result)
                if is_started:
                    work = StartedWork(result, finish, list(tensors), program, ended, order)
                    if not is_message:
                        self._advance(work, tensors)
        finally:
            if work is None and ended is not None:
                ended()
        if work is None:
            return DoneWork(list(tensors), order)
        if not work.advance():
            self._complete_later(work)
        return work

    def _complete_later(self, work: StartedWork) -> None:
        with self._lock:
            self._works.append(work)
        progress.watch(self._move)
        if self._move not in progress.watched or is_own_thread():
            # Nobody else would complete a future that C++ waits for: there is no progress thread, or this is it, in a
            # callback of an earlier work's future.
            work.settle()
            self._move()

    def _move(self) -> StartedWork | None:
        """Complete the works that have ended, and return the oldest other one."""
        # Messages end in any order.
        over = [work for work in list(self._works) if work.advance()]
        with self._lock:
            self._works = [work for work in self._works if work not in over]
            return self._works[0] if self._works else None

    def _advance(self, work: StartedWork, tensors: Sequence[Tensor]) -> None:
        if self._comm.size == 1:
            # No thread advances it, because there is no other rank to wait for.
            work.settle()
        elif self._is_short_of_cores and any(each.numel() * each.element_size() >= LARGE_BYTES for each in tensors):
            with contextlib.suppress(TimeoutError):
                work.settle(BRIEF_WAIT_SECONDS)

    def options_within(self, timeout: timedelta) -> CommunicationOptions:
        """Return the options of the group with a timeout."""
        options = CommunicationOptions() if self.options is None else self.options
        return options.merge(CommunicationOptions(timeout_seconds=timeout.total_seconds()))

    @property
    def timeout(self) -> timedelta:
        """The timeout of calls without one of their own."""
        seconds = None if self.options is None else self.options.timeout_seconds
        return dist.default_pg_timeout if seconds is None else timedelta(seconds=seconds)

    def close(self) -> None:
        """Finish the works in flight, and free the communicator (collective)."""
        with self._program:
            for work in list(self._works):
                if not work.is_completed():
                    work.settle()
            self._move()
            progress.forget(self._move)
            try:
                self._comm.close()
            except (CollectiveTimeoutError, MismatchError, PeerError) as error:
                # After an error, ranks of torch.distributed leave one by one.
                _log.warning("mpidist: a process group was left without the others: %s", error)

    def abort(self) -> None:
        """Leave the group without the other ranks. Works end with an error (local)."""
        self._comm.abort()
        self._move()


def _begin_event(name: str, tensors: Sequence[Tensor]) -> Callable[[], None] | None:
    """Begin an event of torch's profilers, and return the function that ends it. None if no profiler runs."""
    if not _is_profiling():
        return None
    handle = _autograd._record_function_with_args_enter(name, *tensors)

    def end() -> None:
        # Profilers recognize events of a backend by their end in another thread.
        start_daemon("event", lambda: _autograd._record_function_with_args_exit(handle)).join()

    return end
