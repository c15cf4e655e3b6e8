"""All-reduce of arrays on GPUs by NCCL over all ranks, or by one rank alone."""

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
from mpidist.collectives.gpu.staging import DeviceRing, PinnedBuffer, StagingRing, agreed_staging_bytes, received_bytes
from mpidist.collectives.mpi.agreed import problems_of
from mpidist.collectives.mpi.waiting import Steps, pause, until_event
from mpidist.collectives.node.chunks import slices
from mpidist.collectives.node.memory import Pool
from mpidist.collectives.node.node import Node
from mpidist.collectives.node.packing import Pack, PackedReduction
from mpidist.collectives.reduce.algorithms.two_level import Wires, moved
from mpidist.collectives.reduce.choice import Choice, place_of
from mpidist.collectives.reduce.cost_model import Round
from mpidist.collectives.reduce.device_packs import SLICE_ALIGNMENT, DevicePack
from mpidist.collectives.reduce.registry import (
    GPU_PLACES,
    Algorithm,
    AlgorithmEntry,
    Row,
    Wire,
    at_once,
    gpu_algorithms,
    gpu_names,
    wire_algorithms,
)
from mpidist.collectives.reduce.table import BY_NETWORK, Table, look_up, resolved, row_text
from mpidist.core.errors import AlgorithmError
from mpidist.core.options import CommunicationOptions


class Nccl:
    """One NCCL call per pack (ncclAllReduce).

    Args:
        comm: The NCCL communicator of all ranks; closed with this object.
        streams: Where it works.

    Attributes:
        comm: See above.
    """

    def __init__(self, comm: NcclComm, streams: DeviceStreams) -> None:
        self.comm = comm
        self._streams = streams

    @classmethod
    def made(cls, site: DeviceSite) -> Steps[Nccl]:
        """Return a new one (collective).

        Raises:
            AlgorithmError: NCCL does not work on some rank; on all ranks.
        """
        streams = site.streams
        made = yield from NcclComm.made(site.comm, streams.device, has_given_up=streams.has_given_up)
        if isinstance(made, str):
            raise AlgorithmError(f"algorithm 'nccl' does not work here: {made}")
        streams.watch(made)
        return cls(made, streams)

    def all_reduce(self, job: DeviceReduction) -> Steps[list[Array]]:
        """See ``DeviceAlgorithm``."""
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
    """An all-reduce of one rank alone, which casts, divides and copies.

    Args:
        site: Where it works.
    """

    def __init__(self, site: DeviceSite) -> None:
        self._streams = site.streams

    def all_reduce(self, job: DeviceReduction) -> Steps[list[Array]]:
        """See ``DeviceAlgorithm``."""
        yield from ()
        with self._streams.on():
            job.copy()
            return job.store()


gpu_algorithms.register(AlgorithmEntry("alone", at_once(Alone), ()))


# Chunks that are in host memory at a time: one is copied there while the one before is reduced.
_ROOMS = 2


