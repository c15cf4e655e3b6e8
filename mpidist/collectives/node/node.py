"""The ranks of a communicator that share a node, their board and shared memory."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

import numpy as np

from mpidist.collectives.mpi.waiting import Steps
from mpidist.collectives.node.board import Board, bytes_needed
from mpidist.collectives.node.neighbours_memory import NeighboursMemory, address_of
from mpidist.collectives.node.shared_memory import SharedMemory, has_room
from mpidist.collectives.node.shared_results import SharedResults
from mpidist.collectives.node.slots import InlineSlots
from mpidist.core import settings
from mpidist.topology import Topology, import_mpi
from mpidist.topology.faults import revoking

if TYPE_CHECKING:
    from mpi4py import MPI

_MAGIC = 0x6D70696469737421
_log = logging.getLogger("mpidist")


class Node:
    """The node of this rank (collective over the communicator).

    Where any node has no room for its board in shared memory, every rank counts as a node of its own.

    Args:
        comm: The communicator; its ranks on this node are taken together.

    Attributes:
        topology: Of ``comm``.
        comm: The ranks of the node.
        rank, size: In the node.
        ranks: Of every node, its ranks in ``comm``.
        board: Where the ranks of the node meet.
        pids: Process of every rank of the node.
        shared: Shared memory of the node.
        results: Results that the ranks of the node share.
        slots: Where its ranks show small arrays; None before ``make_slots``, and where there is no room.
        reads_neighbours: Whether every rank of every node may read the memory of its neighbours.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.topology = _shared_topology(comm)
        self.comm = self.topology.node
        self.rank, self.size = self.topology.local_rank, self.topology.local_size
        self.ranks: list[list[int]] = [[] for _ in range(self.topology.num_nodes)]
        for rank, index in enumerate(self.topology.node_of_rank):
            self.ranks[index].append(rank)
        with revoking(self.comm):
            self.board = Board(self.comm)
            self.pids: list[int] = self.comm.allgather(os.getpid())
            self.memory = NeighboursMemory()
            may_read = self._can_read() and settings.READ_NEIGHBOURS.read()
        self.shared = SharedMemory(self.board)
        self.results = SharedResults(self.shared)
        self.slots: InlineSlots | None = None
        self._slots_are_made = False
        self.reads_neighbours = bool(comm.allreduce(int(may_read), op=import_mpi().MIN))

    @property
    def is_alone(self) -> bool:
        """Return whether it holds all ranks of the communicator."""
        return self.topology.num_nodes == 1

    def make_slots(self) -> Steps[None]:
        """Make the slots, unless that was tried before (collective over the node)."""
        if not self._slots_are_made:
            self.slots = yield from InlineSlots.made(self.shared, self.rank)
            self._slots_are_made = True

    def close(self) -> None:
        """Let go of shared memory, and free the communicator of the node (collective)."""
        self.results.close()
        self.slots = None
        self.shared.close()
        self.board.close()
        self.topology.close()

    def _can_read(self) -> bool:
        """Return whether this rank can read a number out of each neighbour's memory."""
        mine = np.array([_MAGIC + self.rank], np.int64)
        addresses = self.comm.allgather(address_of(mine) if self.memory.exists else 0)
        works = all(addresses)
        seen = np.zeros(1, np.int64)
        for rank, (pid, address) in enumerate(zip(self.pids, addresses, strict=True)):
            if works and rank != self.rank:
                try:
                    self.memory.read(pid, address, address_of(seen), 8)
                except OSError:
                    works = False
                works = works and seen[0] == _MAGIC + rank
        # The number has to stay where it is until all have looked.
        self.comm.Barrier()
        return works and mine[0] == _MAGIC + self.rank


def _shared_topology(comm: MPI.Intracomm) -> Topology:
    """Return the topology of ``comm``.

    It has nodes of one rank each where a node lacks room for its board.
    """
    topology = Topology(comm)
    with revoking(topology.node):
        fits = has_room(topology.node, bytes_needed(topology.local_size))
    if comm.allreduce(int(fits), op=import_mpi().MIN):
        return topology
    if topology.rank == 0:
        _log.warning(
            "mpidist: there is no room for %d bytes in /dev/shm on every node, so the ranks of a node reduce by "
            "messages; make it larger (docker run --shm-size=1g)",
            bytes_needed(topology.local_size),
        )
    topology.close()
    return Topology(comm, ranks_per_node=1)
