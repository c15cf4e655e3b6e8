"""Connections for hang queries, and the file descriptors that they need.

Open MPI ends a rank that cannot open a connection to another host ("No route to host", after about 3 s). A cable that
is out for a moment only delays messages on open connections. So connections are opened while all hosts respond, and
only from the two askers to the first two ranks of every node. The ranks of one node share memory.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from contextlib import ExitStack, suppress

from mpidist.collectives.mpi.waiting import Comm
from mpidist.core import message_tags
from mpidist.core.errors import PeerError
from mpidist.topology import import_mpi
from mpidist.topology.start import limited

MOST_CONNECTED_RANKS = 256
"""In larger jobs the first query opens the connections. Each needs a file descriptor at either end."""
# MPI's shared window and mpidist's shared memory need a few for a moment. Without them Open MPI ends with a
# segmentation fault, or leaves the other ranks waiting in a call that has no deadline.
_NEEDED = 8


class Connections:
    """The ranks that a rank may send queries to.

    >>> nodes = [range(0, 3), range(3, 6), range(6, 9)]
    >>> [Connections(rank, nodes).above for rank in (0, 1, 3, 6, 8)]
    [[], [0, 3], [0], [0, 3], [6, 7]]
    >>> [sorted(Connections(rank, nodes).known) for rank in (3, 7, 8)]
    [[0, 1, 4, 5, 6, 7], [0, 3, 6, 8], [6, 7]]
    """

    def __init__(self, rank: int, nodes: Sequence[Sequence[int]]) -> None:
        self.own = next(node for node in nodes if rank in node)
        self.others = [node for node in nodes if node is not self.own]
        # On a single node, its first two ranks ask.
        self.askers = [node[0] for node in nodes[:2]] if len(nodes) > 1 else [*self.own[:2]]
        # The ranks that ask before this rank. The ranks among them that pass its questions on are `above`.
        order = [*dict.fromkeys([*self.askers, *self.own])]
        self.before = order[: order.index(rank)]
        far: Sequence[int] = self.askers if rank in self.own[:2] else []
        self.above = [other for other in self.before if other in self.own[:2] or other in far]
        if rank in self.askers:
            far = [other for node in self.others for other in node[:2]]
        # All ranks that this one may send messages to.
        self.known = {*self.own, *far} - {rank}


def open_connections(comm: Comm, nodes: Sequence[Sequence[int]]) -> None:
    """Open the connections between the askers and the first two ranks of other nodes (collective)."""
    if len(nodes) == 1 or comm.Get_size() > MOST_CONNECTED_RANKS:
        return
    rank = comm.Get_rank()
    connections = Connections(rank, nodes)
    far = connections.known.difference(connections.own)
    nothing = bytearray(0)
    requests = [comm.Isend(nothing, other, message_tags.CONNECTIONS) for other in far if other in connections.askers]
    if rank in connections.askers:
        requests += [comm.Irecv(nothing, other, message_tags.CONNECTIONS) for other in far]
    with limited("opening connections to ranks of other nodes"):
        # Wait for one at a time, because an error of several requests does not name the failed rank.
        for request in requests:
            request.Wait()


def check_descriptors(comm: Comm) -> None:
    """Check that all ranks can open some more files (collective).

    Raises OSError on the ranks that cannot, and PeerError on the others.
    """
    rank, lacks = comm.Get_rank(), True
    with suppress(OSError), ExitStack() as files:
        for _ in range(_NEEDED):
            files.enter_context(open(os.devnull))
        lacks = False
    lacking = int(comm.allreduce(rank if lacks else -1, op=import_mpi().MAX))
    lack = f"has fewer than {_NEEDED} file descriptors left, too few to make a communicator. Run: ulimit -n 4096"
    if lacks:
        raise OSError(errno.EMFILE, f"{os.strerror(errno.EMFILE)}: rank {rank} {lack}")
    if lacking >= 0:
        raise PeerError(f"rank {lacking} {lack}")
