"""Batches that are copied to pretended GPUs ahead of use."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist import InputOptions
from mpidist.arrays.device_ops import is_device_array
from tests.support import fake_cupy

late = pytest.mark.parametrize("fake_gpus", [{}, {"jitter": 0.003}], indirect=True, ids=["", "late"])


def parts_of(value: Any) -> tuple[Any, ...]:
    return tuple(getattr(value, "values", (value,)))


def rows_of(strategy: Any, dataset: Any, options: InputOptions | None = None) -> list[list[int]]:
    """Return the rows that this rank's replicas get in each step, after checking where they are."""
    steps = []
    for batch in strategy.experimental_distribute_dataset(dataset, options):
        rows: list[int] = []
        for device, x, y in zip(
            strategy.extended.worker_devices, parts_of(batch["x"]), parts_of(batch["y"]), strict=True
        ):
            assert is_device_array(x)
            assert f"gpu:{x.device.id}" == f"gpu:{y.device.id}" == device
            np.testing.assert_array_equal(x.get(), np.repeat(y.get()[:, None], 3, axis=1) * 2.0)
            rows += y.get().tolist()
        steps.append(rows)
    return steps


def dataset(rows: int = 23) -> Any:
    y = np.arange(rows)
    return mpidist.Dataset.from_tensor_slices({"x": np.repeat(y[:, None], 3, axis=1) * 2.0, "y": y}).batch(4)


@late
@pytest.mark.parametrize("size", [1, 3])
def test_every_replica_gets_its_rows_on_its_device(size: int, gpu_strategy: Any, fake_gpus: Any) -> None:
    options = InputOptions(experimental_per_replica_buffer_size=size)
    on_host = InputOptions(experimental_fetch_to_device=False)
    expected = []
    for batch in gpu_strategy.experimental_distribute_dataset(dataset(), on_host):
        assert all(type(part) is np.ndarray for part in parts_of(batch["x"]))
        expected.append([row for part in parts_of(batch["y"]) for row in part.tolist()])
    assert rows_of(gpu_strategy, dataset(), options) == expected
    assert rows_of(gpu_strategy, dataset().prefetch(2), options) == expected


@late
def test_batches_stay_what_they_are_while_later_ones_come(gpu_strategy: Any, fake_gpus: Any) -> None:
    kept = []
    for batch in gpu_strategy.experimental_distribute_dataset(dataset(200)):
        kept.append(batch)
        gpu_strategy.run(lambda x: np.sum(x * 3 + fake_gpus.ones(x.shape)), args=(batch["x"],))
    for batch in kept:
        for x, y in zip(parts_of(batch["x"]), parts_of(batch["y"]), strict=True):
            np.testing.assert_array_equal(x.get()[:, 0], y.get() * 2.0)


@pytest.mark.parametrize("fake_gpus", [{"jitter": 0.003}], indirect=True)
def test_readers_that_wait_for_a_gpu_leave_the_core_to_others(gpu_strategy: Any, fake_gpus: Any) -> None:
    counts = fake_cupy.counts()
    # NCCL was started with the strategy.
    counts.clear()
    for _ in gpu_strategy.experimental_distribute_dataset(dataset(200).prefetch(2)):
        pass
    assert counts.synchronizations > 0
    assert counts.spins == 0


def test_batches_of_a_function(gpu_strategy: Any, fake_gpus: Any) -> None:
    def make(context: Any) -> Any:
        return mpidist.Dataset.range(5).map(lambda i: (i, f"row {i}")).batch(2)

    seen = 0
    for numbers, texts in gpu_strategy.distribute_datasets_from_function(make):
        for number, text in zip(parts_of(numbers), parts_of(texts), strict=True):
            # Text cannot be on a device.
            assert is_device_array(number)
            assert type(text) is np.ndarray
            seen += len(number)
    assert seen in (4, 5)


