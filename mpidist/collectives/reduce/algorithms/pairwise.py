"""Between nodes, every rank with every other, which sums one segment.

Each sends its part of a segment to the rank that sums that segment. As many bytes as the ring, in two steps. A segment
is summed in one place and in the order of the nodes, so the bits do not depend on where in a message an element
travels; and each contribution crosses the wire once, so with a 16-bit wire it is rounded once, and the sum once.
"""

from __future__ import annotations

import numpy as np

from mpidist.arrays.dtypes import Array, DType
from mpidist.collectives.mpi.mpi_types import NUMPY_OPS
from mpidist.collectives.mpi.waiting import Steps
from mpidist.collectives.node.memory import slices
from mpidist.collectives.reduce.cost_model import Round
from mpidist.collectives.reduce.registry import AlgorithmEntry, Rail, wire_algorithms
from mpidist.core.options import ReduceOp


class Pairwise(Rail):
    """An all-reduce in which every rank exchanges with every other."""

    def all_reduce(self, source: Array, flat: Array, op: ReduceOp, chunk: int, residual: Array | None) -> Steps[None]:
        """See ``Wire``."""
        me = self._position
        borders = slices(flat.size, len(self._ranks))
        wire = self._dtype_on_wire(flat.dtype, op)
        residual = None if wire == flat.dtype else residual
        if residual is not None:
            np.add(source, residual, out=flat)
            source = flat
        inputs = [source[a:b] for a, b in borders]
        parts = [flat[a:b] for a, b in borders]
        mine = inputs[me].copy()
        sent = [part if other == me else part.astype(wire, copy=False) for other, part in enumerate(inputs)]
        if residual is not None:
            np.subtract(source, np.concatenate([part.astype(flat.dtype, copy=False) for part in sent]), out=residual)
        received = [np.empty(mine.size, wire) for _ in parts]
        received[me] = mine
        yield from self._exchange(dict(enumerate(received)), dict(enumerate(sent)), chunk)
        total = parts[me]
        total[:] = received[0]
        for contribution in received[1:]:
            NUMPY_OPS[op](total, contribution.astype(flat.dtype, copy=False), out=total)
        sums = total.astype(wire, copy=False)
        everyone = parts
        if wire != flat.dtype:
            everyone = [sums if other == me else np.empty(part.size, wire) for other, part in enumerate(parts)]
        if residual is not None:
            # What rounding the sum loses is made good by this rank's next contribution to it.
            residual[slice(*borders[me])] += total - sums.astype(flat.dtype, copy=False)
            # What overflowed is lost for good; the next steps shall not suffer from it.
            residual[~np.isfinite(residual)] = 0
        yield from self._exchange(dict(enumerate(everyone)), dict.fromkeys(range(len(parts)), sums), chunk)
        if wire != flat.dtype:
            for part, values in zip(parts, everyone, strict=True):
                part[:] = values

    def _dtype_on_wire(self, dtype: DType, op: ReduceOp) -> DType:
        rounds = dtype == np.float32 and op in (ReduceOp.SUM, ReduceOp.MEAN)
        return self._wire_dtype if rounds and self._wire_dtype is not None else dtype


def pairwise_rounds(nodes: int, count: int) -> list[Round]:
    """Return its rounds: two, but with a message to each other node."""
    others = (nodes - 1) * -(-count // nodes)
    return [
        Round(1, nodes - 1, others, others, is_far=nodes > 2),
        Round(1, nodes - 1, others, 0, is_far=nodes > 2),
    ]


wire_algorithms.register(
    AlgorithmEntry("pairwise", Pairwise, ("between_nodes",), is_ordered=True, rounds=True, cost=pairwise_rounds)
)
