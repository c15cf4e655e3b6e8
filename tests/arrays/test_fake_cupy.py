"""The pretended GPUs: what goes wrong on a GPU now and then goes wrong on them every time."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support import fake_cupy
from tests.support.fake_cupy.memory import FREED, bytes_at
from tests.support.speed import scaled

pytestmark = pytest.mark.one_rank

ROOT = Path(__file__).parents[2]


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    made = threading.Event()
    yield made
    made.set()


def hold(stream: Any, gate: threading.Event) -> None:
    stream.launch_host_func(lambda event: event.wait(30), gate)


# Streams


def test_a_missing_wait_gives_stale_data(fake_gpus: Any, gate: threading.Event) -> None:
    cp = fake_gpus
    first, second = cp.cuda.Stream(non_blocking=True), cp.cuda.Stream(non_blocking=True)
    array = cp.zeros(100)
    cp.cuda.Stream.null.synchronize()
    hold(first, gate)
    array.data.memset_async(1, array.nbytes, first)
    stale = array.get(stream=second)
    second.wait_event(first.record())
    gate.set()
    assert not stale.any()
    assert array.get(stream=second).any()


@pytest.mark.parametrize("fake_gpus", [{"jitter": 0.05}], indirect=True)
def test_results_land_late(fake_gpus: Any) -> None:
    cp = fake_gpus
    stream = cp.cuda.Stream(non_blocking=True)
    stale = 0
    for _ in range(10):
        with stream:
            array = cp.ones(10) + 1
        stale += bool(np.isnan(array.host_view()).any())
        stream.synchronize()
        assert array.get().tolist() == [2.0] * 10
    assert stale > 0


def test_failed_device_keeps_failing(fake_gpus: Any) -> None:
    cp = fake_gpus
    runtime = cp.cuda.runtime
    array, before = cp.zeros(100), cp.cuda.Event()
    before.record()
    before.synchronize()
    first, second = cp.cuda.Stream(non_blocking=True), cp.cuda.Stream(non_blocking=True)
    with cp.cuda.Device(1):
        elsewhere = cp.cuda.Stream(non_blocking=True)
        other = elsewhere.record()
    with pytest.raises(ZeroDivisionError):
        first.launch_host_func(lambda number: 1 / number, 0)
        first.synchronize()
    for event in (before, cp.cuda.Event()):  # also what has happened is not known any more
        assert not event.done
        assert runtime.eventQuery(event.ptr) == 719
        with pytest.raises(runtime.CUDARuntimeError, match="cudaErrorLaunchFailure"):
            event.synchronize()
    assert not second.done
    for call in (second.synchronize, second.record, lambda: array + 1, array.get):
        with pytest.raises(runtime.CUDARuntimeError, match="cudaErrorLaunchFailure"):
            call()
    other.synchronize()
    assert other.done
    assert runtime.eventQuery(other.ptr) == 0


def test_an_event_is_asked_for_as_cuda_does(fake_gpus: Any, gate: threading.Event) -> None:
    cp = fake_gpus
    stream, event = cp.cuda.Stream(non_blocking=True), cp.cuda.Event()
    assert cp.cuda.runtime.eventQuery(event.ptr) == 0
    hold(stream, gate)
    event.record(stream)
    assert cp.cuda.runtime.eventQuery(event.ptr) == 600
    gate.set()
    event.synchronize()
    assert cp.cuda.runtime.eventQuery(event.ptr) == 0


@pytest.mark.one_rank
def test_unseen_errors_are_raised_at_the_end() -> None:
    cp = fake_cupy.install(1)
    cp.cuda.Stream.null.launch_host_func(lambda number: 1 / number, 0)
    with pytest.raises(ZeroDivisionError):
        fake_cupy.uninstall()
    assert "cupy" not in sys.modules
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("fake stream")]


# Memory


def test_freed_memory_is_spoiled(fake_gpus: Any) -> None:
    array = fake_gpus.zeros(100)
    address = array.data.ptr
    part = array[50:]
    del array
    fake_gpus.cuda.Stream.null.synchronize()
    assert not bytes_at(address, 800).any()  # the part keeps it
    del part
    fake_gpus.cuda.Stream.null.synchronize()
    assert (bytes_at(address, 800) == FREED).all()


def test_memory_in_use_is_lost_with_its_array(fake_gpus: Any, gate: threading.Event) -> None:
    cp = fake_gpus
    stream = cp.cuda.Stream(non_blocking=True)
    source, target = cp.zeros(100), cp.zeros(100)
    stream.wait_event(cp.cuda.Stream.null.record())
    hold(stream, gate)
    target.data.copy_from_device_async(source.data, 800, stream)
    del source
    cp.cuda.Stream.null.synchronize()
    gate.set()
    assert target.get(stream=stream).all()  # not the zeros


def test_memory_is_kept_for_its_stream(fake_gpus: Any, gate: threading.Event) -> None:
    cp = fake_gpus
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        source, target = cp.zeros(100), cp.ones(100)
        hold(stream, gate)
        target.data.copy_from_device_async(source.data, 800)
        del source
        again = cp.empty(100)
        assert again.nbytes == 800
        gate.set()
        assert not target.get().any()


def test_streams_do_not_share_freed_memory(fake_gpus: Any) -> None:
    cp = fake_gpus
    array = cp.empty(4096, "u1")
    address = array.data.ptr
    del array
    with cp.cuda.Stream(non_blocking=True):
        assert cp.empty(4096, "u1").data.ptr != address
    assert cp.empty(4096, "u1").data.ptr == address


def test_a_gpu_may_run_out_of_memory(fake_gpus: Any) -> None:
    error = fake_gpus.cuda.memory.OutOfMemoryError
    array = fake_gpus.ones(2)
    fake_cupy.fail_allocations(2)
    for ask in (lambda: fake_gpus.empty(1000), lambda: array + 1):
        with pytest.raises(error, match=r"Out of memory allocating (8,000|16) bytes"):
            ask()
    assert issubclass(error, MemoryError)
    assert (array + 1).get().tolist() == [2, 2]


def test_only_pinned_memory_is_read_late(fake_gpus: Any, gate: threading.Event) -> None:
    import cupyx

    cp = fake_gpus
    pinned, pageable = cupyx.zeros_pinned(100), np.zeros(100)
    one = cp.ones(100)
    one.data.copy_from_host_async(pageable.ctypes.data, 800)
    pageable[:] = 2
    assert not one.get().any()
    hold(cp.cuda.Stream.null, gate)
    one.set(pinned)
    pinned[:] = 2
    gate.set()
    assert (one.get() == 2).all()


# Arrays


def test_nothing_becomes_a_numpy_array_by_itself(fake_gpus: Any) -> None:
    array = fake_gpus.arange(3.0)
    with pytest.raises(TypeError, match="Implicit conversion to a NumPy array is not allowed"):
        np.asarray(array)
    for mixed in (
        lambda: array + np.ones(3),
        lambda: np.ones(3) * array,
        lambda: np.add(array, np.ones(3)),
        lambda: np.add(array, array, out=np.ones(3)),
        lambda: np.concatenate([array, np.ones(3)]),
        lambda: np.copyto(np.ones(3), array),
        lambda: fake_gpus.add(array, np.ones(3)),
    ):
        with pytest.raises(TypeError):
            mixed()
    with pytest.raises(ValueError, match="non-scalar"):
        array[:] = np.ones(3)
    with pytest.raises(ValueError, match="non-scalar"):
        np.copyto(array, np.ones(3))


def test_arrays_of_two_devices_do_not_mix(fake_gpus: Any) -> None:
    here = fake_gpus.ones(3)
    with fake_gpus.cuda.Device(1):
        there = fake_gpus.ones(3)
        with pytest.raises(ValueError, match=r"resides \(0\) is different from the current device \(1\)"):
            there + here
    with pytest.raises(ValueError, match="Peer access is unavailable"):
        there.sum()
    np.testing.assert_array_equal(there.get(), np.ones(3))
    assert there.copy().device.id == 0
    assert copy.deepcopy(there).device.id == 1


# The module


@pytest.mark.jobs
@pytest.mark.one_rank
def test_a_program_runs_on_pretended_gpus(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import cupy, sys\nprint(cupy.cuda.runtime.getDeviceCount(), sys.argv[1:], cupy.ones(3).sum())\n"
    )
    command = [sys.executable, "-m", "tests.support.fake_cupy", "--devices", "3", "--jitter", "0.001", program, "-x"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=scaled(60))
    assert (done.returncode, done.stdout.strip()) == (0, "3 ['-x'] 3.0"), done.stderr


# What is counted


def test_what_costs_time_is_counted(fake_gpus: Any) -> None:
    cp, counts = fake_gpus, fake_cupy.counts()

    def counted() -> tuple[int, ...]:
        found = counts.device_switches, counts.launches, counts.pinned_allocations, counts.synchronizations
        counts.clear()
        return found

    array = cp.zeros(10)
    assert counted() == (0, 0, 0, 0)
    with cp.cuda.Device(0):  # back to what was current, without asking whether it still is
        array += 1
    assert counted() == (1, 1, 0, 0)
    array.get()
    assert counted() == (2, 0, 0, 1)
    pinned = [cp.cuda.alloc_pinned_memory(600), cp.cuda.alloc_pinned_memory(600)]
    del pinned[0]
    cp.cuda.alloc_pinned_memory(1000)
    assert counted() == (0, 0, 2, 0)
    cp.cuda.get_current_stream().record().synchronize()
    cp.cuda.Stream.null.synchronize()
    assert counted() == (0, 0, 0, 2)


@pytest.mark.parametrize("fake_gpus", [{"ptds": True}], indirect=True)
def test_each_thread_may_have_a_default_stream(fake_gpus: Any, gate: threading.Event) -> None:
    array = fake_gpus.zeros(100)
    fake_gpus.cuda.get_current_stream().synchronize()
    hold(fake_gpus.cuda.get_current_stream(), gate)
    array.data.memset_async(1, array.nbytes)
    seen: list[tuple[int, bool]] = []
    thread = threading.Thread(
        target=lambda: seen.append((fake_gpus.cuda.get_current_stream().ptr, bool(array.get().any())))
    )
    thread.start()
    thread.join()
    gate.set()
    assert fake_gpus.cuda.get_current_stream().ptr == 2
    assert seen == [(2, False)]
    assert array.get().any()
