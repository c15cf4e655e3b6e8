"""All-reduce in two levels, chunk by chunk: inside each node, between the nodes, and inside each node again.

The elements are cut into chunks, and each chunk into one slice per *rail*: the ranks with the same number on every
node. A rank reduces its slice over its node, then over its rail, and the ranks of the node copy one another's slices.
Several chunks are on their way at a time, so what happens inside a node hides behind the wire; on a single node there
is no wire, and every rank has a slice. (The scheme of BlueConnect, doi:10.1147/JRD.2019.2947013, with shared memory as
its first level; on one node the reduce-scatter and all-gather of Rabenseifner's algorithm.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from mpidist.arrays.convert import Array
from mpidist.collectives.algorithms.stage import (
    InLanes,
    InOwnTargets,
    Inputs,
    InShared,
    InTargets,
    Lanes,
    PrivateLanes,
    Results,
    Scratch,
    Slots,
    in_one_piece,
)
from mpidist.collectives.algorithms.wires import Wire, Wires
from mpidist.collectives.board import FILLED, REDUCED, TAKEN
from mpidist.collectives.chunks import pieces, slices
from mpidist.collectives.gathering import agreed_minimum
from mpidist.collectives.mpi_types import numpy_op
from mpidist.collectives.neighbours_memory import address_of
from mpidist.collectives.node import Node
from mpidist.collectives.packing import Reduction
from mpidist.collectives.shared_memory import room_for_segments
from mpidist.collectives.trace import WatchedWire, clock
from mpidist.collectives.waiting import LOOKS_BEFORE_YIELD, LOOKS_BEFORE_YIELD_ON_WIRE, Steps
from mpidist.core.errors import AlgorithmError

if TYPE_CHECKING:
    from mpi4py import MPI

# What one rank reduces of a chunk, at most. On one node best between 256 KiB and 1 MiB on the machines measured: large
# enough for the call, small enough for the cache. Between nodes it is cut once more into messages.
SLICE_BYTES = 512 << 10
SLICE_BYTES_BETWEEN_NODES = 1 << 20
# Between nodes less than this is not worth a message to each of them.
_SMALLEST_SLICE_ON_WIRE = 64 << 10
_SMALLEST_SLICE_BYTES = 16 << 10
# Chunks on their way: on one node one is copied out while the next is reduced; several keep a wire busy.
_DEPTH_ON_ONE_NODE = 2
_DEPTH_BETWEEN_NODES = 16
# What the slots of a node take, at most, where smaller slices make do with less.
_MOST_SLOT_BYTES = 128 << 20
# Slices are cut at multiples of the largest element.
_ALIGNMENT = 64
# What a rank tells its node before the ranks meet: whether it takes a shared result, which shared results it holds,
# then where each piece of its input lies, and of its result.
_TAKES_SHARED, _HELD, _PLACES = range(3)


class TwoLevel:
    """One all-reduce after the other through the levels.

    Args:
        node: The node of this rank.
        wires: What happens between nodes.
        slice_bytes: What one rank reduces of a chunk.
        lanes: Where reduced slices lie on their way; None for the ranks' own results.
        slots: What private input passes through; None where it is read out of the ranks' own memory.
    """

    def __init__(self, node: Node, wires: Wires, slice_bytes: int, lanes: Lanes | None, slots: Slots | None) -> None:
        self._node = node
        self._wires = wires
        self._slice_bytes = slice_bytes
        self._lanes = lanes
        self._slots = slots
        self.name = "neighbours" if slots is None else "window"
        self._rails = _rails(node)
        self._depth = _depth(node)
        self._scratch = Scratch(slice_bytes)
        self._takes_shared = False
        self._targets: list[Array] | None = None

    @classmethod
    def made(cls, comm: MPI.Intracomm, node: Node, in_place: bool, wires: Wires) -> Steps[TwoLevel]:
        """Return a new one (collective).

        Args:
            comm: The communicator.
            node: Its node of this rank.
            in_place: Whether private input is read out of the ranks' own memory, or passes through shared memory.
            wires: What happens between nodes.

        Raises:
            AlgorithmError: A rank may not read its neighbours' memory, or shared memory has no room; on all ranks.
        """
        if not in_place:
            size, slots = yield from _made_slots(comm, node)
            return cls(node, wires, size, slots, slots)
        if not node.reads_neighbours:
            raise AlgorithmError(
                "algorithm 'neighbours' reads the memory of other ranks, which the kernel forbids here (ptrace scope, "
                "or containers of their own), or MPIDIST_READ_NEIGHBOURS=0; leave algorithm out"
            )
        lanes = None
        if not node.is_alone:
            lanes = yield from PrivateLanes.made(node, _slice_bytes(node), _depth(node))
        return cls(node, wires, _slice_bytes(node), lanes, None)

    def prepare(self, job: Reduction, may_share: bool) -> None:
        """See ``Algorithm``."""
        shared = self._node.shared
        locations = [shared.locate(piece) if shared.has_arrays else None for piece in job.pieces]
        # Small arrays that were copied together come out of the shared result, too.
        self._takes_shared = may_share and None not in locations[job.has_buffer :]
        inputs = [
            address_of(piece) if location is None else -1 - location
            for piece, location in zip(job.pieces, locations, strict=True)
        ]
        held = self._node.results.held()
        self._targets = None if self._takes_shared else job.targets()
        self._node.board.tell([self._takes_shared, held, *inputs, *self._result_places()])

    def _result_places(self) -> list[int]:
        # What passes lanes is not read out of the ranks' results.
        has_none = self._targets is None or self._lanes is not None
        return [] if has_none else [address_of(target) for target in self._targets or ()]

    def all_reduce(self, job: Reduction) -> Steps[list[Array]]:
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
            yield from self._run(job, inputs, InShared(flat), lanes=None)
            flat.flags.writeable = False
            return job.cut(flat)
        if self._targets is None:
            self._targets = job.targets()
        targets = self._targets
        result_places = [row[_PLACES + number :] for row in told]
        results: Results
        if self._lanes is not None:
            lone = node.size == 1 and not node.is_alone
            results = InOwnTargets(job, targets, self._lanes) if lone else InLanes(job, targets, self._lanes)
        else:
            if any(takes):
                # There is no shared result after all.
                node.board.tell(self._result_places())
                yield from node.board.meet()
                result_places = node.board.told(number)
            results = InTargets(node, job, targets, result_places)
        yield from self._run(job, inputs, results, self._lanes)
        self._targets = None
        if job.given is None:
            return targets
        return job.given

    def _run(self, job: Reduction, inputs: Inputs, results: Results, lanes: Lanes | None) -> Steps[None]:
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
            self.name, wire = self._wires.choose(min(-(-job.nbytes // self._rails), slice_bytes))
        make = _Run
        if job.trace is not None:
            make = _WatchedRun
            wire = None if wire is None else WatchedWire(wire, job.trace)
        run = make(
            self._node, job, inputs, results, wire, self._rails, per_chunk, per_slice, self._depth, lanes is not None
        )
        yield from run.steps()
        if inputs.are_read_in_place or isinstance(results, (InTargets, InShared)):
            # The others may still be reading.
            yield from self._node.board.meet()

    def close(self) -> None:
        """Let go of the memory; shared memory belongs to the node."""
        self._slots = self._lanes = None


def _rails(node: Node) -> int:
    return min(len(ranks) for ranks in node.ranks)


def _slice_bytes(node: Node) -> int:
    return SLICE_BYTES if node.is_alone else SLICE_BYTES_BETWEEN_NODES


def _depth(node: Node) -> int:
    return _DEPTH_ON_ONE_NODE if node.is_alone else _DEPTH_BETWEEN_NODES


def _made_slots(comm: MPI.Intracomm, node: Node) -> Steps[tuple[int, Slots]]:
    """Return a size of slices for which every node has room, and the slots of this node (collective)."""
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
    return size, Slots(node.rank, segments, size * rails, size)


class _Run:
    """One reduction on its way: how far each of its chunks has got."""

    def __init__(
        self,
        node: Node,
        job: Reduction,
        inputs: Inputs,
        results: Results,
        wire: Wire | None,
        rails: int,
        per_chunk: int,
        per_piece: int,
        depth: int,
        reuses_memory: bool,
    ) -> None:
        self._node, self._board = node, node.board
        self._job, self._inputs, self._results, self._wire = job, inputs, results, wire
        self._rails, self._per_chunk, self._per_piece, self._depth = rails, per_chunk, per_piece, depth
        self._reuses_memory = reuses_memory
        self._all = range(node.size)
        self._has_slice = node.rank < rails
        self._combine: Any = numpy_op(job.op)
        # Chunks are numbered through all reductions of the node.
        self._first = self._board.chunks
        self._end = self._first - (-job.count // per_chunk)
        self._filled = self._reduced = self._published = self._taken = self._first
        self._crossing: deque[_Crossing] = deque()

    def steps(self) -> Steps[None]:
        """Move all chunks on until this rank has its result."""
        looks, patience = 0, LOOKS_BEFORE_YIELD if self._wire is None else LOOKS_BEFORE_YIELD_ON_WIRE
        while self._taken < self._end:
            moved = self._cross() if self._crossing else False
            moved = self._fill() or moved
            moved = self._reduce() or moved
            moved = self._take() or moved
            looks = 0 if moved else looks + 1
            if looks:
                self._board.pause(looks, patience)
                yield
        self._board.chunks = self._end

    def _borders(self, chunk: int) -> tuple[int, int]:
        start = (chunk - self._first) * self._per_chunk
        return start, min(start + self._per_chunk, self._job.count)

    def _slice(self, chunk: int, rail: int) -> tuple[int, int]:
        start, stop = self._borders(chunk)
        a, b = slices(stop - start, self._rails)[rail]
        return start + a, start + b

    def _fill(self) -> bool:
        """Copy this rank's input of the next chunk to its slot, once nobody reads what is there."""
        chunk, inputs = self._filled, self._inputs
        if not inputs.pass_slots or not self._has_room(chunk):
            return False
        if inputs.fills:
            self._fill_for_others(chunk)
        self._filled += 1
        self._board.count(FILLED, self._filled)
        return True

    def _fill_for_others(self, chunk: int) -> None:
        start, stop = self._borders(chunk)
        own_start, own_stop = self._slice(chunk, self._node.rank) if self._has_slice else (stop, stop)
        self._inputs.fill(chunk, start, start, own_start)
        self._inputs.fill(chunk, start, own_stop, stop)

    def _reduce(self) -> bool:
        """Reduce this rank's slice of the next chunk over the node, and hand it to the wire."""
        chunk = self._reduced
        if not self._has_room(chunk):
            return False
        if self._inputs.pass_slots and not self._board.reached(FILLED, chunk + 1, self._all):
            return False
        crossing: Steps[None] | None = None
        if self._has_slice:
            start, stop = self._slice(chunk, self._node.rank)
            source = None
            if self._node.size == 1 and self._wire is not None and stop > start:
                source = in_one_piece(self._job, self._job.pieces, start, stop)
            if source is None:
                self._reduce_slice(chunk, start, stop)
            if self._wire is not None and stop > start:
                flat = self._results.flat(chunk, start, stop)
                residual = None if self._job.residuals is None else self._residual(self._job.residuals, start, flat)
                source = flat if source is None else source
                crossing = self._wire.all_reduce(source, flat, self._job.op, chunk, residual)
        self._reduced += 1
        if crossing is None and not self._crossing:
            self._finish(chunk)
        else:
            self._crossing.append(_Crossing(chunk, crossing))
        return True

    def _residual(self, residuals: dict[int, Array], start: int, flat: Array) -> Array:
        if start not in residuals:
            residuals[start] = np.zeros_like(flat)
        return residuals[start]

    def _has_room(self, chunk: int) -> bool:
        """Whether ``chunk`` exists and may be begun: so many are on their way at most, on any rank."""
        before = chunk - self._depth + 1
        if chunk >= self._end or self._taken < before:
            return False
        return not self._reuses_memory or self._board.reached(TAKEN, before, self._all)

    def _reduce_slice(self, chunk: int, start: int, stop: int) -> None:
        job, inputs, combine = self._job, self._inputs, self._combine
        chunk_start, _ = self._borders(chunk)
        for piece in pieces(job.counts, start, stop, self._per_piece):
            target = self._results.target(chunk, start, piece)
            total: Any = None
            for rank in self._all:
                value = inputs.value(rank, chunk, chunk_start, piece, total is None)
                total = value if total is None else combine(total, value, out=target)
            if total is not target:
                np.copyto(target, total)
            if self._wire is None and job.divisor is not None:
                np.true_divide(target, job.divisor, out=target)

    def _cross(self) -> bool:
        """Move what is on the wire; whether a chunk has arrived. They are published in order."""
        for crossing in self._crossing:
            crossing.move()
        arrived = False
        while self._crossing and self._crossing[0].is_done:
            self._finish(self._crossing.popleft().chunk)
            arrived = True
        return arrived

    def _finish(self, chunk: int) -> None:
        job = self._job
        if self._wire is not None and self._has_slice and job.divisor is not None:
            start, stop = self._slice(chunk, self._node.rank)
            flat = self._results.flat(chunk, start, stop)
            np.true_divide(flat, job.divisor, out=flat)
        self._published = chunk + 1
        self._board.count(REDUCED, self._published)

    def _take(self) -> bool:
        """Copy what all ranks of the node have reduced of the next chunk into this rank's result."""
        chunk = self._taken
        if chunk >= self._published or not self._board.reached(REDUCED, chunk + 1, range(self._rails)):
            return False
        for rail in range(self._rails):
            start, stop = self._slice(chunk, rail)
            if stop > start and self._job.is_wanted:
                self._results.collect(rail, chunk, start, stop)
        self._taken += 1
        self._board.count(TAKEN, self._taken)
        return True


class _WatchedRun(_Run):
    """A reduction of which every chunk is seen."""

    def _fill(self) -> bool:
        return self._watch("fill chunk", self._filled, super()._fill)

    def _reduce(self) -> bool:
        return self._watch("reduce chunk", self._reduced, super()._reduce)

    def _take(self) -> bool:
        return self._watch("copy chunk", self._taken, super()._take)

    def _watch(self, what: str, chunk: int, step: Callable[[], bool]) -> bool:
        start = clock()
        moved = step()
        if moved and self._job.trace is not None:
            self._job.trace.chunk(what, chunk, start)
        return moved


class _Crossing:
    """A chunk between having been reduced on this node and having been reduced over all.

    Args:
        chunk: Its number.
        steps: What is left to do; None for nothing.
    """

    def __init__(self, chunk: int, steps: Steps[None] | None) -> None:
        self.chunk = chunk
        self._steps = steps

    @property
    def is_done(self) -> bool:
        return self._steps is None

    def move(self) -> None:
        if self._steps is not None and next(self._steps, self) is self:
            self._steps = None
