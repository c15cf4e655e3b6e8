"""Between nodes, for middle sizes: recursive halving, then recursive doubling, in 2 log2(n) steps.

Partners at half the distance each time exchange halves of the part that they still have to reduce, then the same way
back the sums. Ranks beyond a power of two hand their input to a partner first and get the result from it last.
(Thakur, Rabenseifner and Gropp, doi:10.1177/1094342005051521)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mpidist.arrays.dtypes import Array
from mpidist.collectives.mpi.mpi_types import NUMPY_OPS, message, tag_of
from mpidist.collectives.mpi.waiting import Steps, until_all_done
from mpidist.collectives.reduce.registry import AlgorithmEntry, wire_algorithms
from mpidist.core.enums import ReduceOp

if TYPE_CHECKING:
    from mpi4py import MPI


class HalvingDoubling:
    """An all-reduce over ranks of any number.

    Args:
        comm: The communicator.
        ranks: The ranks, in it.
        position: Of this rank among them.
    """

    def __init__(self, comm: MPI.Intracomm, ranks: list[int], position: int) -> None:
        self._comm = comm
        self._ranks = ranks
        self._position = position
        self._power = 1 << (len(ranks).bit_length() - 1)
        self._extra = len(ranks) - self._power

    def all_reduce(self, source: Array, flat: Array, op: ReduceOp, chunk: int, residual: Array | None) -> Steps[None]:
        """See ``Wire``."""
        me, tag = self._position, tag_of(chunk)
        if source is not flat:
            flat[:] = source
        if me >= self._power:
            partner = self._ranks[me - self._power]
            yield from until_all_done([self._comm.Isend(message(flat), partner, tag)])
            yield from until_all_done([self._comm.Irecv(message(flat), partner, tag)])
            return
        received = np.empty(flat.size if me < self._extra else (flat.size + 1) // 2, flat.dtype)
        if me < self._extra:
            partner = self._ranks[me + self._power]
            yield from until_all_done([self._comm.Irecv(message(received), partner, tag)])
            # In the order of the ranks, though it is the same: addition commutes.
            NUMPY_OPS[op](flat, received, out=flat)
        kept = yield from self._halve(flat, received, op, tag)
        yield from self._double(flat, kept, tag)
        if me < self._extra:
            yield from until_all_done([self._comm.Isend(message(flat), self._ranks[me + self._power], tag)])

    def _halve(self, flat: Array, received: Array, op: ReduceOp, tag: int) -> Steps[list[tuple[int, int, int]]]:
        """Reduce ever smaller parts; return the borders of each and where it was cut."""
        start, stop, steps = 0, flat.size, []
        distance = self._power // 2
        while distance:
            middle = (start + stop) // 2
            steps.append((start, middle, stop))
            if self._position & distance:
                (start, stop), (a, b) = (middle, stop), (start, middle)
            else:
                (start, stop), (a, b) = (start, middle), (middle, stop)
            part = received[: stop - start]
            yield from self._exchange(self._position ^ distance, flat[a:b], part, tag)
            NUMPY_OPS[op](flat[start:stop], part, out=flat[start:stop])
            distance //= 2
        return steps

    def _double(self, flat: Array, steps: list[tuple[int, int, int]], tag: int) -> Steps[None]:
        distance = 1
        for start, middle, stop in reversed(steps):
            low, high = flat[start:middle], flat[middle:stop]
            mine, theirs = (high, low) if self._position & distance else (low, high)
            yield from self._exchange(self._position ^ distance, mine, theirs, tag)
            distance *= 2

    def _exchange(self, partner: int, send: Array, receive: Array, tag: int) -> Steps[None]:
        rank = self._ranks[partner]
        yield from until_all_done(
            [self._comm.Irecv(message(receive), rank, tag), self._comm.Isend(message(send), rank, tag)]
        )


wire_algorithms.register(AlgorithmEntry("halving_doubling", HalvingDoubling, ("between_nodes",), ("several_nodes",)))
