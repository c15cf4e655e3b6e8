"""The ranks of a communicator on one node, with their native core and shared memory."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING

import numpy as np

from mpidist.arrays.dtypes import Array
from mpidist.collectives.mpi.exchange import agreed_minimum
from mpidist.collectives.mpi.waiting import Steps, drive
from mpidist.collectives.node import native
from mpidist.collectives.node.core import SMALL_BETWEEN_NODES, WRITE_SECONDS, Core
from mpidist.collectives.node.memory import (
    NO_ROOM,
    NOT_SHARED,
    SharedMemory,
    SharedResults,
    aligned_zeros,
    room_for_segments,
    shared_memory,
)
from mpidist.collectives.node.native import SlotSizes, address_of
from mpidist.core import settings
from mpidist.core.concurrency import Deadline
from mpidist.core.errors import CollectiveTimeoutError
from mpidist.topology import Topology, allowed_cores, cores_are_short, import_mpi
from mpidist.topology.exit import can_go_on, revoking
from mpidist.topology.processes import Process
from mpidist.topology.same_program import check_same_everywhere
from mpidist.topology.topology import same_as_world

if TYPE_CHECKING:
    from mpi4py import MPI

_MAGIC = 0x6D70696469737421
# Longest reduced slice in bytes. Slices between nodes are split again into messages.
_SLICE_BYTES, SLICE_BYTES_BETWEEN_NODES = 256 << 10, 1 << 20
_SMALLEST_SLICE_BYTES = 16 << 10
# Usual slice on one node: it stays in the cache from one rank to the next. Ranks that share a core exchange larger
# slices, because each exchange costs a context switch.
_USUAL_SLICE_BYTES, _OVERSUBSCRIBED_SLICE_BYTES = 128 << 10, 256 << 10
# Slices in flight. On one node, one is copied out while the next is reduced. The network needs several.
_LANES, LANES_BETWEEN_NODES = 2, 16
# Bytes that a rank publishes inline, and bytes of a slot for larger data.
_SMALL_BYTES, _MOST_CHUNK_BYTES = 128 << 10, 2 << 20
# From this size on, all-reduces write directly into the results of other ranks: private arrays between cores without
# a common cache, and arrays in mapped memory.
_PUSH_FROM_BYTES = 256 << 10
# NC_MOST_PUSHING of mpidist.h.
_MOST_PUSHING = 8
_REASONS = {
    NO_ROOM: "/dev/shm of a node has no room for {} bytes",
    NOT_SHARED: "ranks of a node do not share one /dev/shm, as in containers of their own",
}
_log = logging.getLogger("mpidist")


class Node:
    """The ranks of this rank's node (collective over the communicator).

    Every rank is a node of its own if any rank lacks the native core, if any node lacks shared memory for it, or if the
    core of a job with several nodes cannot call MPI.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.topology, opener, memory = _agreed_topology(comm)
        self.comm = self.topology.node
        self.rank, self.size = self.topology.local_rank, self.topology.local_size
        self.is_alone: bool = self.topology.num_nodes == 1
        # Ranks of every node in ``comm``.
        self.ranks = self.topology.ranks_of_node
        # Number of ranks of a node that reduce slices for other nodes. Equal on all nodes.
        self.rails = min(len(ranks) for ranks in self.ranks)
        with revoking(self.comm):
            pids, cores, has_access = _neighbours(self.comm, opener is not None)
        # Elastic jobs must be able to kill a stopped writer.
        self._processes = _handles(pids) if can_go_on() and self.size <= _MOST_PUSHING else []
        can_end_writers = bool(self._processes) or not can_go_on()
        agreed = np.array([has_access, can_end_writers, not cores_are_short()])
        comm.Allreduce(import_mpi().IN_PLACE, agreed, import_mpi().LAND)
        # Whether every rank may read and write the memory of the other ranks of its node.
        self.reads_neighbours, can_end_writers, has_cores = map(bool, agreed)
        self._usual_slice_bytes = _USUAL_SLICE_BYTES if has_cores else _OVERSUBSCRIBED_SLICE_BYTES
        # None without a native core, and after ``close``.
        self.core: Core | None = None
        if opener is not None and memory is not None:
            read = pids if self.reads_neighbours else None
            self.core = Core(opener, self.comm, memory, read, self.is_alone, self.rails)
            if self.rank == 0 and not self.is_alone:
                self.core.lead(comm, [ranks[0] for ranks in self.ranks])
            if self.is_alone and self.size <= _MOST_PUSHING and can_end_writers:
                # Unlike cores_are_short(), this counts ranks that are bound to one core each as having a core.
                size = settings.PUSH_FROM.read()
                if size is not None or len(cores) >= self.size:
                    self.core.allow_push(size or _PUSH_FROM_BYTES, always=size is not None)
        # Whether data move inside the node. False for one rank of many nodes.
        self.has_neighbours = self.core is not None and (self.size > 1 or self.is_alone)
        self.shared = SharedMemory(self.comm, self.core if self.has_neighbours else None)
        self.results = SharedResults(self.shared)
        # Bytes of a reduced slice, and the slots of this rank, after ``make_room``.
        self.slice_bytes = 0
        self.slots: Array | None = None
        self._has_room: bool | None = None

    def end_writers(self) -> None:
        """Kill ranks that are stopped inside a write into the memory of others."""
        if self.core is None or not self._processes:
            return
        try:
            for rank in self.core.abandon(WRITE_SECONDS):
                if not self._processes[rank].has_ended():
                    _log.warning(
                        "mpidist: killing rank %d of this node, whose write to another rank's memory did not finish "
                        "within %g s", rank, WRITE_SECONDS,
                    )  # fmt: skip
                    self._processes[rank].kill()
        finally:
            self._close_handles()

    def _close_handles(self) -> None:
        while self._processes:
            self._processes.pop().close()

    def make_room(self, comm: MPI.Intracomm) -> Steps[bool]:
        """Allocate the slots once. Return whether all nodes have room (collective over ``comm``)."""
        if self._has_room is not None:
            return self._has_room
        core = self.core if self.has_neighbours else None
        piece = _SLICE_BYTES if self.is_alone else SLICE_BYTES_BETWEEN_NODES
        if core is not None:
            room = room_for_segments() // self.size
            while piece > _SMALLEST_SLICE_BYTES and self._sizes(piece).nbytes > room:
                piece //= 2
            piece = piece if self._sizes(piece).nbytes <= room else 0
        self.slice_bytes = yield from agreed_minimum(comm, piece)
        if core is not None and self.slice_bytes:
            sizes = self._sizes(self.slice_bytes)
            segments = yield from self.shared.segments(sizes.nbytes)
            if segments is not None:
                core.use_slots(segments, sizes)
                self.slots = segments[self.rank]
        has_room = self.slice_bytes > 0 and (core is None or self.slots is not None)
        self._has_room = bool((yield from agreed_minimum(comm, int(has_room))))
        return self._has_room

    def _sizes(self, piece: int) -> SlotSizes:
        """Return the sizes of a rank's slots for slices of ``piece`` bytes."""
        chunk = piece * self.rails if not self.is_alone else min(piece * self.size, _MOST_CHUNK_BYTES)
        lanes = _LANES if self.is_alone else LANES_BETWEEN_NODES
        small = _SMALL_BYTES if self.is_alone else SMALL_BETWEEN_NODES
        return SlotSizes(small, chunk, piece, lanes, self._usual_slice_bytes)

    def close(self) -> None:
        """Release shared memory and free the communicator of the node (collective)."""
        self.results.close()
        self.slots = None
        self._close_handles()
        self.shared.close()
        if self.core is not None:
            self.core.close()
            self.core = None
        self.topology.close()


