"""NumPy dtypes and reduce operations for MPI, and pieces that fit into an MPI count."""

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

# MPI before version 4 counts elements in a C int.  Tests lower it to see the cutting at work.
MAX_COUNT = 2**31 - 1

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
"""The NumPy functions of the operations; a mean is a sum, divided afterwards."""


@cache
def mpi_op(op: ReduceOp, dtype: DType) -> MPI.Op:
    """Return the MPI operation for ``op``; a mean is a sum that is divided afterwards.

    MPI_MIN and MPI_MAX say nothing of NaN, and libraries lose it, or even give ranks different results. Sums of small
    whole numbers that do not fit saturate in Open MPI's vector instructions, and wrap elsewhere. NumPy's functions
    keep NaN, and wrap, so they serve for these.
    """
    mpi = import_mpi()
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
    """Return an operation of NumPy; one for each, as mpi4py has room for few."""

    def reduce(values: memoryview, into: memoryview, _: MPI.Datatype) -> None:
        target = np.frombuffer(into, dtype)
        combine(np.frombuffer(values, dtype), target, out=target)

    return import_mpi().Op.Create(reduce, commute=True)  # type: ignore[no-any-return]


@cache
def mpi_datatype(dtype: DType) -> MPI.Datatype:
    """Return the MPI datatype of one element that MPI can do arithmetic on."""
    datatype: MPI.Datatype = import_mpi().Datatype.fromcode(dtype.char)
    return datatype


def message(array: Array) -> tuple[Array, int, MPI.Datatype]:
    """Return the message for mpi4py of a contiguous array of any dtype."""
    return as_bytes(array), array.nbytes, import_mpi().BYTE


def one_message(array: Array) -> tuple[Array, int, MPI.Datatype]:
    """Return the message for mpi4py of a contiguous array of any dtype and size."""
    return message(array) if array.nbytes <= MAX_COUNT else (as_bytes(array), 1, _bytes(array.nbytes))


@cache
def _bytes(count: int) -> MPI.Datatype:
    """Return the datatype of so many bytes."""
    byte, block = import_mpi().BYTE, 1 << 20
    blocks = byte.Create_contiguous(block)
    whole: MPI.Datatype = import_mpi().Datatype.Create_struct(
        [count // block, count % block], [0, count - count % block], [blocks, byte]
    )
    return whole.Commit()


def tag_of(number: int) -> int:
    """Return a tag that tells messages apart that are under way at the same time."""
    return number % TAGS_OF_ARRAYS


def as_bytes(array: Array) -> Array:
    """Return the memory of a contiguous array as a flat array of bytes."""
    return array.reshape(-1).view("u1")


def chunks(count: int, limit: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield ``(start, stop)`` ranges that cover ``count`` elements in pieces of at most ``limit``.

    >>> list(chunks(5, limit=2))
    [(0, 2), (2, 4), (4, 5)]
    """
    limit = MAX_COUNT if limit is None else limit
    for start in range(0, count, limit):
        yield start, min(start + limit, count)
