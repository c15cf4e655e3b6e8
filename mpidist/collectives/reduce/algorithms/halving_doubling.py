"""Between nodes, for middle sizes: recursive halving, then recursive doubling, in 2 log2(n) steps.

Partners at half the distance each time exchange halves of the part that they still have to reduce, then the same way
back the sums. Ranks beyond a power of two hand their input to a partner first and get the result from it last.
(Thakur, Rabenseifner and Gropp, doi:10.1177/1094342005051521)
"""

from __future__ import annotations

import numpy as np

from mpidist.arrays.dtypes import Array
from mpidist.collectives.mpi.mpi_types import NUMPY_OPS
from mpidist.collectives.mpi.waiting import Steps
from mpidist.collectives.reduce.registry import AlgorithmEntry, Rail, wire_algorithms
from mpidist.core.enums import ReduceOp


class HalvingDoubling(Rail):
    """An all-reduce over ranks of any number."""

    def all_reduce(self, source: Array, flat: Array, op: ReduceOp, chunk: int, residual: Array | None) -> Steps[None]:
        """See ``Wire``."""
        me, power = self._position, 1 << (len(self._ranks).bit_length() - 1)
        extra = len(self._ranks) - power
        if source is not flat:
            flat[:] = source
        if me >= power:
            yield from self._exchange({}, {me - power: flat}, chunk)
            yield from self._exchange({me - power: flat}, {}, chunk)
            return
        received = np.empty(flat.size if me < extra else (flat.size + 1) // 2, flat.dtype)
        if me < extra:
            yield from self._exchange({me + power: received}, {}, chunk)
            # In the order of the ranks, though it is the same: addition commutes.
            NUMPY_OPS[op](flat, received, out=flat)
        kept = yield from self._halve(flat, received, op, power // 2, chunk)
        yield from self._double(flat, kept, chunk)
        if me < extra:
            yield from self._exchange({}, {me + power: flat}, chunk)

    def _halve(
        self, flat: Array, received: Array, op: ReduceOp, distance: int, chunk: int
    ) -> Steps[list[tuple[int, int, int]]]:
        """Reduce ever smaller parts; return the borders of each and where it was cut."""
        start, stop, steps = 0, flat.size, []
        while distance:
            middle = (start + stop) // 2
            steps.append((start, middle, stop))
            if self._position & distance:
                (start, stop), (a, b) = (middle, stop), (start, middle)
            else:
                (start, stop), (a, b) = (start, middle), (middle, stop)
            part = received[: stop - start]
            partner = self._position ^ distance
            yield from self._exchange({partner: part}, {partner: flat[a:b]}, chunk)
            NUMPY_OPS[op](flat[start:stop], part, out=flat[start:stop])
            distance //= 2
        return steps

    def _double(self, flat: Array, steps: list[tuple[int, int, int]], chunk: int) -> Steps[None]:
        distance = 1
        for start, middle, stop in reversed(steps):
            low, high = flat[start:middle], flat[middle:stop]
            mine, theirs = (high, low) if self._position & distance else (low, high)
            partner = self._position ^ distance
            yield from self._exchange({partner: theirs}, {partner: mine}, chunk)
            distance *= 2


wire_algorithms.register(AlgorithmEntry("halving_doubling", HalvingDoubling, ("between_nodes",), ("several_nodes",)))