def _neighbours(comm: MPI.Intracomm, has_core: bool) -> tuple[list[int], set[int], bool]:
    """Return pids and cores of a node, and whether this rank may access its memory."""
    rank, may_access = comm.Get_rank(), has_core and bool(settings.READ_NEIGHBOURS.read())
    # Each rank stores its number at its own index. Its neighbours read it there, and write theirs at their own indices.
    numbers = np.zeros(comm.Get_size(), np.int64)
    numbers[rank] = _MAGIC + rank
    mine = os.getpid(), sorted(allowed_cores()), address_of(numbers)
    found: list[tuple[int, list[int], int]] = comm.allgather(mine)
    for neighbour, (pid, _, address) in enumerate(found):
        if neighbour != rank and may_access:
            number = native.read_number(pid, address + neighbour * numbers.itemsize)
            # Only after the read, which verifies the pid.
            place = address + rank * numbers.itemsize
            may_access = number == _MAGIC + neighbour and native.write_number(pid, place, _MAGIC + rank)
    # ``numbers`` must stay allocated until every rank has read it.
    comm.Barrier()
    return [pid for pid, _, _ in found], set().union(*[cores for _, cores, _ in found]), may_access


def _handles(pids: list[int]) -> list[Process]:
    """Open a pidfd for each process. Return [] if the system has no pidfds or no descriptors are left."""
    handles: list[Process] = []
    try:
        for pid in pids:
            handles.append(Process(pid))
    except (AttributeError, OSError) as error:
        _log.info("mpidist: all-reduces do not write to other ranks' memory: pidfd_open failed: %s", error)
        for handle in handles:
            handle.close()
        return []
    return handles


