"""The algorithms of an all-reduce, one file each, over flat buffers.

Each is made for one communicator, collectively, the first time it is used, and has one method,
``all_reduce(send, receive, op)``: steps that reduce the flat array ``send`` of all ranks into ``receive``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from mpidist.arrays.convert import Array
from mpidist.collectives.algorithms.hierarchical import Hierarchical
from mpidist.collectives.algorithms.mpi import Mpi
from mpidist.collectives.algorithms.reduce_broadcast import ReduceBroadcast
from mpidist.collectives.waiting import Steps
from mpidist.core.enums import ReduceOp

if TYPE_CHECKING:
    from mpi4py import MPI


class Algorithm(Protocol):
    """What every algorithm offers."""

    def all_reduce(self, send: Array, receive: Array, op: ReduceOp) -> Steps[None]:
        """Reduce ``send`` over all ranks into ``receive``; both flat, of equal length and dtype."""

    def close(self) -> None:
        """Free what the algorithm holds (collective)."""


_ALGORITHMS: dict[str, type[Mpi] | type[ReduceBroadcast] | type[Hierarchical]] = {
    "mpi": Mpi,
    "reduce_broadcast": ReduceBroadcast,
    "hierarchical": Hierarchical,
}
DEFAULT = "mpi"


def check_name(name: str | None) -> str:
    """Return the algorithm's name, the default for None.

    Raises:
        ValueError: There is no such algorithm.
    """
    if name is None:
        return DEFAULT
    if name not in _ALGORITHMS:
        raise ValueError(f"algorithm is {name!r}; expected one of {', '.join(sorted(_ALGORITHMS))}, or None")
    return name


def make(name: str, comm: MPI.Intracomm) -> Algorithm:
    """Return a new algorithm for ``comm`` (collective)."""
    return _ALGORITHMS[name](comm)
