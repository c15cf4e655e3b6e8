"""The packing kernels: their CUDA source compiled and run on the CPU, against NumPy, for every dtype and alignment."""

from __future__ import annotations

import ctypes
import mmap
import shutil
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mpidist.arrays import kernels as kernels_module
from mpidist.arrays import streams
from mpidist.arrays.kernel_source import THREADS, all_kernels, kernel_for
from mpidist.arrays.kernels import Kernels, _table_of
from tests.support.compiled_kernels import CompiledCupy, HostArray, HostStream, build
from tests.support.kernel_values import (
    CASTS,
    DIVISIONS,
    assert_same_bits,
    dtype_of,
    expected,
    provided,
    sample,
    some_of_each_width,
)

pytestmark = pytest.mark.one_rank

GUARD = 64


class Place:
    """Memory for ``size`` elements that begins ``offset`` bytes after a multiple of 16, with guards around it."""

    def __init__(self, name: str, size: int, offset: int = 0) -> None:
        dtype = dtype_of(name)
        # Where no element of a huge array would have an address below zero, as on the heap of some Pythons.
        self.raw = np.frombuffer(mmap.mmap(-1, size * dtype.itemsize + 2 * GUARD + 32), np.uint8)
        self.raw[:] = 0xA5
        start = GUARD - self.raw.ctypes.data % 16 + 16 + offset
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
def kernels(cupy: CompiledCupy) -> Kernels:
    return Kernels(cupy)  # type: ignore[arg-type]


def pack_and_check(
    kernels: Kernels, source: str, target: str, sizes: list[int], offsets: list[int], flat_offset: int
) -> None:
    places = [Place(source, size, offset) for size, offset in zip(sizes, offsets, strict=True)]
    for seed, place in enumerate(places):
        place.array.memory[...] = sample(source, place.array.size, seed)
    flat = Place(target, sum(sizes), flat_offset)
    kernels.pack([place.array for place in places], flat.array, HostStream())
    wanted = expected(np.concatenate([place.values for place in places]), target)
    assert_same_bits(flat.values, wanted)
    for place in (flat, *places):
        place.check_guards()


def unpack_and_check(
    kernels: Kernels,
    source: str,
    target: str,
    divisor: float | None,
    sizes: list[int],
    offsets: list[int],
    flat_offset: int,
) -> None:
    flat = Place(source, sum(sizes), flat_offset)
    flat.array.memory[...] = sample(source, sum(sizes))
    places = [Place(target, size, offset) for size, offset in zip(sizes, offsets, strict=True)]
    kernels.unpack(flat.array, [place.array for place in places], divisor, HostStream())
    wanted = expected(flat.values, target, divisor)
    assert_same_bits(np.concatenate([place.values for place in places]), wanted)
    for place in (flat, *places):
        place.check_guards()


@pytest.mark.jobs
@pytest.mark.parametrize(("source", "target"), CASTS)
def test_casts_are_those_of_numpy(kernels: Kernels, source: str, target: str) -> None:
    sizes, offsets = [70_001, 5, 1], [0, 0, 0]
    pack_and_check(kernels, source, target, sizes, offsets, 0)
    unpack_and_check(kernels, source, target, None, sizes, offsets, 0)


@pytest.mark.parametrize("divisor", [1, 2, 3, 7, 48, 1000])
@pytest.mark.parametrize(("source", "target"), DIVISIONS)
def test_division_has_the_bits_of_numpy(kernels: Kernels, source: str, target: str, divisor: int) -> None:
    unpack_and_check(kernels, source, target, divisor, [65_536, 3, 998], [0, 0, 0], 0)


@pytest.mark.parametrize(("source", "target"), some_of_each_width())
def test_any_alignment(kernels: Kernels, source: str, target: str) -> None:
    """Also addresses that are no multiple of the element's size, which a GPU would refuse to read in one go."""
    tile = kernel_for(source, target, False).tile
    for offset in range(18):
        for flat_offset in (0, 1, 2, 4, 6, 8, 15):
            pack_and_check(kernels, source, target, [19, tile + 21], [offset, 16 - offset], flat_offset)
            unpack_and_check(kernels, source, target, None, [19, tile + 21], [offset, 16 - offset], flat_offset)


