"""All-reduce in two levels: inside each node, between the nodes, inside again.

The elements are cut into chunks, and each chunk into one slice per *rail*: the ranks with the same number on every
node. A rank reduces its slice over its node, then over its rail, and the ranks of the node copy one another's slices.
Several chunks are on their way at a time, so the work inside a node hides behind the wire; on a single node there
is no wire, and every rank has a slice. (The scheme of BlueConnect, doi:10.1147/JRD.2019.2947013, with shared memory as
its first level; on one node the reduce-scatter and all-gather of Rabenseifner's algorithm.)
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from mpidist.arrays.dtypes import Array, as_dtype
from mpidist.collectives.mpi.gathering import agreed_minimum
from mpidist.collectives.mpi.waiting import Steps
from mpidist.collectives.node.neighbours_memory import address_of
from mpidist.collectives.node.node import Node
from mpidist.collectives.node.packing import PackedReduction
from mpidist.collectives.node.pipeline import Pipeline, WatchedPipeline, WatchedWire, Wire
from mpidist.collectives.node.shared_memory import room_for_segments
from mpidist.collectives.node.stage import (
    ChunkBuffers,
    InOwnTargets,
    Inputs,
    InShared,
    InSliceBuffers,
    InTargets,
    PrivateSliceBuffers,
    Results,
    Scratch,
    SliceBuffers,
)
from mpidist.collectives.reduce.registry import (
    HOST_PLACES,
    ONE_NODE,
    AlgorithmEntry,
    Row,
    Site,
    host_algorithms,
    wire_algorithms,
)
from mpidist.collectives.reduce.table import look_up
from mpidist.core.errors import AlgorithmError
from mpidist.core.options import CommunicationOptions

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpidist.collectives.node.node import Node

# The way that sums in a fixed order, and rounds every contribution once.
_IN_ORDER = "pairwise"


class Wires:
    """The ways between the nodes for one rank.

    Args:
        comm: The communicator.
        node: The node of this rank.
        row: Which way is taken at which size of a slice.
    """

    def __init__(self, comm: MPI.Intracomm, node: Node, row: Row) -> None:
        self._comm = comm
        self._rail = [ranks[node.rank] if node.rank < len(ranks) else -1 for ranks in node.ranks]
        self._position = node.topology.node_index
        self._row = row
        self._made: dict[tuple[str, str | None], Wire] = {}

    def choose(self, slice_bytes: int, options: CommunicationOptions) -> tuple[str, Wire]:
        """Return the way for slices of this size, after its name."""
        if options.wire_dtype is not None or options.deterministic:
            name = _IN_ORDER
        elif options.algorithm is not None and wire_algorithms.get(options.algorithm):
            name = options.algorithm
        else:
            name = look_up(self._row, slice_bytes)
        key = name, options.wire_dtype
        if key not in self._made:
            entry = wire_algorithms.get(name)
            assert entry is not None, name
            rounding = () if options.wire_dtype is None else (as_dtype(options.wire_dtype),)
            self._made[key] = entry.make(self._comm, self._rail, self._position, *rounding)
        return name, self._made[key]


# Bytes of a chunk that one rank reduces, at most. On one node best between 256 KiB and 1 MiB on the machines measured:
# large enough for the call, small enough for the cache. Between nodes it is cut once more into messages.
SLICE_BYTES = 512 << 10
SLICE_BYTES_BETWEEN_NODES = 1 << 20
# Between nodes less than this is not worth a message to each of them.
_SMALLEST_SLICE_ON_WIRE = 64 << 10
_SMALLEST_SLICE_BYTES = 16 << 10
# Chunks on their way: on one node one is copied out while the next is reduced; several keep a wire busy.
_DEPTH_ON_ONE_NODE = 2
_DEPTH_BETWEEN_NODES = 16
# Bytes of the slots of a node, at most, where smaller slices make do with less.
_MOST_SLOT_BYTES = 128 << 20
# Slices are cut at multiples of the largest element.
_ALIGNMENT = 64
# A rank tells its node before the ranks meet: whether it takes a shared result, which shared results it holds,
# then where each piece of its input lies, and of its result.
_TAKES_SHARED, _HELD, _PLACES = range(3)


class TwoLevel:
    """All-reduces in two levels, one after the other.

    Args:
        node: The node of this rank.
        wires: The ways between nodes.
        slice_bytes: Bytes of a chunk that one rank reduces.
        buffers: Memory of reduced slices on their way; None for the ranks' own results.
        slots: Memory that private input passes through; None where it is read out of the ranks' own memory.
    """

    def __init__(
        self, node: Node, wires: Wires, slice_bytes: int, buffers: SliceBuffers | None, slots: ChunkBuffers | None
    ) -> None:
        self._node = node
        self._wires = wires
        self._slice_bytes = slice_bytes
        self._buffers = buffers
        self._slots = slots
        self._rails = _rails(node)
        self._depth = _depth(node)
        self._scratch = Scratch(slice_bytes)

    @classmethod
    def made(cls, site: Site, in_place: bool) -> Steps[TwoLevel]:
        """Return a new one (collective).

        Args:
            site: Where it works.
            in_place: Whether private input is read out of the ranks' own memory, or passes through shared memory.

        Raises:
            AlgorithmError: A rank may not read its neighbours' memory, or shared memory has no room; on all ranks.
        """
        node, wires = site.node, Wires(site.comm, site.node, site.between_nodes)
        if not in_place:
            size, slots = yield from _made_slots(site.comm, node)
            return cls(node, wires, size, slots, slots)
        if not node.reads_neighbours:
            raise AlgorithmError(
                "algorithm 'neighbours' reads the memory of other ranks, which the kernel forbids here (ptrace scope, "
                "or containers of their own), or MPIDIST_READ_NEIGHBOURS=0; leave algorithm out"
            )
        buffers = None
        if not node.is_alone:
            buffers = yield from PrivateSliceBuffers.made(node, _slice_bytes(node), _depth(node))
        return cls(node, wires, _slice_bytes(node), buffers, None)

    def prepare(self, job: PackedReduction, may_share: bool) -> None:
        """See ``Algorithm``."""
        shared = self._node.shared
        locations = [shared.locate(piece) if shared.has_arrays else None for piece in job.pieces]
        # Small arrays that were copied together come out of the shared result, too.
        takes_shared = may_share and None not in locations[job.has_buffer :]
        inputs = [
            address_of(piece) if location is None else -1 - location
            for piece, location in zip(job.pieces, locations, strict=True)
        ]
        held = self._node.results.held()
        job.own_results = None if takes_shared else job.targets()
        self._node.board.tell([takes_shared, held, *inputs, *self._result_places(job.own_results)])

    def _result_places(self, results: list[Array] | None) -> list[int]:
        # Slices that pass buffers are not read out of the ranks' results.
        return [] if results is None or self._buffers is not None else [address_of(result) for result in results]

    def all_reduce(self, job: PackedReduction) -> Steps[list[Array]]:
        """See ``Algorithm``."""
        node, number = self._node, len(job.counts)
        told = node.board.told(_PLACES + 2 * number)
        inputs = Inputs(node, job, [row[_PLACES : _PLACES + number] for row in told], self._slots, self._scratch)
        takes = [row[_TAKES_SHARED] for row in told]
        shared = None
        if all(takes):
            shared = yield from node.results.take(job.nbytes, [row[_HELD] for row in told])
        if shared is not None:
            flat = shared.view(job.dtype)
            yield from self._run(job, inputs, InShared(flat), buffers=None)
            flat.flags.writeable = False
            return job.cut(flat)
        targets = job.targets() if job.own_results is None else job.own_results
        result_places = [row[_PLACES + number :] for row in told]
        results: Results
        if self._buffers is not None:
            lone = node.size == 1 and not node.is_alone
            results = InOwnTargets(job, targets, self._buffers) if lone else InSliceBuffers(job, targets, self._buffers)
        else:
            if any(takes):
                # There is no shared result after all.
                node.board.tell(self._result_places(targets))
                yield from node.board.meet()
                result_places = node.board.told(number)
            results = InTargets(node, job, targets, result_places)
        yield from self._run(job, inputs, results, self._buffers)
        return targets if job.given is None else job.given

    def _run(self, job: PackedReduction, inputs: Inputs, results: Results, buffers: SliceBuffers | None) -> Steps[None]:
        slice_bytes = self._slice_bytes
        if not self._node.is_alone:
            # Of a small message, too, several chunks shall be on their way.
            share = -(-job.nbytes // (self._rails * self._depth * _ALIGNMENT)) * _ALIGNMENT
            slice_bytes = min(slice_bytes, max(share, _SMALLEST_SLICE_ON_WIRE))
        per_slice = slice_bytes // job.dtype.itemsize
        per_chunk = per_slice * self._rails
        if self._node.is_alone and isinstance(results, InShared) and not inputs.pass_slots:
            # Nobody waits for parts, and each rank keeps to the share of the memory that is near to it.
            per_chunk = job.count
        wire: Wire | None = None
        if not self._node.is_alone:
            job.took, wire = self._wires.choose(min(-(-job.nbytes // self._rails), slice_bytes), job.options)
        make = Pipeline
        if job.tell_chunk is not None:
            make = WatchedPipeline
            wire = None if wire is None else WatchedWire(wire, job.tell_chunk)
        run = make(
            self._node, job, inputs, results, wire, self._rails, per_chunk, per_slice, self._depth, buffers is not None
        )
        yield from run.steps()
        if inputs.are_read_in_place or isinstance(results, (InTargets, InShared)):
            # The others may still be reading.
            yield from self._node.board.meet()

    def close(self) -> None:
        """Let go of the memory; shared memory belongs to the node."""
        self._slots = self._buffers = None


def _rails(node: Node) -> int:
    return min(len(ranks) for ranks in node.ranks)


def _slice_bytes(node: Node) -> int:
    return SLICE_BYTES if node.is_alone else SLICE_BYTES_BETWEEN_NODES


def _depth(node: Node) -> int:
    return _DEPTH_ON_ONE_NODE if node.is_alone else _DEPTH_BETWEEN_NODES


def _made_slots(comm: MPI.Intracomm, node: Node) -> Steps[tuple[int, ChunkBuffers]]:
    """Return the size of slices that fits on every node, and the slots (collective)."""
    room, size, rails, depth = room_for_segments(), _slice_bytes(node), _rails(node), _depth(node)
    room = _MOST_SLOT_BYTES if room is None else min(room, _MOST_SLOT_BYTES)
    while depth * size * (rails + 1) * node.size > room and size >= _SMALLEST_SLICE_BYTES:
        size //= 2
    size = yield from agreed_minimum(comm, size)
    segments = None
    if size >= _SMALLEST_SLICE_BYTES:
        segments = yield from node.shared.segments(depth * size * (rails + 1))
    everywhere = yield from agreed_minimum(comm, int(segments is not None))
    if segments is None or not everywhere:
        raise AlgorithmError(
            "algorithm 'window' found no room in /dev/shm on every node; make it larger (docker run --shm-size=1g) or "
            "leave algorithm out"
        )
    return size, ChunkBuffers(node.rank, segments, size * rails, size)


def _by_memory(node: Node) -> str:
    return "neighbours" if node.reads_neighbours else "window"


for _entry in (
    AlgorithmEntry("neighbours", partial(TwoLevel.made, in_place=True), ONE_NODE[:1], ONE_NODE[:1]),
    AlgorithmEntry("window", partial(TwoLevel.made, in_place=False), HOST_PLACES, ONE_NODE),
    AlgorithmEntry("hierarchical", TwoLevel.made, HOST_PLACES, stands_for=_by_memory),
):
    host_algorithms.register(replace(_entry, is_ordered=True, rounds=True))