def _agreed_opener(comm: MPI.Intracomm) -> native.Opener | None:
    """Return the function that opens a core, or None if any rank has none.

    If a rank cannot use its library, every rank raises RuntimeError.
    """
    opener, error, reason = None, "", ""
    try:
        opener = native.opener()
        reason = native.why_not() or ""
    except (RuntimeError, ValueError) as problem:
        error = str(problem)
    if not comm.allreduce(int(opener is None), op=import_mpi().MAX):
        return opener
    found: list[tuple[str, str]] = comm.allgather((error, reason))
    for rank, (failed, _) in enumerate(found):
        if failed:
            raise RuntimeError(f"rank {rank}: {failed}")
    _say_once(comm, next(missing for _, missing in found if missing))
    return None


def _agreed_topology(comm: MPI.Intracomm) -> tuple[Topology, native.Opener | None, Array | None]:
    """Return the topology, the opener of the native core, and its control memory. All ranks agree about them."""
    check_same_everywhere(comm)
    opener = _agreed_opener(comm)
    if opener is None:
        return Topology(comm, ranks_per_node=1), None, None
    topology = Topology(comm, like=same_as_world(comm))
    nbytes = native.library().nc_control_bytes(topology.local_size)
    steps = shared_memory(topology.node, nbytes, 0, nbytes if topology.local_rank == 0 else 0)

    def late(waited: float) -> CollectiveTimeoutError:
        return CollectiveTimeoutError("creating a communicator", 0, waited, comm.Get_rank())

    with revoking(topology.node):
        memory, reason = drive(steps, lambda: Deadline(None, late))
    # Check every rank, because any may lead its node in another communicator.
    cannot_lead = native.why_not_between_nodes() or ""
    agreed = np.array([reason, bool(cannot_lead)], np.int64)
    comm.Allreduce(import_mpi().IN_PLACE, agreed, import_mpi().MAX)
    reason = int(agreed[0])
    lacks_leader = bool(agreed[1]) and (topology.num_nodes > 1 or reason != 0)
    if not reason and not lacks_leader:
        return topology, opener, memory
    topology.close()
    topology = Topology(comm, ranks_per_node=1)
    if lacks_leader:
        _say_once(comm, next(text for text in comm.allgather(cannot_lead) if text))
        return topology, None, None
    _say_once(comm, _REASONS[reason].format(nbytes))
    return topology, opener, aligned_zeros(native.library().nc_control_bytes(1))


_said: set[str] = set()


def _say_once(comm: MPI.Intracomm, reason: str) -> None:
    if comm.Get_rank() == 0 and comm.Get_size() > 1 and reason not in _said:
        _said.add(reason)
        _log.warning("mpidist: ranks of a node use MPI messages, not shared memory: %s. See docs/install.md", reason)
