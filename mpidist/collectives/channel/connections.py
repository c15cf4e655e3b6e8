"""Connections between ranks beside their collectives, and the file descriptors they take.

They are opened while all hosts answer. Open MPI ends a rank whose connection to another host cannot be made ("No route
to host", after about 3 s). A cable that is out for a moment only delays messages on connections that are there, so
nothing asks on a new one: ranks of one node talk as they like, those of different nodes by way of two ranks that have a
connection to every other from the start.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

from mpidist.collectives.mpi.waiting import Comm
from mpidist.core import message_tags
from mpidist.core.errors import PeerError
from mpidist.topology import import_mpi
from mpidist.topology.limited_calls import limited

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
        hubs: The first rank of each of the first two nodes, which talk to all.
        known: The ranks that this one may talk to.
        order: Those to ask a question, one after the other until one answers; this rank is among them.

    >>> third = Connections(4, [[0, 1], [2, 3], [4, 5]])
    >>> third.order, sorted(third.known)
    ([0, 2, 4, 5], [0, 2, 4, 5])
    >>> sorted(Connections(2, [[0, 1], [2, 3], [4, 5]]).known)
    [0, 1, 2, 3, 4, 5]
    """

    def __init__(self, rank: int, nodes: Sequence[Sequence[int]]) -> None:
        (own,) = (node for node in nodes if rank in node)
        self.hubs = [node[0] for node in nodes[:2]]
        self.order = [*self.hubs, *(mate for mate in own if mate not in self.hubs)]
        everyone = (rank for node in nodes for rank in node)
        self.known = set(everyone if rank in self.hubs else self.order)


def open_connections(comm: Comm, nodes: Sequence[Sequence[int]]) -> None:
    """Open the connections between hubs and all ranks of other nodes (collective)."""
    rank = comm.Get_rank()
    if len(nodes) == 1 or comm.Get_size() > _MOST_RANKS:
        return
    hubs = Connections(rank, nodes).hubs
    far = [other for node in nodes if rank not in node for other in node]
    nothing = bytearray(0)
    requests = [comm.Isend(nothing, other, message_tags.CONNECTIONS) for other in far if other in hubs]
    if rank in hubs:
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
