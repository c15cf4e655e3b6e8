"""Messages from one rank to another, independent of the collectives of a communicator.

A header describes the array and the call site of the sender, and holds small data. Larger data follow without a copy,
with a tag from the header, after the receiver has checked the description, because some MPI libraries write past the
end of the receiver's memory if a message is too long.
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
from typing import Any, TypeVar

import numpy as np

from mpidist.arrays.dtypes import Array, DType
from mpidist.collectives.channel.channel import Channel
from mpidist.collectives.channel.executor import also_moved, move_works
from mpidist.collectives.channel.operation import Description, Operation, Work, describe, signature_text
from mpidist.collectives.channel.progress import progress
from mpidist.collectives.mpi import mpi_types
from mpidist.collectives.mpi.exchange import MessageCount
from mpidist.collectives.mpi.mpi_types import as_bytes
from mpidist.collectives.mpi.waiting import Steps, drive, looks_before_yield, relax, until_all_done
from mpidist.collectives.node.packing import in_order
from mpidist.core import settings
from mpidist.core.concurrency import Deadline
from mpidist.core.errors import MessageTimeoutError, MismatchError, PeerError
from mpidist.core.message_tags import DATA_OF_PROGRAMS, HEADS_OF_PROGRAMS, TAGS_OF_PROGRAMS
from mpidist.core.text import user_call_site
from mpidist.topology import import_mpi

T = TypeVar("T")
_log = logging.getLogger("mpidist")

# Number of the message to its receiver, bytes of the data and of the text, then the text and small data.
_HEAD = struct.Struct("<IQH")
_TEXT_BYTES, _SMALL_BYTES = 500, 4096
# Every 16th poll of a wait advances all messages, and the others only the message that is waited for.
_POLLS_OF_ONE = 16
# Polls at the start of a wait, without checks, because most messages arrive soon.
_QUICK_POLLS = 64
# Interval of queries during a long wait: has the peer exited?
_ASK_EVERY_SECONDS = 5.0


class _Message(Operation[Any]):
    """One message. ``other`` is the peer, or None for any rank."""

    is_async, has_header = True, False
    # Next time to query the peer.
    ask_at = math.inf

    def __init__(self, description: Description, timeout: float, other: int | None) -> None:
        super().__init__(_no_steps(), description, timeout)
        self.other, self.call_site = other, user_call_site()

    def fail(self, error: BaseException) -> None:
        """See ``Operation``."""
        self.error = error
        super().fail(error)


class PointToPoint:
    """The messages of one communicator, on the channel of its collectives."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        # A dict, because it is ordered and quick to search.
        self._in_flight: dict[_Message, None] = {}
        # Number of messages to each rank so far, which selects their data tags.
        self._numbers: Counter[int] = Counter()
        self._lock = threading.RLock()
        self._mpi = import_mpi()
        self._ask_after: float = settings.WARN_AFTER.read() + _ASK_EVERY_SECONDS
        self._count = MessageCount()
        channel.message_counts.append(self._count)

    def check_none_in_flight(self) -> None:
        """Raise RuntimeError if messages are in flight."""
        if self._channel.is_usable:
            self.advance()
            for message in self._in_flight:
                raise RuntimeError(
                    f"{message.text}, started at {message.call_site}, is in flight while its Communicator is closed. "
                    "Call wait() for each message before close()"
                )

    def send(self, array: Array, dest: int, tag: int, timeout: float | None) -> Work[None]:
        """Start sending an array."""
        text, description = _described(f"send to rank {dest}", tag, array.shape, array.dtype)
        message = _Message(description, timeout or self._channel.timeout, dest)
        return self._started(message, self._sending(message, array, dest, tag, text))

    def receive(self, out: Array, source: int | None, tag: int, timeout: float | None) -> Work[int]:
        """Start receiving an array into ``out``. The result is the sending rank."""
        of = "any rank" if source is None else f"rank {source}"
        text, description = _described(f"recv from {of}", tag, out.shape, out.dtype)
        message = _Message(description, timeout or self._channel.timeout, source)
        return self._started(message, self._receiving(message, out, tag, text))

    def _started(self, message: _Message, steps: Steps[object]) -> Work[Any]:
        channel = self._channel
        channel.executor.check_usable()
        message.steps, message.ask_at = steps, time.monotonic() + self._ask_after
        self._notify(message, channel.observers.message_began)
        message.start(self)
        with self._lock:
            self._in_flight[message] = None
            # The first step sends or receives, so messages keep the order of their calls.
            self._step(message)
        return message

    def abort(self) -> None:
        """Fail all messages."""
        self._fail_all(PeerError("this Communicator was aborted while the message was in flight"))

    def _fail_all(self, error: Exception) -> None:
        """Fail all messages. They keep their memory, because MPI may still write to it."""
        with self._lock:
            for message in self._in_flight:
                if not message.is_done:
                    message.fail(error)

    def close(self) -> None:
        """Stop advancing messages."""
        with self._lock:
            if self.move in also_moved:
                also_moved.remove(self.move)
        progress.forget(self.move)

    def later(self, work: Work[T]) -> Work[T]:
        """Advance a message while the program computes or waits for other works."""
        with self._lock:
            if not work.is_done and self.move not in also_moved:
                also_moved.append(self.move)
        if not work.is_done:
            progress.watch(self.move)
        return work

    # The steps of one message ------------------------------------------------------------------------------------

    def _sending(self, message: _Message, array: Array, dest: int, tag: int, content: bytes) -> Steps[None]:
        comm, byte = self._channel.comm, self._mpi.BYTE
        text = (content + str(message.call_site).encode())[:_TEXT_BYTES]
        self._numbers[dest] = number = (self._numbers[dest] + 1) % TAGS_OF_PROGRAMS
        head = _HEAD.pack(number, array.nbytes, len(text)) + text
        is_small = array.nbytes <= _SMALL_BYTES
        if is_small:
            head += array.tobytes()
        requests = [comm.Isend([head, len(head), byte], dest, HEADS_OF_PROGRAMS + tag)]
        if not is_small:
            requests.append(comm.Isend(mpi_types.message(in_order(array)), dest, DATA_OF_PROGRAMS + number))
        self._count.sent[dest] += len(requests)
        yield from until_all_done(requests)

    def _receiving(self, message: _Message, out: Array, tag: int, content: bytes) -> Steps[int]:
        mpi, comm, status = self._mpi, self._channel.comm, self._mpi.Status()
        head = np.empty(_HEAD.size + _TEXT_BYTES + _SMALL_BYTES, np.uint8)
        sender = mpi.ANY_SOURCE if message.other is None else message.other
        request = comm.Irecv([head, head.size, mpi.BYTE], sender, HEADS_OF_PROGRAMS + tag)
        while not request.Test(status):
            yield
        self._count.received += 1
        rank = int(status.Get_source())
        message.has_header = True
        number, nbytes, length = _HEAD.unpack_from(head.data)
        end = _HEAD.size + length
        text = head[_HEAD.size : end].tobytes()
        fits = text.startswith(content)
        into = out if fits and in_order(out) is out else np.empty(nbytes, np.uint8)
        if nbytes > _SMALL_BYTES:
            yield from until_all_done([comm.Irecv(mpi_types.message(into), rank, DATA_OF_PROGRAMS + number)])
            self._count.received += 1
        else:
            as_bytes(into)[:] = head[end : end + nbytes]
        if not fits:
            theirs, _, there = text.decode(errors="replace").partition("\n")
            raise MismatchError(
                f"rank {rank} sends {theirs}, at {there}, but rank {self._channel.rank} expects "
                f"{content.decode().rstrip()}, at {message.call_site}, with tag {tag}. Pass arrays of the same shape "
                "and dtype on both sides"
            )
        if into is not out:
            out[...] = into.view(out.dtype).reshape(out.shape)
        return rank

    def _notify(self, message: _Message, observers: Sequence[Callable[[Operation[object]], None]]) -> None:
        for notify in observers:
            try:
                notify(message)
            except Exception:
                # Continue, because the peer waits for the message.
                _log.exception("mpidist: an observer of %s failed", message.text)

    # Progress -----------------------------------------------------------------------------------------------------

    def move(self) -> Work[object] | None:
        """Advance all messages, and return one in flight, if any."""
        self.advance()
        return next((message for message in list(self._in_flight) if not message.is_done), None)

    def advance(self) -> None:
        """Run the next step of each message."""
        for message in list(self._in_flight):
            self._step(message)

    def _step(self, message: _Message) -> None:
        """Run the next step of a message, unless it was removed by another thread."""
        with self._lock:
            if message not in self._in_flight:
                return
            try:
                if message.step():
                    del self._in_flight[message]
                    self._notify(message, self._channel.observers.message_ended)
                    if not self._in_flight and self.move in also_moved:
                        also_moved.remove(self.move)
            except BaseException as error:
                self._channel.executor.fail_in(message.text, error)

    def wait_for(self, operation: Operation[object], timeout: float | None) -> None:
        """Advance messages until ``operation`` is done, for at most ``timeout`` seconds."""
        assert isinstance(operation, _Message), "messages only"
        for _ in range(min(_QUICK_POLLS, looks_before_yield())):
            if operation.is_done:
                return
            self._step(operation)
        seconds = operation.timeout
        failure: Callable[[_Message, float], TimeoutError] = self._expired
        if timeout is not None and timeout < seconds:
            seconds, failure = timeout, _not_yet
            operation.timeout -= timeout
        report = partial(self._report, operation)
        with suppress(MessageTimeoutError):  # every message has failed with it, including this one
            deadline = partial(Deadline, report, partial(failure, operation), seconds, meanwhile=move_works)
            drive(self._polling(operation), deadline)

    def _polling(self, message: _Message) -> Steps[None]:
        polls, limit = 0, looks_before_yield()
        while not message.is_done:
            polls += 1
            if not message.has_header:  # large data would wait for each back-off
                relax(polls, limit)
            if polls % _POLLS_OF_ONE:
                self._step(message)
            else:
                self._advance_others(message)
            yield

    def _advance_others(self, message: _Message) -> None:
        """Run the next step of each message. Fail if this one can never arrive."""
        executor, observers = self._channel.executor, self._channel.observers
        executor.check_usable()
        self.advance()
        if time.monotonic() > message.ask_at:
            message.ask_at = time.monotonic() + _ASK_EVERY_SECONDS
            for ask in observers.message_asks:
                ask(message, message.other)
        if message.hopeless:
            self.advance()  # the message may have arrived just before the answer
            if not message.is_done and not message.has_header:
                text = f"can never be done: {message.hopeless}"
                executor.fail(f"{message.text} {text}")
                self._fail_all(PeerError(f"{message.text}, at {message.call_site}, {text}"))

    def _report(self, message: _Message, waited: float) -> str | None:
        if any([tell(message, message.other) for tell in self._channel.observers.message_tells]):
            return None
        return (
            f"rank {self._channel.rank} of {self._channel.size} has waited {waited:.0f} s in {message.text}, at "
            f"{message.call_site}"
        )

    def _expired(self, message: _Message, waited: float) -> MessageTimeoutError:
        self._channel.executor.fail(f"{message.text} did not arrive within its deadline")
        error = MessageTimeoutError(message.text, str(message.call_site), waited, self._channel.rank)
        self._fail_all(error)
        return error


@lru_cache(maxsize=1024)
def _described(what: str, tag: int, shape: tuple[int, ...], dtype: DType) -> tuple[bytes, Description]:
    """Return the first line of the header, and the description."""
    text = signature_text(((shape, dtype),))
    nbytes = math.prod(shape) * dtype.itemsize
    description = describe(f"{what} with tag {tag}", text, operation=what.partition(" ")[0], nbytes=nbytes)
    return f"{text}\n".encode(), description


def _not_yet(message: _Message, waited: float) -> TimeoutError:
    return TimeoutError(f"{message.text} is not done after {waited:.3g} s. It continues. Call wait() again")


def _no_steps() -> Steps[None]:
    yield from ()
