"""Collectives on flat memory, in rounds that fit into an MPI count."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from itertools import accumulate, chain, pairwise

import numpy as np

from mpidist.arrays.dtypes import Array
from mpidist.collectives.mpi import mpi_types
from mpidist.collectives.mpi.mpi_types import NUMPY_OPS, as_bytes, chunks, mpi_datatype, mpi_op
from mpidist.collectives.mpi.waiting import Comm, Steps, until_done
from mpidist.core.message_tags import PARTS
from mpidist.core.options import ReduceOp
from mpidist.topology import import_mpi

# Up to which it is more about messages than about bytes: of a whole, and of what each of many ranks gives to it.
_FEW_BYTES, _FEW_OF_EACH = 64 << 10, 4 << 10


def agreed_minimum(comm: Comm, value: int) -> Steps[int]:
    """Return the smallest ``value`` of all ranks (MPI_Iallreduce)."""
    mpi = import_mpi()
    mine, least = np.array([value], np.int64), np.empty(1, np.int64)
    yield from until_done(comm.Iallreduce([mine, 1, mpi.INT64_T], [least, 1, mpi.INT64_T], mpi.MIN))
    return int(least[0])


def gather_lengths(comm: Comm, lengths: list[int]) -> Steps[list[list[int]]]:
    """Return the ``lengths`` of every rank (MPI_Iallgather)."""
    mpi = import_mpi()
    mine = np.array(lengths, np.int64)
    everyone = np.empty((comm.Get_size(), mine.size), np.int64)
    yield from until_done(comm.Iallgather([mine, mine.size, mpi.INT64_T], [everyone, mine.size, mpi.INT64_T]))
    return everyone.tolist()


def all_gather_flat(
    comm: Comm, mine: Array, result: Array, counts: list[int], nodes: Sequence[Sequence[int]] | None = None
) -> Steps[None]:
    """Put the flat arrays of all ranks, one after the other, into ``result``.

    MPI_Iallgatherv where there are few bytes. Many go around a ring, which crosses from each node to the next once.

    Args:
        comm: The communicator.
        mine: Flat contiguous array of this rank.
        result: Flat array of sum(counts) elements.
        counts: Elements of every rank.
        nodes: The ranks of each node, which follow one another in the ring; by default that of all ranks in order.
    """
    source, target = as_bytes(mine), as_bytes(result)
    lengths = [count * mine.dtype.itemsize for count in counts]
    if target.size <= min(max(_FEW_BYTES, _FEW_OF_EACH * len(counts)), mpi_types.MAX_COUNT):
        byte = import_mpi().BYTE
        yield from until_done(comm.Iallgatherv([source, source.size, byte], [target, lengths, byte]))
        return
    borders = [0, *accumulate(lengths)]
    parts = [target[start:stop] for start, stop in pairwise(borders)]
    own, order = comm.Get_rank(), [*chain.from_iterable(nodes or [range(len(parts))])]
    parts[own][:] = source
    place = order.index(own)
    after, before = order[(place + 1) % len(order)], order[place - 1]
    for step in range(len(order) - 1):
        given, taken = parts[order[place - step]], parts[order[place - step - 1]]
        yield from _exchange(comm, {before: taken}, {after: given})


def all_gather_bytes(comm: Comm, data: bytes) -> Steps[list[bytes]]:
    """Return the bytes of all ranks, in rank order (MPI_Iallgatherv)."""
    lengths = [length for (length,) in (yield from gather_lengths(comm, [len(data)]))]
    return (yield from _gather_parts(comm, data, lengths))


def gather_bytes_once(comm: Comm, data: bytes) -> Steps[list[bytes]]:
    """Return the bytes of all ranks; equal ones travel once, and are one object."""
    digest = int.from_bytes(blake2b(data, digest_size=8).digest(), "big", signed=True)
    told = yield from gather_lengths(comm, [digest, len(data)])
    firsts: dict[int, int] = {}
    for rank, (digest, _) in enumerate(told):
        firsts.setdefault(digest, rank)
    lengths = [length if firsts[digest] == rank else 0 for rank, (digest, length) in enumerate(told)]
    parts = yield from _gather_parts(comm, data[: lengths[comm.Get_rank()]], lengths)
    return [parts[firsts[digest]] for digest, _ in told]


def _gather_parts(comm: Comm, data: bytes, lengths: list[int]) -> Steps[list[bytes]]:
    whole = np.empty(sum(lengths), np.uint8)
    yield from all_gather_flat(comm, np.frombuffer(data, np.uint8), whole, lengths)
    return [part.tobytes() for part in np.split(whole, np.cumsum(lengths[:-1]))]


def _exchange(comm: Comm, taken: Mapping[int, Array], given: Mapping[int, Array]) -> Steps[None]:
    """Send bytes to ranks while bytes come from ranks (MPI_Irecv, MPI_Isend)."""
    byte, requests = import_mpi().BYTE, []
    for start, parts in ((comm.Irecv, taken), (comm.Isend, given)):
        for rank, part in parts.items():
            requests += [start([part[a:b], b - a, byte], rank, PARTS) for a, b in chunks(part.size)]
    for request in requests:
        yield from until_done(request)


def broadcast_flat(comm: Comm, data: Array, root: int) -> Steps[None]:
    """Copy the flat array ``data`` of ``root`` into that of every rank (MPI_Ibcast)."""
    byte = import_mpi().BYTE
    raw = as_bytes(data)
    for a, b in chunks(raw.size):
        yield from until_done(comm.Ibcast([raw[a:b], b - a, byte], root))


def reduce_to(comm: Comm, send: Array, receive: Array | None, op: ReduceOp, root: int) -> Steps[None]:
    """Reduce flat ``send`` of all ranks into ``receive`` of ``root``; others may pass None."""
    datatype = mpi_datatype(send.dtype)
    for a, b in chunks(send.size):
        target = None if receive is None else [receive[a:b], b - a, datatype]
        yield from until_done(comm.Ireduce([send[a:b], b - a, datatype], target, mpi_op(op, send.dtype), root))


def exchange_lengths(comm: Comm, lengths: Sequence[int], note: int) -> Steps[tuple[list[int], list[int]]]:
    """Return lengths and notes that the ranks tell this one (MPI_Ialltoall).

    It tells each rank one of its lengths, and all of them its note.
    """
    mpi = import_mpi()
    mine = np.array([lengths, [note] * len(lengths)], np.int64).T.copy()
    theirs = np.empty_like(mine)
    yield from until_done(comm.Ialltoall([mine, 2, mpi.INT64_T], [theirs, 2, mpi.INT64_T]))
    told: list[list[int]] = theirs.T.tolist()
    return told[0], told[1]


def exchange_parts(
    comm: Comm, send: Array, borders: Sequence[int], result: Array, lengths: Sequence[int]
) -> Steps[None]:
    """Give each rank its part, and get one from each.

    By MPI_Isend and MPI_Irecv, whose counts are no limit for the whole.

    Args:
        comm: The communicator.
        send: Flat array of bytes.
        borders: Before, between and behind the parts of the ranks.
        result: Flat array of bytes, for what the ranks give, one after the other.
        lengths: Of what each rank gives.
    """
    own, size = comm.Get_rank(), comm.Get_size()
    given = [send[start:stop] for start, stop in pairwise(borders)]
    taken = [result[start:stop] for start, stop in pairwise([0, *accumulate(lengths)])]
    taken[own][:] = given[own]
    # Each begins with another rank: none is sent to by all at once.
    others = [(own + distance) % size for distance in range(1, size)]
    yield from _exchange(comm, {rank: taken[rank] for rank in reversed(others)}, {rank: given[rank] for rank in others})


def reduce_scatter_rows(comm: Comm, send: Array, result: Array, borders: Sequence[int], op: ReduceOp) -> Steps[None]:
    """Put this rank's elements of the reduction of ``send`` into ``result``.

    MPI_Ireduce_scatter where there are few elements: it sends few messages. Of many it sends several times as much as
    is needed: then each rank gets its own from all others at once, and combines them in the order of ranks.

    Args:
        comm: The communicator.
        send: Flat array.
        result: Flat array of this rank's elements.
        borders: Before, between and behind the elements of the ranks.
        op: The operation.
    """
    if send.nbytes <= _FEW_BYTES and send.size <= mpi_types.MAX_COUNT:
        datatype, operation = mpi_datatype(send.dtype), mpi_op(op, send.dtype)
        counts = tuple([stop - start for start, stop in pairwise(borders)])
        request = comm.Ireduce_scatter([send, send.size, datatype], [result, result.size, datatype], counts, operation)
        yield from until_done(request)
        return
    parts = np.empty((comm.Get_size(), result.size), send.dtype)
    byte_borders = [border * send.itemsize for border in borders]
    yield from exchange_parts(comm, as_bytes(send), byte_borders, as_bytes(parts), [result.nbytes] * len(parts))
    result[...] = parts[0]
    for part in parts[1:]:
        NUMPY_OPS[op](result, part, out=result)
