"""CupyOps on the GPU: streams, events, pinned memory, copies, and what arrays of other libraries become."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpidist.arrays.convert import to_array
from mpidist.arrays.device_ops import device_name, is_device_array, ops_for, ops_of
from tests.gpu import machine

pytestmark = pytest.mark.one_rank

COUNT = 3_000_001


@pytest.fixture
def device(cupy: Any) -> int:
    return int(cupy.cuda.Device().id)


def test_what_is_known_of_an_array(cupy: Any, device: int) -> None:
    array = cupy.arange(12, dtype=np.float32).reshape(3, 4)
    ops = ops_of(array)
    assert ops.kind == "gpu"
    assert is_device_array(array)
    assert (ops.device_of(array), device_name(array)) == (device, f"gpu:{device}")
    assert ops.pointer(array[1:]) == ops.pointer(array) + 16


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "complex128", "bool"])
def test_there_and_back(cupy: Any, device: int, dtype: str) -> None:
    ops = ops_for("gpu")
    values = np.random.default_rng(0).integers(0, 2, (1000, 3)).astype(dtype)
    array = ops.from_host(values, device)
    wanted = values.copy()
    values[...] = 1  # may be changed at once
    np.testing.assert_array_equal(ops.to_host(array), wanted)
    np.testing.assert_array_equal(ops.to_host(ops.copy(array.T)), wanted.T)
    np.testing.assert_array_equal(ops.to_host(ops.zeros((5,), np.dtype(dtype), device)), np.zeros(5, dtype))


def test_bfloat16(cupy: Any, device: int) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes", reason="bfloat16 needs ml_dtypes")
    ops = ops_for("gpu")
    values = np.arange(1000).astype(ml_dtypes.bfloat16)
    array = ops.from_host(values, device)
    assert array.dtype == values.dtype
    assert (ops.to_host(array) == values).all()
    assert (ops.to_host(array + array) == values + values).all()


def test_pinned_copies_follow_their_streams(cupy: Any, device: int) -> None:
    ops = ops_for("gpu")
    work, to_host, to_device = (ops.stream(device) for _ in range(3))
    pinned = ops.pinned(4 * COUNT).view(np.float32)
    assert pinned.size == COUNT
    target = ops.empty((COUNT,), np.dtype(np.float32), device)
    work.wait(ops.current_stream(device).record())
    for number in range(20):
        with work:
            source = cupy.full(COUNT, number, np.float32)
            source += 1
        to_host.wait(work.record())
        ops.copy_to_host(pinned, source, to_host)
        event = to_host.record()
        event.synchronize()
        assert event.is_done
        assert pinned[0] == pinned[-1] == number + 1
        pinned += 1
        ops.copy_to_device(target, pinned, to_device)
        work.wait(to_device.record())
        with work:
            target *= 2
        to_device.wait(work.record())
    work.synchronize()
    np.testing.assert_array_equal(ops.to_host(target), np.full(COUNT, 2 * 21, np.float32))


def test_copies_between_gpus(cupy: Any) -> None:
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("needs two GPUs")
    ops = ops_for("gpu")
    first = ops.from_host(np.arange(COUNT), 0)
    second = ops.copy(first, 1)
    assert (ops.device_of(first), ops.device_of(second)) == (0, 1)
    np.testing.assert_array_equal(ops.to_host(second), np.arange(COUNT))


def test_no_array_comes_to_the_host_unasked(cupy: Any) -> None:
    array = cupy.ones(3)
    assert to_array(array) is array
    with pytest.raises(TypeError):
        np.asarray(array)


def test_torch_tensors_are_used_in_place(cupy: Any, device: int) -> None:
    torch = pytest.importorskip("torch", reason="this is about PyTorch")
    if machine.problem() is not None or not torch.cuda.is_available():
        pytest.skip("needs a PyTorch that sees the GPU")
    tensor = torch.arange(10, dtype=torch.float32, device=f"cuda:{device}")
    array = to_array(tensor)
    assert ops_for("gpu").pointer(array) == tensor.data_ptr()
    array += 1
    cupy.cuda.get_current_stream().synchronize()
    assert tensor.cpu().tolist() == list(range(1, 11))
