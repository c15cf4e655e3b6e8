"""All-reductions that replicas on pretended GPUs start, and wait for on streams of their own."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

import mpidist
from tests.strategies.test_gpu_strategies import devices_of

late = pytest.mark.parametrize("fake_gpus", [{"devices": 8, "jitter": 0.005}], indirect=True)
LENGTH = 20000


def two_gpus_each() -> Any:
    """Return a strategy of all ranks, which have two GPUs each."""
    from mpi4py import MPI

    first = 2 * (MPI.COMM_WORLD.rank % 4)
    return mpidist.MultiWorkerMirroredStrategy(devices=[f"gpu:{first}", f"gpu:{first + 1}"])


def streams_on(cupy: Any, strategy: Any) -> list[tuple[Any, Any]]:
    streams = []
    for device in strategy.extended.worker_devices:
        with cupy.cuda.Device(int(device.removeprefix("gpu:"))) as there:
            streams.append((there, cupy.cuda.Stream(non_blocking=True)))
    return streams


def check(result: Any, expected: float) -> None:
    """Read a result, unless this is the first replica: that would wait for the copies to the others as well."""
    if mpidist.get_replica_context().local_replica_id:
        np.testing.assert_array_equal(result.get(), np.full(LENGTH, expected))


@late
def test_the_caller_may_have_other_streams_current(fake_gpus: Any) -> None:
    with two_gpus_each() as strategy:
        n = strategy.num_replicas_in_sync

        def step(i: int) -> Any:
            result = mpidist.get_replica_context().all_reduce_async("SUM", fake_gpus.full(LENGTH, i + 1.0)).wait()
            check(result, n * (i + 1.0))
            return result

        for i in range(5):
            with ExitStack() as entered:
                for device, stream in streams_on(fake_gpus, strategy):
                    entered.enter_context(device)
                    entered.enter_context(stream)
                results = strategy.run(step, args=(i,))
                first = results.values[0].get()
            np.testing.assert_array_equal(first, np.full(LENGTH, n * (i + 1.0)))
            assert [f"gpu:{device}" for device in devices_of(results)] == list(strategy.extended.worker_devices)


@late
def test_each_replica_may_wait_on_any_of_its_streams(fake_gpus: Any) -> None:
    with two_gpus_each() as strategy:
        n = strategy.num_replicas_in_sync

        def step(i: int) -> None:
            with fake_gpus.cuda.Stream(non_blocking=True):
                x = fake_gpus.full(LENGTH, i + 1.0)
                work = mpidist.get_replica_context().all_reduce_async("SUM", x)
            for _ in range(2):
                with fake_gpus.cuda.Stream(non_blocking=True):
                    check(work.wait(), n * (i + 1.0))

        for i in range(5):
            strategy.run(step, args=(i,))


@pytest.mark.parametrize("fake_gpus", [{"jitter": 0.005}], indirect=True)
def test_what_was_done_at_once_is_waited_for_as_well(gpu_strategy: Any, fake_gpus: Any) -> None:
    n = gpu_strategy.num_replicas_in_sync

    def step() -> None:
        context = mpidist.get_replica_context()
        rows = mpidist.IndexedSlices(fake_gpus.full((1, LENGTH), 2.0), [0], (1, LENGTH))
        works = [context.all_reduce_async("SUM", value) for value in (fake_gpus.full(LENGTH, 2.0), rows)]
        fake_gpus.cuda.Stream(non_blocking=True).use()
        np.testing.assert_array_equal(works[0].wait().get(), np.full(LENGTH, 2.0 * n))
        np.testing.assert_array_equal(works[1].wait().values.get(), np.full((n, LENGTH), 2.0))

    for _ in range(3):
        gpu_strategy.run(step)
