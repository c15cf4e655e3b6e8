"""The algorithms between nodes, for a slice over one rail or for a whole message.

- ``ring``, ``halving_doubling`` and ``pairwise`` reduce a slice over a rail (see ``two_level``).
- ``leaders`` reduces small data over all ranks, in one exchange of the node leaders.
- ``mpi`` and ``reduce_broadcast`` reduce over all ranks by calls of the MPI library.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from mpidist.arrays.dtypes import Array, DType
from mpidist.collectives.mpi.exchange import broadcast_flat, reduce_to
from mpidist.collectives.mpi.mpi_types import NUMPY_OPS, chunks, mpi_datatype, mpi_op
from mpidist.collectives.mpi.waiting import Comm, Steps, until_done
from mpidist.collectives.node.core import SMALL_BETWEEN_NODES, Core
from mpidist.collectives.node.memory import slices
from mpidist.collectives.node.packing import PackedReduction
from mpidist.collectives.reduce.cost_model import Rail, Round, halved_from
from mpidist.collectives.reduce.registry import (
    HOST_PLACES,
    Algorithm,
    AlgorithmEntry,
    Site,
    host_algorithms,
    wire_algorithms,
)
from mpidist.core.errors import AlgorithmError
from mpidist.core.options import ReduceOp

# Ring -----------------------------------------------------------------------------------------------------------------


class Ring(Rail):
    """An all-reduce over a ring.

    Each rank sends to the next rank and receives from the previous one. After n - 1 steps each rank has the sum of one
    segment, and after n - 1 more the sums of all segments. Each rank sends 2 (n - 1) / n of the bytes, which is optimal
    (Patarasuk and Yuan, doi:10.1016/j.jpdc.2008.09.002).
    """

    def all_reduce(self, source: Array, flat: Array, op: ReduceOp, chunk: int, residual: Array | None) -> Steps[None]:
        """Implement ``Wire``."""
        n, me, combine = len(self._ranks), self._position, NUMPY_OPS[op]
        before, after = (me - 1) % n, (me + 1) % n
        borders = slices(flat.size, n)
        inputs, segments = [source[a:b] for a, b in borders], [flat[a:b] for a, b in borders]
        received = np.empty(segments[0].size, flat.dtype)
        for step in range(n - 1):
            mine, theirs = (me - step) % n, (me - step - 1) % n
            part = received[: segments[theirs].size]
            yield from self._exchange({before: part}, {after: segments[mine] if step else inputs[mine]}, chunk)
            combine(inputs[theirs], part, out=segments[theirs])
        for step in range(n - 1):
            mine, theirs = (me + 1 - step) % n, (me - step) % n
            yield from self._exchange({before: segments[theirs]}, {after: segments[mine]}, chunk)


def ring_rounds(nodes: int, count: int) -> list[Round]:
    """Return its rounds, which grow with the number of nodes."""
    segment = -(-count // nodes)
    return [Round(nodes - 1, 1, segment, reduced, is_far=False) for reduced in (segment, 0)]


wire_algorithms.register(AlgorithmEntry("ring", Ring, ("between_nodes",), cost=ring_rounds))


# Halving and doubling -------------------------------------------------------------------------------------------------


class HalvingDoubling(Rail):
    """An all-reduce in 2 ceil(log2(n)) steps, for any number of nodes (Träff, arXiv 2410.14234).

    Each halving step sends the partial sums of the farther half of the remaining segments, until each rank has the sum
    of its own segment. The doubling steps send the sums back in reverse order. As many bytes as the ring. If n is a
    power of two, the partners are as far apart as in recursive halving.
    """

    def all_reduce(self, source: Array, flat: Array, op: ReduceOp, chunk: int, residual: Array | None) -> Steps[None]:
        """Implement ``Wire``."""
        n, me, combine = len(self._ranks), self._position, NUMPY_OPS[op]
        length, more = divmod(flat.size, n)

        def border(segment: int) -> int:
            # Segments are numbered cyclically, and the first ones have an element more.
            rounds, number = divmod(segment, n)
            return rounds * flat.size + number * length + min(number, more)

        # Rotate this rank's segment to the front, so that each step sends contiguous elements.
        first = border(me)
        starts = {
            segments: border(me + segments) - first for step in halved(n) for segments in (*step, step[1] - step[0])
        }
        turned = np.concatenate((source[first:], source[:first]))
        received = np.empty_like(turned[: starts[n // 2]])
        for kept, had in halved(n):
            part = received[: starts[had - kept]]
            yield from self._exchange(
                {(me - kept) % n: part}, {(me + kept) % n: turned[starts[kept] : starts[had]]}, chunk
            )
            combine(turned[: part.size], part, out=turned[: part.size])
        for kept, had in reversed(halved(n)):
            target, sums = turned[starts[kept] : starts[had]], turned[: starts[had - kept]]
            yield from self._exchange({(me + kept) % n: target}, {(me - kept) % n: sums}, chunk)
        flat[first:], flat[:first] = turned[: flat.size - first], turned[flat.size - first :]


def halved(nodes: int) -> list[tuple[int, int]]:
    """Return the segments after and before each halving step.

    >>> halved(5)
    [(3, 5), (2, 3), (1, 2)]
    """
    steps = []
    while nodes > 1:
        steps.append(((nodes + 1) // 2, nodes))
        nodes = (nodes + 1) // 2
    return steps


def halving_doubling_rounds(nodes: int, count: int) -> list[Round]:
    """Return its rounds, each half as large as the previous one."""
    length, more = divmod(count, nodes)
    sent = [(kept, (had - kept) * length + min(had - kept, more)) for kept, had in halved(nodes)]
    halving = [Round(1, 1, elements, elements, is_far=kept > 1) for kept, elements in sent]
    return halving + [each._replace(reduced=0) for each in reversed(halving)]


wire_algorithms.register(
    AlgorithmEntry("halving_doubling", HalvingDoubling, ("between_nodes",), cost=halving_doubling_rounds)
)


# Pairwise -------------------------------------------------------------------------------------------------------------


class Pairwise(Rail):
    """An all-reduce in two steps.

    Each rank receives one segment of all other ranks, sums it, and sends the sum to all. As many bytes as the ring. A
    segment is summed on one rank in the order of the nodes, so the result does not depend on the position of an
    element. With a 16-bit wire, each contribution and each sum is rounded once.
    """

    def all_reduce(self, source: Array, flat: Array, op: ReduceOp, chunk: int, residual: Array | None) -> Steps[None]:
        """Implement ``Wire``."""
        me = self._position
        borders = slices(flat.size, len(self._ranks))
        wire = self._dtype_on_wire(flat.dtype, op)
        residual = None if wire == flat.dtype else residual
        if residual is not None:
            np.add(source, residual, out=flat)
            source = flat
        inputs = [source[a:b] for a, b in borders]
        parts = [flat[a:b] for a, b in borders]
        mine = inputs[me].copy()
        sent = [part if other == me else part.astype(wire, copy=False) for other, part in enumerate(inputs)]
        if residual is not None:
            np.subtract(source, np.concatenate([part.astype(flat.dtype, copy=False) for part in sent]), out=residual)
        received = [np.empty(mine.size, wire) for _ in parts]
        received[me] = mine
        yield from self._exchange(dict(enumerate(received)), dict(enumerate(sent)), chunk)
        total = parts[me]
        total[:] = received[0]
        for contribution in received[1:]:
            NUMPY_OPS[op](total, contribution.astype(flat.dtype, copy=False), out=total)
        sums = total.astype(wire, copy=False)
        everyone = parts
        if wire != flat.dtype:
            everyone = [sums if other == me else np.empty(part.size, wire) for other, part in enumerate(parts)]
        if residual is not None:
            # The next contribution of this rank compensates the rounding error of its sum.
            residual[slice(*borders[me])] += total - sums.astype(flat.dtype, copy=False)
            # Drop overflowed errors, which would spoil all later calls.
            residual[~np.isfinite(residual)] = 0
        yield from self._exchange(dict(enumerate(everyone)), dict.fromkeys(range(len(parts)), sums), chunk)
        if wire != flat.dtype:
            for part, values in zip(parts, everyone, strict=True):
                part[:] = values

    def _dtype_on_wire(self, dtype: DType, op: ReduceOp) -> DType:
        rounds = dtype == np.float32 and op in (ReduceOp.SUM, ReduceOp.MEAN)
        return self._wire_dtype if rounds and self._wire_dtype is not None else dtype


def pairwise_rounds(nodes: int, count: int) -> list[Round]:
    """Return its two rounds, each with a message to every other node."""
    others = (nodes - 1) * -(-count // nodes)
    return [Round(1, nodes - 1, others, reduced, is_far=nodes > 2) for reduced in (others, 0)]


wire_algorithms.register(
    AlgorithmEntry("pairwise", Pairwise, ("between_nodes",), is_ordered=True, rounds=True, cost=pairwise_rounds)
)


# Leaders --------------------------------------------------------------------------------------------------------------


def make_room(site: Site, name: str) -> Steps[None]:
    """Allocate the shared memory of an algorithm, or raise AlgorithmError on all ranks (collective)."""
    has_room = yield from site.node.make_room(site.comm)
    # A single rank works without shared memory.
    if not has_room and site.comm.Get_size() > 1:
        raise AlgorithmError(
            f"algorithm {name!r} found no room in /dev/shm on every node. Enlarge it (docker run --shm-size=1g) or "
            "omit algorithm"
        )


class Leaders(Algorithm):
    """An all-reduce during the handshake, by recursive doubling or halving among the node leaders.

    The native core implements it (see ``mpidist/native/leaders.c``).
    """

    # The core reads small inputs completely before it writes results.
    allows_overlap = True

    def __init__(self, core: Core) -> None:
        self._core = core

    @classmethod
    def made(cls, site: Site) -> Steps[Leaders]:
        """Create it, or raise AlgorithmError on all ranks if /dev/shm is too small (collective)."""
        core = site.node.core
        assert core is not None, "use another algorithm without a core"
        yield from make_room(site, "leaders")
        if site.node.rank == 0:
            core.halve_from(halved_from(len(site.node.ranks), site.between_nodes))
        return cls(core)

    def start(self, job: PackedReduction) -> Callable[[int], None] | None:
        """Send small data with the handshake."""
        if job.nbytes > SMALL_BETWEEN_NODES:
            return None
        return partial(self._begin, job, job.pieces, job.targets() if job.is_wanted else [])

    def all_reduce(self, job: PackedReduction) -> Steps[list[Array]]:
        """Implement ``Algorithm``."""
        targets = job.targets() if job.is_wanted else []
        if job.nbytes > SMALL_BETWEEN_NODES:
            job.separate(may_be_in_place=True)
            per_part = SMALL_BETWEEN_NODES // job.dtype.itemsize
            for number, piece in enumerate(job.pieces):
                for start in range(0, piece.size, per_part):
                    part = slice(start, start + per_part)
                    self._begin(job, [piece[part]], [target[part] for target in targets[number : number + 1]])
                    yield from self._core.go_on()
        elif not job.has_begun:
            self._begin(job, job.pieces, targets)
            yield from self._core.go_on()
        return targets

    def _begin(self, job: PackedReduction, inputs: list[Array], outs: list[Array], identity: int = 0) -> None:
        job.has_begun = True
        self._core.reduce(
            identity, job.op, job.dtype, [inputs], outs, divisor=job.divisor, is_wanted=job.is_wanted, over_nodes=True
        )


host_algorithms.register(
    AlgorithmEntry(
        "leaders",
        Leaders.made,
        ("several_nodes",),
        ("several_nodes",),
        SMALL_BETWEEN_NODES,
        stands_for=lambda node: "hierarchical" if node.is_alone else "mpi" if node.core is None else "leaders",
    )
)


# MPI ------------------------------------------------------------------------------------------------------------------


class FlatReduction(Algorithm):
    """An all-reduce of one flat array by calls of MPI. ``reduce`` makes the calls."""

    def __init__(self, reduce: Callable[[Comm, Array, Array, ReduceOp], Steps[None]], site: Site) -> None:
        self._reduce, self._comm = reduce, site.comm

    def all_reduce(self, job: PackedReduction) -> Steps[list[Array]]:
        """Implement ``Algorithm``."""
        result = job.flat_result()
        yield from self._reduce(self._comm, job.flat_input(), result, job.op)
        return job.finish(result)


def _all_reduce(comm: Comm, send: Array, result: Array, op: ReduceOp) -> Steps[None]:
    """Call MPI_Iallreduce for each part that fits into an MPI count."""
    datatype, operation = mpi_datatype(send.dtype), mpi_op(op, send.dtype)
    for a, b in chunks(send.size):
        yield from until_done(comm.Iallreduce([send[a:b], b - a, datatype], [result[a:b], b - a, datatype], operation))


def _reduce_broadcast(comm: Comm, send: Array, result: Array, op: ReduceOp) -> Steps[None]:
    """Call MPI_Ireduce to rank 0, and MPI_Ibcast."""
    yield from reduce_to(comm, send, result, op, root=0)
    yield from broadcast_flat(comm, result, 0)


for _name, _reduce, _tuned_at in (("mpi", _all_reduce, HOST_PLACES), ("reduce_broadcast", _reduce_broadcast, ())):
    host_algorithms.register(AlgorithmEntry(_name, partial(FlatReduction, _reduce), HOST_PLACES, _tuned_at))
