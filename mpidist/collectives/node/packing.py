"""Packs of arrays that are reduced together: buffers, overlaps and results."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence

import numpy as np

from mpidist.arrays.device_ops import ops_of
from mpidist.arrays.dtypes import Array, DType, is_half
from mpidist.collectives.mpi.mpi_types import NUMPY_OPS
from mpidist.collectives.node.memory import Pool
from mpidist.collectives.node.native import address_of
from mpidist.core.options import CommunicationOptions, ReduceOp

# Smaller results are copied out of the buffer, so that they do not keep it alive.
_SMALL_RESULT_BYTES = 4 << 10
# Copying a smaller array costs less than one more piece, or less than zero-copy access saves.
SMALL_ARRAY_BYTES = 32 << 10
_FEW_PAIRS = 16
# Pieces of a pack, at most (NC_PIECES).
MOST_PIECES = 1024


def group_by_size(sizes: Sequence[int], bytes_per_pack: int) -> list[list[int]]:
    """Group indices into packs. A pack is closed once its size exceeds ``bytes_per_pack``.

    A ``bytes_per_pack`` of 0 makes a single pack.

    >>> group_by_size([16, 16, 16, 16], 16)
    [[0, 1], [2, 3]]
    """
    if bytes_per_pack == 0:
        return [list(range(len(sizes)))] if sizes else []
    packs: list[list[int]] = []
    room = -1
    for index, size in enumerate(sizes):
        if room < 0:
            packs.append([])
            room = bytes_per_pack
        packs[-1].append(index)
        room -= size
    return packs


def divided(flat: Array, divisor: int | None) -> Array:
    """Divide ``flat`` in place unless ``divisor`` is None. Return it."""
    if divisor is not None:
        np.true_divide(flat, divisor, out=flat)
    return flat


def copies_of_overlapping(arrays: Sequence[Array], out: Sequence[Array], pool: Pool) -> list[Array]:
    """Copy each array that may share memory with ``out`` to memory of ``pool``. Return all.

    >>> whole = np.zeros(4)
    >>> start, end = whole[:2], whole[1:]
    >>> first, second = copies_of_overlapping([start, end], [whole[2:]], Pool())
    >>> first is start, second is end
    (True, False)
    """
    # Comparing few pairs costs less than sorting bounds.
    is_small = len(arrays) * len(out) <= _FEW_PAIRS and all(isinstance(array, np.ndarray) for array in (*arrays, *out))
    if is_small and not any(np.may_share_memory(array, target) for array in arrays for target in out):
        return list(arrays)
    return [_copied(array, pool) if does else array for array, does in zip(arrays, overlaps(arrays, out), strict=True)]


def are_in_place(arrays: Sequence[Array], out: Sequence[Array]) -> bool:
    """Return whether each array is its own result, and overlaps no other result.

    >>> whole = np.zeros(4)
    >>> are_in_place([whole[:2]], [whole[:2]]), are_in_place([whole[:2]], [whole[1:3]])
    (True, False)
    """
    for array, target in zip(arrays, out, strict=True):
        if array is not target and (address_of(array), array.strides) != (address_of(target), target.strides):
            return False
    return max(overlaps(arrays, out), default=0) <= 1


def in_order(array: Array) -> Array:
    """Return a C-contiguous, aligned array, which is a copy if necessary."""
    return array if _is_in_order(array) else array.copy()


def _is_in_order(array: Array) -> bool:
    return array.flags.c_contiguous and array.flags.aligned


def _flat(array: Array) -> Array:
    return array if array.ndim == 1 else array.reshape(-1)


def _copied(array: Array, pool: Pool) -> Array:
    copy = pool.take(array.shape, array.dtype)
    copy[...] = array
    return copy


def overlaps(arrays: Sequence[Array], others: Sequence[Array]) -> list[int]:
    """Return how many of ``others`` each of ``arrays`` may share memory with, on one device.

    >>> whole = np.zeros(4)
    >>> overlaps([whole[:1], whole[1:3]], [whole[1:2], whole[2:], whole])
    [1, 3]
    """
    bounds = _bounds(others)
    starts, ends = sorted([start for start, _ in bounds]), sorted([end for _, end in bounds])
    # Arrays that start before its end, minus arrays that end before its start.
    return [bisect_left(starts, high) - bisect_right(ends, low) if low < high else 0 for low, high in _bounds(arrays)]


def _bounds(arrays: Sequence[Array]) -> list[tuple[int, int]]:
    """Return start and end address of each array, (0, 0) if it is empty."""
    pointers: dict[type, Callable[[Array], int]] = {}
    bounds = []
    for array in arrays:
        low = high = 0
        if array.size:
            pointer = pointers.get(type(array))
            if pointer is None:
                pointer = pointers[type(array)] = ops_of(array).pointer
            low = pointer(array)
            high = low + array.dtype.itemsize
            for count, stride in zip(array.shape, array.strides, strict=True):
                if stride < 0:
                    low += (count - 1) * stride
                else:
                    high += (count - 1) * stride
        bounds.append((low, high))
    return bounds


class Pack:
    """Arrays of one dtype that are reduced together.

    Small arrays are copied into one buffer. Large contiguous arrays are not copied. ``shapes`` has the shapes of all
    arrays of the call, ``indices`` the arrays of this pack, in the order of reduction.

    Attributes:
        dtype: Dtype of the reduction.
        apart: Indices of the large arrays.
        algorithms: Name of the chosen algorithm and its substitutes, or None.
        made: Name and instance of the algorithm, or None.
    """

    def __init__(
        self,
        indices: Sequence[int],
        shapes: Sequence[tuple[int, ...]],
        dtype: DType,
        source_dtype: DType,
        result_dtype: DType,
        joins_small: bool = True,
    ) -> None:
        self.indices = indices
        self.dtype = dtype
        self._result_dtype = result_dtype
        self._shapes = shapes
        self._sizes = {i: int(np.prod(shapes[i])) for i in indices}
        casts = not dtype == source_dtype == result_dtype
        joined = SMALL_ARRAY_BYTES if joins_small else 0
        self._together = [i for i in indices if casts or self._sizes[i] * dtype.itemsize < joined]
        if len(self._together) == 1 and not casts:
            self._together = []
        apart = [i for i in indices if i not in set(self._together)]
        if len(apart) > MOST_PIECES:
            self._together, apart = list(indices), []
        self.apart: Sequence[int] = apart
        self._slots = self._make_slots()
        buffered = [sum(self._sizes[i] for i in self._together)] if self._together else []
        self.counts = (*buffered, *(self._sizes[i] for i in apart))
        self.count = sum(self.counts)
        self.nbytes = self.count * dtype.itemsize
        self.residuals: dict[int, Array] = {}
        self.algorithms: tuple[str, ...] | None = None
        self.made: tuple[str, object] | None = None

    def _make_slots(self) -> list[tuple[int, int, int, tuple[int, ...]]]:
        """Return index, start, end and shape of each small array in the buffer."""
        slots, start = [], 0
        for index in self._together:
            stop = start + self._sizes[index]
            slots.append((index, start, stop, self._shapes[index]))
            start = stop
        return slots

    def inputs(self, arrays: Sequence[Array], pool: Pool) -> list[Array]:
        """Return flat contiguous arrays of ``self.counts`` elements, without copies if possible."""
        pieces = []
        if self._together:
            buffer = pool.take(self.counts[0], self.dtype)
            for index, start, stop, shape in self._slots:
                np.copyto(buffer[start:stop].reshape(shape), arrays[index])
            pieces.append(buffer)
        pieces.extend([_flat(in_order(arrays[index])) for index in self.apart])
        return pieces

    def targets(self, out: Sequence[Array], pool: Pool) -> list[Array]:
        """Return flat arrays of ``self.counts`` elements for the result, views of ``out`` if possible."""
        pieces = [pool.take(self.counts[0], self.dtype)] if self._together else []
        for index in self.apart:
            array = out[index]
            pieces.append(_flat(array) if _is_in_order(array) else pool.take(array.size, self.dtype))
        return pieces

    def deliver(self, pieces: Sequence[Array], results: list[Array], *, are_given: bool) -> None:
        """Cast the reduced pieces, and store them in ``results`` by index.

        ``are_given``: ``results`` has the caller's arrays, and only those without a view in ``targets`` are written.
        """
        if self._together:
            buffer = pieces[0].astype(self._result_dtype, copy=False)
            for index, start, stop, shape in self._slots:
                part = buffer[start:stop].reshape(shape)
                if are_given:
                    results[index][...] = part
                else:
                    results[index] = self._kept_apart(part)
        for index, piece in zip(self.apart, pieces[bool(self._together) :], strict=True):
            if not are_given:
                results[index] = self._kept_apart(piece.reshape(self._shapes[index]))
            elif not _is_in_order(results[index]):
                results[index][...] = piece.reshape(self._shapes[index])

    def _kept_apart(self, part: Array) -> Array:
        owner = part.base
        is_small_view = part.nbytes <= _SMALL_RESULT_BYTES and owner is not None and owner.size > part.size
        return part.copy() if is_small_view else part


class PackedReduction:
    """One reduction of a pack by an algorithm.

    Attributes:
        pieces: Input of the first replica: flat contiguous arrays, as ``Pack.inputs`` returns them. Read-only.
        more: Inputs of this rank's other replicas.
        given: Flat arrays for the result, or None for new memory.
        divisor: Divisor of a mean, or None.
        residuals: Rounding errors of the last call by first element of each slice. None without error feedback.
        is_wanted: Whether this rank needs the result.
        may_share: Whether the result may be read-only arrays that the ranks of the node share.
        has_begun: Whether the handshake has started the reduction.
        took: Chosen variant of the algorithm, such as an inter-node algorithm, or None.
        tell_chunk: Called with name, number, start and bytes of each chunk, or None.
    """

    def __init__(
        self,
        pack: Pack,
        pieces: list[Array],
        more: list[list[Array]],
        targets: list[Array] | None,
        op: ReduceOp,
        divisor: int | None,
        options: CommunicationOptions,
        pool: Pool,
    ) -> None:
        self.pieces = pieces
        self.more = more
        self.given = targets
        self.op = op
        self.divisor = divisor
        self.options = options
        self.pool = pool
        self.residuals = pack.residuals if options.error_feedback else None
        self.counts, self.count, self.nbytes, self.dtype = pack.counts, pack.count, pack.nbytes, pack.dtype
        self._flat_dtype = np.dtype(np.float32) if is_half(self.dtype) else self.dtype
        self.is_wanted = True
        self.may_share = self.has_begun = False
        self.took: str | None = None
        self._targets = targets
        self.tell_chunk: Callable[[str, int, int, int], None] | None = None

    def combine_replicas(self) -> None:
        """Reduce the inputs of this rank's replicas into one, in order."""
        if self.more:
            totals = [self.pool.take(piece.size, self.dtype) for piece in self.pieces]
            for inputs in self.more:
                for total, so_far, piece in zip(totals, self.pieces, inputs, strict=True):
                    NUMPY_OPS[self.op](so_far, piece, out=total)
                self.pieces = totals
            self.more = []

    def copy_inputs(self) -> None:
        """Copy the inputs, because the results overlap them."""
        self.pieces, *self.more = [
            [_copied(piece, self.pool) for piece in inputs] for inputs in (self.pieces, *self.more)
        ]

    def flat_input(self) -> Array:
        """Return the input as one array, in a dtype that MPI can reduce."""
        if len(self.pieces) == 1:
            return self.pieces[0].astype(self._flat_dtype, copy=False)
        return np.concatenate(self.pieces, out=self.pool.take(self.count, self._flat_dtype))

    def flat_result(self) -> Array:
        """Return memory for the reduction of ``flat_input``, if possible the target."""
        if self.given is not None and len(self.given) == 1 and self.dtype == self._flat_dtype:
            return self.given[0]
        return self.pool.take(self.count, self._flat_dtype)

    def targets(self) -> list[Array]:
        """Return memory for each piece of the result, the same at each call."""
        if self._targets is None:
            if self.nbytes < SMALL_ARRAY_BYTES:  # separate arrays, so that one does not keep all alive
                self._targets = [np.empty(count, self.dtype) for count in self.counts]
            else:
                self._targets = self.cut(self.pool.take(self.count, self.dtype))
        return self._targets

    def cut(self, flat: Array) -> list[Array]:
        """Return the pieces of a flat result, as views."""
        if len(self.counts) == 1:
            return [flat]
        pieces, start = [], 0
        for count in self.counts:
            pieces.append(flat[start : start + count])
            start += count
        return pieces

    def finish(self, flat: Array) -> list[Array]:
        """Divide a flat result by the divisor. Return its pieces, in the targets if any."""
        pieces = self.cut(divided(flat, self.divisor).astype(self.dtype, copy=False))
        if self.given is None:
            return pieces
        for piece, target in zip(pieces, self.given, strict=True):
            if piece is not target:
                np.copyto(target, piece)
        return self.given
