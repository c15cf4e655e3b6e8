"""All-gather, broadcast and reduce-scatter of arrays in host memory.

By the core inside a node, by MPI between nodes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise

import numpy as np

from mpidist.arrays.dtypes import Array, DType, reduction_dtypes
from mpidist.collectives.channel.channel import Channel
from mpidist.collectives.channel.mismatch import checksums_fit, raise_rows_mismatch, rows_checksum
from mpidist.collectives.channel.observers import MOVE, REDUCE
from mpidist.collectives.channel.operation import Description
from mpidist.collectives.move.movement_plan import BroadcastPlan, DealPlan, GatherPlan
from mpidist.collectives.mpi import exchange
from mpidist.collectives.mpi.mpi_types import as_bytes
from mpidist.collectives.mpi.waiting import Steps
from mpidist.collectives.node.core import Core
from mpidist.collectives.node.memory import Pool
from mpidist.collectives.node.native import address_of
from mpidist.collectives.node.packing import copies_of_overlapping, divided, in_order
from mpidist.collectives.reduce.plan import ReductionPlan

_NOTHING = np.empty(0, np.uint8)
# Arrays for results, as many as are given; None for new ones.
Outs = Sequence[Array] | None


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

    def all_gather(self, plan: GatherPlan, arrays: Sequence[Array], outs: Outs) -> Steps[list[Array]]:
        """Concatenate arrays over the ranks."""
        channel, comm = self._channel, self._channel.comm
        if outs and not all([_is_part(array, out, channel) for array, out in zip(arrays, outs, strict=True)]):
            arrays = copies_of_overlapping(arrays, outs, self._pool)
        moved = [np.ascontiguousarray(array) for array in plan.moved(arrays)]
        core = yield from self._open(plan.description, partial(_gather, moved[0]) if moved else None)
        channel.phase(MOVE)
        rows: list[list[int]] = []
        if core is None:
            rows = yield from exchange.gather_lengths(comm, [len(array) for array in moved])
        results = []
        for index, array in enumerate(moved):
            if core is not None:
                yield from _begun(core, array if index else None)
            lengths = [row[index] for row in rows] if core is None else core.notes()
            out = outs[index] if outs and plan.positions[index] == 0 else None
            if out is not None and sum(lengths[: channel.rank]) != channel.rank * len(array):
                out = None  # which this rank's part may lie in, at another place than it comes to
            whole = self._target((sum(lengths), *array.shape[1:]), array.dtype, out)
            if core is None:
                counts = [length * plan.row_sizes[index] for length in lengths]
                nodes = channel.node.ranks
                yield from exchange.all_gather_flat(comm, array.reshape(-1), whole.reshape(-1), counts, nodes)
            else:
                core.targets([as_bytes(whole)])
                yield from core.go_on()
            results.append(plan.result(index, whole))
        return results

    def all_gather_bytes(self, description: Description, data: bytes) -> Steps[list[bytes]]:
        """Return the bytes of all ranks, in rank order."""
        core = yield from self._open(description, partial(_gather, np.frombuffer(data, np.uint8)))
        if core is None:
            return (yield from exchange.all_gather_bytes(self._channel.comm, data))
        lengths = core.notes()
        whole = np.empty(sum(lengths), np.uint8)
        core.targets([whole])
        yield from core.go_on()
        gathered, ends = whole.tobytes(), accumulate(lengths)
        return [gathered[end - length : end] for length, end in zip(lengths, ends, strict=True)]

    def gathered(self, core: Core, value: Array) -> Steps[Array]:
        """Return the rows of all ranks for this one, one after the other.

        All have begun to give them.
        """
        rows = sum(core.lengths()) * len(value) // value.nbytes if value.nbytes else sum(core.notes())
        result = self._pool.take((rows, *value.shape[1:]), value.dtype)
        core.targets([as_bytes(result)])
        yield from core.go_on()
        return result

    def broadcast(self, plan: BroadcastPlan, arrays: Sequence[Array], outs: Outs) -> Steps[list[Array]]:
        """Return the arrays of the root; those of others tell shapes and dtypes."""
        is_root = self._channel.rank == plan.root
        if is_root and outs and not all([_begins(array, out) for array, out in zip(arrays, outs, strict=True)]):
            arrays = copies_of_overlapping(arrays, outs, self._pool)
        given = [np.ascontiguousarray(array) if is_root else _NOTHING for array in arrays]
        core = yield from self._open(plan.description, partial(_gather, given[0]) if given else None)
        self._channel.phase(MOVE)
        results = []
        for index, array in enumerate(arrays):
            copy = self._target(array.shape, array.dtype, outs[index] if outs else None)
            if core is not None:
                yield from _begun(core, given[index] if index else None)
                core.targets([as_bytes(copy)])
                yield from core.go_on()
            else:
                if is_root:
                    copy[...] = given[index]
                yield from exchange.broadcast_flat(self._channel.comm, copy.reshape(-1), plan.root)
            results.append(copy)
        return results

    def deal(
        self,
        plan: DealPlan,
        arrays: Sequence[Array],
        borders: Sequence[Sequence[int]],
        outs: Outs,
        expected: list[int] | None,
    ) -> Steps[list[Array]]:
        """Give each rank the rows between two borders.

        Returns the rows that all give to this one, one after the other.

        Raises:
            MismatchError: A rank gives another one more or fewer rows than are ``expected`` there.
        """
        comm, rank, results = self._channel.comm, self._channel.rank, []
        # Rows without bytes travel as one byte each, so that they can be counted.
        widths = [nbytes or 1 for nbytes in plan.row_bytes]
        parts = [[row * width for row in rows] for rows, width in zip(borders, widths, strict=True)]
        rows_given = [[stop - start for start, stop in pairwise(rows)] for rows in borders]
        own_notes = [0 if expected is None else rows_checksum(rank, rows, expected) for rows in rows_given]
        apart = copies_of_overlapping(arrays, outs, self._pool) if outs else arrays
        given = [as_bytes(in_order(array)) if array.size else np.zeros(len(array), np.uint8) for array in apart]
        begin = partial(_deal, given[0], parts[0], own_notes[0]) if given else None
        core = yield from self._open(plan.description, begin)
        self._channel.phase(MOVE)
        for index, array in enumerate(arrays):
            if core is None:
                own = [rows * widths[index] for rows in rows_given[index]]
                lengths, notes = yield from exchange.exchange_lengths(comm, own, own_notes[index])
            else:
                if index:
                    _deal(given[index], parts[index], own_notes[index], core, 0)
                    yield from core.go_on()
                lengths, notes = core.lengths(), core.notes()
            rows = sum(lengths) // widths[index]
            dealt = self._target((rows, *plan.row_shapes[index]), array.dtype, outs[index] if outs else None)
            into = as_bytes(dealt) if plan.row_bytes[index] else np.empty(rows, np.uint8)
            if core is None:
                yield from exchange.exchange_parts(comm, given[index], parts[index], into, lengths)
            else:
                core.targets([into])
                yield from core.go_on()
            if expected is not None and not checksums_fit(notes):
                yield from raise_rows_mismatch(comm, rows_given[index], expected, self._channel.current.call_site)
            results.append(dealt)
        return results

    def _target(self, shape: tuple[int, ...], dtype: DType, out: Array | None) -> Array:
        """Return memory for a result: that of ``out`` where it fits."""
        if out is not None and out.shape == shape and out.dtype == dtype and in_order(out) is out:
            return out
        return self._pool.take(shape, dtype)

    def reduce_scatter(
        self, plan: ReductionPlan, array: Array, rows: Sequence[int], out: Array | None
    ) -> Steps[list[Array]]:
        """Return the rows of the reduction between two borders, one array."""
        channel = self._channel
        row_size = math.prod(array.shape[1:])
        borders = [border * row_size for border in rows]
        shape = (rows[channel.rank + 1] - rows[channel.rank], *array.shape[1:])
        wire, result_dtype = plan.formed[0]
        if out is not None:
            (array,) = copies_of_overlapping([array], [out], self._pool)
        send = in_order(array.astype(wire, copy=False)).reshape(-1)
        kept = self._target(shape, wire, out)
        flat = kept.reshape(-1)

        def begin(core: Core, identity: int) -> None:
            core.reduce_scatter(identity, plan.op, send, borders, flat, plan.divisor)

        core = yield from self._open(plan.description, begin)
        channel.phase(REDUCE)
        if core is None:
            wide, _ = reduction_dtypes(array.dtype, plan.op)
            send, flat = send.astype(wide, copy=False), flat.astype(wide, copy=False)
            yield from exchange.reduce_scatter_rows(channel.comm, send, flat, borders, plan.op)
            divided(flat, plan.divisor)
            kept = flat.reshape(shape)
        return [kept.astype(result_dtype, copy=False)]


def _gather(array: Array, core: Core, identity: int) -> None:
    core.gather(identity, as_bytes(array), len(array))


def _begins(array: Array, out: Array, offset: int = 0) -> bool:
    """Return whether an array begins so many bytes behind the begin of a result."""
    return address_of(array) == address_of(out) + offset


def _is_part(array: Array, out: Array, channel: Channel) -> bool:
    """Return whether an array is this rank's part of a result.

    That is one to which all ranks give as much.
    """
    return out.nbytes == channel.size * array.nbytes and _begins(array, out, channel.rank * array.nbytes)


def _deal(given: Array, parts: list[int], note: int, core: Core, identity: int) -> None:
    core.deal(identity, given, parts, note)


def _begun(core: Core, array: Array | None) -> Steps[None]:
    """Yield until all have come to gather an array.

    None for the one that was begun with the meeting.
    """
    if array is not None:
        _gather(array, core, 0)
        yield from core.go_on()
