"""What ``Kernels`` hands to CuPy: streams, tables and arguments, on the stand-in for CuPy, whose streams are late."""

from __future__ import annotations

import gc
import threading
from typing import Any

import numpy as np
import pytest

from mpidist.arrays import kernels as kernels_module
from mpidist.arrays.device_ops import ops_for
from mpidist.arrays.dtypes import as_dtype
from mpidist.arrays.kernel_source import kernel_for
from mpidist.arrays.kernels import Kernels

pytestmark = [
    pytest.mark.one_rank,
    pytest.mark.parametrize("fake_gpus", [{"devices": 2, "jitter": 0.002}], indirect=True),
]

SIZES = [5, 0, 4096, 1, 16_385, 300]


def on_device(values: list[np.ndarray[Any, Any]], device: int = 0) -> list[Any]:
    ops = ops_for("gpu")
    arrays = [ops.from_host(value, device) for value in values]
    ops.current_stream(device).synchronize()
    return arrays


def some(dtype: str, sizes: list[int] = SIZES) -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(1)
    return [(rng.normal(size=size) * 1000).astype(as_dtype(dtype)) for size in sizes]


@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize(
    ("source", "wire"),
    [
        ("float16", "float32"),
        ("bfloat16", "float32"),
        ("float32", "bfloat16"),
        ("int16", "int32"),
        ("int64", "float64"),
    ],
)
def test_there_and_back(fake_gpus: Any, source: str, wire: str, device: int) -> None:
    ops = ops_for("gpu")
    values = some(source)
    with ops.on(device):
        sources, targets = on_device(values, device), [fake_gpus.empty(size, as_dtype(source)) for size in SIZES]
        flat = ops.empty((sum(SIZES),), as_dtype(wire), device)
        stream, other = ops.stream(device), ops.stream(device)
        ops.pack(sources, flat, stream)
        other.wait(stream.record())
        if source == "int64":
            targets = [fake_gpus.empty(size, np.float64) for size in SIZES]
        divides = wire.startswith("float")
        ops.unpack(flat, targets, 3 if divides else None, other)
        other.synchronize()
        flat_values = np.concatenate(values).astype(as_dtype(wire))
        assert (ops.to_host(flat) == flat_values).all()
        wanted = np.true_divide(flat_values, 3, dtype=flat_values.dtype) if divides else flat_values
        wanted = wanted.astype(targets[0].dtype)
        assert (np.concatenate([ops.to_host(target) for target in targets]) == wanted).all()


def test_tables_come_and_go_while_streams_are_late(fake_gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other arrays each time, on two streams, with room for two tables: none may be reused before it was read."""
    monkeypatch.setattr(kernels_module, "_TABLES_KEPT", 2)
    ops, kernels = ops_for("gpu"), Kernels(fake_gpus)
    streams = [ops.stream(0), ops.stream(0)]
    rounds = []
    for index in range(30):
        values = [value + index for value in some("float32", [3, index + 1, 50])]
        rounds.append((values, on_device(values), ops.empty((54 + index,), np.dtype(np.float32), 0)))
    for index, (_, sources, flat) in enumerate(rounds):
        kernels.pack(sources, flat, streams[index % 2])
    gc.collect()
    for stream in streams:
        stream.synchronize()
    for values, _, flat in rounds:
        assert (ops.to_host(flat) == np.concatenate(values)).all()


def test_each_kernel_is_compiled_once(fake_gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    real = fake_gpus.RawKernel
    monkeypatch.setattr(fake_gpus, "RawKernel", lambda code, name: made.append(name) or real(code, name))
    ops, kernels = ops_for("gpu"), Kernels(fake_gpus)
    sources, flat = on_device(some("float32")), ops.empty((sum(SIZES),), np.dtype(np.float16), 0)
    stream = ops.stream(0)
    for _ in range(3):
        kernels.pack(sources, flat, stream)
        kernels.unpack(flat, sources, None, stream)
    stream.synchronize()
    assert made == ["mpidist_float32_to_float16", "mpidist_float16_to_float32"]


@pytest.mark.parametrize("whose", ["of another GPU", "of the host"])
def test_memory_that_is_not_the_gpus_own_is_not_touched(fake_gpus: Any, whose: str) -> None:
    ops, kernels = ops_for("gpu"), Kernels(fake_gpus)
    sources, flat = on_device(some("float32")), ops.empty((sum(SIZES),), np.dtype(np.float32), 0)
    elsewhere = on_device(some("float32", [100]), device=1)[0]
    host = np.zeros(100, np.float32)
    address = ops.pointer(elsewhere) if whose == "of another GPU" else host.ctypes.data
    rows = [(array.data.ptr, 0, array.size) for array in sources if array.size] + [(address, 0, 100)]
    stream = ops.stream(0)
    kernel = kernel_for("float32", "float32", False)
    kernels._launch(kernel, rows, flat, False, 1.0, stream)
    with pytest.raises(fake_gpus.cuda.runtime.CUDARuntimeError, match="a kernel on gpu:0 was to use 400 bytes at"):
        stream.synchronize()
    assert not host.any()


def test_a_table_is_of_one_device_only(fake_gpus: Any) -> None:
    """The default streams of all devices have one handle, and a driver may map memory of two at one address in turn."""
    ops, kernels = ops_for("gpu"), Kernels(fake_gpus)
    kernel, rows = kernel_for("float32", "float32", False), [(4096, 0, 10)]
    seen = []
    for device in (0, 1, 0):
        with ops.current_stream(device) as stream:
            seen.append(kernels._table(kernel, rows, stream).device.data.device_id)
    assert seen == [0, 1, 0]


def test_a_table_waits_for_the_gpu_that_reads_it_whatever_another_one_has_read(fake_gpus: Any) -> None:
    ops, count = ops_for("gpu"), 2000
    arrays = [on_device([np.full(2, k, "f4") for k in range(count + 20)], device) for device in (0, 1)]
    flats = [ops.zeros((2 * (count + 20),), np.dtype("f4"), device) for device in (0, 1)]
    # Both default streams have the number 0.
    streams = [ops.current_stream(device) for device in (0, 1)]
    gate = threading.Event()
    with fake_gpus.cuda.Device(0):
        fake_gpus.cuda.get_current_stream().launch_host_func(lambda gate: gate.wait(30), gate)
    ops.pack(arrays[0][:count], flats[0][: 2 * count], streams[0])
    others = threading.Thread(
        target=lambda: [ops.pack(arrays[1][: count + k], flats[1][: 2 * (count + k)], streams[1]) for k in range(1, 20)]
    )
    others.start()
    others.join(0.5)
    gate.set()
    others.join()
    assert ops.to_host(flats[0][: 2 * count]).tolist() == np.repeat(np.arange(float(count)), 2).tolist()
