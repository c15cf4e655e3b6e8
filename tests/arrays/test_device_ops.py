"""The contract of DeviceOps, the same for NumPy arrays and for CuPy arrays on pretended GPUs."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mpidist.arrays.cupy_ops import CupyOps
from mpidist.arrays.device_ops import DeviceOps, device_name, gpu_ops, is_device_array, ops_for, ops_of
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


@pytest.fixture
def gpu(fake_gpus: Any) -> CupyOps:
    """The operations of GPUs, while the first one is current."""
    fake_gpus.cuda.Device(0).use()
    return gpu_ops()


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
    assert array.flags.c_contiguous
    back = ops.to_host(array)
    assert type(back) is np.ndarray
    np.testing.assert_array_equal(back, values(dtype, *shape), strict=True)


def test_strided_arrays_go_to_the_device(ops: DeviceOps, device: int) -> None:
    given = values("float32", 4, 6)
    for part in (given.T, given[::2, 1::2], given[::-1], np.asfortranarray(given)):
        array = ops.from_host(part, device)
        assert array.flags.c_contiguous
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
    assert copy.flags.c_contiguous
    assert ops.device_of(copy) == device
    np.testing.assert_array_equal(ops.to_host(copy), values("float32", 3, 4).T)


def test_pointers_are_those_of_the_first_elements(ops: DeviceOps, device: int) -> None:
    array = ops.zeros((8,), np.dtype("float64"), device)
    assert ops.pointer(array[3:]) == ops.pointer(array) + 24
    assert array[3:].flags.c_contiguous
    assert not array[::2].flags.c_contiguous


@pytest.mark.parametrize("nbytes", [0, 1, 511, 4096, 100_000])
def test_pinned_memory_is_bytes(gpu: CupyOps, nbytes: int) -> None:
    memory = gpu.pinned(nbytes)
    assert (type(memory), memory.shape, memory.dtype) == (np.ndarray, (nbytes,), np.uint8)
    memory.fill(7)
    assert memory.flags.writeable


def test_pinned_copies_follow_their_stream(gpu: CupyOps) -> None:
    stream = gpu.stream(1)
    source = gpu.from_host(values("float32", 100), 1)
    stream.wait(gpu.current_stream(1).record())
    host = gpu.pinned(400)
    target = gpu.empty((10, 10), np.dtype("float32"), 1)
    stream.wait(gpu.current_stream(1).record())
    gpu.copy_to_host(host, source, stream)
    gpu.copy_to_device(target, host, stream)
    done = stream.record()
    done.synchronize()
    assert done.is_done
    np.testing.assert_array_equal(host.view(np.float32), values("float32", 100))
    np.testing.assert_array_equal(gpu.to_host(target), values("float32", 10, 10))
    stream.synchronize()


def test_copies_of_wrong_arrays_raise(gpu: CupyOps) -> None:
    stream = gpu.stream(1)
    array = gpu.zeros((4, 4), np.dtype("float32"), 1)
    with pytest.raises(ValueError, match="cannot copy 64 bytes into 32"):
        gpu.copy_to_host(gpu.pinned(32), array, stream)
    with pytest.raises(ValueError, match="cannot copy 32 bytes into 64"):
        gpu.copy_to_device(array, gpu.pinned(32), stream)
    with pytest.raises(ValueError, match="not contiguous"):
        gpu.copy_to_host(gpu.pinned(64), array.T[:, :], stream)
    with pytest.raises(ValueError, match="not contiguous"):
        gpu.copy_to_device(array[:, ::2], gpu.pinned(32), stream)


def test_nothing_to_copy_is_no_error(gpu: CupyOps) -> None:
    nothing = gpu.zeros((0, 3), np.dtype("float32"), 1)
    stream = gpu.stream(1)
    gpu.copy_to_host(gpu.pinned(0), nothing, stream)
    gpu.copy_to_device(nothing, gpu.pinned(0), stream)
    stream.synchronize()


def test_a_stream_is_current_inside_its_context(gpu: CupyOps) -> None:
    stream = gpu.stream(1)
    before = gpu.current_stream(1).handle
    with stream:
        assert gpu.current_stream(1).handle == stream.handle
    assert gpu.current_stream(1).handle == before


def test_many_arrays_are_cast_and_divided(gpu: CupyOps) -> None:
    arrays = [values("float16", 3, 5), values("float16", 0), values("float16", 7)]
    there = [gpu.from_host(array, 1) for array in arrays]
    wide = [gpu.empty(array.shape, np.dtype("f"), 1) for array in arrays]
    stream = gpu.stream(1)
    stream.wait(gpu.current_stream(1).record())
    gpu.cast(there, wide, stream)
    stream.synchronize()
    for array, given in zip(wide, arrays, strict=True):
        np.testing.assert_array_equal(gpu.to_host(array), given.astype("f"), strict=True)

    gpu.cast(wide, there, stream, 4)
    stream.synchronize()
    for array, given in zip(there, arrays, strict=True):
        divided = (given.astype("f") / np.float32(4)).astype("f2")
        np.testing.assert_array_equal(gpu.to_host(array), divided, strict=True)


def test_each_kernel_is_compiled_once(fake_gpus: Any, gpu: CupyOps, monkeypatch: pytest.MonkeyPatch) -> None:
    made, real = [], fake_gpus.RawKernel
    monkeypatch.setattr(fake_gpus, "RawKernel", lambda code, name: made.append(name) or real(code, name))
    single, half = gpu.from_host(values("float32", 100), 0), gpu.from_host(values("float16", 100), 0)
    for _ in range(3):
        gpu.cast([single], [half], gpu.current_stream(0))
        gpu.cast([half], [single], gpu.current_stream(0))
    assert made == ["mpidist_float32_to_float16", "mpidist_float16_to_float32"]


def test_kernels_use_memory_of_their_gpu(fake_gpus: Any, gpu: CupyOps) -> None:
    there, here = gpu.from_host(values("float32", 100), 1), gpu.from_host(values("float32", 100), 0)
    gpu.current_stream(1).synchronize()
    gpu.cast([there], [here], gpu.current_stream(0))
    with pytest.raises(fake_gpus.cuda.runtime.CUDARuntimeError, match="a kernel on gpu:0 was to use 400 bytes at"):
        gpu.current_stream(0).synchronize()
