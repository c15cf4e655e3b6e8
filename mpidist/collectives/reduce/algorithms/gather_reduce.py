"""All-reduce of small messages inside a node: each rank reads the inputs of all.

The input is copied into a slot before the ranks meet, so the meeting that opens the collective is the only one.
"""

from __future__ import annotations

import numpy as np

from mpidist.arrays.dtypes import Array
from mpidist.collectives.mpi.mpi_types import NUMPY_OPS
from mpidist.collectives.mpi.waiting import Steps
from mpidist.collectives.node.node import Node
from mpidist.collectives.node.packing import PackedReduction
from mpidist.collectives.node.slots import InlineSlots
from mpidist.collectives.reduce.registry import ONE_NODE, AlgorithmEntry, Site, host_algorithms
from mpidist.core.errors import AlgorithmError


class GatherReduce:
    """All-reduce through the slots of one node. A message larger than a slot takes several rounds.

    Args:
        node: The node.
        slots: Of the node.
    """

    def __init__(self, node: Node, slots: InlineSlots) -> None:
        self._node = node
        self._slots = slots

    @classmethod
    def made(cls, site: Site) -> Steps[GatherReduce]:
        """Return a new one (collective).

        Raises:
            AlgorithmError: There is no room; on all ranks.
        """
        node = site.node
        if not node.is_alone:
            raise AlgorithmError(
                f"algorithm 'gather_reduce' needs all ranks on one node, and there are {node.topology.num_nodes}; "
                "leave algorithm out"
            )
        yield from node.make_slots()
        if node.slots is None:
            raise AlgorithmError(
                "algorithm 'gather_reduce' found no room in /dev/shm; make it larger (docker run --shm-size=1g) or "
                "leave algorithm out"
            )
        return cls(node, node.slots)

    def prepare(self, job: PackedReduction, may_share: bool) -> None:
        """See ``Algorithm``."""
        if job.nbytes <= self._slots.nbytes:
            slot = self._slots.mine(job.count, job.dtype)
            if len(job.pieces) == 1:
                np.copyto(slot, job.pieces[0])
            else:
                np.concatenate(job.pieces, out=slot)
        else:
            self._show(job.flat_input(), 0)

    def all_reduce(self, job: PackedReduction) -> Steps[list[Array]]:
        """See ``Algorithm``."""
        # Not before the ranks have met and agreed: a rank that was told of an error instead has not flipped its own.
        self._slots.flip()
        result = job.flat_result()
        per_round = self._slots.nbytes // job.dtype.itemsize
        if job.count <= per_round:
            self._reduce(job, result)
            return job.finish(result)
        send = job.flat_input()
        for start in range(0, job.count, per_round):
            if start:
                self._show(send, start)
                yield from self._node.board.meet()
                self._slots.flip()
            self._reduce(job, result[start : start + per_round])
        return job.finish(result)

    def _show(self, send: Array, start: int) -> None:
        part = send[start : start + self._slots.nbytes // send.itemsize]
        np.copyto(self._slots.mine(part.size, part.dtype), part)

    def _reduce(self, job: PackedReduction, target: Array) -> None:
        combine = NUMPY_OPS[job.op]
        total, *others = self._slots.shown(target.size, job.dtype)
        for other in others:
            total = combine(total, other, out=target)
        if total is not target:
            np.copyto(target, total)

    def close(self) -> None:
        """Free nothing: the slots are the node's."""


host_algorithms.register(
    AlgorithmEntry("gather_reduce", GatherReduce.made, ONE_NODE, ONE_NODE, is_ordered=True, rounds=True)
)
