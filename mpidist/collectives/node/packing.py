"""Packs of arrays that are reduced together: buffers, overlaps and results."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np

from mpidist.arrays.device_ops import ops_of
from mpidist.arrays.dtypes import Array, DType, is_half
from mpidist.collectives.mpi.mpi_types import NUMPY_OPS
from mpidist.collectives.node import native
from mpidist.collectives.node.memory import Pool
from mpidist.collectives.node.native import address_of
from mpidist.core.options import CommunicationOptions, ReduceOp

# Smaller results are copied out of the buffer, so that they do not keep it alive.
_SMALL_RESULT_BYTES = 4 << 10
# Copying a smaller array costs less than one more piece, or less than zero-copy access saves.
SMALL_ARRAY_BYTES = 32 << 10
# Pieces of a pack, at most (NC_PIECES).
MOST_PIECES = 1024


def group_by_size(sizes: Sequence[int], bytes_per_pack: int) -> list[list[int]]:
    """Group indices into packs, each closed once its size exceeds ``bytes_per_pack``. 0 makes a single pack."""
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


# Overlaps -------------------------------------------------------------------------------------------------------------


def copies_of_overlapping(
    arrays: Sequence[Array], out: Sequence[Array], pool: Pool, *, may_be_in_place: bool = False
) -> list[Array]:
    """Copy each array that may share memory with ``out`` to memory of ``pool``. Return all.

    ``may_be_in_place``: an array at the address of its own result is not copied for that result.
    """
    functions = native.functions()
    if functions is not None and not functions["overlap"](list(arrays), list(out)):
        return list(arrays)
    counts = overlaps(arrays, out)
    if may_be_in_place:
        pairs = zip(counts, arrays, out, strict=True)
        counts = [count - (address_of(array) == address_of(target)) for count, array, target in pairs]
    return [_copied(array, pool) if count > 0 else array for array, count in zip(arrays, counts, strict=True)]


def in_order(array: Array) -> Array:
    """Return a C-contiguous, aligned array, which is a copy if necessary."""
    return array if _is_in_order(array) else array.copy()


def _is_in_order(array: Array) -> bool:
    flags = array.flags
    return flags.c_contiguous and flags.aligned


def _flat(array: Array) -> Array:
    return array if array.ndim == 1 else array.reshape(-1)


def _copied(array: Array, pool: Pool) -> Array:
    copy = pool.take(array.shape, array.dtype)
    copy[...] = array
    return copy


def overlaps(arrays: Sequence[Array], others: Sequence[Array]) -> list[int]:
    """Return how many of ``others`` each of ``arrays`` may share memory with, on one device."""
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


# Packs ----------------------------------------------------------------------------------------------------------------


class Pack:
    """Arrays of one dtype that are reduced together, as flat pieces.

    Arrays that need a cast, and small arrays, are copied into one buffer: the first piece. Each other array is a piece
    without a copy. ``shapes`` has the shapes of all arrays of the call, ``indices`` selects the arrays of this pack.

    Attributes:
        dtype: Dtype of the reduction.
        counts: Elements of each piece.
        count, nbytes: Size of all pieces.
        residuals: Rounding errors of the last call by first element of each slice.
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
        self.indices, self.dtype, self._result_dtype = indices, dtype, result_dtype
        sizes = {index: math.prod(shapes[index]) for index in indices}
        casts = not dtype == source_dtype == result_dtype
        smallest_apart = SMALL_ARRAY_BYTES if joins_small else 0
        joined = [index for index in indices if casts or sizes[index] * dtype.itemsize < smallest_apart]
        if len(joined) == 1 and not casts:
            joined = []
        if len(indices) - len(joined) > MOST_PIECES:
            joined = list(indices)
        ends = list(accumulate(sizes[index] for index in joined))
        # Index, start and end in the buffer, and shape of each array there.
        self._joined = [(i, end - sizes[i], end, shapes[i]) for i, end in zip(joined, ends, strict=True)]
        in_buffer = set(joined)
        self._apart = [(index, shapes[index]) for index in indices if index not in in_buffer]
        self.counts = (*ends[-1:], *(sizes[index] for index, _ in self._apart))
        self.count = sum(self.counts)
        self.nbytes = self.count * dtype.itemsize
        self.residuals: dict[int, Array] = {}

    def inputs(self, arrays: Sequence[Array], pool: Pool) -> list[Array]:
        """Return the pieces of the arrays of a call."""
        pieces = [_flat(in_order(arrays[index])) for index, _ in self._apart]
        if self._joined:
            buffer = pool.take(self.counts[0], self.dtype)
            for index, start, stop, shape in self._joined:
                np.copyto(buffer[start:stop].reshape(shape), arrays[index])
            pieces.insert(0, buffer)
        return pieces

    def targets(self, out: Sequence[Array], pool: Pool) -> list[Array]:
        """Return pieces for the result, which are views of ``out`` if possible."""
        pieces = [pool.take(self.counts[0], self.dtype)] if self._joined else []
        for index, _ in self._apart:
            array = out[index]
            pieces.append(_flat(array) if _is_in_order(array) else pool.take(array.size, self.dtype))
        return pieces

    def deliver(self, pieces: Sequence[Array], results: list[Array], *, are_given: bool) -> None:
        """Cast the reduced pieces, and store them in ``results`` by index.

        ``are_given``: ``results`` has the caller's arrays, and only those without a view in ``targets`` are written.
        """
        if self._joined:
            buffer, *pieces = pieces
            buffer = buffer.astype(self._result_dtype, copy=False)
            for index, start, stop, shape in self._joined:
                part = buffer[start:stop].reshape(shape)
                if are_given:
                    results[index][...] = part
                else:
                    results[index] = _kept_apart(part)
        for (index, shape), piece in zip(self._apart, pieces, strict=True):
            if not are_given:
                result = piece.reshape(shape)
                results[index] = result if len(self.counts) == 1 else _kept_apart(result)
            elif not _is_in_order(results[index]):
                results[index][...] = piece.reshape(shape)


