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

import numpy as np

from mpidist.arrays.dtypes import Array
from mpidist.arrays.streams import Event
from mpidist.collectives.gpu.device_call import DeviceReduction, DeviceSite
from mpidist.collectives.gpu.device_streams import DeviceStreams
from mpidist.collectives.gpu.nccl_comm import NcclComm
from mpidist.collectives.gpu.network_probes import takes_device_memory
from mpidist.collectives.gpu.staging import DeviceRing, PinnedBuffer, StagingRing, agreed_staging_bytes, received_bytes
from mpidist.collectives.mpi.agreed import problems_of
from mpidist.collectives.mpi.waiting import Steps, pause, until_event
from mpidist.collectives.node.chunks import slices
from mpidist.collectives.node.node import Node
from mpidist.collectives.reduce.algorithms.two_level import Wires
from mpidist.collectives.reduce.registry import AlgorithmEntry, Wire, gpu_algorithms
from mpidist.core.errors import AlgorithmError


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

    def __init__(
        self, node: Node, level: _InNode, wires: Wires, ring: DeviceRing, streams: DeviceStreams, staging: StagingRing
    ) -> None:
        self._comm = node.comm
        self._level = level
        self._wires = wires
        self._ring = ring
        self._streams = streams
        self._staging = staging

    @classmethod
    def made(cls, site: DeviceSite) -> Steps[DeviceHierarchical]:
        """Return a new one (collective).

        Raises:
            AlgorithmError: NCCL does not work on some node, or a rank has no memory for it; on all ranks.
        """
        comm, node, streams = site.comm, site.node, site.streams
        wires = Wires(comm, node, site.between_nodes)
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
        level = _InNode(nccl, node.rank, node.rails, streams)
        rail = [ranks[min(node.rank, len(ranks) - 1)] for ranks in node.ranks]
        ring = DeviceRing(comm, rail, node.topology.node_index, streams, aware)
        # MPI does not wait for what a stream has still to do with memory that it gave out before.
        yield from until_event(staging.is_made)
        return cls(node, level, wires, ring, streams, staging)

    def all_reduce(self, job: DeviceReduction) -> Steps[list[Array]]:
        """See ``DeviceAlgorithm``."""
        streams, level = self._streams, self._level
        per_slice = self._staging.nbytes // job.dtype.itemsize
        name, wire = self._wires.choose(min(-(-job.nbytes // level.rails), self._staging.nbytes), job.options)
        rounds = job.options.wire_dtype is not None
        on_device = not rounds and (self._ring.takes_device_memory or name == "ring")
        run = _Run(job, level, wire, self._ring if on_device else None, self._staging, streams)
        with streams.on():
            run.start(per_slice)
        looks = 0
        while not run.is_over:
            with streams.on():
                moved = run.move()
            looks = 0 if moved else looks + 1
            if looks:
                pause(self._comm, looks)
                yield
        with streams.on():
            return job.store()

    def close(self) -> None:
        """Destroy the NCCL communicator (collective over the node) and let go of the memory."""
        self._level.close()


class _InNode:
    """NCCL in one node.

    Args:
        nccl: Its communicator; None for a rank that is alone on its node.
        rank: In the node.
        rails: Ranks of the node that have a slice.
        streams: Where it works.
    """

    def __init__(self, nccl: NcclComm | None, rank: int, rails: int, streams: DeviceStreams) -> None:
        self._nccl = nccl
        self._rank = rank
        self.rails = rails
        self._stream = streams.stream
        self.has_slice = rank < rails
        self.is_alone = nccl is None

    def slice_of(self, chunk: Array) -> Array:
        """Return this rank's slice of a chunk."""
        return self._slices(chunk)[self._rank]

    def _slices(self, chunk: Array) -> list[Array]:
        return [chunk[a:b] for a, b in slices(chunk.size, self.rails)]

    def reduce(self, job: DeviceReduction, source: Array, target: Array) -> None:
        """Reduce each slice of a chunk to the rank that has it.

        A rank that is alone on its node has copied it.
        """
        nccl, targets = self._nccl, self._slices(target)
        if nccl is None:
            return
        if nccl.size == self.rails:
            nccl.reduce_scatter(source, targets[self._rank], job.op, self._stream)
        else:
            with nccl.group():
                for root, part in enumerate(self._slices(source)):
                    nccl.reduce(part, targets[root], job.op, root, self._stream)

    def spread(self, chunk: Array) -> None:
        """Give every rank all slices of a chunk."""
        nccl, parts = self._nccl, self._slices(chunk)
        if nccl is None:
            return
        if nccl.size == self.rails:
            nccl.all_gather(parts[self._rank], chunk, self._stream)
        else:
            with nccl.group():
                for root, part in enumerate(parts):
                    nccl.broadcast(part, part, root, self._stream)

    def close(self) -> None:
        """Destroy the communicator (collective over the node)."""
        if self._nccl is not None:
            self._nccl.close()


class _Run:
    """One reduction, and the progress of each of its chunks.

    Args:
        job: The reduction.
        level: NCCL in the node.
        wire: The way between nodes for host memory.
        ring: The way between nodes for memory of the device, which is then taken; or None.
        staging: The page-locked memory of slices under way.
        streams: Where it works.
    """

    def __init__(
        self,
        job: DeviceReduction,
        level: _InNode,
        wire: Wire,
        ring: DeviceRing | None,
        staging: StagingRing,
        streams: DeviceStreams,
    ) -> None:
        self._job, self._level, self._wire, self._ring = job, level, wire, ring
        self._staging, self._streams = staging, streams
        self._is_mpi_on_device = ring is not None and ring.takes_device_memory
        self._chunks: list[Array] = []
        self._reduced: list[Event] = []
        self._in_flight: deque[_SliceInFlight] = deque()
        self._begun = self._spread = 0

    def start(self, per_slice: int) -> None:
        """Cut the flat array, and have all chunks reduced in the node."""
        level, streams, job = self._level, self._streams, self._job
        per_chunk = per_slice * level.rails
        if level.is_alone:
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
        moved = self._begin()
        for part in self._in_flight:
            part.move()
        while self._in_flight and self._in_flight[0].is_done and not self._waits_for_mpi():
            arrived = self._in_flight.popleft().arrived
            if arrived is not None:
                self._streams.stream.wait(arrived)
            self._level.spread(self._chunks[self._spread])
            self._spread += 1
            moved = True
        return moved

    def _nccl_is_done(self) -> bool:
        """Return whether all chunks have been reduced in the node."""
        return self._reduced[-1].is_done

    def _waits_for_mpi(self) -> bool:
        """Return whether NCCL has to wait: it and MPI never use one device at once."""
        all_arrived = self._begun == len(self._chunks) and all(part.is_done for part in self._in_flight)
        return self._is_mpi_on_device and not all_arrived

    def _begin(self) -> bool:
        """Begin to send the next chunk if there is room; return whether it began."""
        chunk = self._begun
        if chunk == len(self._chunks):
            return False
        steps: Steps[Event] | None = None
        if self._level.has_slice:
            if self._is_mpi_on_device and not self._nccl_is_done():
                return False
            slot = self._staging.take()
            if slot is None:
                return False
            part = self._level.slice_of(self._chunks[chunk])
            steps = (
                self._through(slot, part, chunk) if self._ring is None else self._around(self._ring, slot, part, chunk)
            )
        self._in_flight.append(_SliceInFlight(steps))
        self._begun += 1
        return True

    def _around(self, ring: DeviceRing, slot: PinnedBuffer, part: Array, chunk: int) -> Steps[Event]:
        """Take a slice over the ring, whose sums are formed on the device."""
        arrived = yield from ring.all_reduce(part, self._job.op, chunk, slot, self._reduced[chunk])
        self._staging.give_back(slot, arrived)
        return arrived

    def _through(self, slot: PinnedBuffer, part: Array, chunk: int) -> Steps[Event]:
        """Take a slice to the host, over the wire and back."""
        streams, job = self._streams, self._job
        memory = slot.array(part.size, part.dtype)
        streams.to_host.wait(self._reduced[chunk])
        streams.ops.copy_to_host(memory, part, streams.to_host)
        yield from until_event(streams.to_host.record(), relaxes=False)
        yield from self._wire.all_reduce(memory, memory, job.op, chunk, self._residual(chunk, memory))
        streams.ops.copy_to_device(part, memory, streams.to_device)
        arrived = streams.to_device.record()
        self._staging.give_back(slot, arrived)
        return arrived

    def _residual(self, chunk: int, like: Array) -> Array | None:
        residuals = self._job.residuals
        if residuals is None:
            return None
        if chunk not in residuals:
            residuals[chunk] = np.zeros_like(like)
        return residuals[chunk]


class _SliceInFlight:
    """A slice of a chunk on its way between the nodes.

    Args:
        steps: The steps left, which return the event of its arrival on the device; None for a rank without a slice.
    """

    def __init__(self, steps: Steps[Event] | None) -> None:
        self._steps = steps
        self.arrived: Event | None = None

    @property
    def is_done(self) -> bool:
        return self._steps is None

    def move(self) -> None:
        if self._steps is not None:
            try:
                next(self._steps)
            except StopIteration as stop:
                self.arrived = stop.value
                self._steps = None


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
