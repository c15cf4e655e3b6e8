"""Messages from one rank to another, beside the collectives of a communicator.

A head tells what is sent and from which line; small data travel in it. Larger ones follow, straight from memory to
memory, with a tag that the head names, once the receiver has seen that they are what it expects: of a message longer
than its memory some MPI libraries write more than fits.
"""

from __future__ import annotations

import logging
import math
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import TypeVar

import numpy as np

from mpidist.arrays.dtypes import Array, DType
from mpidist.collectives.channel.channel import Channel
from mpidist.collectives.channel.executor import also_moved, move_works
from mpidist.collectives.channel.operation import Description, Operation, describe, signature_text
from mpidist.collectives.channel.progress import progress
from mpidist.collectives.channel.work import Work
from mpidist.collectives.mpi.mailbox import MessageCount
from mpidist.collectives.mpi.mpi_types import as_bytes, one_message
from mpidist.collectives.mpi.waiting import Steps, drive, until_done
from mpidist.collectives.node.packing import in_order
from mpidist.core import settings
from mpidist.core.concurrency import Deadline
from mpidist.core.errors import MessageTimeoutError, MismatchError, PeerError
from mpidist.core.message_tags import DATA_OF_PROGRAMS, HEADS_OF_PROGRAMS, TAGS_OF_PROGRAMS
from mpidist.core.text import user_call_site
from mpidist.topology import import_mpi

T = TypeVar("T")
_log = logging.getLogger("mpidist")

# Number of the message to its receiver, bytes of the data, of the text; the text; the data if they are small.
_HEAD = struct.Struct("<IQH")
_TEXT_BYTES, _SMALL_BYTES = 500, 4096
# In a long wait, whether the other side has ended its program.
_ASK_EVERY_SECONDS = 5.0


