"""Between nodes: the ring. Every rank sends to the next and receives from the one before, one segment at a time.

In n - 1 steps each rank gets the sum of one segment, in n - 1 more everybody gets all of them: 2 (n - 1) / n of the
bytes leave each rank, which is the least there is. (Patarasuk and Yuan, doi:10.1016/j.jpdc.2008.09.002)
"""

from __future__ import annotations

import numpy as np

from mpidist.arrays.dtypes import Array
from mpidist.collectives.mpi.mpi_types import NUMPY_OPS
from mpidist.collectives.mpi.waiting import Steps
from mpidist.collectives.node.memory import slices
from mpidist.collectives.reduce.cost_model import Round
from mpidist.collectives.reduce.registry import AlgorithmEntry, Rail, wire_algorithms
from mpidist.core.options import ReduceOp


class Ring(Rail):
    """An all-reduce over a ring of ranks."""

    def all_reduce(self, source: Array, flat: Array, op: ReduceOp, chunk: int, residual: Array | None) -> Steps[None]:
        """See ``Wire``."""
        n, me, combine = len(self._ranks), self._position, NUMPY_OPS[op]
        before, after = (me - 1) % n, (me + 1) % n
        borders = slices(flat.size, n)
        inputs, segments = [source[a:b] for a, b in borders], [flat[a:b] for a, b in borders]
        received = np.empty(segments[0].size, flat.dtype)
        for step in range(n - 1):
            mine, theirs = (me - step) % n, (me - step - 1) % n
            part = received[: segments[theirs].size]
            yield from self._exchange({before: part}, {after: segments[mine] if step else inputs[mine]}, chunk)
            combine(inputs[theirs], part, out=segments[theirs])
        for step in range(n - 1):
            mine, theirs = (me + 1 - step) % n, (me - step) % n
            yield from self._exchange({before: segments[theirs]}, {after: segments[mine]}, chunk)


def ring_rounds(nodes: int, count: int) -> list[Round]:
    """Return its rounds: as many as there are nodes, so that it is for few."""
    segment = -(-count // nodes)
    return [
        Round(nodes - 1, 1, segment, segment, is_far=False),
        Round(nodes - 1, 1, segment, 0, is_far=False),
    ]


wire_algorithms.register(AlgorithmEntry("ring", Ring, ("between_nodes",), cost=ring_rounds))
