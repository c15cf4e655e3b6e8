"""The threads of local replicas: they live as long as their strategy, and what one run leaves is not for the next."""

from __future__ import annotations

import contextvars
import gc
import os
import signal
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import mpidist
from mpidist.core import context as core_context
from mpidist.strategies import replica_threads
from tests.support.fake_cupy import devices as fake_devices

pytestmark = pytest.mark.one_rank


def mirrored(*devices: str) -> Any:
    from mpi4py import MPI

    return mpidist.MirroredStrategy(devices, communicator=MPI.COMM_SELF)


@pytest.fixture
def two() -> Iterator[Any]:
    with mirrored("cpu:0", "cpu:1") as strategy:
        yield strategy


def context() -> Any:
    return mpidist.get_replica_context()


def threads_of(strategy: Any) -> tuple[threading.Thread, ...]:
    found: tuple[threading.Thread, ...] = strategy.run(threading.current_thread).values
    return found


def is_first() -> bool:
    return bool(context().is_first_replica)


def test_every_run_has_the_same_threads(two: Any) -> None:
    first = threads_of(two)
    assert [(thread.name, thread.daemon) for thread in first] == [(f"mpidist-replica-{k}", True) for k in range(2)]
    with pytest.raises(ZeroDivisionError):
        two.run(lambda: context().all_reduce("SUM", 1) if is_first() else 1 / 0)
    assert threads_of(two) == first


def test_a_step_makes_no_handle_of_cublas(fake_gpus: Any) -> None:
    def step() -> Any:
        x = fake_gpus.ones((2, 2))
        return context().all_reduce("SUM", x @ x)

    with mirrored("gpu:0", "gpu:1") as strategy:
        for _ in range(5):
            strategy.run(step)
        assert sorted(fake_devices.machine().cublas_handles) == [("mpidist-replica-0", 0), ("mpidist-replica-1", 1)]


def test_threads_end_with_their_strategy() -> None:
    closed, collected = mirrored("cpu:0", "cpu:1"), mirrored("cpu:0", "cpu:1")
    threads = threads_of(closed)
    closed.close()
    assert not any(thread.is_alive() for thread in threads)
    threads = threads_of(collected)
    del collected
    gc.collect()
    for thread in threads:
        thread.join(10)
    assert not any(thread.is_alive() for thread in threads)


def test_a_run_in_a_merge_function(two: Any) -> None:
    def merged(strategy: Any) -> Any:
        return strategy.run(lambda: context().all_reduce("SUM", context().replica_id_in_sync_group + 1))

    def step() -> Any:
        inner = context().merge_call(merged)
        return inner, context().all_reduce("SUM", 10)

    for _ in range(2):
        assert two.experimental_local_results(two.run(step)) == ((3, 20), (3, 20))


def test_what_a_replica_leaves_is_not_for_the_next_run(two: Any) -> None:
    variable = contextvars.ContextVar("variable", default=0)

    def leaves() -> None:
        assert variable.get() == 7
        variable.set(8)
        context().__enter__()

    token = variable.set(7)
    for _ in range(2):
        two.run(leaves)
    variable.reset(token)
    assert two.run(variable.get).values == (0, 0)
    assert two.run(lambda: len(core_context._stack.frames)).values == (1, 1)


def test_nothing_of_a_run_outlives_it(two: Any) -> None:
    result = two.run(lambda: np.zeros(3))
    array = weakref.ref(result.values[1])
    del result
    two.run(lambda: None)
    assert array() is None


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """What a replica of the test waits for; all threads have ended afterwards."""
    monkeypatch.setattr(replica_threads, "_UNWINDING_SECONDS", 0.05)
    release = threading.Event()
    yield release
    release.set()


def test_a_replica_that_hangs_after_another_failed(two: Any, hanging: threading.Event) -> None:
    met: list[str] = []

    def step() -> None:
        if not is_first():
            raise ZeroDivisionError
        try:
            context().all_reduce("SUM", 1)
        finally:
            hanging.wait(30)
            try:
                context().all_reduce("SUM", 100)
            except BaseException as error:
                met.append(type(error).__name__)

    def next_step() -> Any:
        # The one that was left behind goes on in the middle of this run.
        hanging.set()
        for thread in behind if is_first() else ():
            thread.join(30)
        return context().all_reduce("SUM", 1)

    behind = threads_of(two)
    with pytest.raises(ZeroDivisionError), pytest.warns(RuntimeWarning, match="still runs on replica 0"):
        two.run(step)
    assert two.run(next_step).values == (2, 2)
    assert met == ["_Abandoned"]
    assert not set(threads_of(two)) & set(behind)


def test_an_interrupt_while_a_replica_hangs(two: Any, hanging: threading.Event) -> None:
    behind = threads_of(two)

    def step() -> None:
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        hanging.wait(30)

    with pytest.raises(KeyboardInterrupt), pytest.warns(RuntimeWarning, match="still runs on replica 0"):
        two.run(step)
    assert not set(threads_of(two)) & set(behind)
    assert two.run(lambda: context().all_reduce("SUM", 1)).values == (2, 2)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_has_threads_of_its_own(two: Any) -> None:
    two.run(lambda: None)
    child = os.fork()
    if child == 0:
        signal.alarm(30)
        os._exit(0 if two.run(lambda: context().merge_call(lambda s: 5)).values == (5, 5) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_run_that_cannot_begin_leaves_no_threads(two: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_stream(place: Any) -> None:
        raise mpidist.errors.DeviceError("no stream")

    before = threading.active_count()
    with monkeypatch.context() as patch:
        patch.setattr(replica_threads, "_current_stream", no_stream)
        for _ in range(3):
            with pytest.raises(mpidist.errors.DeviceError, match="no stream"):
                two.run(lambda: 1)
    assert threading.active_count() == before
    assert two.run(lambda: context().replica_id_in_sync_group).values == (0, 1)


def test_a_creator_that_is_left_open_acts_in_no_other_run(two: Any) -> None:
    left: list[Any] = []

    def leave_open() -> None:
        scope = mpidist.variable_creator_scope(lambda make, **kwargs: make(**kwargs))
        scope.__enter__()
        left.append(scope)

    two.run(leave_open)
    assert two.run(lambda: len(core_context._stack.creators)).values == (0, 0)
    for scope in left:
        scope.__exit__(None, None, None)
