"""The algorithms of an all-reduce, one file each, over lists of flat arrays in host memory.

Those for arrays on GPUs are beside them (``nccl``, ``device_hierarchical``, ``staged``); see
``mpidist.collectives.gpu.device_choice``. Each is made for one communicator, collectively, the first time it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from mpidist.arrays.convert import Array
from mpidist.collectives.mpi.waiting import Steps
from mpidist.collectives.node.packing import PackedReduction
from mpidist.collectives.reduce.algorithms import wires
from mpidist.collectives.reduce.algorithms.gather_reduce import GatherReduce
from mpidist.collectives.reduce.algorithms.mpi import Mpi
from mpidist.collectives.reduce.algorithms.reduce_broadcast import ReduceBroadcast
from mpidist.collectives.reduce.algorithms.two_level import TwoLevel
from mpidist.collectives.reduce.table import Row
from mpidist.core.errors import AlgorithmError

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpidist.collectives.node.node import Node

# In one node only; and in two levels, on any number of nodes.
IN_NODE = ("gather_reduce",)
TWO_LEVEL = ("hierarchical", "neighbours", "window", *wires.NAMES)
NAMES = tuple(sorted(("mpi", "reduce_broadcast", *IN_NODE, *TWO_LEVEL)))
# For arrays on GPUs alone; "hierarchical" and the ways between nodes are for them, too.
DEVICE_NAMES = ("nccl", "staged")


class Algorithm(Protocol):
    """What every algorithm offers."""

    name: str
    """What ran last, for reports."""

    def prepare(self, job: PackedReduction, may_share: bool) -> None:
        """Do what this rank has to before all ranks meet; every rank passes a job of the same size.

        Args:
            job: The reduction.
            may_share: Whether the result may be read-only arrays that the ranks of the node share.
        """

    def all_reduce(self, job: PackedReduction) -> Steps[list[Array]]:
        """Reduce the prepared job over all ranks, which have met since; returns the flat results, as cut as the input.

        They are the targets of the job, if it has any.
        """

    def close(self) -> None:
        """Free what the algorithm holds (collective)."""


def check_name(name: str | None) -> None:
    """Raise ValueError unless there is an algorithm of that name, or it is None."""
    if name is not None and name not in (*NAMES, *DEVICE_NAMES):
        raise ValueError(
            f"algorithm is {name!r}; expected one of {', '.join(NAMES)}, for arrays on GPUs {', '.join(DEVICE_NAMES)}, "
            "or None"
        )


def kind_of(name: str, node: Node) -> str:
    """Return which algorithm, of those that ``make`` makes, serves ``name``: the ways between nodes share one."""
    if name in TWO_LEVEL and name not in ("neighbours", "window"):
        return "neighbours" if node.reads_neighbours else "window"
    return name


def make(kind: str, comm: MPI.Intracomm, node: Node, between_nodes: Row) -> Steps[Algorithm]:
    """Return a new algorithm for ``comm`` (collective).

    Args:
        kind: See ``kind_of``.
        comm: The communicator.
        node: Its node of this rank.
        between_nodes: See ``Table``.

    Raises:
        AlgorithmError: It does not work here; on all ranks.
    """
    if kind in DEVICE_NAMES:
        raise AlgorithmError(
            f"algorithm {kind!r} is for arrays on GPUs, and was asked for arrays in host memory; leave algorithm out, "
            f"or take one of {', '.join(NAMES)}"
        )
    if kind == "mpi":
        return Mpi(comm)
    if kind == "reduce_broadcast":
        return ReduceBroadcast(comm)
    if kind == "gather_reduce":
        return (yield from GatherReduce.made(node))
    return (yield from TwoLevel.made(comm, node, kind == "neighbours", wires.Wires(comm, node, between_nodes)))
