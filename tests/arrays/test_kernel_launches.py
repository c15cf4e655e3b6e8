"""What ``CastKernels`` hands to CuPy, on the stand-in for CuPy, whose streams are late."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mpidist.arrays.device_ops import ops_for
from mpidist.arrays.dtypes import as_dtype
from mpidist.arrays.kernels import ROWS

pytestmark = [
    pytest.mark.one_rank,
    pytest.mark.parametrize("fake_gpus", [{"devices": 2, "jitter": 0.002}], indirect=True),
]

SIZES = [5, 0, 4096, 1, 16_385, *[3] * ROWS, 300]


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
    ("source", "wire", "result", "divisor"),
    [
        ("float16", "float32", "float16", 3),
        ("bfloat16", "float32", "bfloat16", 3),
        ("int16", "int32", "int16", None),
        ("int64", "float64", "float64", 3),
    ],
)
def test_there_and_back(fake_gpus: Any, source: str, wire: str, result: str, divisor: int | None, device: int) -> None:
    ops = ops_for("gpu")
    values = some(source)
    with ops.on(device):
        sources = on_device(values, device)
        between = [ops.empty(value.shape, as_dtype(wire), device) for value in values]
        targets = [ops.empty(value.shape, as_dtype(result), device) for value in values]
        stream, other = ops.stream(device), ops.stream(device)
        ops.cast(sources, between, stream)
        other.wait(stream.record())
        ops.cast(between, targets, other, divisor)
        other.synchronize()
        wanted = np.concatenate(values).astype(as_dtype(wire))
        assert (np.concatenate([ops.to_host(array) for array in between]) == wanted).all()
        wanted = wanted if divisor is None else np.true_divide(wanted, divisor, dtype=wanted.dtype)
        assert (np.concatenate([ops.to_host(array) for array in targets]) == wanted.astype(as_dtype(result))).all()


def test_each_kernel_is_compiled_once(fake_gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    real = fake_gpus.RawKernel
    monkeypatch.setattr(fake_gpus, "RawKernel", lambda code, name: made.append(name) or real(code, name))
    ops, sources = ops_for("gpu"), on_device(some("float32"))
    targets, stream = on_device(some("float16")), ops.stream(0)
    for _ in range(3):
        ops.cast(sources, targets, stream)
        ops.cast(targets, sources, stream)
    stream.synchronize()
    assert made == ["mpidist_float32_to_float16", "mpidist_float16_to_float32"]


def test_memory_of_another_gpu_is_not_touched(fake_gpus: Any) -> None:
    ops, stream = ops_for("gpu"), ops_for("gpu").stream(0)
    ops.cast(on_device(some("float32", [100]), device=1), on_device(some("float32", [100])), stream)
    with pytest.raises(fake_gpus.cuda.runtime.CUDARuntimeError, match="a kernel on gpu:0 was to use 400 bytes at"):
        stream.synchronize()
