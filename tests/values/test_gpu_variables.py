"""Variables whose copies are on GPUs: reading, the family of assignments, sparse updates."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist import IndexedSlices, VariableAggregation, VariableSynchronization
from mpidist.arrays.device_ops import is_device_array

SCATTERS = ("scatter_add", "scatter_sub", "scatter_mul", "scatter_div", "scatter_min", "scatter_max", "scatter_update")


def variable(strategy: Any, value: Any, **options: Any) -> Any:
    with strategy.scope():
        return mpidist.Variable(value, **options)


def test_copies_are_on_the_replicas_devices(gpu_strategy: Any) -> None:
    v = variable(gpu_strategy, np.arange(3.0), name="v")
    assert v.devices == gpu_strategy.extended.worker_devices
    for component, device in zip(v.values, v.devices, strict=True):
        assert is_device_array(component.value())
        assert f"gpu:{component.value().device.id}" == device == component.device
    assert is_device_array(v.value())
    np.testing.assert_array_equal(v.numpy(), np.arange(3.0))
    assert type(v.numpy()) is np.ndarray


def test_initial_values_come_from_anywhere(gpu_strategy: Any, fake_gpus: Any) -> None:
    on_gpu = fake_gpus.arange(3.0)
    from_gpu = variable(gpu_strategy, on_gpu)
    on_gpu[...] = 7
    np.testing.assert_array_equal(from_gpu.numpy(), np.arange(3.0))
    np.testing.assert_array_equal(variable(gpu_strategy, from_gpu).numpy(), np.arange(3.0))
    assert variable(gpu_strategy, 2.5, dtype="float32").numpy() == np.float32(2.5)


def test_outside_strategies_a_variable_stays_where_its_value_is(fake_gpus: Any) -> None:
    assert mpidist.Variable(np.ones(2)).devices == ("cpu:0",)
    v = mpidist.Variable(fake_gpus.ones(2))
    assert v.devices == ("gpu:0",)
    v.assign_add([1.0, 2.0])
    np.testing.assert_array_equal(v.numpy(), [2.0, 3.0])


def test_numpy_does_not_get_it_unasked(gpu_strategy: Any) -> None:
    v = variable(gpu_strategy, np.arange(3.0))
    with pytest.raises(TypeError, match=r"variable.numpy\(\)"):
        np.asarray(v)
    with pytest.raises(TypeError, match=r"variable.numpy\(\)"):
        np.array(v)


def test_computing_with_it_happens_on_the_device(gpu_strategy: Any, fake_gpus: Any) -> None:
    v = variable(gpu_strategy, np.arange(6.0).reshape(2, 3))

    def compute() -> Any:
        x = fake_gpus.ones((4, 2))
        results = [x @ v, v * 2 + 1, np.sum(v), np.concatenate([v, v]), np.maximum(v, 2), -v, v[1], np.transpose(v)]
        assert all(is_device_array(result) for result in results)
        assert fake_gpus.asarray(v).data.ptr == fake_gpus.asarray(v).data.ptr  # no copy of it
        return [result.get() for result in results]

    host = np.arange(6.0).reshape(2, 3)
    expected = [np.ones((4, 2)) @ host, host * 2 + 1, host.sum(), np.concatenate([host, host])]
    expected += [np.maximum(host, 2), -host, host[1], host.T]
    for results in per_replica_results(gpu_strategy, compute):
        for result, wanted in zip(results, expected, strict=True):
            np.testing.assert_array_equal(result, wanted)
    assert (len(v), float(v[0, 1]), int(v[0, 2]), bool(v[0, 0])) == (2, 1.0, 2, False)
    assert [row.tolist() for row in v] == host.tolist()


def per_replica_results(strategy: Any, fn: Any) -> list[Any]:
    """Return the results of the local replicas as they are, also lists."""
    results: list[Any] = []
    strategy.run(lambda: results.append(fn()))
    return results


def test_nothing_but_assignment_changes_it(gpu_strategy: Any, fake_gpus: Any) -> None:
    v = variable(gpu_strategy, np.zeros((2, 2)))
    with fake_gpus.cuda.Device(v.value().device.id):
        for taken in (v.value(), v[0], v[...], v + 0, v.numpy(), next(iter(v))):
            taken[...] = 9
    np.testing.assert_array_equal(v.numpy(), np.zeros((2, 2)))
    for write in (
        lambda: np.add(v, 1, out=v),
        lambda: np.copyto(v, 1),
        lambda: np.add.at(v, 0, 1),
        lambda: np.clip(v, 0, 1, out=v),
    ):
        with pytest.raises(TypeError, match="assign"):
            write()


def test_assigning_from_anywhere(gpu_strategy: Any, fake_gpus: Any) -> None:
    v, other = variable(gpu_strategy, np.zeros(2, np.float32)), variable(gpu_strategy, [5.0, 6.0], dtype="float32")
    for value in ([1.0, 2.0], np.array([1, 2], np.int16), np.array([1, 2], np.float32)):
        np.testing.assert_array_equal(v.assign(value).numpy(), [1, 2])
    for device in (0, 1):
        with fake_gpus.cuda.Device(device):
            value = fake_gpus.asarray(np.array([3, 4], np.float32))
        np.testing.assert_array_equal(v.assign(value).numpy(), [3, 4])
    np.testing.assert_array_equal(v.assign(other).assign_sub(other).assign_add(other).numpy(), [5, 6])
    assert v.assign_add(np.ones(2, np.float32)).value().dtype == np.float32
    with pytest.raises(TypeError, match="astype"):
        v.assign(fake_gpus.zeros(2, "float64"))
    with pytest.raises(ValueError, match="shape"):
        v.assign(fake_gpus.zeros(3, "float32"))


def test_aggregated_assignments_in_replica_context(gpu_strategy: Any, fake_gpus: Any) -> None:
    n = gpu_strategy.num_replicas_in_sync
    total = variable(gpu_strategy, np.zeros(2), aggregation=VariableAggregation.SUM)
    mean = variable(gpu_strategy, np.zeros(2), aggregation=VariableAggregation.MEAN)
    first = variable(gpu_strategy, np.zeros(2), aggregation=VariableAggregation.ONLY_FIRST_REPLICA)
    count = variable(
        gpu_strategy, 0, synchronization=VariableSynchronization.ON_READ, aggregation=VariableAggregation.SUM
    )

    def step() -> None:
        i = mpidist.get_replica_context().replica_id_in_sync_group
        total.assign_add(fake_gpus.full(2, float(i + 1)))
        mean.assign_add(np.full(2, float(i + 1)))
        first.assign(fake_gpus.full(2, float(i + 5)))
        count.assign_add(i + 1)

    gpu_strategy.run(step)
    for component in total.values:
        np.testing.assert_array_equal(component.numpy(), np.full(2, n * (n + 1) / 2))
    for component in mean.values:
        np.testing.assert_array_equal(component.numpy(), np.full(2, (n + 1) / 2))
    for component in first.values:
        np.testing.assert_array_equal(component.numpy(), [5.0, 5.0])
    assert is_device_array(count.value())
    assert count.numpy() == n * (n + 1) // 2
    count.assign(n)
    assert count.numpy() == n


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64"])
@pytest.mark.parametrize("method", SCATTERS)
def test_scattering_gives_what_it_gives_on_the_host(method: str, dtype: str, gpu_strategy: Any, fake_gpus: Any) -> None:
    rng = np.random.default_rng(3)
    start, rows = rng.integers(2, 99, (5, 3)).astype(dtype), rng.integers(1, 3, (12, 3)).astype(dtype)
    indices = rng.integers(0, 5, 12)
    on_gpu, on_host = variable(gpu_strategy, start), mpidist.Variable(start)
    getattr(on_host, method)(IndexedSlices(rows, indices))
    for given in (IndexedSlices(rows, indices), IndexedSlices(fake_gpus.asarray(rows), indices)):
        on_gpu.assign(start)
        getattr(on_gpu, method)(given)
        for component in on_gpu.values:
            np.testing.assert_allclose(component.numpy(), on_host.numpy(), rtol=1e-6)


def test_scattering_in_replica_context_sums_over_replicas(gpu_strategy: Any, fake_gpus: Any) -> None:
    n = gpu_strategy.num_replicas_in_sync
    v = variable(gpu_strategy, np.zeros((3, 2)), aggregation=VariableAggregation.SUM)
    gpu_strategy.run(lambda: v.scatter_add(IndexedSlices(fake_gpus.ones((2, 2)), [2, 2])))
    for component in v.values:
        np.testing.assert_array_equal(component.numpy(), [[0, 0], [0, 0], [2 * n, 2 * n]])


def test_rows_and_elements(gpu_strategy: Any, fake_gpus: Any) -> None:
    v = variable(gpu_strategy, np.arange(6.0).reshape(3, 2))
    for indices in ([2, -3], np.array([2, -3]), fake_gpus.array([2, -3])):
        np.testing.assert_array_equal(v.sparse_read(indices).get(), [[4, 5], [0, 1]])
    np.testing.assert_array_equal(v.gather_nd([[0, 1], [2, 0]]).get(), [1.0, 4.0])
    for wrong in ([3], [-4]):
        with pytest.raises(IndexError, match="out of bounds"):
            v.sparse_read(wrong)
    with pytest.raises(IndexError, match="out of bounds"):
        v.gather_nd([[0, 2]])
    with pytest.raises(ValueError, match="0 to 2"):
        v.scatter_add(IndexedSlices(np.ones((1, 2)), [3]))


def test_indexed_slices_on_a_device(fake_gpus: Any) -> None:
    with fake_gpus.cuda.Device(1):
        values = fake_gpus.array([[1.0], [2.0], [4.0]])
    slices = IndexedSlices(values, np.array([3, 0, 3]), (4, 1))
    assert slices.values.device.id == slices.indices.device.id == 1
    dense = slices.to_dense()
    assert dense.device.id == 1
    np.testing.assert_array_equal(dense.get(), [[2.0], [0.0], [0.0], [5.0]])
    once = slices.coalesce()
    assert once.indices.get().tolist() == [0, 3]
    assert once.values.get().tolist() == [[2.0], [5.0]]
    assert "array([3, 0, 3])" in repr(slices)
    empty = IndexedSlices(fake_gpus.zeros((0, 1)), [], (4, 1))
    assert empty.to_dense().get().tolist() == [[0.0]] * 4
    with pytest.raises(ValueError, match="expected 0 to 3"):
        IndexedSlices(fake_gpus.ones((1, 1)), [4], (4, 1)).to_dense()


def test_a_deep_copy_is_on_the_same_devices(gpu_strategy: Any) -> None:
    v = variable(gpu_strategy, np.ones(2))
    with gpu_strategy.scope():
        twin = copy.deepcopy(v)
    v.assign_add(np.ones(2))
    assert twin.devices == v.devices
    np.testing.assert_array_equal(twin.numpy(), np.ones(2))


def test_it_shows_itself(gpu_strategy: Any) -> None:
    v = variable(gpu_strategy, 1.5, name="v")
    assert f"{v:.2f}" == "1.50"
    assert "array(1.5)" in repr(v.values[0])
    assert v.device in repr(v.values[0])