@pytest.mark.parametrize(
    ("source", "target"), [("float32", "float32"), ("float16", "float32"), ("float32", "bfloat16")]
)
@pytest.mark.parametrize("start", range(5))
def test_any_size_around_vectors_and_tiles(kernels: Kernels, source: str, target: str, start: int) -> None:
    tile = kernel_for(source, target, False).tile
    itemsize, flat_itemsize = dtype_of(source).itemsize, dtype_of(target).itemsize
    for size in [*range(1, 20), *range(tile - 5, tile + 6), 3 * tile + 7]:
        pack_and_check(kernels, source, target, [size], [start * itemsize], start * flat_itemsize)
        unpack_and_check(kernels, source, target, None, [size], [start * flat_itemsize], start * itemsize)


@pytest.mark.parametrize("seed", range(20))
def test_many_arrays_take_one_launch(kernels: Kernels, cupy: CompiledCupy, seed: int) -> None:
    rng = np.random.default_rng(seed)
    sizes = (rng.pareto(0.4, 161) * 3).clip(0, 20_000).astype(int).tolist()
    offsets = (rng.integers(0, 9, 161) * 2).tolist()
    pack_and_check(kernels, "float16", "float32", sizes, offsets, 4 * int(rng.integers(0, 4)))
    assert cupy.launched == ["mpidist_float16_to_float32"]
    unpack_and_check(kernels, "float32", "float16", 3, sizes, offsets, 4 * int(rng.integers(0, 4)))
    assert cupy.launched[1:] == ["mpidist_float32_to_float16_divided"]


def test_nothing_to_do_launches_nothing(kernels: Kernels, cupy: CompiledCupy) -> None:
    flat = Place("float32", 0)
    kernels.pack([], flat.array, HostStream())
    kernels.pack([Place("float16", 0).array], flat.array, HostStream())
    kernels.unpack(flat.array, [Place("float16", 0).array], 2, HostStream())
    assert cupy.launched == []


def test_arrays_of_several_dtypes_take_a_launch_for_each(kernels: Kernels, cupy: CompiledCupy) -> None:
    names = ["float16", "float32", "float16", "int32", "float32"]
    places = [Place(name, 37 + k) for k, name in enumerate(names)]
    for place in places:
        place.array.memory[...] = sample(place.array.dtype.name, place.array.size)
    flat = Place("float32", sum(place.array.size for place in places) + 3)
    kernels.pack([place.array for place in places], flat.array, HostStream())
    assert sorted(cupy.launched) == [
        "mpidist_float16_to_float32",
        "mpidist_int32_to_float32",
        "mpidist_uint32_to_uint32",
    ]
    wanted = np.concatenate([expected(place.values, "float32") for place in places])
    assert_same_bits(flat.values[:-3], wanted)
    assert (flat.raw[flat.inside][-12:] == 0xA5).all()


def test_a_table_is_made_again_only_for_other_arrays(kernels: Kernels, cupy: CompiledCupy) -> None:
    first, second = [Place("float32", 10), Place("float32", 20)], [Place("float32", 10), Place("float32", 20)]
    flat = Place("float32", 30)
    for _ in range(3):
        for places in (first, second):
            kernels.pack([place.array for place in places], flat.array, HostStream())
            kernels.unpack(flat.array, [place.array for place in places], 2, HostStream())
    assert cupy.uploads == 2


