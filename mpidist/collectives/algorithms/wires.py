"""Wires: how one slice is reduced between the nodes, over the ranks of a rail; which way is taken at which size."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from mpidist.arrays.convert import Array
from mpidist.arrays.dtypes import half_dtype
from mpidist.collectives.algorithms.halving_doubling import HalvingDoubling
from mpidist.collectives.algorithms.pairwise import Pairwise
from mpidist.collectives.algorithms.ring import Ring
from mpidist.collectives.table import Row, look_up
from mpidist.collectives.waiting import Steps
from mpidist.core.enums import ReduceOp
from mpidist.core.options import CommunicationOptions

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpidist.collectives.node import Node


class Wire(Protocol):
    """An all-reduce over the ranks of one rail."""

    def all_reduce(self, source: Array, flat: Array, op: ReduceOp, chunk: int, residual: Array | None) -> Steps[None]:
        """Reduce ``source`` over all ranks into ``flat``.

        Args:
            source: This rank's input; not changed, unless it is ``flat``.
            flat: The result.
            op: The operation.
            chunk: Tells several apart that are on their way.
            residual: Of the size of ``flat``: what rounding lost last time, added to the input, and replaced by what
                it loses now; None to let it go. For a way that rounds.
        """


_MAKERS: dict[str, Callable[[MPI.Intracomm, list[int], int], Wire]] = {
    "ring": Ring,
    "halving_doubling": HalvingDoubling,
    "pairwise": Pairwise,
}
NAMES = tuple(_MAKERS)


class Wires:
    """The ways between the nodes for one rank.

    Args:
        comm: The communicator.
        node: The node of this rank.
        row: Which way is taken at which size of a slice.
        options: Forces one way by ``algorithm``; others follow from ``wire_dtype`` and ``deterministic``.
    """

    def __init__(self, comm: MPI.Intracomm, node: Node, row: Row, options: CommunicationOptions) -> None:
        rail = [ranks[node.rank] if node.rank < len(ranks) else -1 for ranks in node.ranks]
        self._row = row
        self._forced = options.algorithm if options.algorithm in _MAKERS else None
        self._wires: dict[str, Wire] = {}
        # Only Pairwise sums in a fixed order, and rounds every contribution once.
        if options.deterministic or options.wire_dtype is not None:
            wire_dtype = None if options.wire_dtype is None else half_dtype(options.wire_dtype)
            self._forced = "pairwise"
            self._wires["pairwise"] = Pairwise(comm, rail, node.topology.node_index, wire_dtype)
        for name, make in _MAKERS.items():
            self._wires.setdefault(name, make(comm, rail, node.topology.node_index))

    def choose(self, slice_bytes: int) -> tuple[str, Wire]:
        """Return the name of the way that slices of this size take, and the way."""
        name = self._forced or look_up(self._row, slice_bytes)
        return name, self._wires[name]