class Staged:
    """All-reduce in chunks by an algorithm for the host, in page-locked memory.

    Args:
        site: Where it works.
        chunk_bytes: Of a chunk, at most; the same on all ranks.
    """

    def __init__(self, site: DeviceSite, chunk_bytes: int) -> None:
        self._streams = site.streams
        self._choice = site.on_host
        self._pool = site.pool
        self._chunk_bytes = chunk_bytes
        self._given = self._reduced = [np.empty(0, np.uint8)] * _ROOMS

    @classmethod
    def made(cls, site: DeviceSite) -> Steps[Staged]:
        """Return a new one (collective)."""
        chunk_bytes = yield from agreed_staging_bytes(site.comm)
        return cls(site, chunk_bytes)

    def all_reduce(self, job: DeviceReduction) -> Steps[list[Array]]:
        """See ``DeviceAlgorithm``."""
        streams, ops = self._streams, self._streams.ops
        chunks = job.pack.on_host(self._chunk_bytes // job.dtype.itemsize)
        yield from self._make_room(chunks[0].nbytes)
        next_copied = self._copy_to_host(job, chunks, 0)
        for number, chunk in enumerate(chunks):
            copied, room = next_copied, number % _ROOMS
            if number + 1 < len(chunks):
                next_copied = self._copy_to_host(job, chunks, number + 1)
            # The communicator's stream has then been past the last copies from and to this room, too.
            yield from until_event(copied)
            given, reduced = [rooms[room][: chunk.nbytes].view(job.dtype) for rooms in (self._given, self._reduced)]
            yield from self._reduce(job, chunk, given, reduced)
            with streams.on():
                start = number * chunks[0].count
                ops.copy_to_device(job.target[start : start + chunk.count], reduced, streams.stream)
        with streams.on():
            return job.store()

    def _make_room(self, nbytes: int) -> Steps[None]:
        if self._given[0].nbytes < nbytes:
            # The pool would give their memory to others at once.
            yield from until_event(self._streams.stream.record())
            with self._streams.on():
                ops = self._streams.ops
                self._given, self._reduced = [[ops.pinned(nbytes) for _ in range(_ROOMS)] for _ in range(2)]

    def _copy_to_host(self, job: DeviceReduction, chunks: Sequence[Pack], number: int) -> Event:
        streams, chunk, start = self._streams, chunks[number], number * chunks[0].count
        given = self._given[number % _ROOMS][: chunk.nbytes].view(job.dtype)
        with streams.on():
            streams.ops.copy_to_host(given, job.source[start : start + chunk.count], streams.stream)
            return streams.stream.record()

    def _reduce(self, job: DeviceReduction, chunk: Pack, given: Array, reduced: Array) -> Steps[None]:
        options = job.options
        if options.algorithm in gpu_names():
            options = replace(options, algorithm=None)
        host_job = PackedReduction(chunk, [given], [], [reduced], job.op, None, options, self._pool)
        names = self._choice.names_for(chunk.nbytes, options)
        algorithm = self._choice.made(names) or (yield from self._choice.make(names))
        yield from algorithm.all_reduce(host_job)

    def close(self) -> None:
        """Let go of the memory."""
        self._given = self._reduced = [np.empty(0, np.uint8)] * _ROOMS


gpu_algorithms.register(
    AlgorithmEntry("staged", Staged.made, GPU_PLACES, GPU_PLACES, is_ordered=True, rounds=True, instead=())
)


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


_log = logging.getLogger("mpidist")


def may_move_by_nccl(table: Table, place: str) -> bool:
    """Return whether several ranks move arrays by NCCL if it works and has a network.

    The same on every rank.
    """
    row: Row = getattr(table, place)
    return look_up(row, sys.maxsize) in ("nccl", BY_NETWORK)


class DeviceChoice(Choice[DeviceAlgorithm]):
    """The algorithms of one communicator for arrays on one device.

    Args:
        table: Which algorithm is taken where.
        streams: Where they work.
        on_host: The choice for arrays in host memory.
        pool: Host memory.
    """

    def __init__(self, table: Table, streams: DeviceStreams, on_host: Choice[Algorithm], pool: Pool) -> None:
        comm, node = on_host.site.comm, on_host.site.node
        site, place = DeviceSite(comm, node, table.between_nodes, streams, on_host, pool), place_of(node, "gpu")
        super().__init__(gpu_algorithms, site, place, getattr(table, place))
        self.streams = streams

    @property
    def multiple(self) -> int:
        """Return the number of bytes of which flat arrays are a multiple.

        So slices between nodes have one length, and each begins where NCCL reads many elements at a time.
        """
        rails = 1 if self.site.node.is_alone else self.site.node.rails
        return 1 if rails == 1 else rails * SLICE_ALIGNMENT

    def names_for_pack(self, pack: DevicePack, options: CommunicationOptions) -> tuple[str, ...]:
        """Return the algorithm for a pack, then its substitutes; the same on every rank."""
        if self.site.comm.Get_size() == 1:
            return ("alone",)
        return self.names_for(pack.nbytes, options, pack.suits_nccl)

    def settle(self) -> Steps[None]:
        """Replace "by network" in the row of the table, the first time (collective)."""
        if any(name == BY_NETWORK for _, name in self.row):
            has_rdma = yield from rdma_everywhere(self.site.comm)
            self.row = resolved(self.row, has_rdma)
            if self.site.comm.Get_rank() == 0:
                fabric = rdma_fabric()
                why = f"NCCL has RDMA on all ranks, {fabric.name} here" if has_rdma and fabric else "no RDMA for NCCL"
                _log.info("mpidist: arrays on GPUs go between nodes by %s (%s)", row_text(self.row), why)

    def prepare(self) -> Steps[None]:
        """Make the algorithms that the table names (collective)."""
        if self.site.comm.Get_size() > 1:
            yield from self.settle()
            for name in dict.fromkeys(name for _, name in self.row):
                yield from self.make(self.names_from(name))

    @property
    def moves_by_nccl(self) -> bool:
        """Return whether NCCL moves arrays, which it does where large reductions take it.

        The same on every rank after ``prepare``.
        """
        taken = self.first_working(self.names_from(look_up(self.row, sys.maxsize)))
        return self.site.comm.Get_size() > 1 and taken == "nccl"

    @property
    def nccl(self) -> NcclComm:
        """Return NCCL over all ranks, where ``moves_by_nccl``."""
        made = self.made(("nccl",))
        assert isinstance(made, Nccl)
        return made.comm

    def close(self) -> None:
        """Free the algorithms, once all work is done (collective)."""
        self.streams.close()
        super().close()
