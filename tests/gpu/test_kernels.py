"""The cast kernels on the GPU against NumPy: every cast, division and size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpidist.arrays.device_ops import ops_for
from mpidist.arrays.kernels import INTRINSICS, ROWS, TEMPLATES, TILE, entry_of
from tests.gpu import machine
from tests.support.kernel_values import CASTS, DIVISIONS, KERNELS, assert_same_bits, dtype_of, expected, sample

pytestmark = pytest.mark.one_rank

GUARD = 64


class Place:
    """Memory of the GPU for one array, ``offset`` elements after a multiple of 16 bytes, with guards around it."""

    def __init__(self, cupy: Any, name: str, size: int, offset: int = 0, seed: int | None = None) -> None:
        self._dtype = dtype_of(name)
        start = GUARD + offset * self._dtype.itemsize
        self._inside = slice(start, start + size * self._dtype.itemsize)
        filled = np.full(self._inside.stop + GUARD, 0xA5, np.uint8)
        if seed is not None:
            filled[self._inside] = sample(name, size, seed).view(np.uint8)
        self._raw = cupy.asarray(filled)
        self.array = cupy.ndarray((size,), self._dtype, memptr=self._raw.data + start)

    def values(self) -> np.ndarray[Any, Any]:
        """Return the elements, and check the guards."""
        raw = self._raw.get()
        assert (raw[: self._inside.start] == 0xA5).all(), "written before the array"
        assert (raw[self._inside.stop :] == 0xA5).all(), "written behind the array"
        return raw[self._inside].copy().view(self._dtype)


def check(cupy: Any, source: str, target: str, sizes: list[int], divisor: float | None = None, offset: int = 0) -> None:
    ops = ops_for("gpu")
    stream = ops.current_stream(cupy.cuda.Device().id)
    sources = [Place(cupy, source, size, offset, seed) for seed, size in enumerate(sizes)]
    targets = [Place(cupy, target, size, offset) for size in sizes]
    ops.cast([place.array for place in sources], [place.array for place in targets], stream, divisor)
    stream.synchronize()
    for given, got in zip(sources, targets, strict=True):
        assert_same_bits(got.values(), expected(given.values(), target, divisor))


@pytest.mark.parametrize(("source", "target"), CASTS)
def test_casts_are_those_of_numpy(cupy: Any, source: str, target: str) -> None:
    check(cupy, source, target, [70_001, 0, 5, 1])


@pytest.mark.parametrize("divisor", [1, 2, 3, 48, 1000])
@pytest.mark.parametrize(("source", "target"), DIVISIONS)
def test_division_has_the_bits_of_numpy(cupy: Any, source: str, target: str, divisor: int) -> None:
    check(cupy, source, target, [65_536, 3, 998], divisor)


@pytest.mark.parametrize(
    ("source", "target"), [("float32", "float32"), ("float16", "float32"), ("float32", "bfloat16")]
)
def test_any_number_and_alignment_of_arrays(cupy: Any, source: str, target: str) -> None:
    for offset in range(5):
        check(cupy, source, target, [19, TILE + 21], offset=offset)
    check(cupy, source, target, [3] * ROWS + [TILE, 7])


@pytest.mark.parametrize(("source", "target"), [("float32", "float32"), ("float16", "float32")])
def test_sizes_around_a_tile(cupy: Any, source: str, target: str) -> None:
    for size in (1, 2, 3, TILE - 1, TILE, TILE + 1, 3 * TILE + 7, 5_000_003):
        check(cupy, source, target, [size])


def test_more_elements_than_32_bits_count(cupy: Any) -> None:
    if machine.is_stand_in():
        pytest.skip("there is no GPU, and the stand-in for it is slow with 6 GiB")
    size = 2**31 + 77
    if cupy.cuda.runtime.memGetInfo()[0] < 3 * size:
        pytest.skip("needs 6 GiB of free GPU memory")
    ops = ops_for("gpu")
    source, target = cupy.full(size, 3, np.int8), cupy.zeros(size, np.int8)
    source[-5:] = 9
    ops.cast([source], [target], ops.current_stream(cupy.cuda.Device().id))
    assert target[-7:].get().tolist() == [3] * 2 + [9] * 5
    assert int(target.sum(dtype=np.int64)) == 3 * (size - 5) + 45


def test_no_kernel_spills_registers(cupy: Any) -> None:
    if machine.is_stand_in():
        pytest.skip("there is no GPU, and the stand-in for it compiles nothing")
    for name in KERNELS:
        assert cupy.RawKernel(INTRINSICS + TEMPLATES + entry_of(name), name).local_size_bytes == 0, name
