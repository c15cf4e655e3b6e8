"""All-reduce arrays on GPUs: choose an algorithm, and run it.

``nccl`` reduces over all ranks with NCCL. ``staged`` runs an algorithm for the host in page-locked memory. It needs no
NCCL and supports any dtype. ``hierarchical`` uses NCCL inside each node and MPI between nodes, like Horovod's
NCCLHierarchicalAllreduce, but in chunks that overlap.

``hierarchical`` cuts each piece into chunks, and each chunk into one slice per *rail* (see ``two_level``). NCCL reduces
each slice to one rank of the node. That rank exchanges it with its rail through page-locked memory, or directly if MPI
accepts device memory. NCCL then copies the slices to all ranks of the node. NCCL and MPI never use the same memory at
once. All ranks of a node make the same NCCL calls in the same order: first the reductions of all chunks, then the
copies chunk by chunk. A ring sums on the GPU. Small slices, and slices in a wire dtype, are summed on the host.
"""

from __future__ import annotations

import logging
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from mpidist.arrays.dtypes import Array, DType
from mpidist.arrays.streams import Event
from mpidist.collectives.gpu.device_streams import (
    SMALL_BYTES,
    DeviceAlgorithm,
    DevicePack,
    DeviceReduction,
    DeviceSite,
    DeviceStreams,
    HostChunk,
)
from mpidist.collectives.gpu.nccl import NcclComm, make_nccl
from mpidist.collectives.gpu.probes import agreed_staging_bytes, rdma_everywhere, rdma_fabric, takes_device_memory
from mpidist.collectives.mpi.exchange import problems_of
from mpidist.collectives.mpi.mpi_types import NUMPY_OPS
from mpidist.collectives.mpi.waiting import Comm, Steps, pause, until_event
from mpidist.collectives.node.memory import Pool, slices
from mpidist.collectives.node.node import Node
from mpidist.collectives.node.packing import Pack, PackedReduction
from mpidist.collectives.reduce.algorithms.two_level import Wires, moved
from mpidist.collectives.reduce.choice import Choice, place_of
from mpidist.collectives.reduce.cost_model import Rail, Round
from mpidist.collectives.reduce.plan import ReductionPlan
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
from mpidist.core.options import CommunicationOptions, ReduceOp
from mpidist.topology import import_mpi


class Nccl:
    """Reduce each pack with one group of NCCL calls. Closes ``comm`` with this object."""

    def __init__(self, comm: NcclComm, streams: DeviceStreams) -> None:
        self.comm = comm
        self._streams = streams

    @classmethod
    def made(cls, site: DeviceSite) -> Steps[Nccl]:
        """Start NCCL, or raise AlgorithmError on all ranks (collective)."""
        streams = site.streams
        made = yield from make_nccl(site.comm, streams.device, has_given_up=streams.has_given_up)
        if isinstance(made, str):
            raise AlgorithmError(f"algorithm 'nccl' does not work here: {made}")
        streams.nccl.append(made)
        return cls(made, streams)

    def all_reduce(self, job: DeviceReduction) -> Steps[None]:
        """Reduce all pieces with one kernel of NCCL."""
        yield from ()
        with self._streams.on(), self.comm.group():
            for source, target in job.pieces:
                self.comm.all_reduce(source, target, job.pack.op, self._streams.stream)

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

    def all_reduce(self, job: DeviceReduction) -> Steps[None]:
        """Copy the sources to the results."""
        yield from ()
        with self._streams.on():
            job.copy()


gpu_algorithms.register(AlgorithmEntry("alone", Alone, ()))


# Two chunks in host memory: the next one is copied there while one is reduced.
_BUFFERS = 2


