"""Post: byte strings of any length between two ranks, one after the other in each direction, without blocking."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import numpy as np

from mpidist.collectives.mpi.waiting import Steps, all_done
from mpidist.parameter_server.messages import FIRST_MESSAGE_BYTES, pieces_of, receives_of
from mpidist.topology import import_mpi

if TYPE_CHECKING:
    from mpi4py import MPI

_LENGTH = struct.Struct("=q")
_INLINE_BYTES = FIRST_MESSAGE_BYTES - _LENGTH.size


class Post:
    """What goes to another rank with one tag, and comes from it with another.

    Args:
        comm: The communicator.
        other: The rank at the other end.
        tag_out, tag_in: Of what is sent and received.

    Attributes:
        expected: The request of the first part of what comes next; others may poll it together with their own.
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
        """Be ready for what comes next; needed before :attr:`expected` is polled."""
        self.expected.Start()

    def send(self, data: bytes) -> Steps[None]:
        """Send ``data``, after what was sent before."""
        while not all_done(self._sending):
            yield
        first = self._first_out
        _LENGTH.pack_into(first, 0, len(data))
        end = _LENGTH.size + min(len(data), _INLINE_BYTES)
        first[_LENGTH.size : end] = data[:_INLINE_BYTES]
        self._sending.append(self._comm.Isend([memoryview(first)[:end], self._byte], self._other, self._tag_out))
        rest = np.frombuffer(data, np.uint8)[_INLINE_BYTES:]
        if rest.size:
            self._sending += [
                self._comm.Isend([piece, self._byte], self._other, self._tag_out) for piece in pieces_of(rest)
            ]
            while not all_done(self._sending):
                yield

    def receive(self) -> Steps[bytes]:
        """Return what has come, once :attr:`expected` is complete."""
        (length,) = _LENGTH.unpack_from(self._first_in)
        if length <= _INLINE_BYTES:
            return bytes(memoryview(self._first_in)[_LENGTH.size : _LENGTH.size + length])
        data = np.empty(length, np.uint8)
        data[:_INLINE_BYTES] = np.frombuffer(self._first_in, np.uint8)[_LENGTH.size :]
        rest = data[_INLINE_BYTES:]
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
