"""Wires: how one slice is reduced between the nodes, over the ranks of a rail; which way is taken at which size."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mpidist.arrays.dtypes import as_dtype
from mpidist.collectives.node.pipeline import Wire
from mpidist.collectives.reduce.algorithms.halving_doubling import HalvingDoubling
from mpidist.collectives.reduce.algorithms.pairwise import Pairwise
from mpidist.collectives.reduce.algorithms.ring import Ring
from mpidist.collectives.reduce.table import Row, look_up
from mpidist.core.options import CommunicationOptions

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpidist.collectives.node.node import Node


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
    """

    def __init__(self, comm: MPI.Intracomm, node: Node, row: Row) -> None:
        self._comm = comm
        self._rail = [ranks[node.rank] if node.rank < len(ranks) else -1 for ranks in node.ranks]
        self._position = node.topology.node_index
        self._row = row
        self._wires = {name: make(comm, self._rail, self._position) for name, make in _MAKERS.items()}
        self._rounding: dict[str, Pairwise] = {}

    def choose(self, slice_bytes: int, options: CommunicationOptions) -> tuple[str, Wire]:
        """Return the name of the way that slices of this size take, and the way.

        Only ``pairwise`` sums in a fixed order, and rounds every contribution once.
        """
        if options.wire_dtype is not None:
            return "pairwise", self._rounded_to(options.wire_dtype)
        if options.deterministic:
            return "pairwise", self._wires["pairwise"]
        name = options.algorithm if options.algorithm in _MAKERS else look_up(self._row, slice_bytes)
        return str(name), self._wires[str(name)]

    def _rounded_to(self, wire_dtype: str) -> Pairwise:
        if wire_dtype not in self._rounding:
            self._rounding[wire_dtype] = Pairwise(self._comm, self._rail, self._position, as_dtype(wire_dtype))
        return self._rounding[wire_dtype]
