"""MPI datatypes and operations for NumPy arrays, and chunks that fit into an MPI count."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from mpidist.arrays.dtypes import Array, DType
from mpidist.core.message_tags import TAGS_OF_ARRAYS
from mpidist.core.options import ReduceOp
from mpidist.topology import import_mpi

if TYPE_CHECKING:
    from mpi4py import MPI

# MPI before version 4 counts elements in a C int. Tests lower it.
MAX_COUNT = 2**31 - 1
_BYTE = np.dtype(np.uint8)

NUMPY_OPS: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MEAN: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PROD: np.multiply,
    ReduceOp.BAND: np.bitwise_and,
    ReduceOp.BOR: np.bitwise_or,
    ReduceOp.BXOR: np.bitwise_xor,
}
"""NumPy functions of the operations. A mean is a sum that the caller divides."""


@cache
def mpi_op(op: ReduceOp, dtype: DType) -> MPI.Op:
    """Return the MPI operation for ``op``. A mean is a sum that the caller divides."""
    mpi = import_mpi()
    # MPI does not define MPI_MIN and MPI_MAX of NaN: libraries drop NaN, or return different results on different
    # ranks. Sums of small integers saturate in Open MPI's vector code. NumPy keeps NaN, and wraps.
    keeps_nan = dtype.kind == "f" and op in (ReduceOp.MIN, ReduceOp.MAX)
    adds = not op.is_bitwise and op not in (ReduceOp.MIN, ReduceOp.MAX)
    wraps = dtype.kind in "iu" and dtype.itemsize < 4 and adds
    if keeps_nan or wraps:
        return _made_op(NUMPY_OPS[op], dtype)
    operations: dict[ReduceOp, MPI.Op] = {
        ReduceOp.SUM: mpi.SUM,
        ReduceOp.MEAN: mpi.SUM,
        ReduceOp.MIN: mpi.MIN,
        ReduceOp.MAX: mpi.MAX,
        ReduceOp.PROD: mpi.PROD,
        ReduceOp.BAND: mpi.LAND if dtype.kind == "b" else mpi.BAND,
        ReduceOp.BOR: mpi.LOR if dtype.kind == "b" else mpi.BOR,
        ReduceOp.BXOR: mpi.LXOR if dtype.kind == "b" else mpi.BXOR,
    }
    return operations[op]


@cache
def _made_op(combine: np.ufunc, dtype: DType) -> MPI.Op:
    """Return an MPI operation that calls NumPy. Cached, because mpi4py supports few user operations."""

    def reduce(values: memoryview, into: memoryview, _: MPI.Datatype) -> None:
        target = np.frombuffer(into, dtype)
        combine(np.frombuffer(values, dtype), target, out=target)

    return import_mpi().Op.Create(reduce, commute=True)  # type: ignore[no-any-return]


@cache
def mpi_datatype(dtype: DType) -> MPI.Datatype:
    """Return the MPI datatype of one element, for reductions."""
    datatype: MPI.Datatype = import_mpi().Datatype.fromcode(dtype.char)
    return datatype


def message(array: Array) -> tuple[Array, int, MPI.Datatype]:
    """Return mpi4py's message of a contiguous array of any dtype and size."""
    nbytes = array.nbytes
    return (as_bytes(array), nbytes, import_mpi().BYTE) if nbytes <= MAX_COUNT else (as_bytes(array), 1, _bytes(nbytes))


@cache
def _bytes(count: int) -> MPI.Datatype:
    """Return the datatype of ``count`` bytes."""
    byte, block = import_mpi().BYTE, 1 << 20
    blocks = byte.Create_contiguous(block)
    whole: MPI.Datatype = import_mpi().Datatype.Create_struct(
        [count // block, count % block], [0, count - count % block], [blocks, byte]
    )
    return whole.Commit()


def tag_of(number: int) -> int:
    """Return a tag that separates messages in flight."""
    return number % TAGS_OF_ARRAYS


def as_bytes(array: Array) -> Array:
    """Return a contiguous array as a flat array of bytes."""
    return (array if array.ndim == 1 else array.reshape(-1)).view(_BYTE)


def chunks(count: int, limit: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield ``(start, stop)`` ranges of at most ``limit`` elements that cover ``count`` elements.

    >>> list(chunks(5, limit=2))
    [(0, 2), (2, 4), (4, 5)]
    """
    limit = MAX_COUNT if limit is None else limit
    for start in range(0, count, limit):
        yield start, min(start + limit, count)
