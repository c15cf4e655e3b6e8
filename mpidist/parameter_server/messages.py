"""The wire format of requests to a parameter server, replies, and other byte strings.

A request is a list of *parts*, each one operation on one variable, which the server carries out one after the other
without anything in between. It begins with one message: a preamble, and behind it, if all fits, the parts and their
arrays. The rest follows: the parts in one message, then each array in a message of its own, straight from and to its
memory. A reply is made the same way from the arrays that the parts give back; an error is always one message.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from mpidist.arrays.dtypes import Array, DType
from mpidist.collectives.mpi.waiting import Steps, all_done
from mpidist.topology import import_mpi
from mpidist.values import scatter

if TYPE_CHECKING:
    from mpi4py import MPI

# The most that travels in the first message; above it a copy costs more than another message.
FIRST_MESSAGE_BYTES = 16 << 10
# Of a request: number of parts, whether they are in this message, and whether their arrays are. Of a reply: bytes of
# its arrays, whether they are in this message, and the status.
PREAMBLE = struct.Struct("=qqq")
# Operation, variable, number of rows or bytes, optimizer, step, a setting (the learning rate of an update).
PART = struct.Struct("=qqqqqd")
PartNumbers = tuple[int, int, int, int, int, float]
# The number of the request that is given up: both sides count them, from 1.
GIVE_UP = struct.Struct("=q")
# Of one message; MPI before version 4 counts in a C int.
_MOST_BYTES = 1 << 30
INLINE_BYTES = FIRST_MESSAGE_BYTES - PREAMBLE.size
# Of what goes by post: how long it is.
_LENGTH = struct.Struct("=q")
_POST_INLINE_BYTES = FIRST_MESSAGE_BYTES - _LENGTH.size

DONE, FAILED = 0, 1
# The first byte of strings from the coordinator to a worker, and of the answers.
STOP, CALL, RESULT, ERROR = b"S", b"C", b"R", b"E"

BYTES = np.dtype(np.uint8)
INDEX = np.dtype(np.int64)


class ServerOperation(NamedTuple):
    """An operation of a server.

    Attributes:
        code: Its number on the wire.
        name: For messages.
        takes: The arrays that come with it: ``""``, ``"value"``, ``"indices"``, ``"rows"`` (indices and rows), or
            ``"bytes"``.
        gives: The array that comes back: ``""``, ``"value"``, ``"rows"`` or ``"bytes"``.
        is_about_variable: Whether it is done to a variable.
    """

    code: int
    name: str
    takes: str
    gives: str
    is_about_variable: bool


OPERATIONS: list[ServerOperation] = []
"""By their codes."""


def _operation(name: str, takes: str, gives: str, is_about_variable: bool = True) -> ServerOperation:
    operation = ServerOperation(len(OPERATIONS), name, takes, gives, is_about_variable)
    OPERATIONS.append(operation)
    return operation


READ = _operation("reading", "", "value")
GATHER = _operation("reading rows of", "indices", "rows")
ASSIGN = _operation("assign() of", "value", "")
ASSIGN_ADD = _operation("assign_add() of", "value", "")
ASSIGN_SUB = _operation("assign_sub() of", "value", "")
SCATTERS = (scatter.ADD, scatter.SUB, scatter.MUL, scatter.DIV, scatter.MIN, scatter.MAX, scatter.UPDATE)
SCATTER = {op.name: _operation(f"{op.name}() of", "rows", "") for op in SCATTERS}
UPDATE = _operation("an optimizer's update of", "value", "")
UPDATE_ROWS = _operation("an optimizer's sparse update of", "rows", "")
COUNT = _operation("counting a step in", "", "value")
CONTROL = _operation("", "bytes", "bytes", is_about_variable=False)
LEAVE = _operation("taking leave", "", "", is_about_variable=False)
TICK = _operation("waiting for slower workers", "", "", is_about_variable=False)


class Kind:
    """Shape and dtype of an array, which both sides know.

    >>> Kind((2, 3), np.dtype("float32")).nbytes
    24
    """

    __slots__ = ("_itself", "dtype", "nbytes", "shape")

    def __init__(self, shape: tuple[int, ...], dtype: DType) -> None:
        self.shape = shape
        self.dtype = dtype
        self.nbytes: int = math.prod(shape) * dtype.itemsize
        self._itself = [self]

    def layouts(self, layout: str, count: int) -> list[Kind]:
        """Return the kinds of an operation's arrays, which ``layout`` names."""
        if layout == "value":
            return self._itself
        if layout == "":
            return []
        if layout == "bytes":
            return [Kind((count,), BYTES)]
        indices = Kind((count,), INDEX)
        if layout == "indices":
            return [indices]
        return [indices, Kind((count, *self.shape[1:]), self.dtype)]

    def results(self, layout: str, count: int) -> list[Kind]:
        """Return the kind of the array that comes back, if one does."""
        return self._itself if layout == "value" else self.layouts(layout, count)[-1:]


NO_VARIABLE = Kind((), BYTES)


class RequestPart(NamedTuple):
    """One operation of a request.

    Attributes:
        operation: The operation.
        variable: The server's number of the variable; of the strategy whose steps are counted.
        kind: Of the variable.
        arrays: The operation's arrays, contiguous, of exactly the layout.
        length: Number of rows or bytes.
        optimizer: The server's number of the optimizer, for an update.
        step: How many updates there were before this one, as far as the worker knows.
        setting: The learning rate of an update; how many steps ahead of the slowest a worker may be.
        name: Of the variable, or the purpose of a control request, for messages; it does not travel.
    """

    operation: ServerOperation
    variable: int = 0
    kind: Kind = NO_VARIABLE
    arrays: Sequence[Array] = ()
    length: int = 0
    optimizer: int = 0
    step: int = 0
    setting: float = 0.0
    name: str = ""


