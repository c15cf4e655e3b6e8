"""Connections between ranks beside their collectives, and the file descriptors they take.

They are opened while all hosts answer. Open MPI ends a rank whose connection to another host cannot be made ("No route
to host", after about 3 s). A cable that is out for a moment only delays messages on connections that are there, so
nothing asks on a new one: ranks of one node talk as they like, those of different nodes by way of the first two of each
node, which have a connection to the hubs from the start.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence

from mpidist.collectives.mpi.waiting import Comm
from mpidist.core import message_tags
from mpidist.core.errors import PeerError
from mpidist.topology import import_mpi
from mpidist.topology.start import limited

# A connection takes a file descriptor at either end. In larger jobs they are opened by the first question.
_MOST_RANKS = 256
# MPI's shared window and mpidist's shared memory take a few for a moment; without them Open MPI ends with a
# segmentation fault, or leaves the other ranks waiting in a call that has no deadline.
_NEEDED = 8


class Connections:
    """The ranks that this rank may talk to.

    Args:
        rank: This rank.
        nodes: Of every node, its ranks; the same on all ranks.

    Attributes:
        own: The ranks of this rank's node.
        hubs: The first rank of each of the first two nodes, which talk to the first two ranks of every node.
        is_hub: Whether this rank is one of them.
        above: The ranks to hand on to the questions of this node, one after the other until one answers; this rank is
            among them.
        order: The same for its own questions: the first two ranks of a node come between the others and the hubs.

    >>> nodes = [range(0, 3), range(3, 6), range(6, 9)]
    >>> [Connections(rank, nodes).order for rank in (0, 1, 3, 6, 7, 8)]
    [[0, 3], [0, 3, 1], [0, 3], [0, 3, 6], [6, 0, 3, 7], [6, 7, 8]]
    >>> [sorted(Connections(rank, nodes).known()) for rank in (3, 7, 8)]
    [[0, 1, 4, 5, 6, 7], [0, 3, 6, 8], [6, 7]]
    """

    def __init__(self, rank: int, nodes: Sequence[Sequence[int]]) -> None:
        self._rank, self._nodes = rank, nodes
        self.own = next(node for node in nodes if rank in node)
        self.hubs = [node[0] for node in nodes[:2]]
        self.is_hub = rank in self.hubs
        place = self.own.index(rank)
        below = [*self.own[: min(place, 2)]]
        above = [*self.hubs, rank] if place < 2 else self.own[2 : place + 1]
        self.above = [other for other in dict.fromkeys(above) if other not in below]
        self.order = [*below, *self.above]

    def others(self) -> Iterator[Sequence[int]]:
        """Yield the ranks of each other node."""
        return (node for node in self._nodes if node is not self.own)

    def known(self) -> set[int]:
        """Return the ranks that this one may send messages to."""
        far = [rank for node in self.others() for rank in node[:2]] if self.is_hub else []
        hubs = self.hubs if self._rank in self.own[:2] else []
        return {*self.own, *hubs, *far} - {self._rank}


def open_connections(comm: Comm, nodes: Sequence[Sequence[int]]) -> None:
    """Open the connections between hubs and the first two ranks of other nodes (collective)."""
    if len(nodes) == 1 or comm.Get_size() > _MOST_RANKS:
        return
    connections = Connections(comm.Get_rank(), nodes)
    far = connections.known().difference(connections.own)
    nothing = bytearray(0)
    requests = [comm.Isend(nothing, other, message_tags.CONNECTIONS) for other in far if other in connections.hubs]
    if connections.is_hub:
        requests += [comm.Irecv(nothing, other, message_tags.CONNECTIONS) for other in far]
    with limited("opening connections to ranks of other nodes"):
        # One by one, as the error of several together does not say that a rank is lost.
        for request in requests:
            request.Wait()


def check_descriptors(comm: Comm) -> None:
    """Check that every rank of ``comm`` can open some more files (collective).

    Raises:
        OSError: This rank cannot.
        PeerError: Another rank cannot.
    """
    rank, lacks = comm.Get_rank(), not _can_open(_NEEDED)
    lacking = int(comm.allreduce(rank if lacks else -1, op=import_mpi().MAX))
    lack = f"has fewer than {_NEEDED} file descriptors left, which making a communicator takes; type: ulimit -n 4096"
    if lacks:
        raise OSError(errno.EMFILE, f"{os.strerror(errno.EMFILE)}: rank {rank} {lack}")
    if lacking >= 0:
        raise PeerError(f"rank {lacking} {lack}")


def _can_open(count: int) -> bool:
    opened: list[int] = []
    try:
        while len(opened) < count:
            opened.append(os.open(os.devnull, os.O_RDONLY))
    except OSError:
        return False
    finally:
        for descriptor in opened:
            os.close(descriptor)
    return True
