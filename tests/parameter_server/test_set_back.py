"""What a program sets while it trains: the number of updates, an optimizer's settings; and requests that fail early."""

from __future__ import annotations

import resource
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.experimental import cache_variable_reads
from mpidist.optimizers import SGD, Adam
from mpidist.values import IndexedSlices
from tests.parameter_server.coordinated import run_on_chief
from tests.parameter_server.workers import error_of, on_workers, worker_of
from tests.support.ranks.jobs import run_script

pytestmark = [pytest.mark.jobs, pytest.mark.one_rank, pytest.mark.timeout(120)]


def rate(step: int) -> float:
    return 0.1 if step < 20 else 5.0


def restores(strategy: Any, coordinator: Any, folder: str) -> list[float]:
    """Return how far a step goes at the beginning, and after the beginning was restored, twice."""
    with strategy.scope():
        v = mpidist.Variable(0.0, name="v")
        optimizer = Adam(rate)
        optimizer.build([v])

    def step() -> None:
        optimizer.apply_gradients([(1.0, v)])

    def moved() -> float:
        before = float(v.numpy())
        coordinator.schedule(step)
        coordinator.join()
        return float(v.numpy()) - before

    checkpoint = mpidist.Checkpoint(v=v, optimizer=optimizer)
    path = checkpoint.save(f"{folder}/ckpt")
    found = [moved()]
    for _ in range(2):
        for _ in range(30):
            coordinator.schedule(step)
        coordinator.join()
        checkpoint.restore(path)
        found.append(moved())
    return found


def test_workers_of_a_coordinator_go_on_from_what_was_restored(tmp_path: Any) -> None:
    first, *others = run_on_chief(restores, str(tmp_path), jobs={"chief": 1, "ps": 1, "worker": 2})
    assert first == pytest.approx(-0.1, rel=1e-5)
    assert others == [first, first]


def set_back(strategy: Any) -> list[float]:
    """Return the steps of this worker before and after the chief has set everything back."""
    with strategy.scope():
        mine = mpidist.Variable(0.0, name="of worker 0")
        other = mpidist.Variable(0.0, name="of worker 1")
        optimizer = SGD(rate)
        optimizer.build([mine, other])
    v = (mine, other)[worker_of(strategy)]
    found = []
    for _ in range(2):
        strategy.run(lambda: optimizer.apply_gradients([(1.0, v)]))
        found.append(float(v.numpy()))
        strategy.barrier()
        for _ in range(30):
            strategy.run(lambda: optimizer.apply_gradients([(1.0, v)]))
        strategy.barrier()
        if strategy.extended.should_checkpoint:
            for variable in (mine, other, *optimizer.variables):
                variable.assign(np.zeros((), variable.dtype))
        strategy.barrier()
    return found


def test_all_workers_go_on_from_what_the_chief_has_set() -> None:
    for first, second in on_workers(set_back, 1, 2):
        assert (first, second) == (-0.1, -0.1)


def bad_indices(strategy: Any) -> Any:
    with strategy.scope():
        a, b = (mpidist.Variable(np.zeros((5, 2)), name=name) for name in "ab")
        optimizer = SGD(1.0)
    ones = np.ones((5, 2))
    outside = IndexedSlices(ones[:1], [9], (5, 2))
    error = error_of(lambda: strategy.run(lambda: optimizer.apply_gradients([(ones, a), (outside, b)])))
    floats = error_of(lambda: a.sparse_read([0.9, 3.7]))
    return error, floats, float(a.numpy().sum()), int(optimizer.iterations.numpy())


def test_wrong_indices_are_found_before_anything_is_sent() -> None:
    [(error, floats, total, updates)] = on_workers(bad_indices, 2, 1)
    assert error[0] == "ValueError"
    assert floats[0] == "TypeError"
    assert (total, updates) == (0.0, 0)


def kept_reads(strategy: Any) -> list[float]:
    with strategy.scope():
        v = mpidist.Variable([1.0], name="v")
    with cache_variable_reads():
        for _ in range(2):
            (a,) = strategy.extended.read_all([v])
            a += 7
        return [float(a[0]), float(v.numpy()[0]), float(v[0])]


def test_what_a_block_keeps_is_nobody_elses() -> None:
    assert on_workers(kept_reads, 1, 1) == [[8.0, 1.0, 1.0]]


def too_little_memory(strategy: Any) -> Any:
    with strategy.scope():
        large, small = mpidist.Variable(np.zeros(32 << 20, np.uint8)), mpidist.Variable(3.0)
    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm") as file:
        size = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + (8 << 20), before[1]))
    try:
        error = error_of(large.numpy)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    return error[0], float(small.numpy()), float(large.numpy().sum())


def test_a_worker_that_lacks_memory_for_a_value_can_go_on() -> None:
    (kind, small, total) = on_workers(too_little_memory, 1, 1)[0]
    assert kind in ("MemoryError", "_ArrayMemoryError")
    assert (small, total) == (3.0, 0.0)


FULL_SERVER = """
import resource
import numpy as np
import mpidist
from mpidist.cluster_resolver import MPIClusterResolver
resolver = MPIClusterResolver(jobs={"ps": 1, "worker": 1})
if resolver.task_type == "ps":
    server = mpidist.Server(resolver)
    size = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + (160 << 20),) * 2)
    server.join()
else:
    strategy = mpidist.v1.experimental.ParameterServerStrategy(resolver)
    with strategy.scope():
        v = mpidist.Variable(np.zeros(128 << 20, np.uint8))
"""


def test_a_server_that_lacks_memory_says_so_and_ends_the_job() -> None:
    done = run_script(FULL_SERVER, 2)
    assert done.returncode != 0
    assert "MemoryError: this server has no memory for 128.0 MiB" in done.stderr
