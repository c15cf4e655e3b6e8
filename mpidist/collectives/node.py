"""The ranks of a communicator that share a node: their control window, their barrier, and what they may do."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np

from mpidist.arrays.convert import Array
from mpidist.collectives.neighbours_memory import NeighboursMemory, address_of
from mpidist.collectives.shared_memory import SharedMemory
from mpidist.collectives.shared_results import SharedResults
from mpidist.collectives.waiting import Steps
from mpidist.topology import Topology, import_mpi

if TYPE_CHECKING:
    from mpi4py import MPI

# Numbers of 8 bytes that each rank can tell the others of its node.
CONTROL_SLOTS = 2048
_MAGIC = 0x6D70696469737421


class Node:
    """The node of this rank (collective over the communicator).

    Args:
        comm: The communicator; its ranks on this node are taken together.

    Attributes:
        topology: Of ``comm``.
        comm: The ranks of the node.
        rank, size: In ``comm``.
        control: int64 array of shape (size, CONTROL_SLOTS) that all ranks of the node see; each writes its row.
        pids: Process of every rank.
        shared: Windows of the node.
        results: Results that the ranks of the node share.
        reads_neighbours: Whether every rank of every node may read the memory of its neighbours.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.topology = Topology(comm)
        self.comm = self.topology.node
        self.rank, self.size = self.topology.local_rank, self.topology.local_size
        self._window, self.control = self._make_control()
        self.memory = NeighboursMemory()
        self.shared = SharedMemory(self.comm)
        self.results = SharedResults(self)
        self._barrier = self._make_barrier()
        self.pids: list[int] = self.comm.allgather(os.getpid())
        self.reads_neighbours = bool(self.topology.world.allreduce(int(self._can_read()), op=import_mpi().MIN))

    def barrier(self) -> Steps[None]:
        """Yield until all ranks of the node have come; what they wrote before is then seen by all."""
        self._window.Sync()
        request = self._start_barrier()
        while not request.Test():
            yield
        self._window.Sync()

    def close(self) -> None:
        """Free windows, requests and communicators (collective)."""
        self.results.close()
        self.shared.close()
        if self._barrier is not None:
            self._barrier.Free()
        self.control = np.empty((0, 0), np.int64)
        self._window.Unlock_all()
        self._window.Free()
        self.topology.close()

    def _make_control(self) -> tuple[MPI.Win, Array]:
        mpi = import_mpi()
        row = CONTROL_SLOTS * 8
        window = mpi.Win.Allocate_shared(row * self.size if self.rank == 0 else 0, 8, comm=self.comm)
        memory, _ = window.Shared_query(0)
        control = np.frombuffer(memory, np.int64, CONTROL_SLOTS * self.size).reshape(self.size, CONTROL_SLOTS)
        window.Lock_all(mpi.MODE_NOCHECK)
        return window, control

    def _start_barrier(self) -> MPI.Request:
        if self._barrier is None:
            return self.comm.Ibarrier()
        self._barrier.Start()
        return self._barrier

    def _make_barrier(self) -> MPI.Prequest | None:
        try:
            return self.comm.Barrier_init()
        except NotImplementedError:
            return None

    def _can_read(self) -> bool:
        """Whether this rank can read a number that each neighbour has put somewhere in its own memory."""
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
