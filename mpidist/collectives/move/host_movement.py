"""All-gather, broadcast and reduce-scatter of arrays in host memory.

By copies inside a node, by MPI between nodes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, pairwise

import numpy as np

from mpidist.arrays.dtypes import Array
from mpidist.collectives.channel.channel import Channel
from mpidist.collectives.channel.observers import MOVE, REDUCE
from mpidist.collectives.move.movement_plan import BroadcastPlan, GatherPlan
from mpidist.collectives.mpi import gathering
from mpidist.collectives.mpi.waiting import Steps
from mpidist.collectives.node.chunks import slices
from mpidist.collectives.node.memory import Pool
from mpidist.collectives.node.movement import Movement
from mpidist.collectives.node.packing import divided
from mpidist.collectives.reduce.plan import ReductionPlan


class HostMovement:
    """The collectives of one communicator that move arrays in host memory.

    Args:
        channel: The channel that carries them out.
        pool: The memory for their results.
    """

    def __init__(self, channel: Channel, pool: Pool) -> None:
        self._channel = channel
        self._movement = Movement(channel.node)
        self._pool = pool

    def all_gather(self, plan: GatherPlan, arrays: Sequence[Array]) -> Steps[list[Array]]:
        """Concatenate arrays over the ranks."""
        channel, movement, k = self._channel, self._movement, len(arrays)
        moved = [np.ascontiguousarray(array) for array in plan.moved(arrays)]
        lengths = [len(array) for array in moved]
        told = movement.can_tell(2 * k)
        if told:
            channel.node.board.tell(lengths + movement.show(moved))
        yield from channel.open(plan.description)
        channel.phase(MOVE)
        if told:
            rows = channel.node.board.told(2 * k)
        else:
            rows = yield from gathering.gather_lengths(channel.comm, lengths)
        in_node = told and (yield from movement.met())
        results = []
        for index, array in enumerate(moved):
            counts = [row[index] * plan.row_sizes[index] for row in rows]
            borders = list(accumulate(counts, initial=0))
            flat = self._pool.take(borders[-1], array.dtype)
            if in_node:
                wanted = [(rank, flat[start:stop]) for rank, (start, stop) in enumerate(pairwise(borders))]
                longest = max(counts) * array.itemsize
                yield from movement.copy(array, [row[k + index] for row in rows], wanted, longest)
            else:
                yield from gathering.all_gather_flat(channel.comm, array.reshape(-1), flat, counts)
            results.append(plan.result(index, flat, sum([row[index] for row in rows])))
        if in_node:
            yield from movement.finish([place for row in rows for place in row[k:]])
        return results

    def broadcast(self, plan: BroadcastPlan, arrays: Sequence[Array]) -> Steps[list[Array]]:
        """Return the arrays of the root; those of others tell shapes and dtypes."""
        channel, movement, k = self._channel, self._movement, len(arrays)
        told = movement.can_tell(k)
        is_root = channel.rank == plan.root
        sources = [np.ascontiguousarray(array).reshape(-1) for array in arrays] if is_root else []
        if told and is_root:
            channel.node.board.tell(movement.show(sources))
        yield from channel.open(plan.description)
        channel.phase(MOVE)
        places = channel.node.board.told(k)[plan.root] if told else []
        in_node = told and (yield from movement.met())
        results = []
        for index, array in enumerate(arrays):
            flat = self._pool.take(array.size, array.dtype)
            if is_root:
                flat[:] = sources[index]
            if in_node:
                source = sources[index] if is_root else None
                wanted = [] if is_root else [(plan.root, flat)]
                yield from movement.copy(source, [places[index]] * channel.size, wanted, flat.nbytes)
            else:
                yield from gathering.broadcast_flat(channel.comm, flat, plan.root)
            results.append(flat.reshape(array.shape))
        if in_node:
            yield from movement.finish(places)
        return results

    def reduce_scatter(self, plan: ReductionPlan, array: Array) -> Steps[list[Array]]:
        """Return the flat elements of this rank's rows of the reduction, one array."""
        channel, movement = self._channel, self._movement
        row_size = math.prod(array.shape[1:])
        borders = tuple([(a * row_size, b * row_size) for a, b in slices(len(array), channel.size)])
        start, stop = borders[channel.rank]
        wire, result_dtype = plan.formed[0]
        send = np.ascontiguousarray(array, wire).reshape(-1)
        in_node = movement.can_tell(1)
        if in_node:
            channel.node.board.tell(movement.show([send]))
        yield from channel.open(plan.description)
        channel.phase(REDUCE)
        places = [place for (place,) in channel.node.board.told(1)] if in_node else []
        flat = self._pool.take(stop - start, wire)
        can_copy = in_node and (yield from movement.met())
        if in_node and (channel.node.reads_neighbours or all(place < 0 for place in places)):
            movement.reduce_rows(send, places, start, flat, plan.op)
            yield from movement.finish(places)
        elif can_copy:
            yield from movement.reduce_rows_through_slots(send, borders, flat, plan.op)
        else:
            yield from gathering.reduce_scatter_rows(channel.comm, send, flat, borders, plan.op)
        return [divided(flat, plan.divisor).astype(result_dtype, copy=False)]