class Request:
    """Parts of a request as they travel; may be sent any number of times.

    Args:
        parts: The operations, at least one part.

    Attributes:
        parts: As given.
        first: The first message; arrays in it are copies.
        following: The messages behind it; arrays are not copied, and must stay as they are meanwhile.
        results: The arrays of the reply; None if only the reply says which they are.
        comes_apart: Whether each of them comes in a message of its own.
    """

    __slots__ = ("comes_apart", "first", "following", "parts", "results")

    def __init__(self, parts: Sequence[RequestPart]) -> None:
        self.parts = parts
        self.results: list[Kind] | None = []
        self.following: list[Array] = []
        packed: list[Any] = [b""]
        arrays: list[Array] = []
        for operation, variable, kind, some, length, optimizer, step, setting, _ in parts:
            packed.append(PART.pack(operation.code, variable, length, optimizer, step, setting))
            arrays += some
            if operation.gives == "bytes":
                self.results = None
            elif operation.gives and self.results is not None:
                self.results += kind.results(operation.gives, length)
        data_bytes = sum([array.nbytes for array in arrays])
        words_bytes = len(parts) * PART.size
        words_inline, data_inline = words_bytes <= INLINE_BYTES, words_bytes + data_bytes <= INLINE_BYTES
        packed[0] = PREAMBLE.pack(len(parts), words_inline, data_inline)
        if data_inline:
            packed += arrays
        else:
            self.following = arrays
        if words_inline:
            self.first = b"".join(packed)
        else:
            self.first = packed[0]
            self.following.insert(0, np.frombuffer(b"".join(packed[1:]), np.uint8))
        self.comes_apart = self.results is not None and sum([kind.nbytes for kind in self.results]) > INLINE_BYTES


def arrays_in(message: bytearray, at: int, kinds: Sequence[Kind]) -> list[Array]:
    """Return copies of the arrays that a message holds from the byte ``at``.

    >>> [array.tolist() for array in arrays_in(bytearray(b"..ab"), 2, [Kind((2,), BYTES)])]
    [[97, 98]]
    """
    arrays = []
    for kind in kinds:
        arrays.append(np.ndarray(kind.shape, kind.dtype, message, at).copy())
        at += kind.nbytes
    return arrays


def receives_of(comm: MPI.Intracomm, arrays: Sequence[Array], source: int, tag: int) -> list[MPI.Request]:
    """Return the requests that receive ``arrays``, each in messages of its own."""
    byte = import_mpi().BYTE
    return [comm.Irecv([piece, byte], source, tag) for array in arrays for piece in pieces_of(array)]


def pieces_of(array: Array) -> list[Array]:
    """Return a contiguous array's bytes, in pieces that any MPI can count."""
    flat = array.reshape(-1).view(np.uint8)
    if flat.size <= _MOST_BYTES:
        return [flat]
    return [flat[start : start + _MOST_BYTES] for start in range(0, flat.size, _MOST_BYTES)]


class ByteExchange:
    """Byte strings of any length to and from another rank, without blocking. They keep their order in each direction.

    Args:
        comm: The communicator.
        other: The rank at the other end.
        tag_out, tag_in: Of messages sent and received.

    Attributes:
        expected: The request of the next string's first part; others may poll it together with their own.
    """

    def __init__(self, comm: MPI.Intracomm, other: int, tag_out: int, tag_in: int) -> None:
        self._comm, self._other = comm, other
        self._tag_out, self._tag_in = tag_out, tag_in
        self._first_out = bytearray(FIRST_MESSAGE_BYTES)
        self._first_in = bytearray(FIRST_MESSAGE_BYTES)
        self._byte = import_mpi().BYTE
        self._sending: list[MPI.Request] = []
        self.expected = comm.Recv_init(self._first_in, other, tag_in)

    def expect(self) -> None:
        """Start to receive the next string; needed before :attr:`expected` is polled."""
        self.expected.Start()

    def send(self, data: bytes) -> Steps[None]:
        """Send ``data`` after the strings that were sent before."""
        yield from self.flush()
        first = self._first_out
        _LENGTH.pack_into(first, 0, len(data))
        end = _LENGTH.size + min(len(data), _POST_INLINE_BYTES)
        first[_LENGTH.size : end] = data[:_POST_INLINE_BYTES]
        self._sending.append(self._comm.Isend([memoryview(first)[:end], self._byte], self._other, self._tag_out))
        rest = np.frombuffer(data, np.uint8)[_POST_INLINE_BYTES:]
        if rest.size:
            for piece in pieces_of(rest):
                self._sending.append(self._comm.Isend([piece, self._byte], self._other, self._tag_out))
            yield from self.flush()

    def receive(self) -> Steps[bytes]:
        """Return the string that has come, once :attr:`expected` is complete."""
        (length,) = _LENGTH.unpack_from(self._first_in)
        if length <= _POST_INLINE_BYTES:
            return bytes(memoryview(self._first_in)[_LENGTH.size : _LENGTH.size + length])
        data = np.empty(length, np.uint8)
        data[:_POST_INLINE_BYTES] = np.frombuffer(self._first_in, np.uint8)[_LENGTH.size :]
        rest = data[_POST_INLINE_BYTES:]
        receives = receives_of(self._comm, [rest], self._other, self._tag_in)
        while not all_done(receives):
            yield
        return data.tobytes()

    def flush(self) -> Steps[None]:
        """Wait until all that was sent has left."""
        while not all_done(self._sending):
            yield

    def close(self) -> None:
        """Free the request; nothing may be under way."""
        self.expected.Free()
