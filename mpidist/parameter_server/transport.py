"""Messages between workers and servers, and requests to a server.

A message is an object with arrays. If it is small, it is one MPI message. Otherwise each array follows in a message of
its own, straight from and to its memory. The service thread of ``collectives.rpc`` does not fit here, because its
messages are at most a few KiB, and it polls rarely.
"""

from __future__ import annotations

import marshal
import pickle
import struct
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpidist.arrays.dtypes import Array
from mpidist.collectives.channel.shutdown import EXIT_SECONDS
from mpidist.collectives.mpi.waiting import Steps, all_done, drive, looks_before_yield, relax
from mpidist.collectives.node.memory import Pool
from mpidist.core import message_tags, settings
from mpidist.core.concurrency import Deadline
from mpidist.core.errors import PeerError, RankLostError, RequestTimeoutError
from mpidist.core.text import names_text, tell_user, user_call_site
from mpidist.parameter_server.pickling import pack
from mpidist.topology import import_mpi
from mpidist.topology.exit import says_rank_is_lost

if TYPE_CHECKING:
    from mpi4py import MPI

# Above this size, copying an array into the first message costs more than another message.
_FIRST_BYTES = 16 << 10
# Every supported Python reads it.
_MARSHAL_VERSION = 4
# The bytes of the head. If the head does not fit, it follows the first message.
_HEADER = struct.Struct("=q")
INLINE_BYTES = _FIRST_BYTES - _HEADER.size
# MPI before version 4 counts in a C int.
_LARGEST_BYTES = 1 << 30
# Number of a request that the client no longer waits for.
GIVE_UP = struct.Struct("=q")
INDEX = np.dtype(np.int64)
"""Dtype of indices in messages."""
_BYTES = np.dtype(np.uint8)
# About half a millisecond, before a wait has a deadline.
_QUICK_POLLS = 500


class PackedMessage:
    """An object and contiguous arrays, packed to be sent any number of times. Large arrays are not copied.

    The object consists of plain Python values, not of subclasses such as NumPy scalars. For these, ``marshal`` is
    several times faster than ``pickle``.
    """

    __slots__ = ("first", "following")

    def __init__(self, content: Any, arrays: Sequence[Array] = ()) -> None:
        sizes = [array.nbytes for array in arrays]
        head = marshal.dumps((content, sizes), _MARSHAL_VERSION)
        header = _HEADER.pack(len(head))
        self.following: list[Array] = []
        if len(head) + sum(sizes) <= INLINE_BYTES:
            inline: list[Any] = [header, head, *arrays]
            self.first = b"".join(inline)
        elif len(head) <= INLINE_BYTES:
            self.first, self.following = header + head, list(arrays)
        else:
            self.first, self.following = header, [np.frombuffer(head, np.uint8), *arrays]


