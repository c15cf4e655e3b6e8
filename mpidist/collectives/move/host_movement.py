"""All-gather, broadcast and reduce-scatter of arrays in host memory.

By the core inside a node, by MPI between nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from mpidist.arrays.dtypes import Array, reduction_dtypes
from mpidist.collectives.channel.channel import Channel
from mpidist.collectives.channel.description import Description
from mpidist.collectives.channel.observers import MOVE, REDUCE
from mpidist.collectives.move.movement_plan import BroadcastPlan, GatherPlan
from mpidist.collectives.mpi import gathering
from mpidist.collectives.mpi.mpi_types import as_bytes
from mpidist.collectives.mpi.waiting import Steps
from mpidist.collectives.node.chunks import slices
from mpidist.collectives.node.core import Core
from mpidist.collectives.node.memory import Pool
from mpidist.collectives.node.packing import divided, in_order
from mpidist.collectives.reduce.plan import ReductionPlan

_NOTHING = np.empty(0, np.uint8)


class HostMovement:
    """The collectives of one communicator that move arrays in host memory.

    Args:
        channel: The channel that carries them out.
        pool: The memory for their results.
    """

    def __init__(self, channel: Channel, pool: Pool) -> None:
        self._channel = channel
        self._pool = pool

    def _open(self, description: Description, begin: Callable[[Core, int], None] | None) -> Steps[Core | None]:
        """Meet the other ranks; return the core where it moves the arrays.

        ``begin`` has then begun. None where MPI has to move them.
        """
        node = self._channel.node
        core = node.core if node.is_alone else None
        if begin is not None and core is not None and node.slots is not None:
            yield from self._channel.open(description, partial(begin, core))
            return core
        yield from self._channel.open(description)
        if begin is None or core is None or not (yield from node.make_room(self._channel.comm)):
            return None
        begin(core, 0)
        yield from core.go_on()
        return core

    def all_gather(self, plan: GatherPlan, arrays: Sequence[Array]) -> Steps[list[Array]]:
        """Concatenate arrays over the ranks."""
        comm = self._channel.comm
        moved = [np.ascontiguousarray(array) for array in plan.moved(arrays)]
        core = yield from self._open(plan.description, partial(_gather, moved[0]) if moved else None)
        self._channel.phase(MOVE)
        rows: list[list[int]] = []
        if core is None:
            rows = yield from gathering.gather_lengths(comm, [len(array) for array in moved])
        results = []
        for index, array in enumerate(moved):
            if core is not None:
                yield from _begun(core, array if index else None)
            lengths = [row[index] for row in rows] if core is None else core.notes()
            counts = [length * plan.row_sizes[index] for length in lengths]
            flat = self._pool.take(sum(counts), array.dtype)
            if core is None:
                yield from gathering.all_gather_flat(comm, array.reshape(-1), flat, counts)
            else:
                core.targets([as_bytes(flat)])
                yield from core.go_on()
            results.append(plan.result(index, flat, sum(lengths)))
        return results

    def gathered(self, core: Core, value: Array) -> Steps[Array]:
        """Return the arrays of all ranks, one after the other.

        All have begun to gather them.
        """
        result = self._pool.take((sum(core.notes()), *value.shape[1:]), value.dtype)
        core.targets([as_bytes(result)])
        yield from core.go_on()
        return result

    def broadcast(self, plan: BroadcastPlan, arrays: Sequence[Array]) -> Steps[list[Array]]:
        """Return the arrays of the root; those of others tell shapes and dtypes."""
        is_root = self._channel.rank == plan.root
        given = [np.ascontiguousarray(array) if is_root else _NOTHING for array in arrays]
        core = yield from self._open(plan.description, partial(_gather, given[0]) if given else None)
        self._channel.phase(MOVE)
        results = []
        for index, array in enumerate(arrays):
            flat = self._pool.take(array.size, array.dtype)
            if core is not None:
                yield from _begun(core, given[index] if index else None)
                core.targets([as_bytes(flat)])
                yield from core.go_on()
            else:
                if is_root:
                    flat[:] = given[index].reshape(-1)
                yield from gathering.broadcast_flat(self._channel.comm, flat, plan.root)
            results.append(flat.reshape(array.shape))
        return results

    def reduce_scatter(self, plan: ReductionPlan, array: Array) -> Steps[list[Array]]:
        """Return the flat elements of this rank's rows of the reduction, one array."""
        channel = self._channel
        row_size = math.prod(array.shape[1:])
        borders = tuple([(a * row_size, b * row_size) for a, b in slices(len(array), channel.size)])
        start, stop = borders[channel.rank]
        wire, result_dtype = plan.formed[0]
        send = in_order(array.astype(wire, copy=False)).reshape(-1)
        flat = self._pool.take(stop - start, wire)

        def begin(core: Core, identity: int) -> None:
            core.reduce_scatter(identity, plan.op, send, row_size, flat, plan.divisor)

        core = yield from self._open(plan.description, begin)
        channel.phase(REDUCE)
        if core is None:
            wide, _ = reduction_dtypes(array.dtype, plan.op)
            send, flat = send.astype(wide, copy=False), flat.astype(wide, copy=False)
            yield from gathering.reduce_scatter_rows(channel.comm, send, flat, borders, plan.op)
            divided(flat, plan.divisor)
        return [flat.astype(result_dtype, copy=False)]


def _gather(array: Array, core: Core, identity: int) -> None:
    core.gather(identity, as_bytes(array), len(array))


def _begun(core: Core, array: Array | None) -> Steps[None]:
    """Yield until all have come to gather an array.

    None for the one that was begun with the meeting.
    """
    if array is not None:
        _gather(array, core, 0)
        yield from core.go_on()
