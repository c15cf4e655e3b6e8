"""Between nodes: the ring. Every rank sends to the next and receives from the one before, one segment at a time.

In n - 1 steps each rank gets the sum of one segment, in n - 1 more everybody gets all of them: 2 (n - 1) / n of the
bytes leave each rank, which is the least there is. (Patarasuk and Yuan, doi:10.1016/j.jpdc.2008.09.002)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mpidist.arrays.dtypes import Array
from mpidist.collectives.mpi.mpi_types import NUMPY_OPS, message, tag_of
from mpidist.collectives.mpi.waiting import Steps, until_all_done
from mpidist.collectives.node.chunks import slices
from mpidist.collectives.reduce.registry import AlgorithmEntry, wire_algorithms
from mpidist.core.enums import ReduceOp

if TYPE_CHECKING:
    from mpi4py import MPI


class Ring:
    """An all-reduce over a ring of ranks.

    Args:
        comm: The communicator.
        ranks: The ranks of the ring, in it.
        position: Of this rank among them.
    """

    def __init__(self, comm: MPI.Intracomm, ranks: list[int], position: int) -> None:
        self._comm = comm
        self._size, self._position = len(ranks), position
        self._next = ranks[(position + 1) % len(ranks)]
        self._previous = ranks[position - 1]

    def all_reduce(self, source: Array, flat: Array, op: ReduceOp, chunk: int, residual: Array | None) -> Steps[None]:
        """See ``Wire``."""
        n, combine = self._size, NUMPY_OPS[op]
        borders = slices(flat.size, n)
        inputs, segments = [source[a:b] for a, b in borders], [flat[a:b] for a, b in borders]
        received = np.empty(segments[0].size, flat.dtype)
        for step in range(n - 1):
            mine, theirs = (self._position - step) % n, (self._position - step - 1) % n
            part = received[: segments[theirs].size]
            yield from self._exchange(segments[mine] if step else inputs[mine], part, chunk)
            combine(inputs[theirs], part, out=segments[theirs])
        for step in range(n - 1):
            mine, theirs = (self._position + 1 - step) % n, (self._position - step) % n
            yield from self._exchange(segments[mine], segments[theirs], chunk)

    def _exchange(self, send: Array, receive: Array, chunk: int) -> Steps[None]:
        tag = tag_of(chunk)
        yield from until_all_done(
            [
                self._comm.Irecv(message(receive), self._previous, tag),
                self._comm.Isend(message(send), self._next, tag),
            ]
        )


wire_algorithms.register(AlgorithmEntry("ring", Ring, ("between_nodes",), ("several_nodes",)))