class MessagePipe:
    """Messages to and from another rank, in order and without blocking.

    ``content`` and ``arrays`` (as bytes) are those of the message that has arrived.
    """

    def __init__(self, comm: MPI.Intracomm, other: int, tag_out: int, tag_in: int) -> None:
        self._comm, self._other, self._tag_out, self._tag_in = comm, other, tag_out, tag_in
        self._byte = import_mpi().BYTE
        self._buffer = bytearray(_FIRST_BYTES)
        self._inline = memoryview(self._buffer)[_HEADER.size :]
        self.first = comm.Recv_init(self._buffer, other, tag_in)
        self._pool = Pool()
        self._sending: list[MPI.Request] = []
        self._receiving: list[MPI.Request] | None = None
        self._head: Array | None = None
        self.content: Any = None
        self.arrays: list[Array] = []
        # Whether the arrays were not in the first part.
        self.is_split = False
        # Receives that were started, if an exception such as Ctrl-C came before `_receiving` had them.
        self._started: list[MPI.Request] = []
        # False if only a part of them was started.
        self.is_in_step = True

    def send(self, message: PackedMessage) -> None:
        """Start to send a message. Its arrays must not change until :meth:`is_sent`."""
        isend, other, tag, sending = self._comm.Isend, self._other, self._tag_out, self._sending
        sending.append(isend([message.first, self._byte], other, tag))
        for array in message.following:
            sending += [isend([piece, self._byte], other, tag) for piece in _pieces(array)]

    def is_sent(self) -> bool:
        """Return whether all messages have been sent."""
        return all_done(self._sending)

    def expect(self) -> None:
        """Start to receive the next message."""
        self.arrays, self._receiving = [], None
        self.first.Start()

    def has_come(self) -> bool:
        """Return whether the expected message has arrived. It may be called again after an exception."""
        if self._receiving is None:
            if not self.first.Test():
                return False
            (size,) = _HEADER.unpack_from(self._buffer)
            if size > INLINE_BYTES:
                if not self._started:
                    self._head = np.empty(size, np.uint8)
                    self._start([self._head])
                self._receiving, self._started = self._started, []
            else:
                self._open(self._inline, _HEADER.size + size)
                if not self.is_split:
                    return True
        if not all_done(self._receiving or []):
            return False
        if self._head is None:
            return True
        self._open(self._head.data)
        return all_done(self._receiving or [])

    def _open(self, head: memoryview, end: int = 0) -> None:
        """Unpack the head of a message, and copy or start to receive its arrays."""
        self.content, sizes = marshal.loads(head)
        self.is_split = self._head is not None or end + sum(sizes) > _FIRST_BYTES
        if not self.is_split:
            arrays = []
            for size in sizes:
                arrays.append(np.frombuffer(self._buffer, np.uint8, size, end).copy())
                end += size
            self.arrays, self._receiving = arrays, []
            return
        if not self._started:
            try:
                self.arrays = [self._pool.take(size, _BYTES) for size in sizes]
            except MemoryError as error:
                raise MemoryError(f"no memory for {sum(sizes) / 2**20:.1f} MiB of a message") from error
            self._start(self.arrays)
        self._receiving, self._started, self._head = self._started, [], None

    def _start(self, arrays: Sequence[Array]) -> None:
        """Start to receive arrays. Irecv may copy a large one at once, so Ctrl-C often comes here."""
        buffers = [[piece, self._byte] for array in arrays for piece in _pieces(array)]
        try:
            # Python runs no signal handler inside `extend`, so all receives are started and kept, or none.
            self._started.extend(map(self._comm.Irecv, buffers, repeat(self._other), repeat(self._tag_in)))
        except import_mpi().Exception:
            self.is_in_step = False
            raise

    def until_sent(self) -> Steps[None]:
        """Yield until all messages have been sent."""
        while not self.is_sent():
            yield

    def until_come(self) -> Steps[None]:
        """Yield until the expected message has arrived."""
        polls, limit = 0, looks_before_yield()
        while not self.has_come():
            polls += 1
            relax(polls, limit)
            yield

    def close(self) -> None:
        """Free the request for the first part. No other message may be in flight."""
        if not self.first.Test():
            self.first.Cancel()
            self.first.Wait()
        self.first.Free()


def _pieces(array: Array) -> list[Array]:
    """Return the bytes of a contiguous array, in pieces that any MPI can count."""
    flat = array.reshape(-1).view(np.uint8)
    if flat.size <= _LARGEST_BYTES:
        return [flat]
    return [flat[start : start + _LARGEST_BYTES] for start in range(0, flat.size, _LARGEST_BYTES)]


# Requests -----------------------------------------------------------------------------------------------------------


class RequestPart(NamedTuple):
    """One operation: a method of ``Store``, its arguments, contiguous arrays, and a text for errors."""

    method: str
    args: tuple[object, ...]
    arrays: Sequence[Array]
    doing: str