def test_old_tables_live_until_their_stream_has_read_them(
    kernels: Kernels, cupy: CompiledCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Busy(HostStream):
        is_idle = False

        def record(self, *, blocks: bool = False) -> Any:
            stream = self

            class Event:
                @property
                def is_done(self) -> bool:
                    return stream.is_idle

            return Event()

    monkeypatch.setattr(kernels_module, "_TABLES_KEPT", 2)
    stream, flat = Busy(), Place("float32", 10)
    places = [Place("float32", 10) for _ in range(6)]
    for place in places:
        kernels.pack([place.array], flat.array, stream)
    assert len(kernels._tables) == 2
    assert len(kernels._dropped) == 4
    stream.is_idle = True
    kernels.pack([places[0].array], flat.array, stream)
    assert len(kernels._dropped) == 1


def test_tables_travel_in_pinned_memory_of_which_there_is_a_limit(
    kernels: Kernels, cupy: CompiledCupy, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[int] = []

    class Late(HostStream):
        given = 0

        def record(self, *, blocks: bool = False) -> Any:
            self.given += 1
            number = self.given
            return SimpleNamespace(is_done=False, synchronize=lambda: waited.append(number) if blocks else None)

    # Room for the tables of two launches of one array each.
    monkeypatch.setattr(streams, "MOST_STAGED_BYTES", 2 * 64)
    stream, flat = Late(), Place("float32", 100)
    for _ in range(6):
        kernels.pack([Place("float32", 10).array], flat.array, stream)
    assert (cupy.pinned, waited) == (6, [1, 2, 3, 4])
    # One with more arrays than there is room for waits for all before it.
    kernels.pack([Place("float32", 10).array for _ in range(10)], flat.array, stream)
    assert waited == [1, 2, 3, 4, 5, 6]


def test_more_elements_than_32_bits_count(cupy: CompiledCupy) -> None:
    """The last tile of an array of 2**33 + 5 elements, which begins at element 2**32 + 3 of the flat buffer."""
    count, start = 2**33 + 5, 2**32 + 3
    kernel = kernel_for("float16", "float32", False)
    table = _table_of([(4096, 0, start), (8192, start, count), (16384, start + count, 1)], kernel)
    assert table[:, 2].tolist() == [start, count, 1, 0]
    assert table[3, 3] == -(-start // kernel.tile) + -(-count // kernel.tile) + 1
    size = count % kernel.tile or kernel.tile
    source, flat = Place("float16", size), Place("float32", size)
    source.array.memory[...] = sample("float16", size)
    table[1, 0] = source.array.data.ptr - (count - size) * 2
    flat_address = flat.array.data.ptr - (start + count - size) * 4
    last = int(table[2, 3]) - 1
    cupy.run(kernel.name, last, 1, THREADS, table.ctypes.data, 3, flat_address, 1, 1.0)
    assert_same_bits(flat.values, expected(source.values, "float32"))
    flat.check_guards()


def test_nothing_is_read_behind_an_array(kernels: Kernels) -> None:
    """The array and the flat buffer end where memory ends; one byte further would end the process."""
    libc = ctypes.CDLL(None, use_errno=True)
    page = mmap.PAGESIZE
    for source, target in (("float32", "float32"), ("float16", "float32"), ("float32", "float16"), ("bool", "bool")):
        for size in (1, 3, 1023, 1024 + 3):
            memory = mmap.mmap(-1, 12 * page)
            address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
            for last in (5, 11):
                assert libc.mprotect(ctypes.c_void_p(address + last * page), page, 0) == 0
            ends = [(5 * page, source), (11 * page, target)]
            array, flat = (
                HostArray(np.frombuffer(memory, dtype_of(name), size, end - size * dtype_of(name).itemsize))
                for end, name in ends
            )
            array.memory[...] = sample(source, size)
            kernels.pack([array], flat, HostStream())  # type: ignore[list-item, arg-type]
            assert_same_bits(flat.memory, expected(array.memory, target))


def test_a_target_may_be_its_own_part_of_the_flat_buffer(kernels: Kernels) -> None:
    flat = Place("float32", 5000)
    flat.array.memory[...] = sample("float32", 5000)
    wanted = expected(flat.values, "float32", 3)
    kernels.unpack(flat.array, [flat.array], 3, HostStream())
    assert_same_bits(flat.values, wanted)


def test_wrong_arrays_are_refused(kernels: Kernels) -> None:
    flat = Place("float32", 10).array
    turned = HostArray(np.zeros((3, 2), np.float32).T)
    with pytest.raises(ValueError, match="not C-contiguous; make it so: cupy.ascontiguousarray"):
        kernels.pack([turned], flat, HostStream())  # type: ignore[list-item, arg-type]
    with pytest.raises(ValueError, match="the flat buffer has 10 elements; expected at least 11"):
        kernels.pack([Place("float32", 11).array], flat, HostStream())
    with pytest.raises(ValueError, match="6 elements, not contiguous; expected at least 1"):
        kernels.unpack(turned, [Place("float32", 1).array], None, HostStream())  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="copying float32 into int32 in one pass on a GPU is not provided"):
        kernels.unpack(flat, [Place("int32", 3).array], None, HostStream())
    with pytest.raises(TypeError, match="dividing int32 into float32 in one pass on a GPU is not provided"):
        kernels.unpack(Place("int32", 3).array, [Place("float32", 3).array], 2, HostStream())


def test_every_kernel_is_one_that_a_cast_needs() -> None:
    needed = {kernel_for(*pair, False).name for pair in CASTS} | {kernel_for(*pair, True).name for pair in DIVISIONS}
    assert needed == {kernel.name for kernel in all_kernels()}
    assert len(needed) == 64


@pytest.mark.parametrize("name", ["float16", "bfloat16"])
def test_what_mpidist_reduces_has_its_casts(name: str) -> None:
    for source, target in ((name, "float32"), ("float32", name)):
        assert provided(source, target, False)
        assert provided(source, target, True)
    assert provided(name, name, True)
