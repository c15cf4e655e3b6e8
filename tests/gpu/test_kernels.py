"""The packing kernels on the GPU against NumPy: every cast, division, size and alignment."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpidist.arrays.device_ops import ops_for
from mpidist.arrays.kernel_source import all_kernels, kernel_for, source_of
from tests.gpu import machine
from tests.support.kernel_values import (
    CASTS,
    DIVISIONS,
    assert_same_bits,
    dtype_of,
    expected,
    sample,
    some_of_each_width,
)

pytestmark = pytest.mark.one_rank

GUARD = 64


class Place:
    """Memory of the GPU for one array, ``offset`` bytes after a multiple of 16, with guards around it."""

    def __init__(self, cupy: Any, name: str, size: int, offset: int = 0, seed: int | None = None) -> None:
        self._dtype, self._size = dtype_of(name), size
        self._inside = slice(GUARD + offset, GUARD + offset + size * self._dtype.itemsize)
        filled = np.full(self._inside.stop + GUARD, 0xA5, np.uint8)
        if seed is not None:
            filled[self._inside] = sample(name, size, seed).view(np.uint8)
        self._raw = cupy.asarray(filled)
        self.array = cupy.ndarray((size,), self._dtype, memptr=self._raw.data + self._inside.start)

    def values(self) -> np.ndarray[Any, Any]:
        """Return the elements, and check the guards."""
        raw = self._raw.get()
        assert (raw[: self._inside.start] == 0xA5).all(), "written before the array"
        assert (raw[self._inside.stop :] == 0xA5).all(), "written behind the array"
        return raw[self._inside].copy().view(self._dtype)


def check(
    cupy: Any, source: str, target: str, divisor: float | None, sizes: list[int], offset: int, flat_offset: int
) -> None:
    """Pack and unpack."""
    ops = ops_for("gpu")
    stream = ops.current_stream(cupy.cuda.Device().id)
    if divisor is None:
        places = [Place(cupy, source, size, offset, seed) for seed, size in enumerate(sizes)]
        flat = Place(cupy, target, sum(sizes), flat_offset)
        ops.pack([place.array for place in places], flat.array, stream)
        stream.synchronize()
        assert_same_bits(flat.values(), expected(np.concatenate([place.values() for place in places]), target))
    places = [Place(cupy, target, size, offset) for size in sizes]
    flat = Place(cupy, source, sum(sizes), flat_offset, 0)
    ops.unpack(flat.array, [place.array for place in places], divisor, stream)
    stream.synchronize()
    assert_same_bits(np.concatenate([place.values() for place in places]), expected(flat.values(), target, divisor))


@pytest.mark.parametrize(("source", "target"), CASTS)
def test_casts_are_those_of_numpy(cupy: Any, source: str, target: str) -> None:
    check(cupy, source, target, None, [70_001, 0, 5, 1], 0, 0)


@pytest.mark.parametrize("divisor", [1, 2, 3, 48, 1000])
@pytest.mark.parametrize(("source", "target"), DIVISIONS)
def test_division_has_the_bits_of_numpy(cupy: Any, source: str, target: str, divisor: int) -> None:
    check(cupy, source, target, divisor, [65_536, 3, 998], 0, 0)


@pytest.mark.parametrize(("source", "target"), some_of_each_width())
def test_any_alignment(cupy: Any, source: str, target: str) -> None:
    tile = kernel_for(source, target, False).tile
    for offset, flat_offset in [(1, 0), (0, 1), (2, 4), (4, 4), (8, 2), (3, 7), (12, 8), (15, 15)]:
        check(cupy, source, target, None, [19, tile + 21], offset, flat_offset)


@pytest.mark.parametrize(
    ("source", "target"), [("float32", "float32"), ("float16", "float32"), ("float32", "bfloat16")]
)
def test_sizes_around_a_tile(cupy: Any, source: str, target: str) -> None:
    tile = kernel_for(source, target, False).tile
    for size in (1, 2, 3, 4, 5, tile - 1, tile, tile + 1, 3 * tile + 7, 5_000_003):
        check(cupy, source, target, None, [size], 0, 0)


def test_more_elements_than_32_bits_count(cupy: Any) -> None:
    """More than 2**31 elements in one array, and behind it in the flat buffer."""
    if machine.is_stand_in():
        pytest.skip("there is no GPU, and the stand-in for it is slow with 6 GiB")
    sizes = [2**31 + 77, 1000]
    if cupy.cuda.runtime.memGetInfo()[0] < 3 * sum(sizes):
        pytest.skip("needs 6 GiB of free GPU memory")
    ops = ops_for("gpu")
    stream = ops.current_stream(cupy.cuda.Device().id)
    sources = [cupy.full(size, 3 + k, np.int8) for k, size in enumerate(sizes)]
    sources[0][-5:] = 9
    flat = cupy.zeros(sum(sizes), np.int8)
    ops.pack(sources, flat, stream)
    assert flat[:3].get().tolist() == [3] * 3
    assert flat[2**31 + 70 : 2**31 + 80].get().tolist() == [3] * 2 + [9] * 5 + [4] * 3
    assert int(flat.sum(dtype=np.int64)) == 3 * (sizes[0] - 5) + 45 + 4 * 1000
    sources[0].fill(0)
    ops.unpack(flat, sources, None, stream)
    assert sources[0][-6:].get().tolist() == [3] + [9] * 5
    assert int(sources[0].sum(dtype=np.int64)) == 3 * (sizes[0] - 5) + 45


def test_no_kernel_spills_registers(cupy: Any) -> None:
    if machine.is_stand_in():
        pytest.skip("there is no GPU, and the stand-in for it compiles nothing")
    for kernel in all_kernels():
        compiled = cupy.RawKernel(source_of(kernel), kernel.name)
        assert compiled.local_size_bytes == 0, kernel.name
