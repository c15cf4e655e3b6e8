"""The reduction classes on several GPUs of one process: peer copies, NCCL, destinations, the rule of selection."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist import HierarchicalCopyAllReduce, IndexedSlices, NcclAllReduce, ReductionToOneDevice
from mpidist.cross_device_ops import select_cross_device_ops
from mpidist.experimental import CommunicationOptions
from mpidist.values import Mirrored, PerReplica
from tests.support import fake_cupy

CLASSES = [
    ReductionToOneDevice,
    NcclAllReduce,
    lambda: NcclAllReduce(num_packs=0),
    lambda: NcclAllReduce(num_packs=3),
    HierarchicalCopyAllReduce,
]
KINDS_OF_GPUS = [{"devices": 3}, {"devices": 3, "jitter": 0.002}]
pytestmark = [
    pytest.mark.one_rank,
    pytest.mark.parametrize("fake_gpus", KINDS_OF_GPUS, indirect=True, ids=["", "late"]),
]


def on_devices(cupy: Any, values: list[np.ndarray]) -> PerReplica:
    arrays = []
    for device, value in enumerate(values):
        with cupy.cuda.Device(device):
            arrays.append(cupy.asarray(value))
    return PerReplica(arrays)


@pytest.mark.parametrize("make", CLASSES)
@pytest.mark.parametrize(
    ("dtype", "op"),
    [
        ("float32", "SUM"),
        ("float16", "MEAN"),
        ("int64", "MEAN"),
        ("int16", "SUM"),
        ("float64", "MAX"),
        ("int32", "MIN"),
        ("complex64", "SUM"),
    ],
)
def test_every_device_gets_the_result(make: Any, dtype: str, op: str, fake_gpus: Any) -> None:
    ops = make()
    values = [(np.arange(7).reshape(7, 1) * (k + 1)).astype(dtype) for k in range(3)]
    more = [np.array(k, dtype) for k in range(3)]
    pairs = [(value, value) for value in (on_devices(fake_gpus, values), on_devices(fake_gpus, more))]
    results = ops.batch_reduce(op, pairs)
    for result, given in zip(results, (values, more), strict=True):
        expected = {"SUM": np.sum, "MEAN": np.mean, "MAX": np.max, "MIN": np.min}[op](given, axis=0)
        assert isinstance(result, Mirrored)
        for device, array in enumerate(result.values):
            assert (array.device.id, array.shape) == (device, given[0].shape)
            assert array.dtype == (np.float64 if (dtype, op) == ("int64", "MEAN") else np.dtype(dtype))
            np.testing.assert_allclose(array.get(), expected, rtol=1e-3)
    for value, given in zip(pairs[0][0].values, values, strict=True):
        np.testing.assert_array_equal(value.get(), given)
    ops.close()


@pytest.mark.parametrize("make", CLASSES)
def test_results_go_to_their_destinations(make: Any, fake_gpus: Any) -> None:
    ops = make()
    value = on_devices(fake_gpus, [np.full(2, float(k)) for k in range(3)])
    on_host = ops.reduce("SUM", value, "cpu:0")
    assert type(on_host) is np.ndarray
    assert on_host.tolist() == [3.0, 3.0]
    for device in (0, 2):
        there = ops.reduce("SUM", value, f"gpu:{device}")
        assert there.device.id == device
        assert there.get().tolist() == [3.0, 3.0]
    with fake_gpus.cuda.Device(1):
        like = fake_gpus.zeros(5)
    assert ops.reduce("MEAN", value, like).device.id == 1
    from_host = ops.reduce("SUM", PerReplica((np.ones(2), np.ones(2))), "gpu:1")
    assert (from_host.device.id, from_host.get().tolist()) == (1, [2.0, 2.0])
    copies = ops.broadcast(np.ones(2), value)
    assert [copy.device.id for copy in copies.values] == [0, 1, 2]
    ops.close()


def test_one_array_travels_as_it_is(fake_gpus: Any) -> None:
    ops = NcclAllReduce()
    value = on_devices(fake_gpus, [np.full(3, k, "float32") for k in range(2)])
    ops.reduce("SUM", value, value)
    # On each GPU one launch of NCCL, and one that divides.
    for op, expected, launches in (("SUM", [1.0] * 3, 2), ("MEAN", [0.5] * 3, 4)):
        fake_cupy.counts().clear()
        results = ops.reduce(op, value, value).values
        assert fake_cupy.counts().launches == launches
        assert [array.get().tolist() for array in results] == [expected] * 2
    assert [array.get().tolist() for array in value.values] == [[0.0] * 3, [1.0] * 3]
    ops.close()


def test_sparse_values(fake_gpus: Any) -> None:
    parts = []
    for device in range(2):
        with fake_gpus.cuda.Device(device):
            parts.append(IndexedSlices(fake_gpus.full((1, 2), device + 1.0), [device], (3, 2)))
    value = PerReplica(parts)
    result = NcclAllReduce().reduce("MEAN", value, value)
    for device, slices in enumerate(result.values):
        assert slices.values.device.id == slices.indices.device.id == device
        assert slices.to_dense().get().tolist() == [[0.5, 0.5], [1.0, 1.0], [0.0, 0.0]]


def test_custom_function_adds_on_its_device(fake_gpus: Any) -> None:
    seen = []

    def add(arrays: Any) -> Any:
        seen.extend(array.device.id for array in arrays)
        return arrays[0] + arrays[1] * 10

    value = on_devices(fake_gpus, [np.ones(2), np.ones(2)])
    result = ReductionToOneDevice("gpu:2", add).reduce("SUM", value, value)
    assert seen == [2, 2]
    assert [array.device.id for array in result.values] == [0, 1]
    assert [array.get().tolist() for array in result.values] == [[11.0, 11.0]] * 2


def test_nccl_is_chosen_where_it_can_be_used(fake_gpus: Any) -> None:
    devices = ("gpu:0", "gpu:1")
    assert type(select_cross_device_ops(devices, 2, None)) is NcclAllReduce
    assert type(select_cross_device_ops(("gpu:0",), 1, None)) is ReductionToOneDevice
    assert type(select_cross_device_ops(("gpu:0", "cpu:0"), 2, None)) is ReductionToOneDevice


def test_deterministic_sums_are_added_in_order(fake_gpus: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ops = NcclAllReduce()
    monkeypatch.setattr("mpidist.cross_device_ops.cross_device_ops.LocalAllReduce", None)
    value = on_devices(fake_gpus, [np.ones(2), np.ones(2)])
    result = ops.reduce("SUM", value, value, CommunicationOptions(deterministic=True))
    assert [array.get().tolist() for array in result.values] == [[2.0, 2.0]] * 2


def test_device_arrays_are_no_reason_to_warn(fake_gpus: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ops = NcclAllReduce()
        ops.reduce("SUM", on_devices(fake_gpus, [np.ones(2)] * 2), "gpu:0")
        ops.close()


def test_replicas_that_differ_are_told_apart(fake_gpus: Any) -> None:
    ops = NcclAllReduce()
    with pytest.raises(ValueError, match="differ in shape"):
        ops.reduce("SUM", on_devices(fake_gpus, [np.ones(2), np.ones(3)]), "gpu:0")
    ops.close()


def test_strategies_close_what_they_were_given(fake_gpus: Any) -> None:
    from mpi4py import MPI

    ops = NcclAllReduce()
    with mpidist.MirroredStrategy(["gpu:0", "gpu:1"], ops, communicator=MPI.COMM_SELF) as strategy:
        total = strategy.reduce("SUM", strategy.run(lambda: fake_gpus.ones(2)), axis=None)
    assert total.get().tolist() == [2.0, 2.0]
    assert ops._local is None
