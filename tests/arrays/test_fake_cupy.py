"""The pretended GPUs: what goes wrong on a GPU now and then goes wrong on them every time."""

from __future__ import annotations

import copy
import gc
import pickle
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


def test_the_end_waits_for_late_events(gate: threading.Event) -> None:
    cp = fake_cupy.install()
    first, second = cp.cuda.Stream(non_blocking=True), cp.cuda.Stream(non_blocking=True)
    hold(first, gate)
    second.wait_event(first.record())
    threading.Timer(0.3, gate.set).start()
    fake_cupy.uninstall()


def test_ordinary_operations_are_work_of_the_current_stream(fake_gpus: Any, gate: threading.Event) -> None:
    cp = fake_gpus
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        array = cp.full(100, 3.0)
        other = array * 2  # sees what its own stream did
        stream.synchronize()
        hold(stream, gate)
        copied = cp.empty(100)
        copied.data.copy_from_device_async(other.data, other.nbytes)
    assert np.isnan(copied.get()).all()  # the default stream does not wait
    gate.set()
    stream.synchronize()
    np.testing.assert_array_equal(copied.get(), np.full(100, 6.0))


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


def test_a_wait_is_for_what_was_recorded_when_it_was_asked_for(fake_gpus: Any, gate: threading.Event) -> None:
    cp = fake_gpus
    first, second = cp.cuda.Stream(), cp.cuda.Stream()
    event = cp.cuda.Event(disable_timing=True)
    second.wait_event(event)  # never recorded: no wait
    event.record(first)
    second.wait_event(event)
    hold(first, gate)
    event.record(first)
    second.synchronize()
    assert second.done
    assert not event.done
    gate.set()
    event.synchronize()
    assert event.done


def test_events_and_streams_belong_to_devices(fake_gpus: Any) -> None:
    cp = fake_gpus
    event = cp.cuda.Event()
    with cp.cuda.Device(1):
        stream = cp.cuda.Stream()
        with pytest.raises(cp.cuda.runtime.CUDARuntimeError, match="InvalidResourceHandle"):
            event.record(stream)
    with pytest.raises(RuntimeError, match="does not match with the current device"), stream:
        pass
    with pytest.raises(cp.cuda.runtime.CUDARuntimeError, match="InvalidDevice"):
        cp.cuda.Device(2).use()


def test_an_error_of_a_job_surfaces_where_the_stream_is_looked_at(fake_gpus: Any) -> None:
    stream = fake_gpus.cuda.Stream()
    stream.launch_host_func(lambda number: 1 / number, 0)
    with pytest.raises(ZeroDivisionError):
        stream.synchronize()


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
def test_an_error_that_nobody_saw_is_raised_at_the_end() -> None:
    cp = fake_cupy.install(1)
    cp.cuda.Stream.null.launch_host_func(lambda number: 1 / number, 0)
    with pytest.raises(ZeroDivisionError):
        fake_cupy.uninstall()
    assert "cupy" not in sys.modules
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("fake stream")]


def test_a_stream_without_owners_ends(fake_gpus: Any) -> None:
    done = threading.Event()
    stream = fake_gpus.cuda.Stream()
    name = f"fake stream {stream.ptr:#x} of gpu:0"
    (thread,) = [thread for thread in threading.enumerate() if thread.name == name]
    stream.launch_host_func(lambda event: event.set(), done)
    del stream
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()
    assert done.is_set()


# Memory


def test_new_memory_is_not_a_number(fake_gpus: Any) -> None:
    numbers, integers = fake_gpus.empty(100), fake_gpus.empty(100, "int32")
    assert np.isnan(numbers.get()).all()
    assert (integers.get() == -1).all()


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


def test_memory_that_another_stream_still_reads_is_lost_with_its_array(fake_gpus: Any, gate: threading.Event) -> None:
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


def test_memory_is_kept_for_the_stream_that_asked_for_it(fake_gpus: Any, gate: threading.Event) -> None:
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


def test_freed_memory_is_split_for_smaller_requests_and_joined_again(fake_gpus: Any) -> None:
    cp = fake_gpus
    whole = cp.empty(4096, "u1")
    address = whole.data.ptr
    del whole
    parts = [cp.empty(size, "u1") for size in (1000, 512, 2500)]
    assert [part.data.ptr - address for part in parts] == [0, 1024, 1536]
    del parts[1]
    other = cp.empty(1024, "u1")
    assert not address <= other.data.ptr < address + 4096  # the gap is too small
    assert cp.empty(1, "u1").data.ptr == address + 1024
    parts.clear()
    assert cp.empty(4096, "u1").data.ptr == address
    total = cp.get_default_memory_pool().total_bytes()
    for size in (3000, 100, 600):
        cp.empty(size, "u1")
    assert cp.get_default_memory_pool().total_bytes() == total


