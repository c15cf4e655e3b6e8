"""All-gather, broadcast, row exchange and reduce-scatter of arrays in host memory, with their plans.

The native core moves arrays inside a node, and MPI between nodes. Plans are cached per signature.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise

import numpy as np

from mpidist.arrays.dtypes import Array, DType, check_transportable, reduction_dtypes
from mpidist.collectives.channel.channel import Channel
from mpidist.collectives.channel.mismatch import checksums_fit, raise_rows_mismatch, rows_checksum
from mpidist.collectives.channel.observers import MOVE, REDUCE
from mpidist.collectives.channel.operation import Description, Signature, describe, note_text, signature_text
from mpidist.collectives.mpi import exchange
from mpidist.collectives.mpi.mpi_types import as_bytes
from mpidist.collectives.mpi.waiting import Steps
from mpidist.collectives.node.core import Core
from mpidist.collectives.node.memory import Pool
from mpidist.collectives.node.native import address_of
from mpidist.collectives.node.packing import copies_of_overlapping, divided, in_order
from mpidist.collectives.reduce.plan import ReductionPlan

_NOTHING = np.empty(0, np.uint8)
# Arrays for all results. None to allocate them.
Outs = Sequence[Array] | None


# Plans ----------------------------------------------------------------------------------------------------------------
# ``note`` is the structure of the arrays, or other facts that must be equal on all ranks. ``description`` holds the
# text and id that must be equal.


class GatherPlan:
    """The plan of an all-gather of arrays. Ranks may differ in the lengths along ``axis``."""

    def __init__(self, axis: int, signature: Signature, note: str = "", on_device: bool = False) -> None:
        parts = []
        self.positions: list[int] = []
        """The axis of each array, counted from 0."""
        self.row_sizes: list[int] = []
        """Elements of each array per index of the axis."""
        for shape, dtype in signature:
            check_transportable(dtype, "all_gather")
            position = check_has_axis(len(shape), axis, "all_gather")
            lengths = ", ".join("*" if i == position else str(n) for i, n in enumerate(shape))
            parts.append(f"{dtype.name}({lengths})")
            self.positions.append(position)
            self.row_sizes.append(math.prod(shape[:position] + shape[position + 1 :]))
        place = " on GPUs" if on_device else ""
        of = f"{', '.join(parts)}{place}{note_text('as', note)}"
        nbytes = _bytes_of(signature)
        self.description = describe(f"all_gather along axis {axis}", of, operation="all_gather", nbytes=nbytes)

    def moved(self, arrays: Sequence[Array]) -> list[Array]:
        """Move the axis of each array to the front."""
        return [
            np.moveaxis(array, position, 0) if position else array
            for array, position in zip(arrays, self.positions, strict=True)
        ]

    def result(self, index: int, moved: Array) -> Array:
        """Move the axis of a result back from the front."""
        position = self.positions[index]
        return np.moveaxis(moved, 0, position) if position else moved


class DealPlan:
    """The plan of an exchange of rows. Ranks may differ in the number of rows.

    ``root`` is the only sender or receiver, if there is one. ``compares`` says whether ranks pass the rows to expect.
    """

    def __init__(
        self, name: str, root: int | None, signature: Signature, note: str = "", compares: bool = False
    ) -> None:
        parts = []
        for shape, dtype in signature:
            check_transportable(dtype, name)
            check_has_axis(len(shape), 0, name)
            parts.append(f"{dtype.name}({', '.join(['*', *map(str, shape[1:])])})")
        at = "" if root is None else f" {'to' if name == 'gather' else 'from'} rank {root}"
        of = f"{', '.join(parts)}{note_text('as', note)}{' with expected rows' if compares else ''}"
        self.description = describe(f"{name}{at}", of, operation=name, nbytes=_bytes_of(signature))
        self.row_shapes = [shape[1:] for shape, _ in signature]
        self.row_bytes = [math.prod(shape[1:]) * dtype.itemsize for shape, dtype in signature]


class BroadcastPlan:
    """The plan of a broadcast of arrays."""

    def __init__(self, root: int, signature: Signature, note: str = "", on_device: bool = False) -> None:
        for _, dtype in signature:
            check_transportable(dtype, "broadcast")
        self.root = root
        of = f"{signature_text(signature)}{' on GPUs' if on_device else ''}{note_text('for', note)}"
        nbytes = _bytes_of(signature)
        self.description = describe(f"broadcast from rank {root}", of, operation="broadcast", nbytes=nbytes)


def _bytes_of(signature: Signature) -> int:
    return sum(math.prod(shape) * dtype.itemsize for shape, dtype in signature)


def check_has_axis(rank: int, axis: int, method: str) -> int:
    """Check an axis of an array of ``rank`` dimensions, and return it counted from 0."""
    if rank == 0:
        raise ValueError(f"{method} needs an array with at least one axis, not a scalar. Use value[None]")
    if not -rank <= axis < rank:
        raise ValueError(f"{method}: an array of rank {rank} has no axis {axis!r}. Use {-rank} to {rank - 1}")
    return axis % rank


# Host memory ----------------------------------------------------------------------------------------------------------


class HostMovement:
    """The collectives of one channel that move arrays in host memory."""

    def __init__(self, channel: Channel, pool: Pool) -> None:
        self._channel = channel
        self._pool = pool

    def _open(self, description: Description, begin: Callable[[Core, int], None] | None) -> Steps[Core | None]:
        """Run the handshake and ``begin``. Return the core, or None if MPI must move the arrays."""
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
        """Concatenate arrays over the ranks along the axis of the plan."""
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
                # The input may be inside ``out``, but at another address than this rank's rows.
                out = None
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
        """Gather the bytes of all ranks, in rank order."""
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
        """Return the concatenated rows of all ranks, after all ranks have started the gather."""
        rows = sum(core.lengths()) * len(value) // value.nbytes if value.nbytes else sum(core.notes())
        result = self._pool.take((rows, *value.shape[1:]), value.dtype)
        core.targets([as_bytes(result)])
        yield from core.go_on()
        return result

    def broadcast(self, plan: BroadcastPlan, arrays: Sequence[Array], outs: Outs) -> Steps[list[Array]]:
        """Broadcast the arrays of the root. Arrays of other ranks provide shapes and dtypes."""
        is_root = self._channel.rank == plan.root
        if is_root and outs and not all([_begins(array, out) for array, out in zip(arrays, outs, strict=True)]):
            arrays = copies_of_overlapping(arrays, outs, self._pool)
        sent = [np.ascontiguousarray(array) if is_root else _NOTHING for array in arrays]
        core = yield from self._open(plan.description, partial(_gather, sent[0]) if sent else None)
        self._channel.phase(MOVE)
        results = []
        for index, array in enumerate(arrays):
            copy = self._target(array.shape, array.dtype, outs[index] if outs else None)
            if core is not None:
                yield from _begun(core, sent[index] if index else None)
                core.targets([as_bytes(copy)])
                yield from core.go_on()
            else:
                if is_root:
                    copy[...] = sent[index]
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
        """Send each rank the rows between two borders, and return the concatenated received rows.

        Raises MismatchError if a rank receives other numbers of rows than ``expected``.
        """
        comm, rank, results = self._channel.comm, self._channel.rank, []
        # Send one byte for each row without bytes, so that rows can be counted.
        widths = [nbytes or 1 for nbytes in plan.row_bytes]
        parts = [[row * width for row in rows] for rows, width in zip(borders, widths, strict=True)]
        rows_sent = [[stop - start for start, stop in pairwise(rows)] for rows in borders]
        own_notes = [0 if expected is None else rows_checksum(rank, rows, expected) for rows in rows_sent]
        apart = copies_of_overlapping(arrays, outs, self._pool) if outs else arrays
        sent = [as_bytes(in_order(array)) if array.size else np.zeros(len(array), np.uint8) for array in apart]
        begin = partial(_deal, sent[0], parts[0], own_notes[0]) if sent else None
        core = yield from self._open(plan.description, begin)
        self._channel.phase(MOVE)
        for index, array in enumerate(arrays):
            if core is None:
                own = [rows * widths[index] for rows in rows_sent[index]]
                lengths, notes = yield from exchange.exchange_lengths(comm, own, own_notes[index])
            else:
                if index:
                    _deal(sent[index], parts[index], own_notes[index], core, 0)
                    yield from core.go_on()
                lengths, notes = core.lengths(), core.notes()
            rows = sum(lengths) // widths[index]
            dealt = self._target((rows, *plan.row_shapes[index]), array.dtype, outs[index] if outs else None)
            into = as_bytes(dealt) if plan.row_bytes[index] else np.empty(rows, np.uint8)
            if core is None:
                yield from exchange.exchange_parts(comm, sent[index], parts[index], into, lengths)
            else:
                core.targets([into])
                yield from core.go_on()
            if expected is not None and not checksums_fit(notes):
                yield from raise_rows_mismatch(comm, rows_sent[index], expected, self._channel.current.call_site)
            results.append(dealt)
        return results

    def _target(self, shape: tuple[int, ...], dtype: DType, out: Array | None) -> Array:
        """Return ``out`` if it can hold the result, else new memory."""
        if out is not None and out.shape == shape and out.dtype == dtype and in_order(out) is out:
            return out
        return self._pool.take(shape, dtype)

    def reduce_scatter(
        self, plan: ReductionPlan, array: Array, rows: Sequence[int], out: Array | None
    ) -> Steps[list[Array]]:
        """Return this rank's rows of the reduction."""
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
    core.move(identity, as_bytes(array), None, len(array))


def _begins(array: Array, out: Array, offset: int = 0) -> bool:
    """Return True if an array begins ``offset`` bytes after the start of a result."""
    return address_of(array) == address_of(out) + offset


def _is_part(array: Array, out: Array, channel: Channel) -> bool:
    """Return True if an array is this rank's part of a result with equal parts."""
    return out.nbytes == channel.size * array.nbytes and _begins(array, out, channel.rank * array.nbytes)


def _deal(sent: Array, parts: list[int], note: int, core: Core, identity: int) -> None:
    core.move(identity, sent, parts, note)


def _begun(core: Core, array: Array | None) -> Steps[None]:
    """Wait until all ranks have started to gather an array."""
    # The gather of the first array starts with the handshake, so it is None.
    if array is not None:
        _gather(array, core, 0)
        yield from core.go_on()