class PointToPoint:
    """The messages of one communicator.

    Args:
        channel: The channel that it has for its collectives.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._under_way: list[Work[object]] = []
        # Messages so far to each rank.
        self._numbers: Counter[int] = Counter()
        self._lock = threading.RLock()
        self._count = MessageCount()
        channel.message_counts.append(self._count)

    def check_none_under_way(self) -> None:
        """Raise RuntimeError where messages have not gone or come."""
        if self._channel.is_usable:
            self._advance()
            for work in self._under_way[:1]:
                raise RuntimeError(
                    f"{work.operation.text}, started at {work.operation.call_site}, is under way while its "
                    "Communicator is closed; expected wait() for each message before"
                )

    def send(self, array: Array, dest: int, tag: int, timeout: float | None) -> Work[None]:
        """Start to send an array, which must not be changed before the work is done."""
        text, description = _described(f"send to rank {dest}", tag, array.shape, array.dtype)
        here = user_call_site()
        data, told = as_bytes(in_order(array)), f"{text}\n{here}".encode()[:_TEXT_BYTES]
        return self._started(self._sending(data, dest, tag, told), description, dest, here, timeout)

    def receive(self, out: Array, source: int | None, tag: int, timeout: float | None) -> Work[int]:
        """Start to receive an array into one like it.

        The result is the rank that sent it.
        """
        of = "any rank" if source is None else f"rank {source}"
        text, description = _described(f"recv from {of}", tag, out.shape, out.dtype)
        here = user_call_site()
        came: list[int] = []
        return self._started(
            self._receiving(out, source, tag, text, here, came), description, source, here, timeout, came
        )

    def _started(
        self,
        steps: Steps[T],
        description: Description,
        other: int | None,
        here: str,
        timeout: float | None,
        came: Sequence[int] = (),
    ) -> Work[T]:
        """Start a message.

        ``came`` has the rank that sends it as soon as its head is there.
        """
        channel = self._channel
        channel.executor.check_usable()
        operation = Operation(steps, description, timeout)
        operation.is_work, operation.call_site = True, here
        operation.ask_at = time.monotonic() + settings.WARN_AFTER.read() + _ASK_EVERY_SECONDS
        self._tell(operation, channel.observers.message_began)
        if channel.observers.message_ended:
            steps = self._observed(operation, steps)
        complete = partial(self._complete, other, came)
        work: Work[T] = Work(operation, steps, timeout or channel.timeout, self._advance, complete)
        with self._lock:
            self._under_way.append(work)
            # Messages are handed to MPI in the order of the calls.
            self._step(work)
        return work

    def abort(self) -> None:
        """End all messages of this rank with an error.

        MPI may still write to the memory of one, which is kept.
        """
        self._settle_all(PeerError("this Communicator was aborted while the message was under way"))

    def _settle_all(self, error: Exception) -> None:
        with self._lock:
            for work in self._under_way:
                if not work.is_done:
                    work.settle(error)

    def close(self) -> None:
        """Move nothing on any more."""
        with self._lock:
            if self.move in also_moved:
                also_moved.remove(self.move)
        progress.forget(self.move)

    def later(self, work: Work[T]) -> Work[T]:
        """Have a work go on while the program computes, or waits for something else."""
        with self._lock:
            if not work.is_done and self.move not in also_moved:
                also_moved.append(self.move)
        if not work.is_done:
            progress.watch(self.move)
        return work

    # Of one message -----------------------------------------------------------------------------------------------

    def _sending(self, data: Array, dest: int, tag: int, told: bytes) -> Steps[None]:
        comm, byte = self._channel.comm, import_mpi().BYTE
        self._numbers[dest] = number = (self._numbers[dest] + 1) % TAGS_OF_PROGRAMS
        head = _HEAD.pack(number, data.size, len(told)) + told
        if data.size <= _SMALL_BYTES:
            head += data.tobytes()
        requests = [comm.Isend([head, len(head), byte], dest, HEADS_OF_PROGRAMS + tag)]
        self._count.sent[dest] += 1
        if data.size > _SMALL_BYTES:
            requests.append(comm.Isend(one_message(data), dest, DATA_OF_PROGRAMS + number))
            self._count.sent[dest] += 1
        for request in requests:
            yield from until_done(request)

    def _receiving(self, out: Array, source: int | None, tag: int, text: str, here: str, came: list[int]) -> Steps[int]:
        mpi, comm, status = import_mpi(), self._channel.comm, import_mpi().Status()
        head = np.empty(_HEAD.size + _TEXT_BYTES + _SMALL_BYTES, np.uint8)
        asked = mpi.ANY_SOURCE if source is None else source
        coming = comm.Irecv([head, head.size, mpi.BYTE], asked, HEADS_OF_PROGRAMS + tag)
        while not coming.Test(status):
            yield
        self._count.received += 1
        rank = int(status.Get_source())
        came.append(rank)
        number, nbytes, length = _HEAD.unpack(head[: _HEAD.size].tobytes())
        theirs, _, there = head[_HEAD.size :][:length].tobytes().decode(errors="replace").partition("\n")
        fits = theirs == text
        into = out if fits and in_order(out) is out else np.empty(nbytes, np.uint8)
        if nbytes > _SMALL_BYTES:
            yield from until_done(comm.Irecv(one_message(into), rank, DATA_OF_PROGRAMS + number))
            self._count.received += 1
        else:
            as_bytes(into)[:] = head[_HEAD.size + length :][:nbytes]
        if not fits:
            raise MismatchError(
                f"rank {rank} sends {theirs}, at {there}, and rank {self._channel.rank} expects {text}, at {here}, "
                f"with tag {tag}; expected arrays of the same shape and dtype on both sides"
            )
        if into is not out:
            out[...] = into.view(out.dtype).reshape(out.shape)
        return rank

    def _observed(self, operation: Operation[object], steps: Steps[T]) -> Steps[T]:
        """Carry out the steps of a message, and tell observers of its end."""
        try:
            result = yield from steps
        except GeneratorExit:  # the program ends while it is on its way: it has no end that observers could see
            raise
        except BaseException as error:
            operation.error = error
            self._tell(operation, self._channel.observers.message_ended)
            operation.error = None
            raise
        self._tell(operation, self._channel.observers.message_ended)
        return result

    def _tell(self, operation: Operation[object], event: Sequence[Callable[[Operation[object]], None]]) -> None:
        for tell in event:
            try:
                tell(operation)
            except Exception:
                # The other side waits for the message.
                _log.exception("mpidist: an observer failed when it was told of %s", operation.text)

    # Moving on ----------------------------------------------------------------------------------------------------

    def move(self) -> Work[object] | None:
        """Move all messages on, and return one of those that are left."""
        self._advance()
        return next((work for work in list(self._under_way) if not work.is_done), None)

    def _advance(self) -> None:
        with self._lock:
            for work in list(self._under_way):
                self._step(work)

    def _step(self, work: Work[object]) -> None:
        try:
            if work.step():
                self._under_way.remove(work)
                if not self._under_way and self.move in also_moved:
                    also_moved.remove(self.move)
        except BaseException as error:
            self._channel.executor.lose_or_interrupt(error, work.operation.text)

    def _complete(self, other: int | None, came: Sequence[int], work: Work[object], timeout: float | None) -> None:
        """Move messages on until one is done, for at most ``timeout`` seconds."""
        if work.is_done:
            return
        left = work.timeout - work.waited
        is_last = timeout is None or timeout >= left
        seconds = left if is_last or timeout is None else timeout
        work.waited += 0 if is_last else seconds
        error = partial(self._expired if is_last else _not_yet, work)
        report = partial(self._report, other, work)
        with suppress(MessageTimeoutError):  # all messages end with it, this one too
            drive(self._polling(other, came, work), lambda: Deadline(report, error, seconds, meanwhile=move_works))

    def _polling(self, other: int | None, came: Sequence[int], work: Work[object]) -> Steps[None]:
        while not work.is_done:
            self._channel.executor.check_usable()
            self._advance()
            self._ask(other, work.operation)
            if work.operation.hopeless:
                self._advance()  # it may have come just before the answer
                if not work.is_done and not came:
                    self._lose(work.operation)
            yield

    def _report(self, other: int | None, work: Work[object], waited: float) -> str | None:
        if any([tell(work.operation, other) for tell in self._channel.observers.message_tells]):
            return None
        return (
            f"rank {self._channel.rank} of {self._channel.size} has waited {waited:.0f} s in {work.operation.text}, at "
            f"{work.operation.call_site}"
        )

    def _ask(self, other: int | None, operation: Operation[object]) -> None:
        if time.monotonic() > operation.ask_at:
            operation.ask_at = time.monotonic() + _ASK_EVERY_SECONDS
            for ask in self._channel.observers.message_asks:
                ask(operation, other)

    def _lose(self, operation: Operation[object]) -> None:
        text = f"can never be done: {operation.hopeless}"
        self._channel.executor.unusable = f"{operation.text} {text}"
        self._settle_all(PeerError(f"{operation.text}, at {operation.call_site}, {text}"))

    def _expired(self, work: Work[object], waited: float) -> MessageTimeoutError:
        # MPI may still write to its memory, which the work keeps.
        self._channel.executor.unusable = f"{work.operation.text} did not come within its deadline"
        operation = work.operation
        error = MessageTimeoutError(operation.text, str(operation.call_site), waited, self._channel.rank)
        self._settle_all(error)
        return error


@lru_cache(maxsize=1024)
def _described(what: str, tag: int, shape: tuple[int, ...], dtype: DType) -> tuple[str, Description]:
    """Return the array as text, and the description of the message."""
    text = signature_text(((shape, dtype),))
    nbytes = math.prod(shape) * dtype.itemsize
    return text, describe(f"{what} with tag {tag}", text, operation=what.partition(" ")[0], nbytes=nbytes)


def _not_yet(work: Work[object], waited: float) -> TimeoutError:
    return TimeoutError(
        f"{work.operation.text} is not done after {waited:.3g} s; it goes on, and may be waited for again"
    )