def test_another_stream_takes_no_memory_of_this_one(fake_gpus: Any) -> None:
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


def test_pinned_memory_is_read_late_and_other_memory_at_once(fake_gpus: Any, gate: threading.Event) -> None:
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


def test_accesses_outside_of_an_array_are_errors(fake_gpus: Any) -> None:
    array = fake_gpus.zeros(100)
    with pytest.raises(RuntimeError, match="illegal access"):
        array.data.memset_async(0, 801)
    with pytest.raises(RuntimeError, match="illegal access"):
        (array[50:].data + 8).memset_async(0, 400)


def test_used_memory_is_counted(fake_gpus: Any) -> None:
    pool = fake_gpus.get_default_memory_pool()
    before = pool.used_bytes()
    array = fake_gpus.zeros(1000)
    assert pool.used_bytes() - before == 8192
    del array
    assert pool.used_bytes() == before


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


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "complex128"])
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


def test_arrays_are_changed_in_place(fake_gpus: Any) -> None:
    cp = fake_gpus
    array = cp.arange(6, dtype="float32").reshape(2, 3)
    view = array.ravel()
    address = array.data.ptr
    array += 1
    array[0] = 9
    np.copyto(array[1, :2], cp.zeros(2, "float32"))
    np.multiply(array, 2, out=array)
    array[:, 2] *= 10
    np.add.at(view, cp.array([0, 0]), 1)
    view[cp.array([1])] = 5
    assert array.data.ptr == address
    assert array.get().tolist() == [[20, 5, 180], [0, 0, 120]]
    assert view.get().tolist() == [20, 5, 180, 0, 0, 120]


def test_views_share_memory(fake_gpus: Any) -> None:
    array = fake_gpus.arange(12, dtype="int32").reshape(3, 4)
    for part in (array[1:], array.T, array[:, 1], array[::-1], array.view("uint8"), array.reshape(4, 3), array[None]):
        assert np.may_share_memory(part.host_view(), array.host_view())
        assert part.base is not None
    assert array.T.reshape(-1).get().tolist() == array.get().T.reshape(-1).tolist()
    assert np.transpose(array).data.ptr == array.data.ptr
    assert not hasattr(array.flags, "writeable")


def test_numbers_come_out(fake_gpus: Any) -> None:
    array = fake_gpus.asarray([1.5])
    assert (float(array[0]), int(array[0]), array.item(), bool(array)) == (1.5, 1, 1.5, True)
    assert array.sum().shape == ()
    with pytest.raises(ValueError, match="ambiguous"):
        bool(fake_gpus.ones(2))
    assert pickle.loads(pickle.dumps(array)).get().tolist() == [1.5]
    with pytest.raises(TypeError, match="unhashable"):
        hash(array)


def test_dtypes_that_cupy_lacks_are_refused(fake_gpus: Any) -> None:
    for dtype in ("O", "U3", "g", "M8[s]", ">f4"):
        with pytest.raises(ValueError, match="Unsupported dtype"):
            fake_gpus.empty(3, dtype)


def test_reductions_lack_the_keywords_that_cupys_lack(fake_gpus: Any) -> None:
    with pytest.raises(TypeError, match="initial"):
        np.sum(fake_gpus.ones(3), initial=1)


def test_functions_that_cupy_lacks_are_refused(fake_gpus: Any) -> None:
    with pytest.raises(TypeError, match="no implementation found"):
        np.setxor1d(fake_gpus.ones(3), fake_gpus.ones(3))


# The module


@pytest.mark.parametrize("fake_gpus", [{"devices": 3, "nccl": False}], indirect=True)
def test_the_fixture_takes_parameters(fake_gpus: Any) -> None:
    import cupy
    import cupy.cuda.nccl as nccl

    assert cupy is fake_gpus
    assert cupy.cuda.runtime.getDeviceCount() == 3
    assert not nccl.available
    with pytest.raises(RuntimeError, match="installed already"):
        fake_cupy.install()


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
