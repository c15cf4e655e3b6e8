"""Exchange between ranks by MPI: arrays, pickled objects, shared errors, and small messages.

The functions are generators (see ``waiting``), which never block in MPI.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from io import BytesIO
from itertools import accumulate, chain, pairwise
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from mpidist.arrays.dtypes import Array
from mpidist.collectives.mpi import mpi_types
from mpidist.collectives.mpi.mpi_types import NUMPY_OPS, as_bytes, chunks, message, mpi_datatype, mpi_op
from mpidist.collectives.mpi.waiting import Comm, Steps, all_done, until_done
from mpidist.core.concurrency import Deadline, wait_until
from mpidist.core.errors import AlgorithmError, CollectiveTimeoutError, MismatchError, PeerError, shared_error
from mpidist.core.message_tags import PARTS
from mpidist.core.options import ReduceOp
from mpidist.topology import import_mpi
from mpidist.topology.exit import says_rank_is_lost
from mpidist.topology.start import finish

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")
E = TypeVar("E", bound=BaseException)

# Below this, latency costs more than bandwidth: bytes in all, and per rank in a job of many ranks.
_FEW_BYTES, _FEW_BYTES_PER_RANK = 64 << 10, 4 << 10
_NAPS_SECONDS = (1e-5, 1e-3)

COMMON_ERRORS = (AlgorithmError, MismatchError, PeerError, CollectiveTimeoutError)
"""Errors that all ranks raise together, or after which the channel has failed anyway."""
# Attribute of other errors that all ranks of a communicator raise.
_IS_COMMON = "_mpidist_is_common"


# Flat arrays --------------------------------------------------------------------------------------------------------


def agreed_minimum(comm: Comm, value: int) -> Steps[int]:
    """Return the smallest ``value`` of all ranks (MPI_Iallreduce)."""
    mpi, least = import_mpi(), np.array([value], np.int64)
    yield from until_done(comm.Iallreduce(mpi.IN_PLACE, least, mpi.MIN))
    return int(least[0])


def gather_lengths(comm: Comm, lengths: list[int]) -> Steps[list[list[int]]]:
    """Return the ``lengths`` of every rank (MPI_Iallgather)."""
    everyone = np.empty((comm.Get_size(), len(lengths)), np.int64)
    yield from until_done(comm.Iallgather(np.array(lengths, np.int64), everyone))
    return everyone.tolist()


def exchange_words(comm: Comm, words: list[list[int]]) -> Steps[list[list[int]]]:
    """Send each rank its integer of each list. Return the received integers by rank (MPI_Ialltoall)."""
    mine = np.array(words, np.int64).T.copy()
    theirs = np.empty_like(mine)
    yield from until_done(comm.Ialltoall(mine, theirs))
    return theirs.T.tolist()  # type: ignore[no-any-return]


def all_gather_flat(
    comm: Comm, mine: Array, result: Array, counts: list[int], nodes: Sequence[Sequence[int]] | None = None
) -> Steps[None]:
    """Concatenate the flat arrays of all ranks in ``result``.

    Small arrays use MPI_Iallgatherv, large ones a ring. If ``nodes`` lists the ranks of each node, the ring enters each
    node once. Otherwise it follows the order of ranks.
    """
    source, target = as_bytes(mine), as_bytes(result)
    lengths = [count * mine.dtype.itemsize for count in counts]
    if target.size <= min(max(_FEW_BYTES, _FEW_BYTES_PER_RANK * len(counts)), mpi_types.MAX_COUNT):
        yield from until_done(comm.Iallgatherv(source, [target, lengths]))
        return
    borders = [0, *accumulate(lengths)]
    parts = [target[start:stop] for start, stop in pairwise(borders)]
    own, order = comm.Get_rank(), [*chain.from_iterable(nodes or [range(len(parts))])]
    parts[own][:] = source
    place = order.index(own)
    after, before = order[(place + 1) % len(order)], order[place - 1]
    for step in range(len(order) - 1):
        sent, received = parts[order[place - step]], parts[order[place - step - 1]]
        yield from _exchange(comm, {before: received}, {after: sent})


def _exchange(comm: Comm, received: Mapping[int, Array], sent: Mapping[int, Array]) -> Steps[None]:
    """Receive bytes from ranks, and send bytes to ranks (MPI_Irecv, MPI_Isend)."""
    requests = [comm.Irecv(message(part), rank, PARTS) for rank, part in received.items() if part.size]
    requests += [comm.Isend(message(part), rank, PARTS) for rank, part in sent.items() if part.size]
    for request in requests:
        yield from until_done(request)


def broadcast_flat(comm: Comm, data: Array, root: int) -> Steps[None]:
    """Copy the flat array ``data`` of ``root`` to every rank (MPI_Ibcast)."""
    yield from until_done(comm.Ibcast(message(data), root))


def reduce_to(comm: Comm, send: Array, receive: Array | None, op: ReduceOp, root: int) -> Steps[None]:
    """Reduce flat ``send`` of all ranks into ``receive`` of ``root``. Other ranks may pass None."""
    datatype = mpi_datatype(send.dtype)
    for a, b in chunks(send.size):
        target = None if receive is None else [receive[a:b], b - a, datatype]
        yield from until_done(comm.Ireduce([send[a:b], b - a, datatype], target, mpi_op(op, send.dtype), root))


def exchange_parts(
    comm: Comm, send: Array, borders: Sequence[int], result: Array, lengths: Sequence[int]
) -> Steps[None]:
    """Send each rank its part of the bytes, and concatenate the received parts in ``result``.

    ``borders`` delimits the parts in ``send``. ``lengths``: bytes of the received parts.
    """
    # MPI_Ialltoallv would limit the size of the whole by its counts.
    own, size = comm.Get_rank(), comm.Get_size()
    sent = [send[start:stop] for start, stop in pairwise(borders)]
    received = [result[start:stop] for start, stop in pairwise([0, *accumulate(lengths)])]
    received[own][:] = sent[own]
    # Each rank starts with another peer, so that no rank receives from all at once.
    others = [(own + distance) % size for distance in range(1, size)]
    incoming = {rank: received[rank] for rank in reversed(others)}
    yield from _exchange(comm, incoming, {rank: sent[rank] for rank in others})


def reduce_scatter_rows(comm: Comm, send: Array, result: Array, borders: Sequence[int], op: ReduceOp) -> Steps[None]:
    """Reduce flat ``send`` of all ranks. Store this rank's elements in ``result``.

    ``borders`` delimits the elements of each rank. Small arrays use MPI_Ireduce_scatter, which sends few messages but
    more bytes than needed. For large ones each rank receives its part from all others, and combines them in rank order.
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


