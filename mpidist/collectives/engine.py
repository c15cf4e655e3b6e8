"""Engine: how each collective is carried out on one channel, in steps that yield while they wait."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpidist.arrays.convert import Array
from mpidist.collectives import algorithms, gathering
from mpidist.collectives.algorithms.reduce_broadcast import reduce_to as reduce_to_rank
from mpidist.collectives.channel import Channel
from mpidist.collectives.choice import Choice
from mpidist.collectives.chunks import slices
from mpidist.collectives.handshake import plan_id
from mpidist.collectives.memory import Pool
from mpidist.collectives.movement import Movement
from mpidist.collectives.packing import copies_of_overlapping, divided
from mpidist.collectives.plan import ReductionPlan
from mpidist.collectives.table import Table
from mpidist.collectives.trace import OTHERS, PACK, REDUCE, UNPACK
from mpidist.collectives.waiting import Steps


class Engine:
    """Gives the steps of collectives; each opens with the channel's handshake.

    Args:
        channel: On which they are carried out.
        table: Which algorithm is taken at which size.
    """

    def __init__(self, channel: Channel, table: Table) -> None:
        self.channel = channel
        self.choice = Choice(channel.comm, channel.node, table)
        self._movement = Movement(channel.node)
        self._pool = Pool()
        self.last_algorithm = "none"

    def all_reduce(
        self, plan: ReductionPlan, arrays: Sequence[Array], out: Sequence[Array] | None, call_site: str | None
    ) -> Steps[list[Array]]:
        """Reduce ``arrays`` over all ranks, into ``out`` where it is given; returns the results."""
        handshake = self.channel.handshake
        if plan.inline:
            self.last_algorithm = "handshake"
            plan.fill_inline(arrays, handshake.payload(plan.count))
            if not handshake.begin(plan.id):
                yield from handshake.finish(plan.id, plan.text, call_site)
            return plan.from_inline(handshake.totals(plan.count), out)
        if out is not None:
            # One pack may write what another has still to read.
            arrays = copies_of_overlapping(arrays, out)
        return (yield from self._reduce_packs(plan, arrays, out, call_site, may_share=out is None, is_wanted=True))

    def _reduce_packs(
        self,
        plan: ReductionPlan,
        arrays: Sequence[Array],
        out: Sequence[Array] | None,
        call_site: str | None,
        *,
        may_share: bool,
        is_wanted: bool,
    ) -> Steps[list[Array]]:
        """Reduce one pack after the other by its algorithm; the results of a rank that does not want them are blank."""
        handshake, trace = self.channel.handshake, self.channel.trace
        results = plan.blank_results(out)
        if not plan.packs:
            yield from handshake.open(plan.id, plan.text, call_site)
        for number, pack in enumerate(plan.packs):
            algorithm = self.choice.made(pack.nbytes, plan.options)
            if algorithm is None:
                algorithm = yield from self._make_algorithm(pack.nbytes, plan, call_site)
            if trace is not None:
                trace.phase(PACK)
            job = plan.reduction(pack, arrays, out, self._pool)
            job.trace, job.is_wanted = trace, is_wanted
            algorithm.prepare(job, may_share)
            if number == 0:
                if not handshake.begin(plan.id):
                    yield from handshake.finish(plan.id, plan.text, call_site)
            else:
                if trace is not None:
                    trace.phase(OTHERS)
                yield from self.channel.node.board.meet()
            if trace is not None:
                trace.phase(REDUCE)
            pieces = yield from algorithm.all_reduce(job)
            self.last_algorithm = algorithm.name
            if trace is not None:
                trace.took(algorithm.name)
                trace.phase(UNPACK)
            if is_wanted:
                pack.deliver(pieces, results, out)
        return results

    def reduce_to(
        self, plan: ReductionPlan, arrays: Sequence[Array], root: int, call_site: str | None
    ) -> Steps[list[Array]]:
        """Reduce to rank ``root``; what the others return is of no account.

        Between nodes by MPI's own call, unless the options ask for what that does not offer.
        """
        channel, is_root = self.channel, self.channel.rank == root
        if (channel.node.is_alone and channel.size > 1) or _asks_for_more(plan):
            return (yield from self._reduce_packs(plan, arrays, None, call_site, may_share=False, is_wanted=is_root))
        yield from channel.handshake.open(plan.id, plan.text, call_site)
        results = plan.blank_results(None)
        if channel.trace is not None:
            channel.trace.phase(REDUCE)
            channel.trace.took("mpi")
        for pack in plan.packs:
            job = plan.reduction(pack, arrays, None, self._pool)
            flat = job.flat_result() if is_root else None
            yield from reduce_to_rank(channel.comm, job.flat_input(), flat, plan.op, root)
            if flat is not None:
                pack.deliver(job.finish(flat), results, None)
        return results

    def reduce_scatter(self, plan: ReductionPlan, array: Array, call_site: str | None) -> Steps[Array]:
        """Return the flat elements of this rank's rows of the reduction."""
        channel, movement = self.channel, self._movement
        row_size = int(np.prod(array.shape[1:]))
        if _asks_for_more(plan):
            (whole,) = yield from self._reduce_packs(plan, [array], None, call_site, may_share=False, is_wanted=True)
            first, last = slices(len(array), channel.size)[channel.rank]
            mine: Array = whole[first:last].reshape(-1).copy()
            return mine
        borders = [(a * row_size, b * row_size) for a, b in slices(len(array), channel.size)]
        start, stop = borders[channel.rank]
        wire, result_dtype = plan.formed[0]
        send = np.ascontiguousarray(array, wire).reshape(-1)
        told = channel.node.is_alone
        if told:
            channel.node.board.tell([movement.place_of(send)])
        yield from channel.handshake.open(plan.id, plan.text, call_site)
        if channel.trace is not None:
            channel.trace.phase(REDUCE)
        places = [place for (place,) in channel.node.board.told(1)] if told else []
        flat = self._pool.take(stop - start, wire)
        if told and (channel.node.reads_neighbours or all(place < 0 for place in places)):
            movement.reduce_rows(send, places, start, flat, plan.op)
            yield from channel.node.board.meet()
        elif told and (yield from movement.works()):
            yield from movement.reduce_rows_through_slots(send, borders, flat, plan.op)
        else:
            yield from gathering.reduce_scatter_rows(channel.comm, send, flat, borders, plan.op)
        return divided(flat, plan.divisor).astype(result_dtype, copy=False)

    def _make_algorithm(self, nbytes: int, plan: ReductionPlan, call_site: str | None) -> Steps[algorithms.Algorithm]:
        """Return a new algorithm for a message, once all ranks have come."""
        yield from self.channel.handshake.open(plan.id, plan.text, call_site)
        return (yield from self.choice.make(nbytes, plan.options))

    def all_gather(self, moved: list[Array], axis: int, text: str, call_site: str | None) -> Steps[list[Array]]:
        """Gather arrays along their first axis, which comes to be ``axis``."""
        channel, movement, k = self.channel, self._movement, len(moved)
        told = movement.can_tell(2 * k)
        mine = [len(array) for array in moved]
        if told:
            channel.node.board.tell([*mine, *map(movement.place_of, moved)])
        yield from channel.handshake.open(plan_id(text), text, call_site)
        if channel.trace is not None:
            channel.trace.moves(sum(array.nbytes for array in moved))
        if told:
            words = np.array(channel.node.board.told(2 * k)).reshape(self.channel.size, 2 * k)
            lengths, places = words[:, :k], words[:, k:]
        else:
            lengths = yield from gathering.gather_lengths(channel.comm, mine)
        in_node = told and (yield from movement.works())
        results = []
        for index, array in enumerate(moved):
            row = int(np.prod(array.shape[1:]))
            counts = [n * row for n in lengths[:, index].tolist()]
            flat = self._pool.take(sum(counts), array.dtype)
            if in_node:
                wanted = list(enumerate(np.split(flat, np.cumsum(counts[:-1]))))
                longest = max(counts) * array.itemsize
                yield from movement.copy(array, places[:, index].tolist(), wanted, longest)
            else:
                yield from gathering.all_gather_flat(channel.comm, array.reshape(-1), flat, counts)
            whole = flat.reshape(int(lengths[:, index].sum()), *array.shape[1:])
            results.append(np.moveaxis(whole, 0, axis if axis >= 0 else axis + array.ndim))
        if in_node:
            # The others may still be reading.
            yield from channel.node.board.meet()
        return results

    def broadcast(self, arrays: Sequence[Array], root: int, text: str, call_site: str | None) -> Steps[list[Array]]:
        """Return the arrays of rank ``root``; those of others tell shapes and dtypes."""
        channel, movement = self.channel, self._movement
        told = movement.can_tell(len(arrays))
        is_root = self.channel.rank == root
        sources = [np.ascontiguousarray(array).reshape(-1) for array in arrays] if is_root else []
        if told:
            channel.node.board.tell([movement.place_of(source) for source in sources])
        yield from channel.handshake.open(plan_id(text), text, call_site)
        if channel.trace is not None:
            channel.trace.moves(sum(array.nbytes for array in arrays))
        places = channel.node.board.told(len(arrays))[root] if told else []
        in_node = told and (yield from movement.works())
        results = []
        for index, array in enumerate(arrays):
            flat = self._pool.take(array.size, array.dtype)
            if is_root:
                flat[:] = sources[index]
            if in_node:
                source = sources[index] if is_root else None
                wanted = [] if is_root else [(root, flat)]
                yield from movement.copy(source, [places[index]] * self.channel.size, wanted, flat.nbytes)
            else:
                yield from gathering.broadcast_flat(channel.comm, flat, root)
            results.append(flat.reshape(array.shape))
        if in_node:
            # The others may still be reading.
            yield from channel.node.board.meet()
        return results


def _asks_for_more(plan: ReductionPlan) -> bool:
    """Whether a call asks for an algorithm, for a fixed order of sums, or for a 16-bit wire."""
    options = plan.options
    return options.algorithm is not None or options.deterministic or options.wire_dtype is not None
