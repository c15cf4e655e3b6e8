"""Between nodes, every rank with every other, which sums one segment.

Each sends its part of a segment to the rank that sums that segment. As many bytes as the ring, in two steps. A segment
is summed in one place and in the order of the nodes, so the bits do not depend on where in a message an element
travels; and each contribution crosses the wire once, so with a 16-bit wire it is rounded once, and the sum once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mpidist.arrays.dtypes import Array, DType
from mpidist.collectives.mpi.mpi_types import NUMPY_OPS, message, tag_of
from mpidist.collectives.mpi.waiting import Steps, until_all_done
from mpidist.collectives.node.chunks import slices
from mpidist.collectives.reduce.registry import AlgorithmEntry, wire_algorithms
from mpidist.core.enums import ReduceOp

if TYPE_CHECKING:
    from mpi4py import MPI


class Pairwise:
    """An all-reduce in which every rank exchanges with every other.

    Args:
        comm: The communicator.
        ranks: The ranks, in it.
        position: Of this rank among them.
        wire_dtype: Dtype in which sums of float32 cross the wire; None for their own.
    """

    def __init__(self, comm: MPI.Intracomm, ranks: list[int], position: int, wire_dtype: DType | None = None) -> None:
        self._comm = comm
        self._ranks = ranks
        self._position = position
        self._others = [other for other in range(len(ranks)) if other != position]
        self._wire_dtype = wire_dtype

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
        yield from self._exchange(sent, received, chunk)
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
        yield from self._exchange([sums] * len(parts), everyone, chunk)
        if wire != flat.dtype:
            for part, values in zip(parts, everyone, strict=True):
                part[:] = values

    def _dtype_on_wire(self, dtype: DType, op: ReduceOp) -> DType:
        rounds = self._wire_dtype is not None and dtype == np.float32 and op in (ReduceOp.SUM, ReduceOp.MEAN)
        return self._wire_dtype if rounds and self._wire_dtype is not None else dtype

    def _exchange(self, send: list[Array], receive: list[Array], chunk: int) -> Steps[None]:
        """Send each other rank its array of ``send``, and receive into ``receive``."""
        tag, comm, ranks = tag_of(chunk), self._comm, self._ranks
        requests = [comm.Irecv(message(receive[other]), ranks[other], tag) for other in self._others]
        requests += [comm.Isend(message(send[other]), ranks[other], tag) for other in self._others]
        yield from until_all_done(requests)


wire_algorithms.register(
    AlgorithmEntry("pairwise", Pairwise, ("between_nodes",), ("several_nodes",), is_ordered=True, rounds=True)
)