class Request(PackedMessage):
    """Operations that the server performs in order, with nothing in between."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[RequestPart]) -> None:
        self.parts = parts
        super().__init__(
            [(method, args, len(arrays)) for method, args, arrays, _ in parts],
            [array for _, _, arrays, _ in parts for array in arrays],
        )

    @property
    def doing(self) -> str:
        """What the request does, for messages."""
        return names_text(dict.fromkeys(part.doing for part in self.parts))


class Connection:
    """Requests to one server. Any thread may ask, one at a time.

    An exception, such as a deadline or Ctrl-C, may end a wait early. The next request receives that reply first. If the
    server lacks arrays of the request, it drops the request, because their owner may change them.
    """

    def __init__(self, comm: MPI.Intracomm, server: int, name: str, timeout: float) -> None:
        self._comm = comm
        self.server = server
        self.name = name
        self._timeout = timeout
        self.lock = threading.Lock()
        self._pipe = MessagePipe(comm, server, message_tags.REQUEST, message_tags.REPLY)
        self._giving_up: list[MPI.Request] = []
        self._sent = Request([])
        self._number = 0
        self._owes_reply = False
        self._is_given_up = self._has_left = False
        # Why the server cannot be asked any more.
        self._end: str | None = None
        self.is_lost = False

    def ask(self, request: Request) -> list[Any]:
        """Return the result of each part: None, an object, or the bytes of an array.

        Raise the server's error. Parts after the failed one were not performed.
        """
        with self.lock:
            self.start(request)
            return self.finish()

    def control(self, name: str, *arguments: object, doing: str) -> Any:
        """Call the method ``name`` of the server's ``Store``, with arguments that are pickled like functions."""
        packed = pack(arguments, lambda _: None, f"the arguments for {doing}")
        (answer,) = self.ask(Request([RequestPart("control", (name, packed), (), doing)]))
        return None if answer is None else pickle.loads(answer)

    def leave(self) -> None:
        """Release the server, unless that was done or it is lost."""
        if self.is_lost or self._has_left:
            return
        if self._owes_reply:
            self._timeout = min(self._timeout, EXIT_SECONDS)
        self.ask(Request([RequestPart("leave", (self._comm.Get_rank(),), (), "leaving")]))
        self._has_left = True
        self._end = (
            "this process released the parameter servers when mpidist.launch() returned, or when its program ended. "
            "Use variables only inside the function that you pass to launch()"
        )

    def start(self, request: Request) -> None:
        """Send a request, with the lock held. Its arrays must not change until :meth:`finish`."""
        if self._end is not None:
            kind = RankLostError if self.is_lost else RuntimeError
            raise kind(f"{self.name} can no longer be asked: {self._end}")
        if self._owes_reply:
            failure, _ = self._take_reply()
            if failure is not None and not self._is_given_up:
                tell_user(f"a request that was not waited for: {failure}")
        self._sent = request
        try:
            self._number += 1
            self._pipe.send(request)
            self._pipe.expect()
        except BaseException as error:
            self._check_lost(error)
            self._end = f"{request.doing} was interrupted while it was sent, by {type(error).__name__}: {error}"
            raise
        self._owes_reply, self._is_given_up = True, False

    def finish(self) -> list[Any]:
        """Return the results of the request that was started, with the lock held."""
        failure, results = self._take_reply()
        if failure is not None:
            raise failure
        return results

    def _take_reply(self) -> tuple[Exception | None, list[Any]]:
        """Return the error of the server, and the results. It may be called again after an exception."""
        pipe = self._pipe
        try:
            for _ in range(_QUICK_POLLS):
                if pipe.has_come():
                    break
            else:
                drive(pipe.until_come(), self._deadline)
            if not pipe.is_sent():
                drive(pipe.until_sent(), self._deadline)
        except BaseException as error:
            self._check_lost(error)
            if not pipe.is_in_step:
                self._end = f"the reply to {self._sent.doing} was interrupted by {type(error).__name__}: {error}"
            elif self._sent.following and not self._is_given_up and not pipe.is_sent():
                # The caller may change the arrays from now on.
                self._is_given_up = True
                all_done(self._giving_up)
                number, byte = GIVE_UP.pack(self._number), import_mpi().BYTE
                self._giving_up.append(self._comm.Isend([number, byte], self.server, message_tags.GIVE_UP))
            raise
        self._owes_reply = False
        pickled_error, results = pipe.content
        arrays, pipe.arrays = iter(pipe.arrays), []
        if pickled_error is None:
            return None, [next(arrays) if result is ... else result for result in results]
        failure: Exception = pickle.loads(pickled_error)
        if not isinstance(failure, PeerError):
            failure.args = (f"{self._sent.doing} failed at {self.name}: {failure}",)
        return failure, []

    def _deadline(self) -> Deadline:
        doing, rank, site = self._sent.doing, self._comm.Get_rank(), user_call_site()
        return Deadline(
            lambda waited: f"rank {rank} has waited {waited:.0f} s for {self.name} in {doing}, at {site}",
            lambda waited: RequestTimeoutError(f"{self.name} in {doing}, at {site}", waited, rank),
            self._timeout,
            settings.WARN_AFTER.read(),
        )

    def _check_lost(self, error: BaseException) -> None:
        """Raise RankLostError if MPI's ``error`` means that the server failed."""
        if says_rank_is_lost(error):
            self._end = f"it was lost in {self._sent.doing}"
            self.is_lost = True
            raise RankLostError(
                f"{self.name} was lost while this process waited for it in {self._sent.doing}; its variables are gone. "
                "Start the job again and restore the newest checkpoint"
            ) from error


def ask_all(parts: Sequence[tuple[Connection, RequestPart]]) -> list[Any]:
    """Ask several servers at once, and return the results in the order of the parts.

    Requests that were sent are finished before an error is raised.
    """
    by_server: dict[Connection, list[int]] = {}
    for place, (connection, _) in enumerate(parts):
        by_server.setdefault(connection, []).append(place)
    # All threads use one order, because they would wait for each other's locks otherwise.
    ordered = sorted(by_server, key=lambda connection: connection.server)
    requests = {connection: Request([parts[place][1] for place in by_server[connection]]) for connection in ordered}
    if len(requests) == 1:
        ((connection, request),) = requests.items()
        return connection.ask(request)
    results: list[Any] = [None] * len(parts)
    errors: list[Exception] = []
    started: list[Connection] = []
    with ExitStack() as locks:
        for connection in requests:
            locks.enter_context(connection.lock)
        try:
            for connection, request in requests.items():
                connection.start(request)
                started.append(connection)
        except Exception as error:  # raised below, after the other requests
            errors.append(error)
        for connection in started:
            try:
                for place, result in zip(by_server[connection], connection.finish(), strict=True):
                    results[place] = result
            except Exception as error:  # as above
                errors.append(error)
    if errors:
        raise errors[0]
    return results
