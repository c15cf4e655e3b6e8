"""All-reduce arrays on GPUs: choose an algorithm, and run it.

``nccl`` reduces over all ranks with NCCL. ``staged`` runs an algorithm for the host in page-locked memory. It needs no
NCCL and supports any dtype. ``hierarchical`` uses NCCL inside each node and MPI between nodes, like Horovod's
NCCLHierarchicalAllreduce, but in chunks that overlap.

``hierarchical`` cuts the flat array into chunks, and each chunk into one slice per *rail* (see ``two_level``). NCCL
reduces each slice to one rank of the node. That rank exchanges it with its rail through page-locked memory, or directly
if MPI accepts device memory. NCCL then copies the slices to all ranks of the node. The host waits for the device only
when MPI needs the bytes. All ranks of a node make the same NCCL calls in the same order: first the reductions of all
chunks, then the copies chunk by chunk. A ring sums on the GPU. Small slices, and slices in a wire dtype, are summed on
the host.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from mpidist.arrays.dtypes import Array
from mpidist.arrays.streams import Event, Stream
from mpidist.collectives.gpu.device_streams import DeviceAlgorithm, DeviceReduction, DeviceSite, DeviceStreams
from mpidist.collectives.gpu.nccl_comm import NcclComm
from mpidist.collectives.gpu.probes import rdma_everywhere, rdma_fabric, takes_device_memory
from mpidist.collectives.gpu.staging import DeviceRing, PinnedBuffer, StagingRing, agreed_staging_bytes
from mpidist.collectives.mpi.exchange import problems_of
from mpidist.collectives.mpi.waiting import Steps, pause, until_event
from mpidist.collectives.node.memory import Pool, slices
from mpidist.collectives.node.node import Node
from mpidist.collectives.node.packing import Pack, PackedReduction
from mpidist.collectives.reduce.algorithms.two_level import Wires, moved
from mpidist.collectives.reduce.choice import Choice, place_of
from mpidist.collectives.reduce.cost_model import Round
from mpidist.collectives.reduce.device_packs import SLICE_ALIGNMENT, DevicePack
from mpidist.collectives.reduce.registry import (
    BY_NETWORK,
    GPU_PLACES,
    Algorithm,
    AlgorithmEntry,
    Row,
    Table,
    Wire,
    gpu_algorithms,
    gpu_names,
    look_up,
    resolved,
    row_text,
    wire_algorithms,
)
from mpidist.core.errors import AlgorithmError
from mpidist.core.options import CommunicationOptions


class Nccl:
    """Reduce each pack with one NCCL call. Closes ``comm`` with this object."""

    def __init__(self, comm: NcclComm, streams: DeviceStreams) -> None:
        self.comm = comm
        self._streams = streams

    @classmethod
    def made(cls, site: DeviceSite) -> Steps[Nccl]:
        """Start NCCL, or raise AlgorithmError on all ranks (collective)."""
        streams = site.streams
        made = yield from NcclComm.made(site.comm, streams.device, has_given_up=streams.has_given_up)
        if isinstance(made, str):
            raise AlgorithmError(f"algorithm 'nccl' does not work here: {made}")
        streams.watch(made)
        return cls(made, streams)

    def all_reduce(self, job: DeviceReduction) -> Steps[list[Array]]:
        """Reduce with one call of NCCL."""
        yield from ()
        with self._streams.on():
            self.comm.all_reduce(job.source, job.target, job.op, self._streams.stream)
            return job.store()

    def close(self) -> None:
        """Destroy the NCCL communicator (collective)."""
        self.comm.close()


gpu_algorithms.register(
    AlgorithmEntry("nccl", Nccl.made, GPU_PLACES, GPU_PLACES, is_general=False, instead=("hierarchical", "staged"))
)


class Alone(DeviceAlgorithm):
    """Cast, divide and copy on a single rank."""

    def __init__(self, site: DeviceSite) -> None:
        self._streams = site.streams

    def all_reduce(self, job: DeviceReduction) -> Steps[list[Array]]:
        """Copy the source to the result."""
        yield from ()
        with self._streams.on():
            job.copy()
            return job.store()


gpu_algorithms.register(AlgorithmEntry("alone", Alone, ()))


# Two chunks in host memory: the next one is copied there while one is reduced.
_BUFFERS = 2


class Staged:
    """Reduce chunks of at most ``chunk_bytes`` in page-locked memory with a host algorithm."""

    def __init__(self, site: DeviceSite, chunk_bytes: int) -> None:
        self._streams = site.streams
        self._choice = site.on_host
        self._pool = site.pool
        self._chunk_bytes = chunk_bytes
        self._inputs = self._outputs = [np.empty(0, np.uint8)] * _BUFFERS

    @classmethod
    def made(cls, site: DeviceSite) -> Steps[Staged]:
        """Agree on the size of a chunk (collective)."""
        chunk_bytes = yield from agreed_staging_bytes(site.comm)
        return cls(site, chunk_bytes)

    def all_reduce(self, job: DeviceReduction) -> Steps[list[Array]]:
        """Reduce chunk by chunk, and copy the next chunk to the host during each reduction."""
        streams, ops = self._streams, self._streams.ops
        chunks = job.pack.on_host(self._chunk_bytes // job.dtype.itemsize)
        yield from self._allocate_buffers(chunks[0].nbytes)
        next_copied = self._copy_to_host(job, chunks, 0)
        for number, chunk in enumerate(chunks):
            copied, index = next_copied, number % _BUFFERS
            if number + 1 < len(chunks):
                next_copied = self._copy_to_host(job, chunks, number + 1)
            # The stream is then also past the last copies from and to these buffers.
            yield from until_event(copied)
            source, reduced = [
                buffers[index][: chunk.nbytes].view(job.dtype) for buffers in (self._inputs, self._outputs)
            ]
            yield from self._reduce(job, chunk, source, reduced)
            with streams.on():
                start = number * chunks[0].count
                ops.copy_to_device(job.target[start : start + chunk.count], reduced, streams.stream)
        with streams.on():
            return job.store()

    def _allocate_buffers(self, nbytes: int) -> Steps[None]:
        if self._inputs[0].nbytes < nbytes:
            # Freed memory may be reused at once, so wait for the copies.
            yield from until_event(self._streams.stream.record())
            with self._streams.on():
                ops = self._streams.ops
                self._inputs, self._outputs = [[ops.pinned(nbytes) for _ in range(_BUFFERS)] for _ in range(2)]

    def _copy_to_host(self, job: DeviceReduction, chunks: Sequence[Pack], number: int) -> Event:
        streams, chunk, start = self._streams, chunks[number], number * chunks[0].count
        target = self._inputs[number % _BUFFERS][: chunk.nbytes].view(job.dtype)
        with streams.on():
            streams.ops.copy_to_host(target, job.source[start : start + chunk.count], streams.stream)
            return streams.stream.record()

    def _reduce(self, job: DeviceReduction, chunk: Pack, source: Array, reduced: Array) -> Steps[None]:
        options = job.options
        if options.algorithm in gpu_names():
            options = replace(options, algorithm=None)
        host_job = PackedReduction(chunk, [source], [reduced], job.op, None, options, self._pool)
        names = self._choice.names_for(chunk.nbytes, options)
        algorithm = self._choice.made(names) or (yield from self._choice.make(names))
        yield from algorithm.all_reduce(host_job)

    def close(self) -> None:
        """Free the host memory."""
        self._inputs = self._outputs = [np.empty(0, np.uint8)] * _BUFFERS


gpu_algorithms.register(
    AlgorithmEntry("staged", Staged.made, GPU_PLACES, GPU_PLACES, is_ordered=True, rounds=True, instead=())
)


@dataclass(frozen=True)
class DeviceHierarchical:
    """Reduce with NCCL inside nodes and MPI between them.

    Args:
        node: Node of this rank.
        level: NCCL inside the node.
        wires: Inter-node algorithms for host memory.
        ring: Inter-node algorithm for device memory.
        streams: Streams of the device.
        staging: Page-locked memory of slices in flight.
    """

    node: Node
    level: _InNode
    wires: Wires
    ring: DeviceRing
    streams: DeviceStreams
    staging: StagingRing

    @classmethod
    def made(cls, site: DeviceSite) -> Steps[DeviceHierarchical]:
        """Start NCCL and allocate memory, or raise AlgorithmError on all ranks (collective)."""
        comm, node, streams = site.comm, site.node, site.streams
        wires = Wires(site, {**wire_algorithms.costs, "ring": _ring_on_device})
        aware = yield from takes_device_memory(comm)
        slice_bytes = yield from agreed_staging_bytes(comm)
        made: NcclComm | str | None = None
        if node.size > 1:
            made = yield from NcclComm.made(node.comm, streams.device, has_given_up=streams.has_given_up)
        nccl, problem = (None, made) if isinstance(made, str) else (made, None)
        try:
            # A slot on the device holds a segment of a slice, which may be one element longer than others.
            staging = StagingRing(streams, slice_bytes, slice_bytes // len(node.ranks) + 16)
        except Exception as error:  # agreed below, because the others wait
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
        # Earlier work of a stream may still use the allocated memory, and MPI does not wait for it.
        yield from until_event(staging.is_made)
        return cls(node, level, wires, ring, streams, staging)

    def all_reduce(self, job: DeviceReduction) -> Steps[list[Array]]:
        """Reduce in overlapping chunks."""
        streams, nbytes = self.streams, self.staging.nbytes
        name = self.wires.choose(job.nbytes, job.options, nbytes, nbytes).name
        on_device = job.options.wire_dtype is None and (self.ring.takes_device_memory or name == "ring")
        run = _Run(job, self, None if on_device else self.wires.made(name, job.options))
        with streams.on():
            run.start(nbytes // job.dtype.itemsize)
        failed_polls = 0
        while not run.is_over:
            with streams.on():
                moved = run.move()
            failed_polls = 0 if moved else failed_polls + 1
            if failed_polls:
                pause(self.node.comm, failed_polls)
                yield
        with streams.on():
            return job.store()

    def close(self) -> None:
        """Destroy the NCCL communicator (collective over the node)."""
        if self.level.nccl is not None:
            self.level.nccl.close()


def _ring_on_device(nodes: int, count: int) -> list[Round]:
    """Return the rounds of the ring. A sum costs a launch, about as much as a message."""
    return [
        each._replace(reduced=0, messages=each.messages + (each.reduced > 0))
        for each in wire_algorithms.costs["ring"](nodes, count)
    ]


@dataclass(frozen=True)
class _InNode:
    """Run NCCL inside one node.

    Args:
        nccl: Communicator of the node, or None for a rank alone on its node.
        rank: Rank in the node.
        rails: Number of ranks with a slice.
        stream: Stream of the calls.
    """

    nccl: NcclComm | None
    rank: int
    rails: int
    stream: Stream

    def slices(self, chunk: Array) -> list[Array]:
        """Return one slice of a chunk per rail."""
        return [chunk[a:b] for a, b in slices(chunk.size, self.rails)]

    def reduce(self, job: DeviceReduction, source: Array, target: Array) -> None:
        """Reduce each slice of a chunk to its rank."""
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
        """Copy all slices of a chunk to every rank."""
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
    """Track one reduction and its chunks.

    Args:
        job: Reduction to run.
        algorithm: Algorithm with its streams and memory.
        wire: Inter-node algorithm for host memory. None to use the ring on the device.
    """

    def __init__(self, job: DeviceReduction, algorithm: DeviceHierarchical, wire: Wire | None) -> None:
        self._job, self._wire, self._ring = job, wire, algorithm.ring
        self._level, self._staging, self._streams = algorithm.level, algorithm.staging, algorithm.streams
        self._is_mpi_on_device = wire is None and algorithm.ring.takes_device_memory
        self._chunks: list[Array] = []
        self._reduced: list[Event] = []
        # Remaining steps of each slice in flight, and the event of its return to the device, keyed by chunk.
        self._in_flight: deque[Steps[None] | None] = deque()
        self._arrived: dict[int, Event] = {}
        self._begun = self._spread = 0

    def start(self, per_slice: int) -> None:
        """Cut the flat array into chunks, and reduce all of them in the node."""
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
        """Return True when every chunk is enqueued for the copy to all ranks."""
        return self._spread == len(self._chunks)

    def move(self) -> bool:
        """Advance the chunks, and return True on progress."""
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
        """Return True when all chunks are reduced in the node."""
        return self._reduced[-1].is_done

    def _waits_for_mpi(self) -> bool:
        """Return True while MPI uses the device, so that NCCL must wait."""
        all_arrived = self._begun == len(self._chunks) and not any(self._in_flight)
        return self._is_mpi_on_device and not all_arrived

    def _begin(self) -> bool:
        """Send the next chunk if a slot is free, and return True if so."""
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
        """Reduce a slice between nodes, and free its slot."""
        if self._wire is None:
            arrived = yield from self._ring.all_reduce(part, self._job.op, chunk, slot, self._reduced[chunk])
        else:
            arrived = yield from self._through(self._wire, slot, part, chunk)
        self._staging.give_back(slot, arrived)
        self._arrived[chunk] = arrived

    def _through(self, wire: Wire, slot: PinnedBuffer, part: Array, chunk: int) -> Steps[Event]:
        """Copy a slice to the host, reduce it between nodes, and copy it back."""
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


_log = logging.getLogger("mpidist")


def may_move_by_nccl(table: Table, place: str) -> bool:
    """Return True on every rank if NCCL, when it works, moves arrays."""
    row: Row = getattr(table, place)
    return look_up(row, sys.maxsize) in ("nccl", BY_NETWORK)


class DeviceChoice(Choice[DeviceAlgorithm]):
    """Choose among the algorithms of one communicator for arrays on one device."""

    def __init__(self, table: Table, streams: DeviceStreams, on_host: Choice[Algorithm], pool: Pool) -> None:
        comm, node = on_host.site.comm, on_host.site.node
        site, place = DeviceSite(comm, node, table.between_nodes, streams, on_host, pool), place_of(node, "gpu")
        super().__init__(gpu_algorithms, site, place, getattr(table, place))
        self.streams = streams

    @property
    def multiple(self) -> int:
        """Return the number of bytes that flat arrays are padded to.

        Slices between nodes then have one length, and each starts at an address that allows NCCL wide loads.
        """
        rails = 1 if self.site.node.is_alone else self.site.node.rails
        return 1 if rails == 1 else rails * SLICE_ALIGNMENT

    def names_for_pack(self, pack: DevicePack, options: CommunicationOptions) -> tuple[str, ...]:
        """Return the algorithm for a pack and its substitutes, the same on every rank."""
        if self.site.comm.Get_size() == 1:
            return ("alone",)
        return self.names_for(pack.nbytes, options, pack.suits_nccl)

    def settle(self) -> Steps[None]:
        """Replace "by network" in the row of the table once (collective)."""
        if any(name == BY_NETWORK for _, name in self.row):
            has_rdma = yield from rdma_everywhere(self.site.comm)
            self.row = resolved(self.row, has_rdma)
            if self.site.comm.Get_rank() == 0:
                fabric = rdma_fabric()
                why = f"NCCL has RDMA on all ranks, {fabric.name} here" if has_rdma and fabric else "no RDMA for NCCL"
                _log.info("mpidist: arrays on GPUs go between nodes by %s (%s)", row_text(self.row), why)

    def prepare(self) -> Steps[None]:
        """Create the algorithms that the table names (collective)."""
        if self.site.comm.Get_size() > 1:
            yield from self.settle()
            for name in dict.fromkeys(name for _, name in self.row):
                yield from self.make(self.names_from(name))

    @property
    def moves_by_nccl(self) -> bool:
        """Return True if NCCL moves arrays, the same on every rank after ``prepare``."""
        name = self.first_working(self.names_from(look_up(self.row, sys.maxsize)))
        return self.site.comm.Get_size() > 1 and name == "nccl"

    @property
    def nccl(self) -> NcclComm:
        """Return NCCL over all ranks. Requires ``moves_by_nccl``."""
        made = self.made(("nccl",))
        assert isinstance(made, Nccl)
        return made.comm

    def close(self) -> None:
        """Free the algorithms when all work is done (collective)."""
        self.streams.close()
        super().close()
