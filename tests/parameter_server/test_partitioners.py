"""Partitioners and the "div" rule: TensorFlow's numbers, and what they promise for any shape."""

from __future__ import annotations

from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from mpidist.experimental.partitioners import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    Partitioner,
)
from mpidist.parameter_server.sharded_variable import div_sizes

pytestmark = pytest.mark.one_rank

_SHAPES = st.lists(st.integers(0, 40), min_size=1, max_size=3)
_DTYPES = st.sampled_from(["float32", "int8", "complex128", "bool"])


@pytest.mark.parametrize(
    ("partitioner", "shape", "expected"),
    [
        (FixedShardsPartitioner(2), (10, 3), [2, 1]),
        (FixedShardsPartitioner(16), (10, 3), [10, 1]),
        (MinSizePartitioner(4, max_shards=2), (6, 1), [2, 1]),
        (MinSizePartitioner(4, max_shards=10), (6, 1), [6, 1]),
        (MinSizePartitioner(), (1024, 1024), [1, 1]),
        (MinSizePartitioner(256 << 10, max_shards=16), (1024, 1024), [16, 1]),
        (MinSizePartitioner(256 << 10, max_shards=99), (1024, 1024), [16, 1]),
        (MaxSizePartitioner(4), (6, 1), [6, 1]),
        (MaxSizePartitioner(4, max_shards=2), (6, 1), [2, 1]),
        (MaxSizePartitioner(1024), (6, 1), [1, 1]),
    ],
    ids=str,
)
def test_example_25(partitioner: Any, shape: tuple[int, ...], expected: list[int]) -> None:
    assert partitioner(shape, np.float32) == expected
    assert partitioner(shape, dtype="float32", axis=0) == expected


def test_sizes_are_rounded_up() -> None:
    # 24 bytes: three shards of 8, though 7 would do; and a row of 4 bytes is never cut.
    assert MinSizePartitioner(9, max_shards=10)((6,), "float32") == [3]
    assert MaxSizePartitioner(9)((6,), "float32") == [3]
    assert MaxSizePartitioner(1)((6,), "float32") == [6]


@pytest.mark.parametrize("dtype", [object, str, "S", "U7"])
def test_strings_count_what_is_said(dtype: Any) -> None:
    assert MinSizePartitioner(32, max_shards=99)((6, 1), dtype) == [3, 1]
    assert MinSizePartitioner(32, max_shards=99, bytes_per_string=32)((6, 1), dtype) == [6, 1]
    assert MaxSizePartitioner(32)((6, 1), dtype) == [3, 1]
    assert MaxSizePartitioner(32, bytes_per_string=32)((6, 1), dtype) == [6, 1]


@hypothesis.given(shape=_SHAPES, dtype=_DTYPES, data=st.data())
def test_what_partitioners_promise(shape: list[int], dtype: str, data: st.DataObject) -> None:
    axis = data.draw(st.integers(0, len(shape) - 1))
    nbytes, shards = data.draw(st.integers(1, 5000)), data.draw(st.integers(1, 50))
    total = int(np.prod(shape)) * np.dtype(dtype).itemsize
    row = total // max(1, shape[axis])

    def along_axis(partitioner: Partitioner) -> int:
        result = partitioner(shape, dtype, axis)
        assert [result[i] for i in range(len(shape)) if i != axis] == [1] * (len(shape) - 1)
        assert 1 <= result[axis] <= max(1, shape[axis])
        return result[axis]

    assert along_axis(FixedShardsPartitioner(shards)) == max(1, min(shards, shape[axis]))
    most = along_axis(MinSizePartitioner(nbytes, max_shards=shards))
    assert most <= shards
    assert (most - 1) * nbytes < max(1, total)
    parts = along_axis(MaxSizePartitioner(nbytes))
    largest = div_sizes(shape[axis], parts)[0] * row
    assert largest <= max(nbytes, row)
    assert along_axis(MaxSizePartitioner(nbytes, max_shards=shards)) == min(parts, shards)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda n: FixedShardsPartitioner(n), "num_shards"),
        (lambda n: MinSizePartitioner(n), "min_shard_bytes"),
        (lambda n: MinSizePartitioner(max_shards=n), "max_shards"),
        (lambda n: MinSizePartitioner(bytes_per_string=n), "bytes_per_string"),
        (lambda n: MaxSizePartitioner(n), "max_shard_bytes"),
        (lambda n: MaxSizePartitioner(1, max_shards=n), "max_shards"),
        (lambda n: MaxSizePartitioner(1, bytes_per_string=n), "bytes_per_string"),
    ],
)
def test_wrong_arguments(make: Any, name: str) -> None:
    for number in (0, -3):
        with pytest.raises(ValueError, match=f"{name} is {number}; expected 1 or more"):
            make(number)
    for other in (1.5, "2", True):
        with pytest.raises(TypeError, match=f"{name} is .*; expected a whole number"):
            make(other)
    make(np.int64(3))


@pytest.mark.parametrize(("shape", "axis"), [((), 0), ((3,), 1), ((3, 4), -1)])
def test_an_axis_that_is_not_there(shape: tuple[int, ...], axis: int) -> None:
    with pytest.raises(ValueError, match="expected one of its axes"):
        FixedShardsPartitioner(2)(shape, "float32", axis)


def test_a_shape_that_is_none() -> None:
    with pytest.raises(ValueError, match="expected numbers of at least 0"):
        FixedShardsPartitioner(2)((-1, 3), "float32")


def test_a_subclass_says_how_many() -> None:
    class Halves(Partitioner):
        def _shards(self, shape: tuple[int, ...], dtype: np.dtype[Any], axis: int) -> int:
            return 2

    assert Halves()((7, 7), "float32", axis=1) == [1, 2]
    with pytest.raises(NotImplementedError, match="Partitioner does not implement"):
        Partitioner()((7,), "float32")
