"""All-reduce in two levels: to one leader per node, between the leaders, and back inside the node."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np

from mpidist.arrays.convert import Array
from mpidist.collectives.algorithms.mpi import Mpi
from mpidist.collectives.algorithms.reduce_broadcast import broadcast, reduce_to
from mpidist.collectives.waiting import Steps
from mpidist.core.enums import ReduceOp
from mpidist.topology import Topology, import_mpi

if TYPE_CHECKING:
    from mpi4py import MPI


class Hierarchical:
    """Reduce inside each node, all-reduce between the first ranks of the nodes, broadcast inside each node.

    Args:
        comm: The communicator; the nodes are those of its ranks (collective).
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._topology = Topology(comm)
        is_leader = self._topology.local_rank == 0
        color = 0 if is_leader else import_mpi().UNDEFINED
        leaders = cast("MPI.Intracomm", self._topology.world.Split(color, key=self._topology.rank))
        self._leaders = leaders if is_leader else None
        self._between = Mpi(leaders) if is_leader else None

    def all_reduce(self, send: Array, receive: Array, op: ReduceOp) -> Steps[None]:
        """See ``Algorithm``."""
        node = self._topology.node
        if self._between is None:
            yield from reduce_to(node, send, None, op, root=0)
        else:
            of_node = np.empty_like(receive)
            yield from reduce_to(node, send, of_node, op, root=0)
            yield from self._between.all_reduce(of_node, receive, op)
        yield from broadcast(node, receive, root=0)

    def close(self) -> None:
        """Free the communicators of nodes and leaders (collective)."""
        if self._leaders is not None:
            self._leaders.Free()
        self._topology.close()