# Pickled objects, for metadata only ---------------------------------------------------------------------------------


def gather_objects(comm: Comm, value: T) -> Steps[list[T]]:
    """Return the objects of all ranks. Equal ones are sent once, and are one object."""
    data = pickle.dumps(value)
    digest = int.from_bytes(blake2b(data, digest_size=8).digest(), "big", signed=True)
    headers = yield from gather_lengths(comm, [digest, len(data)])
    firsts: dict[int, int] = {}
    for rank, (digest, _) in enumerate(headers):
        firsts.setdefault(digest, rank)
    lengths = [length if firsts[digest] == rank else 0 for rank, (digest, length) in enumerate(headers)]
    whole = np.empty(sum(lengths), np.uint8)
    yield from all_gather_flat(comm, np.frombuffer(data, np.uint8)[: lengths[comm.Get_rank()]], whole, lengths)
    stream = BytesIO(whole.data)
    objects = {digest: pickle.load(stream) for digest in firsts}
    return [objects[digest] for digest, _ in headers]


def broadcast_pickle(comm: Comm, pickled: bytes, root: int) -> Steps[Any]:
    """Return the object that ``root`` has pickled, on every rank."""
    length = np.array([len(pickled)])
    yield from broadcast_flat(comm, length, root)
    data = np.frombuffer(pickled, np.uint8).copy() if comm.Get_rank() == root else np.empty(length[0], np.uint8)
    yield from broadcast_flat(comm, data, root)
    return pickle.loads(data.data)


# Errors of all ranks ------------------------------------------------------------------------------------------------


def as_common(error: E, prints: bool) -> E:
    """Mark an error that all ranks raise, and return it. ``prints``: this rank prints it."""
    setattr(error, _IS_COMMON, True)
    return shared_error(error, prints)


def is_common(error: BaseException) -> bool:
    """Return whether all ranks raise this error in the current collective."""
    return isinstance(error, COMMON_ERRORS) or hasattr(error, _IS_COMMON)


def all_do(comm: Comm, work: Callable[[], T], error: Callable[[int, str], Exception]) -> Steps[T]:
    """Run ``work`` on every rank. Return its result, or raise on all ranks if one fails (collective).

    ``error`` builds the exception from the first failed rank and the text of its error.
    """
    failure, result = None, None
    try:
        result = work()
    except Exception as caught:  # the other ranks wait for this one
        failure = caught
    problems = yield from problems_of(comm, None if failure is None else f"{type(failure).__name__}: {failure}")
    for rank, text in problems.items():
        raise as_common(error(rank, text), prints=comm.Get_rank() in (0, rank)) from failure
    return result  # type: ignore[return-value]  # only None if work returns it


