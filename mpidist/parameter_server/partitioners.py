"""Partitioners: the number of shards of a variable (tf.distribute.experimental.partitioners)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import DTypeLike

from mpidist.arrays.dtypes import DType, as_dtype

__all__ = ["FixedShardsPartitioner", "MaxSizePartitioner", "MinSizePartitioner", "Partitioner"]

# Kinds of dtypes whose elements have no fixed size.
_WITHOUT_SIZE = "OSUT"


class Partitioner:
    """The base of partitioners, which cut along one axis.

    A subclass implements ``_shards``. Any callable with the signature of ``__call__`` is a partitioner too.
    """

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name.strip('_')}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({arguments})"

    def __call__(self, shape: Sequence[int], dtype: DTypeLike, axis: int = 0) -> list[int]:
        """Return a variable's number of shards along each axis, which is 1 except for ``axis``.

        The sizes of shards differ by at most one row, larger ones first.

        Args:
            shape: Shape of the variable, with at least one axis.
            dtype: Dtype of its elements.
            axis: Axis to cut, from 0 to ``len(shape) - 1``.

        Raises:
            ValueError: The shape lacks ``axis``, or contains a negative number.

        Source: https://www.tensorflow.org/api_docs/python/tf/distribute/experimental/partitioners
        """
        dims = tuple(int(d) for d in shape)
        if any(d < 0 for d in dims):
            raise ValueError(f"shape is {dims}; expected numbers of at least 0")
        if not 0 <= axis < len(dims):
            raise ValueError(f"axis is {axis} for the shape {dims}; expected one of its axes, 0 or more")
        result = [1] * len(dims)
        result[axis] = max(1, min(dims[axis], self._shards(dims, as_dtype(dtype), axis)))
        return result

    def _shards(self, shape: tuple[int, ...], dtype: DType, axis: int) -> int:
        """Return the number of shards. The caller limits it to the number of rows."""
        raise NotImplementedError(f"{type(self).__name__} does not implement _shards()")


class FixedShardsPartitioner(Partitioner):
    """A partitioner into ``num_shards`` shards, or one per row if there are fewer rows.

    Args:
        num_shards: A whole number of 1 or more.

    >>> FixedShardsPartitioner(num_shards=2)((10, 3), "float32")
    [2, 1]
    """

    def __init__(self, num_shards: int) -> None:
        self._num_shards = _at_least_one("num_shards", num_shards)

    def _shards(self, shape: tuple[int, ...], dtype: DType, axis: int) -> int:
        return self._num_shards


class MinSizePartitioner(Partitioner):
    """A partitioner into shards of about ``min_shard_bytes``, at most ``max_shards``.

    As in TensorFlow the number of shards is rounded up, so a shard may have a little less than ``min_shard_bytes``.

    Args:
        min_shard_bytes: Bytes of a shard, 256 KiB by default.
        max_shards: Largest number of shards. With the default of 1, nothing is cut.
        bytes_per_string: Bytes of an element whose dtype has no size, such as ``object`` and ``str``.

    >>> MinSizePartitioner(min_shard_bytes=4, max_shards=2)((6, 1), "float32")
    [2, 1]
    """

    def __init__(self, min_shard_bytes: int = 256 << 10, max_shards: int = 1, bytes_per_string: int = 16) -> None:
        self._min_shard_bytes = _at_least_one("min_shard_bytes", min_shard_bytes)
        self._max_shards = _at_least_one("max_shards", max_shards)
        self._bytes_per_string = _at_least_one("bytes_per_string", bytes_per_string)

    def _shards(self, shape: tuple[int, ...], dtype: DType, axis: int) -> int:
        nbytes = math.prod(shape) * _itemsize(dtype, self._bytes_per_string)
        return min(self._max_shards, -(-nbytes // self._min_shard_bytes))


class MaxSizePartitioner(Partitioner):
    """A partitioner into the fewest shards of at most ``max_shard_bytes``. A single row is never cut.

    Args:
        max_shard_bytes: Bytes of a shard.
        max_shards: Largest number of shards, which may exceed ``max_shard_bytes`` then. None: any number.
        bytes_per_string: Bytes of an element whose dtype has no size, such as ``object`` and ``str``.

    >>> MaxSizePartitioner(max_shard_bytes=4)((6, 1), "float32")
    [6, 1]
    """

    def __init__(self, max_shard_bytes: int, max_shards: int | None = None, bytes_per_string: int = 16) -> None:
        self._max_shard_bytes = _at_least_one("max_shard_bytes", max_shard_bytes)
        self._max_shards = None if max_shards is None else _at_least_one("max_shards", max_shards)
        self._bytes_per_string = _at_least_one("bytes_per_string", bytes_per_string)

    def _shards(self, shape: tuple[int, ...], dtype: DType, axis: int) -> int:
        row_bytes = math.prod((*shape[:axis], *shape[axis + 1 :])) * _itemsize(dtype, self._bytes_per_string)
        rows_per_shard = max(1, self._max_shard_bytes // max(1, row_bytes))
        shards = -(-shape[axis] // rows_per_shard)
        return shards if self._max_shards is None else min(shards, self._max_shards)


def _at_least_one(name: str, value: object) -> int:
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r} of type {type(value).__name__}; expected a whole number, 1 or more")
    if value < 1:
        raise ValueError(f"{name} is {value}; expected 1 or more")
    return int(value)


def _itemsize(dtype: DType, bytes_per_string: int) -> int:
    return bytes_per_string if dtype.kind in _WITHOUT_SIZE else dtype.itemsize
