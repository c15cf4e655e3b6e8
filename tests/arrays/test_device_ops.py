"""The contract of DeviceOps, the same for NumPy arrays and for CuPy arrays on pretended GPUs."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mpidist.arrays.device_ops import DeviceOps, device_name, is_device_array, ops_for, ops_of
from mpidist.arrays.dtypes import Array

pytestmark = pytest.mark.one_rank

DTYPES = [np.dtype(name) for name in ("float32", "float64", "float16", "int8", "int64", "uint16", "bool", "complex64")]
DTYPES.append(np.dtype(ml_dtypes.bfloat16))


@pytest.fixture(params=["cpu", "gpu"])
def ops(request: pytest.FixtureRequest) -> DeviceOps:
    if request.param == "gpu":
        request.getfixturevalue("fake_gpus").cuda.Device(0).use()
    return ops_for(request.param)


@pytest.fixture
def device(ops: DeviceOps) -> int:
    """A device that is not the current one, where there are several."""
    return 1 if ops.kind == "gpu" else 0


def values(dtype: Any, *shape: int) -> Array:
    return np.arange(int(np.prod(shape))).reshape(shape).astype(dtype)


def test_an_array_leads_to_its_operations(ops: DeviceOps, device: int) -> None:
    array = ops.zeros((2, 3), np.dtype("float32"), device)
    assert ops_of(array) is ops
    assert ops_for(ops.kind) is ops
    assert is_device_array(array) == (ops.kind == "gpu")
    assert device_name(array) == {"cpu": "cpu", "gpu": "gpu:1"}[ops.kind]
    assert ops.device_of(array) == device


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown kind of device 'tpu'"):
        ops_for("tpu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (5,), (2, 3), (0,), (3, 0, 2)])
def test_arrays_go_to_the_device_and_back(ops: DeviceOps, device: int, dtype: Any, shape: tuple[int, ...]) -> None:
    given = values(dtype, *shape)
    array = ops.from_host(given, device)
    given.fill(0)
    assert (array.shape, array.dtype, ops.device_of(array)) == (shape, dtype, device)
    assert ops.is_contiguous(array)
    back = ops.to_host(array)
    assert type(back) is np.ndarray
    np.testing.assert_array_equal(back, values(dtype, *shape), strict=True)


def test_arrays_that_are_not_contiguous_go_to_the_device(ops: DeviceOps, device: int) -> None:
    given = values("float32", 4, 6)
    for part in (given.T, given[::2, 1::2], given[::-1], np.asfortranarray(given)):
        array = ops.from_host(part, device)
        assert ops.is_contiguous(array)
        np.testing.assert_array_equal(ops.to_host(array), part)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zeros_and_empty(ops: DeviceOps, device: int, dtype: Any) -> None:
    np.testing.assert_array_equal(ops.to_host(ops.zeros((2, 3), dtype, device)), np.zeros((2, 3), dtype), strict=True)
    empty = ops.empty((4, 0, 2), dtype, device)
    assert (empty.shape, empty.dtype, ops.device_of(empty)) == ((4, 0, 2), dtype, device)


def test_a_copy_is_independent_and_contiguous(ops: DeviceOps, device: int) -> None:
    array = ops.from_host(values("float32", 3, 4), device)
    with ops.on(device):
        copy = ops.copy(array.T)
        array.fill(-1)
    assert ops.is_contiguous(copy)
    assert ops.device_of(copy) == device
    np.testing.assert_array_equal(ops.to_host(copy), values("float32", 3, 4).T)


def test_pointers_are_those_of_the_first_elements(ops: DeviceOps, device: int) -> None:
    array = ops.zeros((8,), np.dtype("float64"), device)
    assert ops.pointer(array[3:]) == ops.pointer(array) + 24
    assert ops.is_contiguous(array[3:])
    assert not ops.is_contiguous(array[::2])


@pytest.mark.parametrize("nbytes", [0, 1, 511, 4096, 100_000])
def test_pinned_memory_is_bytes(ops: DeviceOps, nbytes: int) -> None:
    memory = ops.pinned(nbytes)
    assert (type(memory), memory.shape, memory.dtype) == (np.ndarray, (nbytes,), np.uint8)
    memory.fill(7)
    assert memory.flags.writeable


def test_bytes_go_through_pinned_memory_in_the_order_of_a_stream(ops: DeviceOps, device: int) -> None:
    stream = ops.stream(device)
    source = ops.from_host(values("float32", 100), device)
    stream.wait(ops.current_stream(device).record())
    host = ops.pinned(400)
    target = ops.empty((10, 10), np.dtype("float32"), device)
    stream.wait(ops.current_stream(device).record())
    ops.copy_to_host(host, source, stream)
    ops.copy_to_device(target, host, stream)
    done = stream.record()
    done.synchronize()
    assert done.is_done
    np.testing.assert_array_equal(host.view(np.float32), values("float32", 100))
    np.testing.assert_array_equal(ops.to_host(target), values("float32", 10, 10))
    stream.synchronize()


def test_copies_of_other_sizes_and_of_gaps_are_refused(ops: DeviceOps, device: int) -> None:
    stream = ops.stream(device)
    array = ops.zeros((4, 4), np.dtype("float32"), device)
    with pytest.raises(ValueError, match="cannot copy 64 bytes into 32"):
        ops.copy_to_host(ops.pinned(32), array, stream)
    with pytest.raises(ValueError, match="cannot copy 32 bytes into 64"):
        ops.copy_to_device(array, ops.pinned(32), stream)
    with pytest.raises(ValueError, match="not contiguous"):
        ops.copy_to_host(ops.pinned(64), array.T[:, :], stream)
    with pytest.raises(ValueError, match="not contiguous"):
        ops.copy_to_device(array[:, ::2], ops.pinned(32), stream)


def test_nothing_to_copy_is_no_error(ops: DeviceOps, device: int) -> None:
    nothing = ops.zeros((0, 3), np.dtype("float32"), device)
    stream = ops.stream(device)
    ops.copy_to_host(ops.pinned(0), nothing, stream)
    ops.copy_to_device(nothing, ops.pinned(0), stream)
    stream.synchronize()


def test_a_stream_is_current_inside_its_context(ops: DeviceOps, device: int) -> None:
    stream = ops.stream(device)
    before = ops.current_stream(device).handle
    with stream:
        assert ops.current_stream(device).handle == stream.handle
    assert ops.current_stream(device).handle == before


def test_many_arrays_are_cast_and_divided(ops: DeviceOps, device: int) -> None:
    arrays = [values("float32", 3, 5), values("float32", 0), values("float16", 7), values("int16", 2, 2)]
    there = [ops.from_host(array, device) for array in arrays]
    wide = [ops.empty(array.shape, np.dtype(dtype), device) for array, dtype in zip(arrays, "fffi", strict=True)]
    stream = ops.stream(device)
    stream.wait(ops.current_stream(device).record())
    ops.cast(there, wide, stream)
    stream.synchronize()
    for array, given in zip(wide, arrays, strict=True):
        np.testing.assert_array_equal(ops.to_host(array), given.astype(array.dtype), strict=True)

    ops.cast(wide[:3], [*wide[:2], there[2]], stream, 4)
    stream.synchronize()
    for array, given in zip([*wide[:2], there[2]], arrays, strict=False):
        divided = (given.astype("float32") / np.float32(4)).astype(given.dtype)
        np.testing.assert_array_equal(ops.to_host(array), divided, strict=True)


@pytest.mark.parametrize("fake_gpus", [{"devices": 2}], indirect=True)
def test_the_cpu_waits_for_an_event_of_a_gpu_and_the_reverse(fake_gpus: Any) -> None:
    cpu, gpu = ops_for("cpu"), ops_for("gpu")
    stream = gpu.stream(0)
    event = stream.record()
    cpu.stream(0).wait(event)
    assert event.is_done
    stream.wait(cpu.stream(0).record())
    stream.synchronize()