def first_does(comm: Comm, work: Callable[[], T]) -> Steps[T]:
    """Run ``work`` on rank 0. Return its result, or raise its error, on all ranks (collective)."""
    pickled = b""
    if comm.Get_rank() == 0:
        try:
            pickled = pickle.dumps((work(), None))
        except Exception as error:  # the other ranks wait for this one
            pickled = _pickled(error)
    result, failure = yield from broadcast_pickle(comm, pickled, 0)
    if failure is not None:
        raise as_common(failure, prints=comm.Get_rank() == 0)
    return result  # type: ignore[no-any-return]


def _pickled(error: Exception) -> bytes:
    """Pickle an error, or its text if the error cannot be restored."""
    try:
        pickled = pickle.dumps((None, error))
        pickle.loads(pickled)
    except Exception:
        return pickle.dumps((None, RuntimeError(f"{type(error).__name__}: {error}")))
    return pickled


def problems_of(comm: Comm, problem: T | None) -> Steps[dict[int, T]]:
    """Return the problems of all ranks by rank, without None (collective)."""
    everyone: list[T | None] = yield from gather_objects(comm, problem)
    return {rank: theirs for rank, theirs in enumerate(everyone) if theirs is not None}


# Small messages -----------------------------------------------------------------------------------------------------


class MessageCount:
    """Number of messages sent to each rank, and received. Not thread-safe."""

    def __init__(self) -> None:
        self.sent: Counter[int] = Counter()
        self.received = 0


def drain(comm: MPI.Intracomm, counts: Sequence[MessageCount], doing: str) -> list[tuple[int, int]]:
    """Receive and drop messages in flight before ``comm`` is freed (collective).

    No rank may send any more. ``counts`` are all counts of messages on ``comm``, and ``doing`` is the purpose, for the
    report of a long wait. Returns source and tag of each dropped message.
    """
    # Open MPI reuses the number of a freed communicator. A late message would count as the first message of the next
    # one, and all later ones would wait forever.
    mpi, rank = import_mpi(), comm.Get_rank()
    most_sent = np.array([sum(sum(count.sent.values()) for count in counts)])
    finish(comm.Iallreduce(mpi.IN_PLACE, most_sent, mpi.MAX), comm, doing)
    if not most_sent[0]:
        return []
    sent, expected = np.zeros(comm.Get_size(), np.int64), np.zeros(1, np.int64)
    for count in counts:
        for dest, number in count.sent.items():
            sent[dest] += number
    finish(comm.Ireduce_scatter_block(sent, expected), comm, doing)
    missing = int(expected[0]) - sum(count.received for count in counts)
    dropped: list[tuple[int, int]] = []
    status = mpi.Status()

    def are_all_received() -> bool:
        while len(dropped) < missing and (arrived := comm.Improbe(status=status)) is not None:
            arrived.Recv([np.empty(status.Get_count(mpi.BYTE), np.uint8), mpi.BYTE])
            dropped.append((status.Get_source(), status.Get_tag()))
        return len(dropped) >= missing

    deadline = Deadline(None, lambda waited: CollectiveTimeoutError(doing, 0, waited, rank))
    wait_until(are_all_received, deadline, *_NAPS_SECONDS)
    return dropped


class Mailbox:
    """Pickled messages of at most a few KiB. No method waits.

    If a rank fails, ``on_loss`` receives MPI's error. Without ``on_loss`` the method raises it.
    """

    def __init__(self, comm: MPI.Intracomm, tag: int, on_loss: Callable[[Exception], object] | None = None) -> None:
        self._comm, self._tag, self._on_loss = comm, tag, on_loss
        self.count = MessageCount()
        self._sending: list[MPI.Request] = []

    def send(self, rank: int, content: object) -> None:
        """Start to send a message (MPI_Isend)."""
        self._unless_lost(lambda: self._send(rank, content), None)

    def received(self) -> Iterator[tuple[int, Any]]:
        """Yield source and content of each message that has arrived."""
        while (arrived := self._unless_lost(self._next, None)) is not None:
            yield arrived

    def all_sent(self) -> bool:
        """Return whether all messages have been sent, or cannot be sent any more."""
        return self._unless_lost(lambda: all_done(self._sending), True)

    def _send(self, rank: int, content: object) -> None:
        self._sending.append(self._comm.isend(content, rank, self._tag))
        self.count.sent[rank] += 1

    def _next(self) -> tuple[int, Any] | None:
        status = import_mpi().Status()
        if not self._comm.iprobe(tag=self._tag, status=status):
            return None
        content = self._comm.recv(source=status.Get_source(), tag=self._tag)
        self.count.received += 1
        return status.Get_source(), content

    def _unless_lost(self, call: Callable[[], T], otherwise: T) -> T:
        try:
            return call()
        except import_mpi().Exception as error:
            if self._on_loss is None or not says_rank_is_lost(error):
                raise
            self._on_loss(error)
            return otherwise
