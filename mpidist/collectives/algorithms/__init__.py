"""The algorithms of an all-reduce, one file each, over flat buffers.

Each is made for one communicator, collectively, the first time it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from mpidist.arrays.convert import Array
from mpidist.collectives.algorithms.hierarchical import Hierarchical
from mpidist.collectives.algorithms.mpi import Mpi
from mpidist.collectives.algorithms.neighbours import Neighbours
from mpidist.collectives.algorithms.reduce_broadcast import ReduceBroadcast
from mpidist.collectives.algorithms.window import Window
from mpidist.collectives.node import Node
from mpidist.collectives.waiting import Steps
from mpidist.core.enums import ReduceOp

if TYPE_CHECKING:
    from mpi4py import MPI


class Algorithm(Protocol):
    """What every algorithm offers."""

    most_parts: int
    """In how many pieces of memory it takes its input."""

    def all_reduce(
        self, parts: Sequence[Array], receive: Callable[[], Array], op: ReduceOp, divisor: int | None, may_share: bool
    ) -> Steps[Array]:
        """Reduce the concatenation of flat ``parts`` of one dtype over all ranks, and return the flat result.

        Args:
            parts: The input; not changed.
            receive: Returns the array for the result; called once, unless the result comes in other memory.
            op: The operation.
            divisor: What a mean divides the sum by; None for other operations.
            may_share: Whether the result may be a read-only array that the ranks of the node share.
        """

    def close(self) -> None:
        """Free what the algorithm holds (collective)."""


_ON_A_COMMUNICATOR: dict[str, type[Mpi] | type[ReduceBroadcast]] = {"mpi": Mpi, "reduce_broadcast": ReduceBroadcast}
_ON_NODES: dict[str, type[Hierarchical] | type[Neighbours] | type[Window]] = {
    "hierarchical": Hierarchical,
    "neighbours": Neighbours,
    "window": Window,
}


def check_name(name: str | None) -> None:
    """Raise ValueError unless there is an algorithm of that name, or it is None."""
    names = sorted([*_ON_A_COMMUNICATOR, *_ON_NODES])
    if name is not None and name not in names:
        raise ValueError(f"algorithm is {name!r}; expected one of {', '.join(names)}, or None")


def needs_node(name: str) -> bool:
    """Whether the algorithm asks who shares a node."""
    return name in _ON_NODES


def make(name: str, comm: MPI.Intracomm, node: Node | None) -> Algorithm:
    """Return a new algorithm for ``comm`` (collective)."""
    if node is None:
        return _ON_A_COMMUNICATOR[name](comm)
    return _ON_NODES[name](node)
