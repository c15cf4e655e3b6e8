"""All-reduce in two levels: inside each node, then between the nodes.

The elements are cut into one stripe for each *rail*, the ranks with the same local rank on every node. Each rank
reduces the slices of its stripe over its node, then over its rail, and the ranks of the node copy the slices of each
other. Several slices are in flight, so that work inside a node overlaps with messages. On a single node each rank has a
stripe and sends no messages. The native core does the work inside a node.

This is BlueConnect (doi:10.1147/JRD.2019.2947013) with shared memory as its first level. On one node it is the
reduce-scatter and all-gather of Rabenseifner's algorithm.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from mpidist.arrays.dtypes import Array, as_dtype
from mpidist.collectives.mpi.waiting import Steps, looks_at, pause
from mpidist.collectives.node.core import CHUNK, DONE, EVENTS, MET, OVERLAP, SHARED_BYTES, SLICE, Core
from mpidist.collectives.node.memory import pieces
from mpidist.collectives.node.node import LANES_BETWEEN_NODES
from mpidist.collectives.node.packing import PackedReduction, divided, overlaps
from mpidist.collectives.reduce.algorithms.inter_node import make_room
from mpidist.collectives.reduce.cost_model import SMALLEST_SLICE_BETWEEN_NODES, Cost, Way, fastest
from mpidist.collectives.reduce.registry import (
    HOST_PLACES,
    Algorithm,
    AlgorithmEntry,
    Site,
    Wire,
    host_algorithms,
    wire_algorithms,
)
from mpidist.core.options import CommunicationOptions

# The algorithm that sums in a fixed order, and rounds each contribution once.
_IN_ORDER = "pairwise"
# Bounds the cache of choices by message size.
_MOST_CHOSEN = 1024


class Wires:
    """The inter-node algorithms of one rank, chosen by their costs."""

    def __init__(self, site: Site, costs: Mapping[str, Cost]) -> None:
        node, self._comm, self._network = site.node, site.comm, site.between_nodes
        self._rail = [ranks[node.rank] if node.rank < len(ranks) else -1 for ranks in node.ranks]
        self._position, self._rails = node.topology.node_index, node.rails
        self._costs = costs
        self._chosen: dict[tuple[int, int, int, str | None], Way] = {}
        self._made: dict[tuple[str, str | None], Wire] = {}

    def choose(self, nbytes: int, options: CommunicationOptions, limit: int, smallest: int) -> Way:
        """Choose the fastest inter-node algorithm for the options and slices of ``smallest`` to ``limit`` bytes."""
        name = options.algorithm if options.algorithm in self._costs else None
        if options.wire_dtype is not None or options.deterministic:
            name = _IN_ORDER
        key = (nbytes, limit, smallest, name)
        if key not in self._chosen:
            if len(self._chosen) == _MOST_CHOSEN:
                self._chosen.clear()
            costs = self._costs if name is None else {name: self._costs[name]}
            self._chosen[key] = fastest(costs, len(self._rail), self._rails, nbytes, self._network, limit, smallest)
        return self._chosen[key]

    def made(self, name: str, options: CommunicationOptions) -> Wire:
        """Return an inter-node algorithm, created on first use."""
        key = name, options.wire_dtype
        if key not in self._made:
            entry = wire_algorithms[name]
            rounding = () if options.wire_dtype is None else (as_dtype(options.wire_dtype),)
            self._made[key] = entry.make(self._comm, self._rail, self._position, *rounding)
        return self._made[key]


class TwoLevel(Algorithm):
    """The algorithm ``hierarchical``, and ``alone`` for a single rank."""

    # The core finds overlaps before it starts.
    allows_overlap = True

    def __init__(self, site: Site) -> None:
        self._comm, self._node = site.comm, site.node
        self._wires = Wires(site, wire_algorithms.costs)
        # None for a rank that has nothing to move inside its node.
        self._core = site.node.core if site.node.has_neighbours and site.node.slots is not None else None
        self.takes_replicas = site.node.is_alone and self._core is not None

    @classmethod
    def made(cls, site: Site) -> Steps[TwoLevel]:
        """Create it, or raise AlgorithmError on all ranks if /dev/shm is too small (collective)."""
        yield from make_room(site, "hierarchical")
        return cls(site)

    def start(self, job: PackedReduction) -> Callable[[int], None] | None:
        """Reduce during the handshake if all ranks are on one node."""
        core = self._core
        return None if core is None or not self._node.is_alone else partial(self._begin, job, core)

    def all_reduce(self, job: PackedReduction) -> Steps[list[Array]]:
        """Implement ``Algorithm``."""
        core, shared = self._core, None
        if core is None:
            yield from self._reduce_alone(job)
            return job.targets()
        if not job.has_begun:
            self._begin(job, core, 0)
        in_flight = None if self._node.is_alone else self._in_flight(job)
        if core.state != DONE or in_flight is not None:
            shared = yield from self._settle_result(job, core)
            yield from self._finish(job, core, in_flight, shared)
        if shared is None:
            return job.targets() if job.is_wanted else []
        shared.flags.writeable = False
        return job.cut(shared)

    def _begin(self, job: PackedReduction, core: Core, identity: int) -> None:
        job.may_share = job.may_share and job.nbytes >= SHARED_BYTES and self._node.shared.has_arrays
        outs = job.targets() if job.is_wanted and not job.may_share else []
        job.has_begun = True
        core.reduce(
            identity,
            job.op,
            job.dtype,
            [job.pieces, *job.more],
            None if job.may_share else outs,
            divisor=job.divisor,
            per_slice=0 if self._node.is_alone else self._way(job).slice_bytes // job.dtype.itemsize,
            held=self._node.results.held() if job.may_share else 0,
            is_wanted=job.is_wanted,
            is_watched=job.tell_chunk is not None,
        )
        if core.state == OVERLAP:
            job.copy_inputs()
            self._begin(job, core, identity)

    def _way(self, job: PackedReduction) -> Way:
        return self._wires.choose(job.nbytes, job.options, self._node.slice_bytes, SMALLEST_SLICE_BETWEEN_NODES)

    def _settle_result(self, job: PackedReduction, core: Core) -> Steps[Array | None]:
        """Return the shared result of the node after the handshake, if all ranks share it."""
        results = self._node.results
        yield from core.go_on()
        if core.state != MET:
            return None
        if not job.may_share:
            core.look()
            return None
        shared = None
        if core.report.shares:
            shared = results.free(job.nbytes, core.notes())
            if shared is None and (yield from results.add(job.nbytes)):
                shared = results.free(job.nbytes, core.notes())
        core.targets(None if shared is not None else job.targets(), shared)
        return None if shared is None else shared.view(job.dtype)

    def _in_flight(self, job: PackedReduction) -> _InFlight:
        job.took = self._way(job).name
        return _InFlight(job, self._wires.made(job.took, job.options))

    def _finish(
        self, job: PackedReduction, core: Core, in_flight: _InFlight | None, shared: Array | None
    ) -> Steps[None]:
        """Reduce until this rank has its result, while slices are in flight."""
        polls = 0
        while core.state != DONE:
            if core.state == SLICE:
                assert in_flight is not None
                self._send(job, core, in_flight, shared)
            elif core.state == CHUNK and job.tell_chunk is not None:
                event = core.report.event
                job.tell_chunk(EVENTS[event.what], event.chunk, time.perf_counter_ns() - event.nanoseconds, 0)
            elif in_flight is None:
                yield from core.go_on()
                continue
            else:
                arrived = in_flight.move()
                for chunk in arrived:
                    core.crossed(chunk)
                polls = 0 if arrived else core.pause(polls, looks_at(1 + len(in_flight)))
                yield
            core.look(0 if in_flight is None else None)

    def _send(self, job: PackedReduction, core: Core, in_flight: _InFlight, shared: Array | None) -> None:
        part, slots = core.report.slice, self._node.slots
        if part.length == 0:
            in_flight.add(part.chunk, None)
            return
        if shared is not None:
            flat = shared[part.start : part.start + part.length]
        else:
            assert slots is not None
            flat = slots[part.lane : part.lane + part.length * job.dtype.itemsize].view(job.dtype)
        in_flight.add(part.chunk, in_flight.crossing(flat, flat, part.chunk, part.start))

    # Single rank on its node ------------------------------------------------------------------------------------

    def _reduce_alone(self, job: PackedReduction) -> Steps[None]:
        job.separate(may_be_in_place=True)
        if self._node.is_alone:
            for piece, target in zip(job.pieces, job.targets(), strict=True):
                np.copyto(target, piece)
                divided(target, job.divisor)
            return
        in_flight, per_slice = self._in_flight(job), self._way(job).slice_bytes // job.dtype.itemsize
        # Sums are formed in the targets of several slices at a time, so the targets must not overlap.
        are_apart = job.given is None or job.count <= per_slice or max(overlaps(job.given, job.given)) <= 1
        start = polls = 0
        while start < job.count or len(in_flight):
            while start < job.count and len(in_flight) < LANES_BETWEEN_NODES:
                stop = min(start + per_slice, job.count)
                chunk = start // per_slice
                in_flight.add(chunk, self._crossing_alone(job, in_flight, chunk, start, stop, are_apart))
                start = stop
            polls = 0 if in_flight.move() else polls + looks_at(len(in_flight))
            pause(self._comm, polls)
            yield

    def _crossing_alone(
        self, job: PackedReduction, in_flight: _InFlight, chunk: int, start: int, stop: int, are_apart: bool
    ) -> Steps[None]:
        parts = pieces(job.counts, start, stop)
        inputs = [job.pieces[piece][begin : begin + count] for piece, begin, count, _ in parts]
        targets = [job.targets()[piece][begin : begin + count] for piece, begin, count, _ in parts]
        if len(parts) == 1 and are_apart:
            yield from in_flight.crossing(inputs[0], targets[0], chunk, start)
            divided(targets[0], job.divisor)
            return
        flat = np.concatenate(inputs)
        yield from in_flight.crossing(flat, flat, chunk, start)
        divided(flat, job.divisor)
        for target, (_, _, count, offset) in zip(targets, parts, strict=True):
            target[:] = flat[offset - start : offset - start + count]


class _InFlight:
    """The slices of one reduction in flight between the nodes."""

    def __init__(self, job: PackedReduction, wire: Wire) -> None:
        self._job = job
        self._wire = wire
        # In order of their numbers. None for a slice that has arrived.
        self._parts: deque[tuple[int, Steps[None] | None]] = deque()

    def __len__(self) -> int:
        return len(self._parts)

    def crossing(self, source: Array, flat: Array, chunk: int, start: int) -> Steps[None]:
        """Reduce slice ``chunk``, which begins at element ``start``, over the rail into ``flat``."""
        job, began = self._job, time.perf_counter_ns()
        yield from self._wire.all_reduce(source, flat, job.op, chunk, self._residual(flat, start))
        if job.tell_chunk is not None:
            job.tell_chunk("chunk", chunk, began, flat.nbytes)

    def _residual(self, flat: Array, start: int) -> Array | None:
        residuals = self._job.residuals
        if residuals is not None and start not in residuals:
            residuals[start] = np.zeros_like(flat)
        return None if residuals is None else residuals[start]

    def add(self, chunk: int, steps: Steps[None] | None) -> None:
        """Add a slice with its remaining steps, if any."""
        self._parts.append((chunk, steps))

    def move(self) -> list[int]:
        """Advance all slices, and return the numbers of newly arrived slices, in order."""
        self._parts = deque((chunk, steps and moved(steps)) for chunk, steps in self._parts)
        arrived = []
        while self._parts and self._parts[0][1] is None:
            arrived.append(self._parts.popleft()[0])
        return arrived


def moved(steps: Steps[None]) -> Steps[None] | None:
    """Run the next step, and return the steps, or None after the last one."""
    return None if next(steps, steps) is steps else steps


host_algorithms.register(
    AlgorithmEntry("hierarchical", TwoLevel.made, HOST_PLACES, HOST_PLACES, is_ordered=True, rounds=True)
)
host_algorithms.register(AlgorithmEntry("alone", TwoLevel.made, ()))
