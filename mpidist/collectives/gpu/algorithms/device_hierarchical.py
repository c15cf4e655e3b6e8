"""All-reduce of arrays on GPUs in two levels: NCCL inside each node, MPI between them.

The flat array is cut into chunks, and each chunk into one slice per *rail* (see ``two_level``). NCCL reduces the slices
of a chunk to the ranks of the node that have them; each passes through page-locked memory to its rail and back, or
straight from and to the device where MPI takes its memory; NCCL spreads the slices over the node. The host waits for
the device only where MPI needs the bytes. NCCL calls are made in the same order on all ranks of a node: first the
reductions of all chunks, then, chunk by chunk, the spreading. The sums of a ring are formed on the GPU; those of small
slices, and of slices that are rounded, on the host.

Chunks overlap. The scheme of Horovod's NCCLHierarchicalAllreduce, in chunks.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from mpidist.arrays.dtypes import Array
from mpidist.arrays.streams import Event, Stream
from mpidist.collectives.gpu.device_call import DeviceReduction, DeviceSite
from mpidist.collectives.gpu.device_streams import DeviceStreams
from mpidist.collectives.gpu.nccl_comm import NcclComm
from mpidist.collectives.gpu.network_probes import takes_device_memory
from mpidist.collectives.gpu.staging import DeviceRing, PinnedBuffer, StagingRing, agreed_staging_bytes, received_bytes
from mpidist.collectives.mpi.exchange import problems_of
from mpidist.collectives.mpi.waiting import Steps, pause, until_event
from mpidist.collectives.node.memory import slices
from mpidist.collectives.node.node import Node
from mpidist.collectives.reduce.algorithms.two_level import Wires, moved
from mpidist.collectives.reduce.cost_model import Round
from mpidist.collectives.reduce.registry import AlgorithmEntry, Wire, gpu_algorithms, wire_algorithms
from mpidist.core.errors import AlgorithmError


@dataclass(frozen=True)
class DeviceHierarchical:
    """NCCL in the node, MPI between the nodes.

    Args:
        node: The node of this rank.
        level: NCCL in the node.
        wires: The ways between nodes for host memory.
        ring: The way between nodes for memory of the device.
        streams: Where it works.
        staging: The page-locked memory of slices under way.
    """

    node: Node
    level: _InNode
    wires: Wires
    ring: DeviceRing
    streams: DeviceStreams
    staging: StagingRing

    @classmethod
    def made(cls, site: DeviceSite) -> Steps[DeviceHierarchical]:
        """Return a new one (collective).

        Raises:
            AlgorithmError: NCCL does not work on some node, or a rank has no memory for it; on all ranks.
        """
        comm, node, streams = site.comm, site.node, site.streams
        wires = Wires(site, {**wire_algorithms.costs, "ring": _ring_on_device})
        aware = yield from takes_device_memory(comm)
        slice_bytes = yield from agreed_staging_bytes(comm)
        made: NcclComm | str | None = None
        if node.size > 1:
            made = yield from NcclComm.made(node.comm, streams.device, has_given_up=streams.has_given_up)
        nccl, problem = (None, made) if isinstance(made, str) else (made, None)
        try:
            staging = StagingRing(streams, slice_bytes, received_bytes(slice_bytes, len(node.ranks)))
        except Exception as error:  # the others wait for this rank
            problem = problem or f"rank {comm.Get_rank()}: {type(error).__name__}: {error}"
        problems = yield from problems_of(comm, problem)
        for problem in problems.values():
            if nccl is not None:
                nccl.close()
            raise AlgorithmError(f"algorithm 'hierarchical' does not work here for arrays on GPUs: {problem}")
        if nccl is not None:
            streams.watch(nccl)
        level = _InNode(nccl, node.rank, node.rails, streams.stream)
        rail = [ranks[min(node.rank, len(ranks) - 1)] for ranks in node.ranks]
        ring = DeviceRing(comm, rail, node.topology.node_index, streams, aware)
        # MPI does not wait for what a stream has still to do with memory that it gave out before.
        yield from until_event(staging.is_made)
        return cls(node, level, wires, ring, streams, staging)

    def all_reduce(self, job: DeviceReduction) -> Steps[list[Array]]:
        """See ``DeviceAlgorithm``."""
        streams, nbytes = self.streams, self.staging.nbytes
        name = self.wires.choose(job.nbytes, job.options, nbytes, nbytes).name
        on_device = job.options.wire_dtype is None and (self.ring.takes_device_memory or name == "ring")
        run = _Run(job, self, None if on_device else self.wires.made(name, job.options))
        with streams.on():
            run.start(nbytes // job.dtype.itemsize)
        looks = 0
        while not run.is_over:
            with streams.on():
                moved = run.move()
            looks = 0 if moved else looks + 1
            if looks:
                pause(self.node.comm, looks)
                yield
        with streams.on():
            return job.store()

    def close(self) -> None:
        """Destroy the NCCL communicator (collective over the node) and let go of the memory."""
        if self.level.nccl is not None:
            self.level.nccl.close()


def _ring_on_device(nodes: int, count: int) -> list[Round]:
    """Return the rounds of the ring, a sum of which takes a launch.

    That is about as long as a message.
    """
    return [
        each._replace(reduced=0, messages=each.messages + (each.reduced > 0))
        for each in wire_algorithms.costs["ring"](nodes, count)
    ]


@dataclass(frozen=True)
class _InNode:
    """NCCL in one node.

    Args:
        nccl: Its communicator; None for a rank that is alone on its node.
        rank: In the node.
        rails: Ranks of the node that have a slice.
        stream: On which it works.
    """

    nccl: NcclComm | None
    rank: int
    rails: int
    stream: Stream

    def slices(self, chunk: Array) -> list[Array]:
        """Return the slice of a chunk for each rank that has one."""
        return [chunk[a:b] for a, b in slices(chunk.size, self.rails)]

    def reduce(self, job: DeviceReduction, source: Array, target: Array) -> None:
        """Reduce each slice of a chunk to the rank that has it.

        A rank that is alone on its node has copied it.
        """
        nccl, targets = self.nccl, self.slices(target)
        if nccl is None:
            return
        if nccl.size == self.rails:
            nccl.reduce_scatter(source, targets[self.rank], job.op, self.stream)
        else:
            with nccl.group():
                for root, part in enumerate(self.slices(source)):
                    nccl.reduce(part, targets[root], job.op, root, self.stream)

    def spread(self, chunk: Array) -> None:
        """Give every rank all slices of a chunk."""
        nccl, parts = self.nccl, self.slices(chunk)
        if nccl is None:
            return
        if nccl.size == self.rails:
            nccl.all_gather(parts[self.rank], chunk, self.stream)
        else:
            with nccl.group():
                for root, part in enumerate(parts):
                    nccl.broadcast(part, part, root, self.stream)


class _Run:
    """One reduction, and the progress of each of its chunks.

    Args:
        job: The reduction.
        way: With all that it takes.
        wire: The way between nodes for host memory; None where that for memory of the device is taken.
    """

    def __init__(self, job: DeviceReduction, way: DeviceHierarchical, wire: Wire | None) -> None:
        self._job, self._wire, self._ring = job, wire, way.ring
        self._level, self._staging, self._streams = way.level, way.staging, way.streams
        self._is_mpi_on_device = wire is None and way.ring.takes_device_memory
        self._chunks: list[Array] = []
        self._reduced: list[Event] = []
        # The steps left of each slice on its way between the nodes, and when it is on the device again, by its chunk.
        self._in_flight: deque[Steps[None] | None] = deque()
        self._arrived: dict[int, Event] = {}
        self._begun = self._spread = 0

    def start(self, per_slice: int) -> None:
        """Cut the flat array, and have all chunks reduced in the node."""
        level, streams, job = self._level, self._streams, self._job
        per_chunk = per_slice * level.rails
        if level.nccl is None:
            job.copy()
        for start in range(0, job.target.size, per_chunk):
            chunk = job.target[start : start + per_chunk]
            level.reduce(job, job.source[start : start + per_chunk], chunk)
            self._chunks.append(chunk)
            self._reduced.append(streams.stream.record())

    @property
    def is_over(self) -> bool:
        """Return whether all chunks have been handed to NCCL to be spread."""
        return self._spread == len(self._chunks)

    def move(self) -> bool:
        """Move chunks on; return whether any has got further."""
        has_moved = self._begin()
        self._in_flight = deque(steps and moved(steps) for steps in self._in_flight)
        while self._in_flight and self._in_flight[0] is None and not self._waits_for_mpi():
            self._in_flight.popleft()
            if self._spread in self._arrived:
                self._streams.stream.wait(self._arrived.pop(self._spread))
            self._level.spread(self._chunks[self._spread])
            self._spread += 1
            has_moved = True
        return has_moved

    def _nccl_is_done(self) -> bool:
        """Return whether all chunks have been reduced in the node."""
        return self._reduced[-1].is_done

    def _waits_for_mpi(self) -> bool:
        """Return whether NCCL has to wait: it and MPI never use one device at once."""
        all_arrived = self._begun == len(self._chunks) and not any(self._in_flight)
        return self._is_mpi_on_device and not all_arrived

    def _begin(self) -> bool:
        """Begin to send the next chunk if there is room; return whether it began."""
        chunk = self._begun
        if chunk == len(self._chunks):
            return False
        steps: Steps[None] | None = None
        if self._level.rank < self._level.rails:
            if self._is_mpi_on_device and not self._nccl_is_done():
                return False
            slot = self._staging.take()
            if slot is None:
                return False
            part = self._level.slices(self._chunks[chunk])[self._level.rank]
            steps = self._crossing(slot, part, chunk)
        self._in_flight.append(steps)
        self._begun += 1
        return True

    def _crossing(self, slot: PinnedBuffer, part: Array, chunk: int) -> Steps[None]:
        """Take a slice over the ring on the device, or through the host."""
        if self._wire is None:
            arrived = yield from self._ring.all_reduce(part, self._job.op, chunk, slot, self._reduced[chunk])
        else:
            arrived = yield from self._through(self._wire, slot, part, chunk)
        self._staging.give_back(slot, arrived)
        self._arrived[chunk] = arrived

    def _through(self, wire: Wire, slot: PinnedBuffer, part: Array, chunk: int) -> Steps[Event]:
        """Take a slice to the host, over the wire and back."""
        streams, job = self._streams, self._job
        memory = slot.array(part.size, part.dtype)
        streams.to_host.wait(self._reduced[chunk])
        streams.ops.copy_to_host(memory, part, streams.to_host)
        yield from until_event(streams.to_host.record(), relaxes=False)
        yield from wire.all_reduce(memory, memory, job.op, chunk, self._residual(chunk, memory))
        streams.ops.copy_to_device(part, memory, streams.to_device)
        return streams.to_device.record()

    def _residual(self, chunk: int, like: Array) -> Array | None:
        residuals = self._job.residuals
        if residuals is None:
            return None
        if chunk not in residuals:
            residuals[chunk] = np.zeros_like(like)
        return residuals[chunk]


gpu_algorithms.register(
    AlgorithmEntry(
        "hierarchical",
        DeviceHierarchical.made,
        ("several_nodes_gpu",),
        ("several_nodes_gpu",),
        rounds=True,
        is_general=False,
        instead=("staged",),
        stands_for=lambda node: "nccl" if node.is_alone else "hierarchical",
    )
)
