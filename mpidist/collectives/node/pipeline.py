"""One reduction in two levels, whose chunks move on as soon as they can."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from mpidist.arrays.dtypes import Array
from mpidist.collectives.mpi.mpi_types import NUMPY_OPS
from mpidist.collectives.mpi.waiting import LOOKS_BEFORE_YIELD, LOOKS_BEFORE_YIELD_ON_WIRE, Steps
from mpidist.collectives.node.board import FILLED, REDUCED, TAKEN
from mpidist.collectives.node.chunks import pieces, slices
from mpidist.collectives.node.node import Node
from mpidist.collectives.node.packing import PackedReduction
from mpidist.collectives.node.stage import Inputs, Results, in_one_piece
from mpidist.core.enums import ReduceOp


class Wire(Protocol):
    """An all-reduce over the ranks of one rail."""

    def all_reduce(self, source: Array, flat: Array, op: ReduceOp, chunk: int, residual: Array | None) -> Steps[None]:
        """Reduce ``source`` over all ranks into ``flat``.

        Args:
            source: This rank's input; not changed, unless it is ``flat``.
            flat: The result.
            op: The operation.
            chunk: Tells several apart that are on their way.
            residual: Of the size of ``flat``: the loss of rounding last time, added to the input, and replaced by the
                loss now; None to let it go. For a way that rounds.
        """


class Pipeline:
    """One reduction, and the progress of its chunks.

    Args:
        node: The node of this rank.
        job: The reduction.
        inputs: Where the input of each rank of the node is read.
        results: Where reduced slices lie.
        wire: The way between nodes; None on one node.
        rails: Slices of a chunk: the ranks of the node that have one, and as many on every node.
        per_chunk: Elements of a chunk.
        per_piece: Elements that are reduced in one go, at most.
        depth: Chunks on their way, at most.
        reuses_memory: Whether chunks pass through memory that has to be free again first.
    """

    def __init__(
        self,
        node: Node,
        job: PackedReduction,
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
        self._combine = NUMPY_OPS[job.op]
        # Chunks are numbered through all reductions of the node.
        self._first = self._board.chunks
        self._end = self._first - (-job.count // per_chunk)
        self._filled = self._reduced = self._published = self._taken = self._first
        self._in_flight: deque[InFlight] = deque()

    def steps(self) -> Steps[None]:
        """Move all chunks on until this rank has its result."""
        looks, most_looks = 0, LOOKS_BEFORE_YIELD if self._wire is None else LOOKS_BEFORE_YIELD_ON_WIRE
        while self._taken < self._end:
            moved = self._move_in_flight() if self._in_flight else False
            moved = self._fill() or moved
            moved = self._reduce() or moved
            moved = self._take() or moved
            looks = 0 if moved else looks + 1
            if looks:
                self._board.pause(looks, most_looks)
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
        """Copy this rank's input of the next chunk to its slot, once nobody reads it."""
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
        """Reduce this rank's next slice over the node, and hand it to the wire."""
        chunk = self._reduced
        if not self._has_room(chunk):
            return False
        if self._inputs.pass_slots and not self._board.reached(FILLED, chunk + 1, self._all):
            return False
        on_wire: Steps[None] | None = None
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
                on_wire = self._wire.all_reduce(source, flat, self._job.op, chunk, residual)
        self._reduced += 1
        if on_wire is None and not self._in_flight:
            self._finish(chunk)
        else:
            self._in_flight.append(InFlight(chunk, on_wire))
        return True

    def _residual(self, residuals: dict[int, Array], start: int, flat: Array) -> Array:
        if start not in residuals:
            residuals[start] = np.zeros_like(flat)
        return residuals[start]

    def _has_room(self, chunk: int) -> bool:
        """Return whether ``chunk`` exists and may be begun.

        Only ``depth`` are on their way at a time, on any rank.
        """
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

    def _move_in_flight(self) -> bool:
        """Move chunks on the wire; return whether one has arrived. They are published in order."""
        for part in self._in_flight:
            part.move()
        arrived = False
        while self._in_flight and self._in_flight[0].is_done:
            self._finish(self._in_flight.popleft().chunk)
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
        """Copy the reduced slices of the next chunk into this rank's result."""
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


class WatchedPipeline(Pipeline):
    """A reduction whose chunks are all reported."""

    def _fill(self) -> bool:
        return self._watch("fill chunk", self._filled, super()._fill)

    def _reduce(self) -> bool:
        return self._watch("reduce chunk", self._reduced, super()._reduce)

    def _take(self) -> bool:
        return self._watch("copy chunk", self._taken, super()._take)

    def _watch(self, name: str, chunk: int, step: Callable[[], bool]) -> bool:
        start = time.perf_counter_ns()
        moved = step()
        if moved and self._job.tell_chunk is not None:
            self._job.tell_chunk(name, chunk, start, 0)
        return moved


class WatchedWire:
    """A wire whose chunks are all reported.

    Args:
        wire: The wire.
        tell_chunk: Called with the name, number, start and bytes of each chunk.
    """

    def __init__(self, wire: Wire, tell_chunk: Callable[[str, int, int, int], None]) -> None:
        self._wire = wire
        self._tell_chunk = tell_chunk

    def all_reduce(self, source: Array, flat: Array, op: ReduceOp, chunk: int, residual: Array | None) -> Steps[None]:
        """See ``Wire``."""
        start = time.perf_counter_ns()
        yield from self._wire.all_reduce(source, flat, op, chunk, residual)
        self._tell_chunk("chunk", chunk, start, flat.nbytes)


class InFlight:
    """A chunk on its way between the nodes.

    Args:
        chunk: Its number.
        steps: The steps left; None for none.
    """

    def __init__(self, chunk: int, steps: Steps[None] | None) -> None:
        self.chunk = chunk
        self._steps = steps

    @property
    def is_done(self) -> bool:
        """Return whether it has arrived."""
        return self._steps is None

    def move(self) -> None:
        """Take one more step."""
        if self._steps is not None and next(self._steps, self) is self:
            self._steps = None
