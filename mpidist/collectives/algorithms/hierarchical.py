"""All-reduce in two levels: to one leader per node, between the leaders, and back inside the node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import numpy as np

from mpidist.arrays.convert import Array
from mpidist.collectives.algorithms.mpi import Mpi
from mpidist.collectives.algorithms.reduce_broadcast import broadcast, reduce_to
from mpidist.collectives.node import Node
from mpidist.collectives.packing import divided
from mpidist.collectives.waiting import Steps
from mpidist.core.enums import ReduceOp
from mpidist.topology import import_mpi

if TYPE_CHECKING:
    from mpi4py import MPI


class Hierarchical:
    """Reduce inside each node, all-reduce between the first ranks of the nodes, broadcast inside each node.

    Args:
        node: The node of this rank (collective over the communicator).
    """

    most_parts = 1

    def __init__(self, node: Node) -> None:
        self._node = node.comm
        is_leader = node.rank == 0
        color = 0 if is_leader else import_mpi().UNDEFINED
        leaders = cast("MPI.Intracomm", node.topology.world.Split(color, key=node.topology.rank))
        self._leaders = leaders if is_leader else None
        self._between = Mpi(leaders) if is_leader else None

    def all_reduce(
        self, parts: Sequence[Array], receive: Callable[[], Array], op: ReduceOp, divisor: int | None, may_share: bool
    ) -> Steps[Array]:
        """See ``Algorithm``."""
        (send,) = parts
        result = receive()
        if self._between is None:
            yield from reduce_to(self._node, send, None, op, root=0)
        else:
            of_node = np.empty_like(result)
            yield from reduce_to(self._node, send, of_node, op, root=0)
            result = yield from self._between.all_reduce([of_node], lambda: result, op, None, False)
        yield from broadcast(self._node, result, root=0)
        return divided(result, divisor)

    def close(self) -> None:
        """Free the communicator of the leaders (collective)."""
        if self._leaders is not None:
            self._leaders.Free()
