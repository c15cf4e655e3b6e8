"""Choice: which algorithm a reduction takes on one communicator, and the algorithms that have been made for it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from mpidist.collectives.mpi.waiting import Steps
from mpidist.collectives.reduce import algorithms
from mpidist.collectives.reduce.table import SHIPPED, Row, Table, look_up
from mpidist.core.errors import AlgorithmError
from mpidist.core.options import CommunicationOptions

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpidist.collectives.node.node import Node

_log = logging.getLogger("mpidist")
_ORDERED = ("hierarchical", "pairwise", "gather_reduce", "neighbours", "window")


def check_options(options: CommunicationOptions) -> None:
    """Raise for options that name something unknown, or two things that do not go together."""
    algorithms.check_name(options.algorithm)
    for name in ("wire_dtype", "deterministic"):
        if getattr(options, name) and options.algorithm not in (None, *_ORDERED):
            raise ValueError(
                f"{name}={getattr(options, name)!r} and algorithm={options.algorithm!r} do not go together; "
                f"leave algorithm out, or take one of {', '.join(_ORDERED)}"
            )
    if options.error_feedback and options.wire_dtype is None:
        raise ValueError("error_feedback=True makes good what a wire_dtype loses; give wire_dtype='bfloat16' as well")


def place_of(node: Node, kind: str = "cpu") -> str:
    """Return the row of a table that counts for the ranks around ``node``, and arrays on devices of a kind."""
    if kind == "gpu":
        return "one_node_gpu" if node.is_alone else "several_nodes_gpu"
    if not node.is_alone:
        return "several_nodes"
    return "one_node_readable" if node.reads_neighbours else "one_node"


class Choice:
    """The algorithms of one communicator.

    Args:
        comm: The communicator.
        node: Its node of this rank.
        table: Which algorithm is taken where.
    """

    def __init__(self, comm: MPI.Intracomm, node: Node, table: Table = SHIPPED) -> None:
        self._comm = comm
        self._node = node
        self.table = table
        self._made: dict[str, algorithms.Algorithm] = {}
        self._without: set[str] = set()

    @property
    def row(self) -> Row:
        """The row of the table for the place that the communicator is at."""
        row: Row = getattr(self.table, place_of(self._node))
        return row

    def name_for(self, nbytes: int, options: CommunicationOptions) -> str:
        """Return the algorithm for a message: the same on every rank."""
        if options.algorithm is not None:
            return options.algorithm
        if not self._node.is_alone and (options.wire_dtype is not None or options.deterministic):
            return "hierarchical"
        name = look_up(self.row, nbytes)
        if options.deterministic:
            return name if name in _ORDERED else "hierarchical"
        return "mpi" if name in self._without else name

    def made(self, nbytes: int, options: CommunicationOptions) -> algorithms.Algorithm | None:
        """Return the algorithm for a message if it has been made."""
        return self._made.get(algorithms.kind_of(self.name_for(nbytes, options), self._node))

    def make(self, nbytes: int, options: CommunicationOptions) -> Steps[algorithms.Algorithm]:
        """Make the algorithm for a message (collective).

        Where the table's own choice does not work, MPI's call takes its place, and a warning says so.

        Raises:
            AlgorithmError: It was asked for by name, or what only it offers was, and does not work here.
        """
        name = self.name_for(nbytes, options)
        kind = algorithms.kind_of(name, self._node)
        rounds = options.wire_dtype is not None and not self._node.is_alone
        try:
            made = yield from algorithms.make(kind, self._comm, self._node, self.table.between_nodes)
        except AlgorithmError as error:
            if options.algorithm is not None or options.deterministic or rounds or name == "mpi":
                raise
            if self._comm.Get_rank() == 0:
                _log.warning("mpidist: %s; MPI's own call is taken in its place", error)
            self._without.add(name)
            return self.made(nbytes, options) or (yield from self.make(nbytes, options))
        self._made[kind] = made
        return made

    def close(self) -> None:
        """Free what the algorithms hold (collective)."""
        for algorithm in self._made.values():
            algorithm.close()
        self._made.clear()