@pytest.mark.min_ranks(2)
def test_ranks_that_run_out_get_empty_batches_on_their_device(fake_gpus: Any) -> None:
    from mpi4py import MPI

    device = f"gpu:{MPI.COMM_WORLD.rank % 2}"
    with mpidist.MultiWorkerMirroredStrategy(devices=[device]) as strategy:
        batches = strategy.distribute_datasets_from_function(
            lambda context: mpidist.Dataset.range(2 * (context.input_pipeline_id + 1)).batch(2)
        )
        lengths = []
        for batch in batches:
            (part,) = batch.values
            assert f"gpu:{part.device.id}" == device
            lengths.append(len(part))
    assert lengths == [2] * (MPI.COMM_WORLD.rank + 1) + [0] * (MPI.COMM_WORLD.size - MPI.COMM_WORLD.rank - 1)


def test_errors_of_reading_come_after_the_batches_before_them(gpu_strategy: Any, fake_gpus: Any) -> None:
    def numbers() -> Iterator[int]:
        yield from range(5)
        raise OSError("the disk is gone")

    def make(context: Any) -> Any:
        return mpidist.Dataset.from_generator(numbers).batch(1)

    options = InputOptions(experimental_per_replica_buffer_size=3)
    iterator = iter(gpu_strategy.distribute_datasets_from_function(make, options))
    local = len(gpu_strategy.extended.worker_devices)
    for _ in range(5 // local):
        next(iterator)
    with pytest.raises(OSError, match="the disk is gone"):
        next(iterator)


@late
def test_a_pass_may_be_left_at_any_time(gpu_strategy: Any, fake_gpus: Any) -> None:
    before = set(threading.enumerate())
    for leave in ("close", "drop"):
        iterator = iter(gpu_strategy.experimental_distribute_dataset(dataset(100)))
        next(iterator)
        next(iterator)
        if leave == "close":
            iterator.close()
            with pytest.raises(StopIteration):
                next(iterator)
        del iterator
        gc.collect()
    for thread in set(threading.enumerate()) - before:
        if thread.name == "mpidist-read-ahead":
            thread.join(10)
            assert not thread.is_alive()


@pytest.mark.parametrize("fake_gpus", [{"jitter": 0.005}], indirect=True)
@pytest.mark.parametrize("leave", ["close", "drop"])
def test_copies_that_nobody_waits_for_do_no_harm(leave: str, fake_gpus: Any) -> None:
    options = InputOptions(experimental_per_replica_buffer_size=12)
    strategy = mpidist.OneDeviceStrategy("gpu:0")
    for _ in range(2):
        iterator = iter(strategy.experimental_distribute_dataset(dataset(200), options))
        for _ in range(6):
            batch = next(iterator)
        shape = batch["x"].shape  # several more are on their way now
        if leave == "close":
            iterator.close()
        del iterator, batch
        # What they were to fill is handed out again.
        others = [fake_gpus.ones(shape) for _ in range(8)]
        fake_gpus.cuda.Device().synchronize()
        for other in others:
            np.testing.assert_array_equal(other.get(), np.ones(shape))


def test_a_dataset_may_be_on_the_device_itself(fake_gpus: Any) -> None:
    from mpi4py import MPI

    options = InputOptions(
        experimental_fetch_to_device=False,
        experimental_replication_mode=mpidist.InputReplicationMode.PER_REPLICA,
        experimental_place_dataset_on_device=True,
    )

    def make(context: Any) -> Any:
        def batches() -> Iterator[Any]:
            with fake_gpus.cuda.Device(context.input_pipeline_id):
                yield fake_gpus.full(2, context.input_pipeline_id)

        return mpidist.Dataset.from_generator(batches)

    with mpidist.MirroredStrategy(["gpu:0", "gpu:1"], communicator=MPI.COMM_SELF) as strategy:
        (batch,) = strategy.distribute_datasets_from_function(make, options)
        assert [part.device.id for part in batch.values] == [0, 1]
        assert [part.get().tolist() for part in batch.values] == [[0, 0], [1, 1]]


def test_element_spec_and_length(gpu_strategy: Any) -> None:
    fetched = gpu_strategy.experimental_distribute_dataset(dataset())
    kept = gpu_strategy.experimental_distribute_dataset(dataset(), InputOptions(experimental_fetch_to_device=False))
    assert fetched.element_spec == kept.element_spec
    assert len(fetched) == len(kept) == 6
    assert next(iter(fetched)).keys() == fetched.element_spec.keys()
