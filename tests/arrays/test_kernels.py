"""The cast kernels: their CUDA source compiled and run on the CPU, against NumPy, for every dtype and size."""

from __future__ import annotations

import ctypes
import mmap
import shutil
from typing import Any

import numpy as np
import pytest

from mpidist.arrays.kernels import ROWS, TABLE, THREADS, TILE, CastKernels
from tests.support.compiled_kernels import CompiledCupy, HostArray, HostStream, build
from tests.support.kernel_values import CASTS, DIVISIONS, assert_same_bits, dtype_of, expected, sample

pytestmark = pytest.mark.one_rank

GUARD = 64


class Place:
    """Memory for ``size`` elements that begins ``offset`` elements after a multiple of 16 bytes, between guards."""

    def __init__(self, name: str, size: int, offset: int = 0) -> None:
        dtype = dtype_of(name)
        # Where no element of a huge array would have an address below zero, as on the heap of some Pythons.
        self.raw = np.frombuffer(mmap.mmap(-1, (size + offset) * dtype.itemsize + 2 * GUARD + 16), np.uint8)
        self.raw[:] = 0xA5
        start = GUARD - self.raw.ctypes.data % 16 + offset * dtype.itemsize
        self.inside = slice(start, start + size * dtype.itemsize)
        self.array = HostArray(np.ndarray(size, dtype, self.raw[self.inside]))

    @property
    def values(self) -> np.ndarray[Any, Any]:
        return self.array.memory.copy()

    def check_guards(self) -> None:
        assert (self.raw[: self.inside.start] == 0xA5).all(), "written before the array"
        assert (self.raw[self.inside.stop :] == 0xA5).all(), "written behind the array"


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++, which compiles the kernels for the CPU")
    return build(tmp_path_factory.mktemp("kernels"), compiler)


@pytest.fixture
def cupy(library: ctypes.CDLL) -> CompiledCupy:
    return CompiledCupy(library)


@pytest.fixture
def kernels(cupy: CompiledCupy) -> CastKernels:
    return CastKernels(cupy)  # type: ignore[arg-type]


def check(
    kernels: CastKernels, source: str, target: str, sizes: list[int], offset: int = 0, divisor: float | None = None
) -> None:
    sources = [Place(source, size, offset) for size in sizes]
    targets = [Place(target, size, offset) for size in sizes]
    for seed, place in enumerate(sources):
        place.array.memory[...] = sample(source, place.array.size, seed)
    wanted = [expected(place.values, target, divisor) for place in sources]
    kernels.cast([p.array for p in sources], [p.array for p in targets], HostStream(), divisor)  # type: ignore
    for place, values in zip(targets, wanted, strict=True):
        assert_same_bits(place.values, values)
    for place in (*sources, *targets):
        place.check_guards()


@pytest.mark.parametrize(("source", "target"), CASTS)
def test_casts_have_the_bits_of_numpy(kernels: CastKernels, source: str, target: str) -> None:
    check(kernels, source, target, [70_001, 0, 5, 1])


@pytest.mark.parametrize("divisor", [1, 2, 3, 7, 48, 1000])
@pytest.mark.parametrize(("source", "target"), DIVISIONS)
def test_divisions_have_the_bits_of_numpy(kernels: CastKernels, source: str, target: str, divisor: int) -> None:
    check(kernels, source, target, [65_536, 3, 998], divisor=divisor)


@pytest.mark.parametrize(("source", "target"), [("float16", "float32"), ("float32", "float32"), ("int64", "int64")])
def test_any_element_may_be_the_first(kernels: CastKernels, source: str, target: str) -> None:
    for offset in range(9):
        check(kernels, source, target, [19, TILE + 21], offset)


@pytest.mark.parametrize(("source", "target"), [("bool", "bool"), ("float16", "float32"), ("float32", "bfloat16")])
def test_any_size_around_a_tile(kernels: CastKernels, source: str, target: str) -> None:
    for size in [*range(1, 20), *range(TILE - 3, TILE + 4), 3 * TILE + 7]:
        check(kernels, source, target, [size])


@pytest.mark.parametrize("seed", range(5))
def test_arrays_of_one_dtype_share_launches(kernels: CastKernels, cupy: CompiledCupy, seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = (rng.pareto(0.4, ROWS + 41) * 3).clip(0, 20_000).astype(int).tolist()
    check(kernels, "float16", "float32", sizes)
    check(kernels, "float32", "float16", sizes[:ROWS], divisor=3)
    launches = -(-sum(size > 0 for size in sizes) // ROWS)
    assert cupy.launched == ["mpidist_float16_to_float32"] * launches + ["mpidist_float32_to_float16_divided"]


def test_nothing_to_do_launches_nothing(kernels: CastKernels, cupy: CompiledCupy) -> None:
    kernels.cast([], [], HostStream())  # type: ignore[arg-type]
    check(kernels, "float16", "float32", [0, 0])
    assert cupy.launched == []


def test_more_elements_than_32_bits_count(cupy: CompiledCupy) -> None:
    """The last tile of the second array, of 2**33 + 5 elements."""
    count, tiles_before = 2**33 + 5, 2**20
    size = count % TILE
    source, target = Place("float16", size), Place("float32", size)
    source.array.memory[...] = sample("float16", size)
    rows = np.zeros((ROWS, 4), np.int64)
    addresses = source.array.data.ptr - (count - size) * 2, target.array.data.ptr - (count - size) * 4
    rows[:3] = [(4096, 8192, tiles_before * TILE, 0), (*addresses, count, tiles_before), (4096, 8192, 1, 2**31)]
    last = tiles_before + count // TILE
    cupy.run("mpidist_float16_to_float32", last, 1, THREADS, rows.reshape(-1).view(TABLE), 3, 1.0)
    assert_same_bits(target.values, expected(source.values, "float32"))
    target.check_guards()


def test_nothing_is_read_behind_an_array(kernels: CastKernels) -> None:
    """The arrays end where memory ends; one byte further would end the process."""
    libc = ctypes.CDLL(None, use_errno=True)
    page = mmap.PAGESIZE
    for source, target in (("float32", "float32"), ("float16", "float32"), ("float32", "float16"), ("bool", "bool")):
        for size in (1, 3, 1023, 1024 + 3):
            memory = mmap.mmap(-1, 12 * page)
            address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            for last in (5, 11):
                assert libc.mprotect(ctypes.c_void_p(address + last * page), page, 0) == 0
            array, into = (
                HostArray(np.frombuffer(memory, dtype_of(name), size, end - size * dtype_of(name).itemsize))
                for end, name in [(5 * page, source), (11 * page, target)]
            )
            array.memory[...] = sample(source, size)
            kernels.cast([array], [into], HostStream())  # type: ignore
            assert_same_bits(into.memory, expected(array.memory, target))


def test_an_array_may_be_divided_in_place(kernels: CastKernels) -> None:
    place = Place("float32", 5000)
    place.array.memory[...] = sample("float32", 5000)
    wanted = expected(place.values, "float32", 3)
    kernels.cast([place.array], [place.array], HostStream(), 3)  # type: ignore
    assert_same_bits(place.values, wanted)
