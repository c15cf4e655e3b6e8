"""Between nodes, for many of them: halving, then doubling, in 2 ceil(log2(n)) steps.

There may be any number of nodes. Each step of the first half sends the sums of the farther half of the segments that a
rank still has to the rank that is to have them, until each has the sum of its own segment; the second half goes the
same way back. As many bytes as the ring. On a power of two the partners are as far apart as in recursive halving.
(Träff, arXiv 2410.14234)
"""

from __future__ import annotations

import numpy as np

from mpidist.arrays.dtypes import Array
from mpidist.collectives.mpi.mpi_types import NUMPY_OPS
from mpidist.collectives.mpi.waiting import Steps
from mpidist.collectives.reduce.cost_model import Round
from mpidist.collectives.reduce.registry import AlgorithmEntry, Rail, wire_algorithms
from mpidist.core.options import ReduceOp


class HalvingDoubling(Rail):
    """An all-reduce over ranks of any number."""

    def all_reduce(self, source: Array, flat: Array, op: ReduceOp, chunk: int, residual: Array | None) -> Steps[None]:
        """See ``Wire``."""
        n, me, combine = len(self._ranks), self._position, NUMPY_OPS[op]
        length, more = divmod(flat.size, n)

        def border(segment: int) -> int:
            """Return where a segment begins, of those that follow one another round and round."""
            rounds, number = divmod(segment, n)
            return rounds * flat.size + number * length + min(number, more)

        # This rank's segment is the first, so that all that is sent lies side by side.
        first = border(me)
        starts = {
            segments: border(me + segments) - first for step in halved(n) for segments in (*step, step[1] - step[0])
        }
        turned = np.concatenate((source[first:], source[:first]))
        received = np.empty_like(turned[: starts[n // 2]])
        for kept, had in halved(n):
            part = received[: starts[had - kept]]
            yield from self._exchange(
                {(me - kept) % n: part}, {(me + kept) % n: turned[starts[kept] : starts[had]]}, chunk
            )
            combine(turned[: part.size], part, out=turned[: part.size])
        for kept, had in reversed(halved(n)):
            there, back = turned[starts[kept] : starts[had]], turned[: starts[had - kept]]
            yield from self._exchange({(me + kept) % n: there}, {(me - kept) % n: back}, chunk)
        flat[first:], flat[:first] = turned[: flat.size - first], turned[flat.size - first :]


def halved(nodes: int) -> list[tuple[int, int]]:
    """Return of each step how many segments a rank keeps, and how many it had.

    >>> halved(5)
    [(3, 5), (2, 3), (1, 2)]
    """
    steps = []
    while nodes > 1:
        steps.append(((nodes + 1) // 2, nodes))
        nodes = (nodes + 1) // 2
    return steps


def halving_doubling_rounds(nodes: int, count: int) -> list[Round]:
    """Return its rounds: each half as large as the one before."""
    length, more = divmod(count, nodes)
    sent = [(kept, (had - kept) * length + min(had - kept, more)) for kept, had in halved(nodes)]
    there = [Round(1, 1, elements, elements, is_far=kept > 1) for kept, elements in sent]
    return there + [each._replace(reduced=0) for each in reversed(there)]


wire_algorithms.register(
    AlgorithmEntry("halving_doubling", HalvingDoubling, ("between_nodes",), cost=halving_doubling_rounds)
)
