"""Wires: how one slice is reduced between the nodes, over the ranks of a rail; which way is taken at which size."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mpidist.arrays.dtypes import as_dtype
from mpidist.collectives.node.pipeline import Wire
from mpidist.collectives.reduce.registry import Row, wire_algorithms
from mpidist.collectives.reduce.table import look_up
from mpidist.core.options import CommunicationOptions

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpidist.collectives.node.node import Node

# The way that sums in a fixed order, and rounds every contribution once.
_IN_ORDER = "pairwise"


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
        self._made: dict[tuple[str, str | None], Wire] = {}

    def choose(self, slice_bytes: int, options: CommunicationOptions) -> tuple[str, Wire]:
        """Return the name of the way that slices of this size take, and the way."""
        if options.wire_dtype is not None or options.deterministic:
            name = _IN_ORDER
        elif options.algorithm is not None and wire_algorithms.get(options.algorithm):
            name = options.algorithm
        else:
            name = look_up(self._row, slice_bytes)
        key = name, options.wire_dtype
        if key not in self._made:
            entry = wire_algorithms.get(name)
            assert entry is not None, name
            rounding = () if options.wire_dtype is None else (as_dtype(options.wire_dtype),)
            self._made[key] = entry.make(self._comm, self._rail, self._position, *rounding)
        return name, self._made[key]
