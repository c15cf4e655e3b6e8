"""What a request to a parameter server and its reply look like on the wire.

A request is a list of *parts*, each one operation on one variable, which the server carries out one after the other
without anything in between. It begins with one message: a preamble, and behind it, if all fits, the parts and their
arrays. What does not fit follows: the parts in one message, then each array in a message of its own, straight from and
to where it lies. A reply is made the same way from the arrays that the parts give back; an error is always one message.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from mpidist.arrays.convert import Array
from mpidist.arrays.dtypes import DType

TAG_REQUEST, TAG_DATA, TAG_REPLY, TAG_REPLY_DATA, TAG_TO_WORKER, TAG_FROM_WORKER = range(1, 7)

# The most that travels in the first message; above it a copy costs more than another message.
FIRST_MESSAGE_BYTES = 16 << 10
# Of a request: number of parts, bytes of their arrays, whether the parts are in this message, and the arrays. Of a
# reply: number of arrays, their bytes, whether they are in this message, and the status.
PREAMBLE = struct.Struct("=qqqq")
# Operation, variable, number of rows or bytes, optimizer, step, a number (the learning rate of an update).
PART = struct.Struct("=qqqqqd")
# Of one message; MPI before version 4 counts in a C int.
_MOST_BYTES = 1 << 30
INLINE_BYTES = FIRST_MESSAGE_BYTES - PREAMBLE.size

DONE, FAILED = 0, 1

BYTES = np.dtype(np.uint8)
INDEX = np.dtype(np.int64)


class Operation(NamedTuple):
    """What can be asked of a server.

    Attributes:
        code: Its number on the wire.
        name: For messages.
        takes: The arrays that come with it: ``""``, ``"value"``, ``"indices"``, ``"rows"`` (indices and rows), or
            ``"bytes"``.
        gives: What comes back: ``""``, ``"value"``, ``"rows"`` or ``"bytes"``.
    """

    code: int
    name: str
    takes: str
    gives: str


READ = Operation(0, "reading", "", "value")
GATHER = Operation(1, "reading rows of", "indices", "rows")
ASSIGN = Operation(2, "assign() of", "value", "")
ASSIGN_ADD = Operation(3, "assign_add() of", "value", "")
ASSIGN_SUB = Operation(4, "assign_sub() of", "value", "")
SCATTER = {
    name: Operation(5 + i, f"{name}() of", "rows", "")
    for i, name in enumerate(
        (
            "scatter_add",
            "scatter_sub",
            "scatter_mul",
            "scatter_div",
            "scatter_min",
            "scatter_max",
            "scatter_update",
        )
    )
}
UPDATE = Operation(12, "an optimizer's update of", "value", "")
UPDATE_ROWS = Operation(13, "an optimizer's sparse update of", "rows", "")
COUNT = Operation(14, "counting a step in", "", "value")
CONTROL = Operation(15, "", "bytes", "bytes")
LEAVE = Operation(16, "taking leave", "", "")
TICK = Operation(17, "waiting for slower workers", "", "")

OPERATIONS = {
    operation.code: operation
    for operation in (
        READ,
        GATHER,
        ASSIGN,
        ASSIGN_ADD,
        ASSIGN_SUB,
        *SCATTER.values(),
        UPDATE,
        UPDATE_ROWS,
        COUNT,
        CONTROL,
        LEAVE,
        TICK,
    )
}


class Kind(NamedTuple):
    """Shape and dtype of a variable, which both sides know."""

    shape: tuple[int, ...]
    dtype: DType

    def layouts(self, what: str, count: int) -> list[tuple[tuple[int, ...], DType]]:
        """Return shape and dtype of the arrays that ``what`` of an operation stands for."""
        if what == "":
            return []
        if what == "value":
            return [(self.shape, self.dtype)]
        if what == "bytes":
            return [((count,), BYTES)]
        indices = ((count,), INDEX)
        if what == "indices":
            return [indices]
        return [indices, ((count, *self.shape[1:]), self.dtype)]

    def results(self, what: str, count: int) -> list[tuple[tuple[int, ...], DType]]:
        """Return shape and dtype of the array that comes back, if one does; that of bytes is not known before."""
        return self.layouts(what, count)[-1:] if what != "bytes" else []


class Part(NamedTuple):
    """One operation of a request.

    Attributes:
        operation: What to do.
        variable: The server's number of the variable; of the strategy whose steps are counted.
        kind: Of the variable.
        arrays: What the operation takes, contiguous, of exactly the layout.
        length: Number of rows or bytes.
        optimizer: The server's number of the optimizer, for an update.
        step: How many updates there were before this one, as far as the worker knows.
        number: The learning rate of an update; how many steps ahead of the slowest a worker may be.
        name: Of the variable, or what a control request is about, for messages; it does not travel.
    """

    operation: Operation
    variable: int = 0
    kind: Kind = Kind((), BYTES)
    arrays: Sequence[Array] = ()
    length: int = 0
    optimizer: int = 0
    step: int = 0
    number: float = 0.0
    name: str = ""


def nbytes_of(layout: tuple[tuple[int, ...], DType]) -> int:
    """Return the bytes of an array of a shape and dtype.

    >>> nbytes_of(((2, 3), np.dtype("float32")))
    24
    """
    shape, dtype = layout
    count = 1
    for length in shape:
        count *= length
    return count * dtype.itemsize


def pieces_of(array: Array) -> Iterator[Array]:
    """Return the memory of a contiguous array as bytes, in pieces that any MPI can count."""
    flat = array.reshape(-1).view(np.uint8)
    if flat.size <= _MOST_BYTES:
        yield flat
        return
    for start in range(0, flat.size, _MOST_BYTES):
        yield flat[start : start + _MOST_BYTES]
