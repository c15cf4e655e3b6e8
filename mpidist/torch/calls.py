"""Carries out the calls of torch: at once where torch waits, otherwise started."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch.distributed.distributed_c10d

from mpidist.collectives import Communicator
from mpidist.core.errors import CollectiveTimeoutError, MismatchError, PeerError
from mpidist.core.options import CommunicationOptions
from mpidist.topology import cores_are_short
from mpidist.torch.foreign import Foreign
from mpidist.torch.ordering import Order, order_of
from mpidist.torch.profiling import begin_event, is_profiling
from mpidist.torch.reductions import SUM
from mpidist.torch.results import Finish
from mpidist.torch.tensors import memory_of
from mpidist.torch.works import LARGE_BYTES, DoneWork, OpenWorks, StartedWork

if TYPE_CHECKING:
    from torch import Tensor

c10d: Foreign = torch.distributed.distributed_c10d
_log = logging.getLogger("mpidist")
# Written by torch where a call has no timeout of its own.
_UNSET = timedelta(0)
_MESSAGES = ("send_async", "recv_async")


class Calls:
    """The calls of one group.

    Args:
        comm: The ranks of the group.
        name: Of the backend, for profilers.
        options: Laid over those of the communicator.

    Attributes:
        options: As given, with the timeout that was set since.
        count: The collectives so far.
    """

    def __init__(self, comm: Communicator, name: str, options: CommunicationOptions | None) -> None:
        self._comm, self._name, self.options = comm, name, options
        self._program = threading.RLock()
        self._works = OpenWorks()
        self.count = 0
        # Where the progress thread has no core of its own, backward hides nothing.
        self._is_short_of_cores = cores_are_short(2)

    def sum_in_place(self, tensors: list[Tensor], opts: Foreign) -> Foreign:
        """Sum up one tensor where it lies, and wait, as most calls do.

        None where there is more to ask.
        """
        if opts.asyncOp or len(tensors) > 1 or hash(opts.reduceOp) != SUM or opts.timeout > _UNSET:
            return None
        if self.options is not None or is_profiling():
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
        event: str,
        given: Sequence[Tensor],
        tensors: Sequence[Tensor],
        opts: Foreign,
        finish: Finish,
        *args: Any,
        **kwargs: Any,
    ) -> Foreign:
        """Carry out or start the method ``name`` of the Communicator.

        Args:
            name: Of the method.
            event: Its name for profilers.
            given: The tensors that go in, for profilers.
            tensors: For the result.
            opts: Of the call, from torch; None for messages, which are always started.
            finish: Brings the result into the tensors.
            args: Of the method.
            kwargs: Of the method.
        """
        self.count += opts is not None
        if opts is not None and opts.timeout > _UNSET:
            kwargs["options"] = self.options_within(opts.timeout)
        elif self.options is not None:
            kwargs["options"] = self.options
        order = order_of(chain(given, tensors))
        ended = begin_event(f"{self._name}:{event}", given)
        if opts is None or opts.asyncOp:
            return self._start(name + "_async", list(tensors), finish, ended, order, args, kwargs)
        try:
            with self._program, order.calling():
                finish(getattr(self._comm, name)(*args, **kwargs))
        finally:
            if ended is not None:
                ended()
        return DoneWork(list(tensors), order)

    def _start(
        self,
        name: str,
        tensors: list[Tensor],
        finish: Finish,
        ended: Callable[[], None] | None,
        order: Order,
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> StartedWork:
        # Collectives are carried out by one thread of the program at a time, messages by any.
        program = threading.RLock() if name in _MESSAGES else self._program
        with program:
            try:
                with order.calling():
                    started = getattr(self._comm, name)(*args, **kwargs)
            except BaseException:
                if ended is not None:
                    ended()
                raise
            work = StartedWork(started, finish, tensors, program, ended, order)
            if name not in _MESSAGES and self._comm.size == 1:
                # There is nobody to wait for, and so no thread that moves it on.
                work.settle()
            elif name not in _MESSAGES and self._is_short_of_cores and any(map(_is_large, tensors)):
                work.carry_on()
        if not work.advance():
            self._works.add(work)
        return work

    def options_within(self, timeout: timedelta) -> CommunicationOptions:
        """Return the options of the group with a timeout."""
        options = CommunicationOptions() if self.options is None else self.options
        return options.merge(CommunicationOptions(timeout_seconds=timeout.total_seconds()))

    @property
    def timeout(self) -> timedelta:
        """The timeout of the calls that have none of their own."""
        seconds = None if self.options is None else self.options.timeout_seconds
        return c10d.default_pg_timeout if seconds is None else timedelta(seconds=seconds)

    def close(self) -> None:
        """Finish the works on their way, and free the communicator (collective).

        After an error, ranks of torch.distributed leave one by one: one that the others do not join says so.
        """
        with self._program:
            self._works.close()
            try:
                self._comm.close()
            except (CollectiveTimeoutError, MismatchError, PeerError) as error:
                _log.warning("mpidist: a process group was left without the others: %s", error)

    def abort(self) -> None:
        """Leave the group without the other ranks; works end with an error (local)."""
        self._comm.abort()
        self._works.move()


def _is_large(tensor: Tensor) -> bool:
    # Also of a sparse one.
    nbytes: int = tensor.numel() * tensor.element_size()
    return nbytes >= LARGE_BYTES
