"""Between nodes, every rank with every other: each sends its part of a segment to the rank that sums that segment.

As many bytes as the ring, in two steps. A segment is summed in one place and in the order of the nodes, so the bits do
not depend on where in a message an element travels; and each contribution crosses the wire once, so with a 16-bit wire
it is rounded once, and the sum once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mpidist.arrays.convert import Array
from mpidist.arrays.dtypes import DType
from mpidist.collectives.chunks import slices
from mpidist.collectives.mpi_types import message, numpy_op, tag_of
from mpidist.collectives.waiting import Steps, until_all_done
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

    def all_reduce(self, flat: Array, op: ReduceOp, chunk: int, residual: Array | None) -> Steps[None]:
        """See ``Wire``."""
        me = self._position
        borders = slices(flat.size, len(self._ranks))
        wire = self._dtype_on_wire(flat.dtype, op)
        sent = _rounded(flat, wire, residual)
        start, stop = borders[me]
        received = np.empty((len(self._ranks), stop - start), wire)
        received[me] = sent[start:stop]
        yield from self._exchange([sent[a:b] for a, b in borders], list(received), chunk)
        total = flat[start:stop]
        total[:] = received[0]
        for contribution in received[1:]:
            numpy_op(op)(total, contribution.astype(flat.dtype, copy=False), out=total)
        # What rounding the sum loses is made good by this rank's next contribution.
        sums = _rounded(total, wire, None)
        if residual is not None:
            residual[start:stop] += total - sums
        everyone = flat if wire == flat.dtype else np.empty(flat.size, wire)
        everyone[start:stop] = sums
        parts = [everyone[a:b] for a, b in borders]
        yield from self._exchange([parts[me]] * len(parts), parts, chunk)
        if everyone is not flat:
            flat[:] = everyone

    def _dtype_on_wire(self, dtype: DType, op: ReduceOp) -> DType:
        rounds = self._wire_dtype is not None and dtype == np.float32 and op in (ReduceOp.SUM, ReduceOp.MEAN)
        return self._wire_dtype if rounds and self._wire_dtype is not None else dtype

    def _exchange(self, send: list[Array], receive: list[Array], chunk: int) -> Steps[None]:
        """Send each other rank its array of ``send``, and receive from it into its array of ``receive``."""
        tag, comm, ranks = tag_of(chunk), self._comm, self._ranks
        requests = [comm.Irecv(message(receive[other]), ranks[other], tag) for other in self._others]
        requests += [comm.Isend(message(send[other]), ranks[other], tag) for other in self._others]
        yield from until_all_done(requests)


def _rounded(values: Array, dtype: DType, residual: Array | None) -> Array:
    """Return ``values`` in ``dtype``; ``residual`` is added before, and receives what rounding loses."""
    if dtype == values.dtype:
        return values
    if residual is None:
        return values.astype(dtype)
    residual += values
    rounded = residual.astype(dtype)
    residual -= rounded.astype(values.dtype)
    return rounded
