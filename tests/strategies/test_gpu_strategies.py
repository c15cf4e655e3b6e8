"""Strategies on pretended GPUs: current devices, where values go, streams, and no way round by the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist import IndexedSlices
from mpidist.arrays.device_ops import is_device_array
from tests.support.ranks.layouts import per_replica


def devices_of(value: Any) -> list[int]:
    return [part.device.id for part in getattr(value, "values", (value,))]


def local_devices(strategy: Any) -> list[int]:
    return [int(device.removeprefix("gpu:")) for device in strategy.extended.worker_devices]


def test_the_replicas_device_is_current_in_run(gpu_strategy: Any, fake_gpus: Any) -> None:
    seen: list[tuple[int, tuple[str, ...]]] = []

    def step() -> Any:
        seen.append((fake_gpus.cuda.Device().id, mpidist.get_replica_context().devices))
        return fake_gpus.ones(2)

    result = gpu_strategy.run(step)
    expected = local_devices(gpu_strategy)
    assert seen == [(device, (f"gpu:{device}",)) for device in expected]
    assert devices_of(result) == expected
    assert fake_gpus.cuda.Device().id == expected[0]


def test_the_first_gpu_is_current_in_scopes(gpu_strategy: Any, fake_gpus: Any) -> None:
    first = local_devices(gpu_strategy)[0]
    with fake_gpus.cuda.Device(1 - first).use():
        with gpu_strategy.scope():
            assert fake_gpus.cuda.Device().id == first
            with gpu_strategy.scope() as entered:
                assert entered is gpu_strategy
            assert fake_gpus.cuda.Device().id == first
            assert mpidist.Variable(fake_gpus.ones(2)).value().device.id == first
        assert fake_gpus.cuda.Device().id == 1 - first
        with pytest.raises(KeyError), gpu_strategy.scope():
            raise KeyError
        assert fake_gpus.cuda.Device().id == 1 - first


def test_the_first_gpu_is_current_in_merge_functions(fake_gpus: Any) -> None:
    from mpi4py import MPI

    def merged(strategy: Any) -> int:
        return int(fake_gpus.ones(1).device.id)

    with mpidist.MirroredStrategy(["cpu:0", "gpu:1", "gpu:0"], communicator=MPI.COMM_SELF) as strategy:
        seen = strategy.run(lambda: mpidist.get_replica_context().merge_call(merged))
    assert seen.values == (1, 1, 1)


def test_a_scope_of_cpus_leaves_the_device(fake_gpus: Any) -> None:
    from mpi4py import MPI

    with (
        mpidist.MirroredStrategy(["cpu:0", "cpu:1"], communicator=MPI.COMM_SELF) as strategy,
        fake_gpus.cuda.Device(1),
        strategy.scope(),
    ):
        assert fake_gpus.cuda.Device().id == 1


def test_reduce_stays_on_the_first_device(gpu_strategy: Any, fake_gpus: Any) -> None:
    n = gpu_strategy.num_replicas_in_sync
    first = local_devices(gpu_strategy)[0]
    values = per_replica(gpu_strategy, lambda i: np.full((2, 3), i + 1.0))
    on_gpus = gpu_strategy.run(lambda x: fake_gpus.asarray(x), args=(values,))
    numbers = np.arange(1.0, n + 1)
    for op, expected in (("SUM", numbers.sum()), ("MEAN", numbers.mean()), ("MAX", numbers.max())):
        for axis, shape in ((None, (2, 3)), (0, (3,)), ((0, 1), ())):
            if op != "MEAN" and axis == (0, 1):
                continue
            total = gpu_strategy.reduce(op, on_gpus, axis)
            assert (total.device.id, total.shape) == (first, shape)
            times = 2 if op == "SUM" and axis == 0 else 1
            np.testing.assert_allclose(total.get(), np.full(shape, expected * times))
    assert gpu_strategy.reduce("MEAN", {"a": on_gpus, "b": values}, axis=0)["b"].tolist() == [numbers.mean()] * 3


def test_a_mean_over_replicas_without_rows(gpu_strategy: Any, fake_gpus: Any) -> None:
    n = gpu_strategy.num_replicas_in_sync
    counts = per_replica(gpu_strategy, lambda i: i)
    rows = gpu_strategy.run(lambda count: fake_gpus.full((count, 2), 3.0), args=(counts,))
    mean = gpu_strategy.reduce("MEAN", rows, axis=0)
    np.testing.assert_array_equal(mean.get(), [3.0, 3.0] if n > 1 else [np.nan, np.nan])
    least = gpu_strategy.reduce("MIN", rows, axis=0)
    np.testing.assert_array_equal(least.get(), [3.0, 3.0] if n > 1 else [np.inf, np.inf])


def test_all_reduce_gives_each_kind_back_where_it_was(gpu_strategy: Any, fake_gpus: Any) -> None:
    n = gpu_strategy.num_replicas_in_sync

    def step() -> None:
        context = mpidist.get_replica_context()
        here = fake_gpus.cuda.Device().id
        total = context.all_reduce(
            "SUM",
            {
                "gpu": fake_gpus.ones(3, "float32"),
                "host": np.ones(2),
                "number": 1,
                "rows": IndexedSlices(fake_gpus.ones((1, 2)), [0], (2, 2)),
            },
        )
        assert (total["gpu"].device.id, total["gpu"].dtype) == (here, np.float32)
        assert total["gpu"].get().tolist() == [n] * 3
        assert type(total["host"]) is np.ndarray
        assert (total["host"].tolist(), total["number"]) == ([n, n], n)
        assert total["rows"].values.device.id == here
        assert total["rows"].to_dense().get().tolist() == [[n, n], [0, 0]]
        out = fake_gpus.empty(3)
        assert context.all_reduce("MEAN", fake_gpus.full(3, 2.0), out=out) is out
        assert out.get().tolist() == [2.0] * 3
        work = context.all_reduce_async("SUM", [fake_gpus.ones(2), fake_gpus.ones(())])
        assert [part.get().tolist() for part in work.wait()] == [[n, n], n]

    gpu_strategy.run(step)


def test_gathering(gpu_strategy: Any, fake_gpus: Any) -> None:
    n = gpu_strategy.num_replicas_in_sync
    expected = [i for i in range(n) for _ in range(i + 1)]

    def step() -> Any:
        context = mpidist.get_replica_context()
        i = context.replica_id_in_sync_group
        mine = fake_gpus.full(i + 1, i)
        gathered = context.all_gather(mine, axis=0)
        assert gathered.device.id == fake_gpus.cuda.Device().id
        assert gathered.get().tolist() == expected
        return mine

    gathered = gpu_strategy.gather(gpu_strategy.run(step), axis=0)
    assert gathered.device.id == local_devices(gpu_strategy)[0]
    assert gathered.get().tolist() == expected


def test_destinations(gpu_strategy: Any, fake_gpus: Any) -> None:
    n = gpu_strategy.num_replicas_in_sync
    extended = gpu_strategy.extended
    with gpu_strategy.scope():
        v = mpidist.Variable(np.zeros(2))
    values = gpu_strategy.run(lambda: fake_gpus.ones(2))
    if n > 1:
        for destination in ("host", "cpu:0"):
            assert extended.reduce_to("SUM", values, destination).tolist() == [n, n]
        assert devices_of(extended.reduce_to("SUM", values, "gpu:1")) == [1]
        assert devices_of(extended.reduce_to("SUM", values, v)) == local_devices(gpu_strategy)
        assert devices_of(extended.broadcast_to(np.ones(2), v)) == local_devices(gpu_strategy)
    updated = extended.update(v, lambda copy, x: copy.assign_add(x), args=(np.ones(2),))
    assert updated is v
    assert v.numpy().tolist() == [1.0, 1.0]


def test_arrays_of_the_strategy_are_on_its_devices(gpu_strategy: Any) -> None:
    zeros = gpu_strategy.extended.zeros((2, 3), "float64")
    assert devices_of(zeros) == local_devices(gpu_strategy)
    for part in getattr(zeros, "values", (zeros,)):
        np.testing.assert_array_equal(part.get(), np.zeros((2, 3)))


def test_devices_of_non_slot_updates(gpu_strategy: Any, fake_gpus: Any) -> None:
    made = gpu_strategy.extended.update_non_slot(None, lambda: fake_gpus.ones(1), group=False)
    assert [array.device.id for array in made] == local_devices(gpu_strategy)


def test_functions_of_values_run_on_the_replicas_device(gpu_strategy: Any, fake_gpus: Any) -> None:
    values = gpu_strategy.experimental_distribute_values_from_function(lambda context: fake_gpus.ones(2))
    assert devices_of(values) == local_devices(gpu_strategy)


@pytest.mark.parametrize("fake_gpus", [{"jitter": 0.005}], indirect=True)
def test_replicas_may_have_streams_of_their_own(gpu_strategy: Any, fake_gpus: Any) -> None:
    n = gpu_strategy.num_replicas_in_sync

    def step() -> Any:
        context = mpidist.get_replica_context()
        with fake_gpus.cuda.Stream(non_blocking=True) as stream:
            x = fake_gpus.asarray(np.full(1000, 1.0))
            for _ in range(3):
                x = context.all_reduce("MEAN", x * 2)
            x = context.all_reduce("SUM", x)
        # As CuPy has it: who leaves a stream has what follows wait for it.
        fake_gpus.cuda.get_current_stream().wait_event(stream.record())
        return x

    for _ in range(3):
        result = gpu_strategy.run(step)
        for part in getattr(result, "values", (result,)):
            assert part.get().tolist() == [8.0 * n] * 1000


@pytest.mark.parametrize("fake_gpus", [{"jitter": 0.005}], indirect=True)
def test_a_stream_that_a_replica_keeps_is_waited_for(fake_gpus: Any) -> None:
    from mpi4py import MPI

    def step() -> Any:
        fake_gpus.cuda.Stream(non_blocking=True).use()
        return fake_gpus.asarray(np.full(1000, 1.0)) * 2

    with mpidist.MirroredStrategy(["gpu:0", "gpu:1"], communicator=MPI.COMM_SELF) as strategy:
        for _ in range(3):
            for part in strategy.run(step).values:
                assert part.get().tolist() == [2.0] * 1000


def test_a_step_never_passes_through_the_host(
    gpu_strategy: Any, fake_gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if gpu_strategy.extended.spans_ranks and gpu_strategy.num_replicas_in_sync == 1:
        pytest.skip("one rank has nobody to reduce with")
    with gpu_strategy.scope():
        v = mpidist.Variable(np.ones((4, 3)))
        optimizers = [
            mpidist.optimizers.SGD(0.1),
            mpidist.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
            mpidist.optimizers.Adam(),
        ]
        accuracy, mean = mpidist.metrics.Accuracy(), mpidist.metrics.Mean()
    accumulator = mpidist.optimizers.GradientAccumulator(2)

    def step() -> Any:
        gradient = fake_gpus.ones((4, 3)) @ np.transpose(v) @ v
        clipped, _ = mpidist.optimizers.clip_by_global_norm([gradient], 1.0)
        for optimizer in optimizers:
            optimizer.apply_gradients([(clipped[0], v)])
            accumulator.apply_gradients(optimizer, [(gradient, v)])
        losses = gradient.sum(axis=1)
        mean.update_state(losses, sample_weight=fake_gpus.ones(4))
        accuracy.update_state(fake_gpus.arange(4), fake_gpus.arange(4))
        return mpidist.compute_average_loss(losses)

    gpu_strategy.run(step)  # the first one makes slots and plans

    def refuse(*_: Any, **__: Any) -> Any:
        raise AssertionError("an array was copied to the host in a step")

    for name in ("get", "item", "__float__", "__int__", "__bool__"):
        monkeypatch.setattr(fake_gpus.ndarray, name, refuse)
    total = gpu_strategy.reduce("SUM", gpu_strategy.run(step), axis=None)
    monkeypatch.undo()
    assert is_device_array(total)
    assert np.isfinite(float(total))
    assert float(accuracy.result()) == 1.0
