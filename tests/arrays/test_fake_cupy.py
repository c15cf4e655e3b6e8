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


def test_a_failed_device_does_nothing_more_and_says_so_for_ever(fake_gpus: Any) -> None:
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


@pytest.mark.one_rank
def test_unseen_errors_are_raised_at_the_end() -> None:
    cp = fake_cupy.install(1)
    cp.cuda.Stream.null.launch_host_func(lambda number: 1 / number, 0)
    with pytest.raises(ZeroDivisionError):
        fake_cupy.uninstall()
    assert "cupy" not in sys.modules
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("fake stream")]


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


def test_pinned_memory_goes_back_without_a_look_at_the_streams(fake_gpus: Any, gate: threading.Event) -> None:
    cp = fake_gpus
    pinned = np.frombuffer(cp.cuda.alloc_pinned_memory(800), np.float64, 100)
    pinned[:] = 0
    array = cp.ones(100)
    hold(cp.cuda.Stream.null, gate)
    array.data.copy_from_host_async(pinned.ctypes.data, 800)
    del pinned
    gate.set()
    assert array.get().all()  # not the zeros


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


@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_operations_give_what_numpy_gives(fake_gpus: Any, dtype: str) -> None:
    cp = fake_gpus
    left, right = np.arange(1, 7).reshape(2, 3).astype(dtype), np.full((2, 3), 2, dtype)
    there_left, there_right = cp.asarray(left), cp.asarray(right)
    for operation in (
        lambda a, b: a + b, lambda a, b: a - b * 2, lambda a, b: 3 / a, lambda a, b: a ** 2, lambda a, b: -a,
        lambda a, b: a == b, lambda a, b: (a.T @ b), lambda a, b: np.add(a, b), lambda a, b: np.sqrt(a),
        lambda a, b: np.concatenate([a, b], axis=1), lambda a, b: np.stack([a, b]), lambda a, b: a.sum(axis=0),
        lambda a, b: np.sum(a), lambda a, b: a.mean(), lambda a, b: np.take(a, np.array([0, 2]), axis=1) + 0,
        lambda a, b: a[1], lambda a, b: a[:, ::2], lambda a, b: a[1, 2], lambda a, b: a.reshape(-1)[1:4],
        lambda a, b: np.where(a == b, a, b), lambda a, b: np.zeros_like(a), lambda a, b: np.full_like(a, 7),
        lambda a, b: np.linalg.norm(a), lambda a, b: a.astype("complex64"), lambda a, b: np.multiply.outer(a, b),
        lambda a, b: np.ascontiguousarray(a.T) if isinstance(a, np.ndarray) else cp.ascontiguousarray(a.T),
    ):  # fmt: skip
        expected, found = np.asarray(operation(left, right)), operation(there_left, there_right)
        assert type(found) is cp.ndarray
        np.testing.assert_array_equal(found.get(), expected, strict=True)


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