def _kept_apart(part: Array) -> Array:
    """Copy a small part, which would keep its large array alive."""
    owner = part.base
    is_small_view = owner is not None and part.nbytes <= _SMALL_RESULT_BYTES and owner.size > part.size
    return part.copy() if is_small_view else part


class PackedReduction:
    """One reduction of a pack by an algorithm.

    Attributes:
        pieces: Input of the first replica, as ``Pack.inputs`` returns it. Read-only.
        more: Inputs of this rank's other replicas.
        given: Pieces for the result, as ``Pack.targets`` returns them, or None for new memory.
        counts, count, nbytes, dtype: See ``Pack``.
        divisor: Divisor of a mean, or None.
        residuals: Rounding errors of the last call by first element of each slice. None without error feedback.
        is_wanted: Whether this rank needs the result.
        may_share: Whether the result may be read-only arrays that the ranks of the node share.
        has_begun: Whether the handshake has started the reduction.
        took: Chosen variant of the algorithm, such as an inter-node algorithm, or None.
        tell_chunk: Called with name, number, start and bytes of each chunk, or None.
    """

    is_wanted, may_share, has_begun = True, False, False
    took: str | None = None
    tell_chunk: Callable[[str, int, int, int], None] | None = None

    def __init__(
        self,
        pack: Pack,
        arrays: Sequence[Array],
        out: Sequence[Array] | None,
        op: ReduceOp,
        divisor: int | None,
        options: CommunicationOptions,
        pool: Pool,
        more: Sequence[Sequence[Array]] = (),
    ) -> None:
        self.pieces = pack.inputs(arrays, pool)
        self.more = [pack.inputs(replica, pool) for replica in more]
        self.given = self._targets = None if out is None else pack.targets(out, pool)
        self.op, self.divisor, self.options, self.pool = op, divisor, options, pool
        self.residuals = pack.residuals if options.error_feedback else None
        self.counts, self.count, self.nbytes, self.dtype = pack.counts, pack.count, pack.nbytes, pack.dtype

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

    def separate(self, *, may_be_in_place: bool = False) -> None:
        """Copy the pieces that results may overwrite too early. See ``copies_of_overlapping``."""
        if self.given is not None:
            self.pieces = copies_of_overlapping(self.pieces, self.given, self.pool, may_be_in_place=may_be_in_place)

    @property
    def _flat_dtype(self) -> DType:
        return np.dtype(np.float32) if is_half(self.dtype) else self.dtype

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
            # One block costs less than many large arrays. Small arrays must not keep each other alive.
            is_small = self.nbytes < SMALL_ARRAY_BYTES
            new = [np.empty(count, self.dtype) for count in self.counts] if is_small else None
            self._targets = new or self.cut(self.pool.take(self.count, self.dtype))
        return self._targets

    def cut(self, flat: Array) -> list[Array]:
        """Return the pieces of a flat result, as views."""
        ends = accumulate(self.counts)
        return [flat[end - count : end] for count, end in zip(self.counts, ends, strict=True)]

    def finish(self, flat: Array) -> list[Array]:
        """Divide a flat result by the divisor. Return its pieces, in the targets if any."""
        flat = divided(flat, self.divisor).astype(self.dtype, copy=False)
        if self.given is None:
            return self.cut(flat)
        if flat is not self.given[0]:
            for piece, target in zip(self.cut(flat), self.given, strict=True):
                np.copyto(target, piece)
        return self.given
