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
from mpidist.collectives.node.memory import Pool, borders
from mpidist.collectives.node.native import address_of
from mpidist.collectives.node.packing import copies_of_overlapping, divided, in_order
from mpidist.collectives.reduce.plan import ReductionPlan

_NOTHING = np.empty(0, np.uint8)
# Arrays for all results. None to allocate them.
Outs = Sequence[Array] | None
# Borders of the bytes for each rank, by array.
Cuts = list[list[int]] | None


class MovePlan:
    """The plan of a collective that moves arrays: all_gather, broadcast, gather, scatter or all_to_all.

    Except in a broadcast, lengths along ``axis`` may differ between ranks. ``note`` and ``more`` are further facts that
    must be equal on all ranks. ``root`` is the only rank that sends, or receives.

    ``positions`` holds the axis of each array, counted from 0, and ``row_sizes`` its elements per index of that axis.
    ``equal_cuts`` are the borders of equal parts for each rank, None if all bytes go to all ranks.
    """

    def __init__(
        self,
        channel: Channel,
        name: str,
        signature: Signature,
        note: str = "",
        axis: int = 0,
        root: int | None = None,
        more: str = "",
    ) -> None:
        self.root, self._size = root, channel.size
        self.is_broadcast = name == "broadcast"
        # The only rank that receives, in a gather. In a broadcast or scatter, ``root`` is the only rank that sends.
        self._receiver = root if name == "gather" else None
        self.receives = self._receiver in (None, channel.rank)
        self.sends = self._receiver is not None or root in (None, channel.rank)
        for _, dtype in signature:
            check_transportable(dtype, name)
        shapes, self.positions = [shape for shape, _ in signature], [0] * len(signature)
        self._rows, of = shapes, signature_text(signature)
        if not self.is_broadcast:
            self.positions = places = [check_has_axis(len(shape), axis, name) for shape in shapes]
            self._rows = [shape[:at] + shape[at + 1 :] for shape, at in zip(shapes, places, strict=True)]
            of = ", ".join([_open_text(shape, dtype, at) for (shape, dtype), at in zip(signature, places, strict=True)])
        self.row_sizes = [math.prod(row) for row in self._rows]
        # Bytes of a row in messages. A row without bytes has one, so that rows can be counted.
        self._widths = [size * dtype.itemsize or 1 for size, (_, dtype) in zip(self.row_sizes, signature, strict=True)]
        self._signature = signature
        self.equal_cuts = self.cut(None) if name in ("gather", "scatter", "all_to_all") else None
        at = "" if root is None else f" {'from' if self._receiver is None else 'to'} rank {root}"
        title = f"{name} along axis {axis}" if name == "all_gather" else f"{name}{at}"
        note = note_text("for" if self.is_broadcast else "as", note)
        nbytes = sum(math.prod(shape) * dtype.itemsize for shape, dtype in signature)
        self.description = describe(title, f"{of}{more}{note}", operation=name, nbytes=nbytes)

    def cut(self, counts: Sequence[int] | None) -> list[list[int]]:
        """Return the borders of the rows for each rank. Raises ValueError if ``counts`` do not fit."""
        cuts = []
        for (shape, _), width in zip(self._signature, self._widths, strict=True):
            cut: Sequence[int] = [0] * (self._size + 1)
            if self._receiver is not None:
                cut = [0] * (self._receiver + 1) + [shape[0]] * (self._size - self._receiver)
            elif self.sends:
                cut = cut_rows(shape[0], self._size, counts)
            cuts.append([row * width for row in cut])
        return cuts

    def rows(self, index: int, cut: Sequence[int]) -> list[int]:
        """Return the number of rows between borders."""
        return [(stop - start) // self._widths[index] for start, stop in pairwise(cut)]

    def moved(self, arrays: Sequence[Array]) -> Sequence[Array]:
        """Move the axis of each array to the front."""
        if not any(self.positions):
            return arrays
        pairs = zip(arrays, self.positions, strict=True)
        return [np.moveaxis(array, position, 0) if position else array for array, position in pairs]

    def sent(self, arrays: Sequence[Array]) -> list[Array]:
        """Return the bytes that this rank sends of each array."""
        if not self.sends:
            return [_NOTHING] * len(arrays)
        sent = []
        for array, size in zip(self.moved(arrays), self.row_sizes, strict=True):
            has_bytes = size or self.is_broadcast
            sent.append(as_bytes(np.ascontiguousarray(array)) if has_bytes else np.zeros(len(array), np.uint8))
        return sent

    def shape(self, index: int, nbytes: int) -> tuple[int, ...]:
        """Return the shape of a result, with its axis at the front."""
        return self._rows[index] if self.is_broadcast else (nbytes // self._widths[index], *self._rows[index])

    def result(self, index: int, moved: Array) -> Array:
        """Move the axis of a result back from the front."""
        position = self.positions[index]
        return np.moveaxis(moved, 0, position) if position else moved


def _open_text(shape: tuple[int, ...], dtype: DType, position: int) -> str:
    """Return dtype and shape as text, without the length of one axis."""
    return f"{dtype.name}({', '.join('*' if i == position else str(n) for i, n in enumerate(shape))})"


def check_has_axis(rank: int, axis: int, method: str) -> int:
    """Check an axis of an array of ``rank`` dimensions, and return it counted from 0."""
    if rank == 0:
        raise ValueError(f"{method} needs an array with at least one axis, not a scalar. Use value[None]")
    if not -rank <= axis < rank:
        raise ValueError(f"{method}: an array of rank {rank} has no axis {axis!r}. Use {-rank} to {rank - 1}")
    return axis % rank


def cut_rows(rows: int, size: int, counts: Sequence[int] | None) -> Sequence[int]:
    """Return the borders of the rows for each of ``size`` ranks. Raises ValueError if ``counts`` do not fit."""
    if counts is None:
        return borders(rows, size)
    cuts = list(accumulate(map(int, counts), initial=0))
    if len(cuts) != size + 1 or cuts[-1] != rows or min(counts) < 0:
        raise ValueError(
            f"counts is {counts!r}; expected how many of {rows} rows each of {size} ranks gets, in their order"
        )
    return cuts


def check_expected(expected: Sequence[int], size: int, outs: Sequence[Array]) -> list[int]:
    """Return the rows that this rank expects. Raises ValueError if they do not fit the ranks or ``outs``."""
    rows = [*map(int, expected)]
    if len(rows) != size or min(rows) < 0:
        raise ValueError(f"expected is {rows!r}; expected how many rows each of {size} ranks gives this one, in order")
    for out in outs:
        if out.shape[:1] != (sum(rows),):
            given = signature_text(((out.shape, out.dtype),))
            raise ValueError(f"out has {given}; expected {sum(rows)} rows, as in {rows!r}")
    return rows


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

    def move(
        self,
        plan: MovePlan,
        arrays: Sequence[Array],
        outs: Outs = None,
        cuts: Cuts = None,
        expected: list[int] | None = None,
    ) -> Steps[list[Array]]:
        """Move ``arrays`` as the plan says. Return the results, in ``outs`` if they fit.

        Raises MismatchError if a rank receives other numbers of rows than ``expected``.
        """
        channel, rank = self._channel, self._channel.rank
        if outs and plan.sends and not (cuts is None and self._are_in_place(plan, arrays, outs)):
            arrays = copies_of_overlapping(arrays, outs, self._pool)
        sent, notes = plan.sent(arrays), [0] * len(arrays)
        if cuts is not None and expected is not None:
            notes = [rows_checksum(rank, plan.rows(index, cut), expected) for index, cut in enumerate(cuts)]

        def begin(index: int, core: Core, identity: int) -> None:
            core.move(identity, sent[index], None if cuts is None else cuts[index], notes[index])

        core = yield from self._open(plan.description, partial(begin, 0) if sent else None)
        channel.phase(MOVE)
        received = (yield from self._exchange_lengths(plan, sent, cuts, notes)) if core is None else []
        results = []
        for index, data in enumerate(sent):
            if core is not None:
                if index:  # the first array starts with the handshake
                    begin(index, core, 0)
                    yield from core.go_on()
                received.append((core.lengths(), notes if expected is None else core.notes()))
            lengths, their_notes = received[index]
            out = None if outs is None or plan.positions[index] else outs[index]
            if out is not None and cuts is None and plan.root is None and sum(lengths[:rank]) != rank * data.size:
                # The input may be inside ``out``, but at another address than this rank's rows.
                out = None
            result = self._target(plan.shape(index, sum(lengths)), arrays[index].dtype, out)
            into = as_bytes(result) if result.size else np.empty(sum(lengths), np.uint8)
            if core is not None:
                core.targets([into])
                yield from core.go_on()
            elif cuts is not None:
                yield from exchange.exchange_parts(channel.comm, data, cuts[index], into, lengths)
            elif plan.root is None:
                yield from exchange.all_gather_flat(channel.comm, data, into, lengths, channel.node.ranks)
            else:
                into[: data.size] = data
                yield from exchange.broadcast_flat(channel.comm, into, plan.root)
            if cuts is not None and expected is not None and not checksums_fit(their_notes):
                rows = plan.rows(index, cuts[index])
                yield from raise_rows_mismatch(channel.comm, rows, expected, channel.executor.current.call_site)
            results.append(plan.result(index, result))
        return results

    def _are_in_place(self, plan: MovePlan, arrays: Sequence[Array], outs: Sequence[Array]) -> bool:
        """Return whether each array is its part of the result, for equal parts."""
        size, rank = (1, 0) if plan.is_broadcast else (self._channel.size, self._channel.rank)
        return all(
            out.nbytes == size * array.nbytes and address_of(array) == address_of(out) + rank * array.nbytes
            for array, out in zip(arrays, outs, strict=True)
        )

    def _exchange_lengths(
        self, plan: MovePlan, sent: list[Array], cuts: Cuts, notes: list[int]
    ) -> Steps[list[tuple[list[int], list[int]]]]:
        """Return for each array the bytes and the note that each rank sends here."""
        if not sent or plan.is_broadcast:
            return [([], notes)] * len(sent)
        if cuts is None:
            rows = yield from exchange.gather_lengths(self._channel.comm, [data.size for data in sent])
            return [(list(lengths), notes) for lengths in zip(*rows, strict=True)]
        words = [[stop - start for start, stop in pairwise(cut)] for cut in cuts]
        words += [[note] * self._channel.size for note in notes]
        words = yield from exchange.exchange_words(self._channel.comm, words)
        return list(zip(words[: len(sent)], words[len(sent) :], strict=True))

    def gathered(self, core: Core, value: Array) -> Steps[Array]:
        """Return the concatenated rows of all ranks, after all ranks have started the gather."""
        rows = sum(core.lengths()) * len(value) // value.nbytes if value.nbytes else sum(core.notes())
        result = self._pool.take((rows, *value.shape[1:]), value.dtype)
        core.targets([as_bytes(result)])
        yield from core.go_on()
        return result

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
