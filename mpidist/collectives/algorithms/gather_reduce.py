"""All-reduce of small messages inside a node: every rank shows its input to all, and each reduces all of it.

The input is copied into shared memory before the ranks meet, so the meeting that opens the collective is the only
one. Two slots per rank take turns: a slot is written again only after a later meeting.
"""

from __future__ import annotations

import numpy as np

from mpidist.arrays.convert import Array
from mpidist.arrays.dtypes import DType
from mpidist.collectives.mpi_types import numpy_op
from mpidist.collectives.node import Node
from mpidist.collectives.packing import Reduction
from mpidist.collectives.waiting import Steps
from mpidist.core.errors import AlgorithmError

# What fits into one slot; larger messages take several turns.
SLOT_BYTES = 512 << 10
_MOST_VIEWS = 256


class GatherReduce:
    """Works where all ranks are on one node, with room for the slots in shared memory.

    Args:
        node: The node.
        segments: Of every rank, two slots.
    """

    name = "gather_reduce"

    def __init__(self, node: Node, segments: list[Array]) -> None:
        self._node = node
        self._segments = segments
        self._turn = 0
        # Making a view costs as much as summing a small array.
        self._views: dict[tuple[int, int, DType], list[Array]] = {}

    @classmethod
    def made(cls, node: Node) -> Steps[GatherReduce]:
        """Return a new one (collective).

        Raises:
            AlgorithmError: There is no room; on all ranks.
        """
        if not node.is_alone:
            raise AlgorithmError(
                f"algorithm 'gather_reduce' needs all ranks on one node, and there are {node.topology.num_nodes}; "
                "leave algorithm out"
            )
        segments = yield from node.shared.segments(2 * SLOT_BYTES)
        if segments is None:
            raise AlgorithmError(
                "algorithm 'gather_reduce' found no room in /dev/shm; make it larger (docker run --shm-size=1g) or "
                "leave algorithm out"
            )
        return cls(node, segments)

    def prepare(self, job: Reduction, may_share: bool) -> None:
        """See ``Algorithm``."""
        if job.nbytes <= SLOT_BYTES:
            slot = self._slots(1 - self._turn, job.count, job)[self._node.rank]
            if len(job.pieces) == 1:
                np.copyto(slot, job.pieces[0])
            else:
                np.concatenate(job.pieces, out=slot)
        else:
            self._show(job.flat_input(), job, 0)

    def all_reduce(self, job: Reduction) -> Steps[list[Array]]:
        """See ``Algorithm``."""
        # Not before the ranks have met and agreed: a rank that was told of an error instead has not taken its turn.
        self._turn = 1 - self._turn
        result = job.flat_result()
        per_turn = SLOT_BYTES // job.dtype.itemsize
        if job.count <= per_turn:
            self._reduce(job, result)
            return job.finish(result)
        send = job.flat_input()
        for start in range(0, job.count, per_turn):
            if start:
                self._show(send, job, start)
                yield from self._node.board.meet()
                self._turn = 1 - self._turn
            self._reduce(job, result[start : start + per_turn])
        return job.finish(result)

    def _show(self, send: Array, job: Reduction, start: int) -> None:
        part = send[start : start + SLOT_BYTES // job.dtype.itemsize]
        np.copyto(self._slots(1 - self._turn, part.size, job)[self._node.rank], part)

    def _slots(self, turn: int, count: int, job: Reduction) -> list[Array]:
        """Return the arrays of all ranks in the slots of a turn."""
        key = (turn, count, job.dtype)
        slots = self._views.get(key)
        if slots is None:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            first = turn * SLOT_BYTES
            stop = first + count * job.dtype.itemsize
            slots = self._views[key] = [segment[first:stop].view(job.dtype) for segment in self._segments]
        return slots

    def _reduce(self, job: Reduction, target: Array) -> None:
        combine = numpy_op(job.op)
        total, *others = self._slots(self._turn, target.size, job)
        for other in others:
            total = combine(total, other, out=target)
        if total is not target:
            np.copyto(target, total)

    def close(self) -> None:
        """Let go of the slots; they belong to the node."""
        self._segments = []
        self._views.clear()