class Staged(DeviceAlgorithm):
    """Reduce chunks of at most ``chunk_bytes`` in page-locked memory with a host algorithm."""

    def __init__(self, site: DeviceSite, chunk_bytes: int) -> None:
        self._streams, self._choice, self._pool = site.streams, site.on_host, site.pool
        self._chunk_bytes = chunk_bytes
        pinned = self._streams.ops.pinned
        with self._streams.on():
            # Input and output of each chunk.
            self._buffers = [(pinned(chunk_bytes), pinned(chunk_bytes)) for _ in range(_BUFFERS)]

    @classmethod
    def made(cls, site: DeviceSite) -> Steps[Staged]:
        """Agree on the size of a chunk (collective)."""
        chunk_bytes = yield from agreed_staging_bytes(site.comm)
        return cls(site, chunk_bytes)

    def all_reduce(self, job: DeviceReduction) -> Steps[None]:
        """Reduce chunk by chunk, and copy the next chunk to the host during each reduction."""
        streams, pack = self._streams, job.pack
        chunks = pack.on_host(self._chunk_bytes // pack.dtype.itemsize)
        next_copied = self._copy_to_host(job, chunks, 0)
        for number, chunk in enumerate(chunks):
            copied = next_copied
            if number + 1 < len(chunks):
                next_copied = self._copy_to_host(job, chunks, number + 1)
            # The stream is then also past the last copies from and to these buffers.
            yield from until_event(copied)
            source, reduced = self._views(chunk, number)
            yield from self._reduce(pack, chunk.pack, source, reduced)
            with streams.on():
                for piece, there, here in chunk.spans:
                    streams.ops.copy_to_device(job.pieces[piece][1][there], reduced[here], streams.stream)

    def _copy_to_host(self, job: DeviceReduction, chunks: Sequence[HostChunk], number: int) -> Event:
        streams, (target, _) = self._streams, self._views(chunks[number], number)
        with streams.on():
            for piece, there, here in chunks[number].spans:
                streams.ops.copy_to_host(target[here], job.pieces[piece][0][there], streams.stream)
            return streams.stream.record()

    def _views(self, chunk: HostChunk, number: int) -> list[Array]:
        """View the buffers of a chunk."""
        return [buffer[: chunk.pack.nbytes].view(chunk.pack.dtype) for buffer in self._buffers[number % _BUFFERS]]

    def _reduce(self, pack: DevicePack, chunk: Pack, source: Array, reduced: Array) -> Steps[None]:
        options = pack.options
        if options.algorithm in gpu_names():
            options = replace(options, algorithm=None)
        host_job = PackedReduction(chunk, [source], [reduced], pack.op, None, options, self._pool)
        names = self._choice.names_for(chunk.nbytes, options)
        algorithm = self._choice.made(names) or (yield from self._choice.make(names))
        yield from algorithm.all_reduce(host_job)


gpu_algorithms.register(
    AlgorithmEntry("staged", Staged.made, GPU_PLACES, GPU_PLACES, is_ordered=True, rounds=True, instead=())
)


# Between nodes --------------------------------------------------------------------------------------------------------


# Slices in flight.
SLOTS = 4
# NCCL reads single elements from other addresses.
_SLICE_ALIGNMENT = 128


class StagingSlot:
    """Hold one slice in page-locked memory, and a received part of it on the device.

    Use the device memory on ``streams.to_device`` after ``until_free``.
    """

    def __init__(self, streams: DeviceStreams, nbytes: int, received_bytes: int = 0) -> None:
        ops = streams.ops
        with streams.on(), streams.to_device:
            self._memory = ops.pinned(nbytes)
            self._received = ops.empty((received_bytes,), np.dtype(np.uint8), streams.device)
            # After its last content was copied. Earlier work of a stream may still use the allocated memory.
            self.free_after = streams.to_device.record()

    def until_free(self) -> Steps[None]:
        """Yield until the slot may be used. MPI does not wait for events."""
        yield from until_event(self.free_after, relaxes=False)

    def array(self, count: int, dtype: DType) -> Array:
        """View the host memory as ``count`` elements."""
        return self._memory[: count * dtype.itemsize].view(dtype)

    def received(self, count: int, dtype: DType) -> Array:
        """View the device memory as ``count`` elements."""
        return self._received[: count * dtype.itemsize].view(dtype)


class DeviceRing(Rail):
    """All-reduce arrays on GPUs over a ring of ranks. MPI may accept device pointers."""

    def __init__(
        self, comm: Comm, ranks: list[int], position: int, streams: DeviceStreams, takes_device_memory: bool
    ) -> None:
        super().__init__(comm, ranks, position)
        self._streams, self.takes_device_memory = streams, takes_device_memory

    def all_reduce(self, flat: Array, op: ReduceOp, chunk: int, slot: StagingSlot, filled: Event) -> Steps[Event]:
        """Reduce ``flat`` in place over all ranks, and return its event on ``streams.to_device``.

        ``filled`` is the event after which ``flat`` is filled. It must be done if MPI accepts device memory.
        """
        n, me, streams = len(self._ranks), self._position, self._streams
        before, after = (me - 1) % n, (me + 1) % n
        borders = slices(flat.size, n)
        memory = flat if self.takes_device_memory else slot.array(flat.size, flat.dtype)
        segments, staged = [flat[a:b] for a, b in borders], [memory[a:b] for a, b in borders]
        yield from self._stage_first(segments[me], staged[me], filled)
        for step in range(n - 1):
            mine, theirs = (me - step) % n, (me - step - 1) % n
            received = slot.received(segments[theirs].size, flat.dtype)
            target = received if self.takes_device_memory else staged[theirs]
            yield from self._exchange({before: target}, {after: staged[mine]}, chunk)
            yield from self._add(op, segments[theirs], received, staged[theirs])
        for step in range(n - 1):
            mine, theirs = (me + 1 - step) % n, (me - step) % n
            yield from self._exchange({before: staged[theirs]}, {after: staged[mine]}, chunk)
            if not self.takes_device_memory:
                streams.ops.copy_to_device(segments[theirs], staged[theirs], streams.to_device)
        with streams.on():
            return streams.to_device.record()

    def _stage_first(self, segment: Array, staged: Array, filled: Event) -> Steps[None]:
        """Copy the first segment for MPI, and order the sums after ``filled``."""
        streams = self._streams
        with streams.on():
            streams.to_device.wait(filled)
            if self.takes_device_memory:
                return
            streams.to_host.wait(filled)
            streams.ops.copy_to_host(staged, segment, streams.to_host)
            is_staged = streams.to_host.record()
        yield from until_event(is_staged, relaxes=False)

    def _add(self, op: ReduceOp, segment: Array, received: Array, staged: Array) -> Steps[None]:
        """Add the received elements on the device, and copy the sum for MPI."""
        streams = self._streams
        with streams.on():
            if not self.takes_device_memory:
                streams.ops.copy_to_device(received, staged, streams.to_device)
            with streams.to_device:
                NUMPY_OPS[op](segment, received, out=segment)
            is_staged = streams.to_device.record()
            if not self.takes_device_memory:
                streams.to_host.wait(is_staged)
                streams.ops.copy_to_host(staged, segment, streams.to_host)
                is_staged = streams.to_host.record()
        yield from until_event(is_staged, relaxes=False)

    def _message(self, array: Array) -> Any:
        if not self.takes_device_memory:
            return super()._message(array)
        mpi = import_mpi()
        memory = mpi.buffer.fromaddress(self._streams.ops.pointer(array), array.nbytes)
        return memory, array.nbytes, mpi.BYTE


@dataclass(frozen=True)
class DeviceHierarchical:
    """Reduce with NCCL inside nodes and MPI between them. ``ring`` works on device memory, ``wires`` on host memory."""

    node: Node
    nccl: NcclComm | None
    wires: Wires
    ring: DeviceRing
    streams: DeviceStreams
    slots: list[StagingSlot]
    slice_bytes: int

    @classmethod
    def made(cls, site: DeviceSite) -> Steps[DeviceHierarchical]:
        """Start NCCL and allocate memory, or raise AlgorithmError on all ranks (collective)."""
        comm, node, streams = site.comm, site.node, site.streams
        wires = Wires(site, {**wire_algorithms.costs, "ring": _ring_on_device})
        aware = yield from takes_device_memory(comm)
        slice_bytes = yield from agreed_staging_bytes(comm)
        made: NcclComm | str | None = None
        if node.size > 1:
            made = yield from make_nccl(node.comm, streams.device, has_given_up=streams.has_given_up)
        nccl, problem = (None, made) if isinstance(made, str) else (made, None)
        try:
            # A slot on the device holds a segment of a slice, which may be one element longer than others.
            slots = [StagingSlot(streams, slice_bytes, slice_bytes // len(node.ranks) + 16) for _ in range(SLOTS)]
        except Exception as error:  # agreed below, because the others wait
            problem = problem or f"rank {comm.Get_rank()}: {type(error).__name__}: {error}"
        problems = yield from problems_of(comm, problem)
        for problem in problems.values():
            if nccl is not None:
                nccl.close()
            raise AlgorithmError(f"algorithm 'hierarchical' does not work here for arrays on GPUs: {problem}")
        if nccl is not None:
            streams.nccl.append(nccl)
        rail = [ranks[min(node.rank, len(ranks) - 1)] for ranks in node.ranks]
        ring = DeviceRing(comm, rail, node.topology.node_index, streams, aware)
        return cls(node, nccl, wires, ring, streams, slots, slice_bytes)

    def all_reduce(self, job: DeviceReduction) -> Steps[None]:
        """Reduce in overlapping chunks."""
        pack, nbytes = job.pack, self.slice_bytes
        name = self.wires.choose(pack.nbytes, pack.options, nbytes, nbytes).name
        on_device = pack.options.wire_dtype is None and (self.ring.takes_device_memory or name == "ring")
        run = _Run(job, self, None if on_device else self.wires.made(name, pack.options))
        with self.streams.on():
            run.start(nbytes // pack.dtype.itemsize)
        failed_polls = 0
        while not run.is_over:
            with self.streams.on():
                has_moved = run.move()
            failed_polls = 0 if has_moved else failed_polls + 1
            if failed_polls:
                pause(self.node.comm, failed_polls)
                yield

    def close(self) -> None:
        """Destroy the NCCL communicator (collective over the node)."""
        if self.nccl is not None:
            self.nccl.close()


def _ring_on_device(nodes: int, count: int) -> list[Round]:
    """Return the rounds of the ring. A sum costs a launch, about as much as a message."""
    return [
        each._replace(reduced=0, messages=each.messages + (each.reduced > 0))
        for each in wire_algorithms.costs["ring"](nodes, count)
    ]


class _Run:
    """Track one reduction and its chunks. ``wire`` is None to use the ring on the device."""

    def __init__(self, job: DeviceReduction, algorithm: DeviceHierarchical, wire: Wire | None) -> None:
        self._job, self._wire, self._ring = job, wire, algorithm.ring
        self._node, self._nccl = algorithm.node, algorithm.nccl
        self._slots, self._streams = algorithm.slots, algorithm.streams
        self._is_mpi_on_device = wire is None and algorithm.ring.takes_device_memory
        # Each chunk, and the event after which the node has reduced it.
        self._chunks: list[tuple[Array, Event]] = []
        # Remaining steps of each slice in flight, or None when it has arrived.
        self._in_flight: deque[Steps[None] | None] = deque()
        self._begun = self._shared = 0

    def start(self, per_slice: int) -> None:
        """Cut the pieces into chunks, and reduce all of them in the node."""
        nccl, stream, job = self._nccl, self._streams.stream, self._job
        per_chunk = per_slice * self._node.rails
        if nccl is None:
            job.copy()
        for source, target in job.pieces:
            for start in range(0, target.size, per_chunk):
                chunk = target[start : start + per_chunk]
                if nccl is not None:
                    cuts = self._cuts(chunk)
                    nccl.reduce_scatter(source[start : start + per_chunk], self._mine(chunk), job.pack.op, stream, cuts)
                self._chunks.append((chunk, stream.record()))

    def _cuts(self, chunk: Array) -> list[tuple[int, int]]:
        """Return one slice of a chunk per rail. Its address allows NCCL wide loads."""
        unit, size = _SLICE_ALIGNMENT // chunk.itemsize, chunk.size
        return [(min(a * unit, size), min(b * unit, size)) for a, b in slices(-(-size // unit), self._node.rails)]

    def _mine(self, chunk: Array) -> Array:
        """Return the slice of this rank, empty if it has no rail."""
        start, stop = (*self._cuts(chunk)[self._node.rank :], (0, 0))[0]
        return chunk[start:stop]

    @property
    def is_over(self) -> bool:
        """Return True when every chunk is enqueued for the copy to all ranks."""
        return self._shared == len(self._chunks)

    def move(self) -> bool:
        """Advance the slices, share arrived chunks in the node, and return True on progress."""
        before = self._begun + self._shared
        if self._begun < len(self._chunks) and len(self._in_flight) < len(self._slots):
            self._in_flight.append(self._crossing(self._begun))
            self._begun += 1
        self._in_flight = deque(steps and moved(steps) for steps in self._in_flight)
        while self._in_flight and self._in_flight[0] is None:
            self._in_flight.popleft()
        arrived = self._begun - len(self._in_flight)
        # NCCL must not run while MPI uses the device.
        if not self._is_mpi_on_device or arrived == len(self._chunks):
            for chunk, _ in self._chunks[self._shared : arrived]:
                part = self._mine(chunk)
                if part.size:
                    self._streams.stream.wait(self._slot(self._shared).free_after)
                if self._nccl is not None:
                    self._nccl.all_gather(part, chunk, self._streams.stream, self._cuts(chunk))
                self._shared += 1
        return self._begun + self._shared > before

    def _slot(self, number: int) -> StagingSlot:
        return self._slots[number % len(self._slots)]

    def _crossing(self, number: int) -> Steps[None]:
        """Reduce this rank's slice of a chunk between nodes."""
        (chunk, reduced), slot = self._chunks[number], self._slot(number)
        part = self._mine(chunk)
        if not part.size:
            return
        yield from self._until_reduced()
        yield from slot.until_free()
        if self._wire is None:
            arrived = yield from self._ring.all_reduce(part, self._job.pack.op, number, slot, reduced)
        else:
            arrived = yield from self._through(self._wire, slot, part, number, reduced)
        slot.free_after = arrived

    def _until_reduced(self) -> Steps[None]:
        """Yield until the node has reduced all chunks, if MPI uses device memory."""
        if self._is_mpi_on_device:
            yield from until_event(self._chunks[-1][1], relaxes=False)

    def _through(self, wire: Wire, slot: StagingSlot, part: Array, number: int, reduced: Event) -> Steps[Event]:
        """Copy a slice to the host, reduce it between nodes, and copy it back."""
        streams = self._streams
        memory = slot.array(part.size, part.dtype)
        streams.to_host.wait(reduced)
        streams.ops.copy_to_host(memory, part, streams.to_host)
        yield from until_event(streams.to_host.record(), relaxes=False)
        residuals = self._job.pack.residuals
        if self._job.pack.options.error_feedback and number not in residuals:
            residuals[number] = np.zeros_like(memory)
        yield from wire.all_reduce(memory, memory, self._job.pack.op, number, residuals.get(number))
        streams.ops.copy_to_device(part, memory, streams.to_device)
        return streams.to_device.record()


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


# Choice ---------------------------------------------------------------------------------------------------------------


_log = logging.getLogger("mpidist")
# Between nodes each piece is at least one message.
_SMALL_BYTES_BETWEEN_NODES = 4 << 20


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
        self._packs: WeakKeyDictionary[ReductionPlan, list[DevicePack]] = WeakKeyDictionary()

    def packs_of(self, plan: ReductionPlan) -> list[DevicePack]:
        """Return the packs of a plan, the same on every rank."""
        packs = self._packs.get(plan)
        if packs is None:
            # Does not depend on the algorithm, which is chosen after the inputs are packed.
            small = SMALL_BYTES if self.site.node.is_alone else _SMALL_BYTES_BETWEEN_NODES
            packs = [
                DevicePack(group, plan.shapes, plan.op, plan.divisor, small, plan.options)
                for group in plan.device_groups
            ]
            self._packs[plan] = packs
        return packs

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
    def mover(self) -> NcclComm | None:
        """Return NCCL over all ranks if it moves arrays, or None on every rank. Call after ``prepare``."""
        made = self.made(self.names_from(look_up(self.row, sys.maxsize)))
        return made.comm if isinstance(made, Nccl) else None

    def close(self) -> None:
        """Free the algorithms when all work is done (collective)."""
        self.streams.close()
        super().close()
