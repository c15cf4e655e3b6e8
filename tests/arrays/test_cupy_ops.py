"""What CuPy leaves to its caller: the order between streams, devices that are not current, memory that is in use."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from mpidist.arrays import cupy_ops, streams
from mpidist.arrays.cupy_ops import CupyOps
from mpidist.arrays.device_ops import ops_for
from mpidist.core.errors import DeviceError
from tests.support import fake_cupy
from tests.support.fake_cupy.devices import machine

pytestmark = pytest.mark.one_rank

FLOAT = np.dtype("float32")


class Gate:
    """Holds a stream until it is opened."""

    def __init__(self) -> None:
        self._open = threading.Event()

    def hold(self, stream: Any) -> None:
        with stream:  # the default stream is that of the current device
            stream.raw.launch_host_func(lambda gate: gate.wait(30), self._open)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def ops(fake_gpus: Any) -> CupyOps:
    fake_gpus.cuda.Device(0).use()
    made = ops_for("gpu")
    assert isinstance(made, CupyOps)
    return made


@pytest.fixture
def gate(fake_gpus: Any) -> Iterator[Gate]:
    made = Gate()
    yield made
    made.open()


def test_stream_and_device_are_current_together(fake_gpus: Any, ops: CupyOps) -> None:
    stream = ops.stream(1)
    assert fake_gpus.cuda.runtime.getDevice() == 0
    with stream:
        assert fake_gpus.cuda.runtime.getDevice() == 1
        assert fake_gpus.cuda.get_current_stream().ptr == stream.handle != 0
        with ops.stream(0):
            assert fake_gpus.cuda.runtime.getDevice() == 0
        assert fake_gpus.cuda.runtime.getDevice() == 1
    assert fake_gpus.cuda.runtime.getDevice() == 0
    assert fake_gpus.cuda.get_current_stream(1).ptr == 0


def test_failed_stream_restores_the_device(fake_gpus: Any, ops: CupyOps) -> None:
    class Refused:
        ptr = 0

        def use(self) -> None:
            raise RuntimeError("refused")

    stream = ops.stream(1)
    stream.raw = Refused()
    with pytest.raises(RuntimeError, match="refused"), stream:
        pass
    assert fake_gpus.cuda.runtime.getDevice() == 0


@pytest.mark.parametrize("fake_gpus", [{"ptds": True}, {"ptds": False}], indirect=True, ids=["setting", "use"])
def test_per_thread_default_stream_raises(fake_gpus: Any, ops: CupyOps) -> None:
    if not machine().ptds:
        fake_gpus.cuda.Stream.ptds.use()
    expected = (
        r"current stream of gpu:0 is .* which differs in mpidist's threads.*unset CUPY_CUDA_PER_THREAD_DEFAULT_STREAM"
    )
    with pytest.raises(DeviceError, match=expected):
        ops.current_stream(0)
    fake_gpus.cuda.Stream(non_blocking=True).use()
    assert ops.current_stream(0).handle > 2


def test_used_stream_stays_current(fake_gpus: Any, ops: CupyOps) -> None:
    own, ours = fake_gpus.cuda.Stream(non_blocking=True), ops.stream(0)
    own.use()
    with ours, ours:
        assert fake_gpus.cuda.get_current_stream().ptr == ours.handle
    assert fake_gpus.cuda.get_current_stream().ptr == own.ptr


def test_streams_of_other_libraries_by_number(fake_gpus: Any, ops: CupyOps) -> None:
    theirs = ops.stream(1)
    known = ops.stream_of_others(1, theirs.handle)
    assert known is ops.stream_of_others(1, theirs.handle)
    with known:
        assert fake_gpus.cuda.get_current_stream(1).ptr == theirs.handle
        assert fake_gpus.cuda.Device().id == 1
    with ops.stream_of_others(1, 0):
        assert ops.current_stream(1).handle == 0


def test_event_waits_for_earlier_work(ops: CupyOps, gate: Gate) -> None:
    stream = ops.stream(1)
    gate.hold(stream)
    event = stream.record()
    assert not event.is_done
    gate.open()
    event.synchronize()
    assert event.is_done


def test_an_event_of_a_failed_device_raises(fake_gpus: Any, ops: CupyOps) -> None:
    runtime = fake_gpus.cuda.runtime

    def fail(_: None) -> None:
        raise runtime.CUDARuntimeError(700)

    stream = ops.stream(1)
    with stream:
        stream.raw.launch_host_func(fail, None)
    with pytest.raises(runtime.CUDARuntimeError, match="cudaErrorIllegalAddress"):
        stream.synchronize()
    with pytest.raises(runtime.CUDARuntimeError, match="cudaErrorIllegalAddress"):
        stream.record()
    event = ops.stream(0).record()
    event.synchronize()
    assert event.is_done


def test_event_before_a_failure_raises(fake_gpus: Any, ops: CupyOps, gate: Gate) -> None:
    def fail(_: None) -> None:
        raise fake_gpus.cuda.runtime.CUDARuntimeError(700)

    stream, other = ops.stream(0), ops.stream(0)
    event = stream.record()
    event.synchronize()
    assert event.is_done
    other.raw.launch_host_func(fail, None)
    with pytest.raises(fake_gpus.cuda.runtime.CUDARuntimeError):
        other.synchronize()
    with pytest.raises(fake_gpus.cuda.runtime.CUDARuntimeError, match="an illegal memory access was encountered"):
        event.is_done


def test_stream_waits_for_another_devices_event(ops: CupyOps, gate: Gate) -> None:
    first, second = ops.stream(0), ops.stream(1)
    gate.hold(first)
    second.wait(first.record())
    event = second.record()
    assert not event.is_done
    gate.open()
    second.synchronize()
    assert event.is_done


def test_pinned_source_may_change_after_the_call(ops: CupyOps, gate: Gate) -> None:
    pinned = ops.pinned(400).view(FLOAT)
    pinned[:] = 5
    gate.hold(ops.current_stream(1))
    array = ops.from_host(pinned, 1)
    pinned[:] = -1
    gate.open()
    np.testing.assert_array_equal(ops.to_host(array), np.full(100, 5, FLOAT))


def test_staging_is_kept_until_the_gpu_read_it(ops: CupyOps, gate: Gate) -> None:
    gate.hold(ops.current_stream(0))
    arrays = [ops.from_host(np.full(100, number, FLOAT), 0) for number in range(5)]
    gate.open()
    for number, array in enumerate(arrays):
        np.testing.assert_array_equal(ops.to_host(array), np.full(100, number, FLOAT))
    ops.from_host(np.zeros(1, FLOAT), 0)
    ops.current_stream(0).synchronize()
    ops.from_host(np.zeros(1, FLOAT), 0)
    assert len(ops._staging._items) <= 1


def test_large_arrays_pin_little_memory(fake_gpus: Any, ops: CupyOps) -> None:
    for mebibytes in (9, 17, 33):
        value = np.arange(mebibytes << 18, dtype=np.int32)
        np.testing.assert_array_equal(ops.to_host(ops.from_host(value, 0)), value)
    sizes = [block.nbytes for block in machine().pinned._blocks]
    assert max(sizes) == 4 << 20
    # The pool keeps what it pinned for each size apart: that of the pieces, and that of the ends of the arrays.
    assert all(size * sizes.count(size) <= 32 << 20 for size in sizes)


def test_arrays_wait_for_earlier_arrays_to_arrive(fake_gpus: Any, ops: CupyOps, gate: Gate) -> None:
    def open_when_the_host_waits() -> None:
        give_up = time.monotonic() + 30.0
        while not fake_cupy.counts().synchronizations and time.monotonic() < give_up:
            time.sleep(0.01)
        gate.open()

    opening = threading.Thread(target=open_when_the_host_waits)
    fake_cupy.counts().clear()
    gate.hold(ops.current_stream(0))
    opening.start()
    arrays = [ops.from_host(np.full(1 << 20, number, np.int32), 0) for number in range(12)]
    assert fake_cupy.counts().synchronizations > 0
    assert fake_cupy.counts().spins == 0
    assert [int(ops.to_host(array).max()) for array in arrays] == list(range(12))
    assert sum(block.nbytes for block in machine().pinned._blocks) <= 32 << 20
    opening.join()


@pytest.mark.parametrize("fake_gpus", [{"jitter": 0.001}], indirect=True)
def test_copies_to_the_host_pin_little_memory(fake_gpus: Any, ops: CupyOps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cupy_ops, "_PIECE_BYTES", 512)
    for module in (cupy_ops, streams):
        monkeypatch.setattr(module, "MOST_STAGED_BYTES", 2048)
    monkeypatch.setattr(fake_gpus.ndarray, "get", lambda *_: pytest.fail("a copy to pageable memory"))
    values = [np.arange(5000, dtype="f4").reshape(50, 100).T, np.float64(3), np.zeros((0, 2), "i2"), np.ones(300, "f2")]
    fake_cupy.counts().clear()
    with fake_gpus.cuda.Device(1):
        arrays = [fake_gpus.asarray(value) for value in values]
    for copy, value in zip(ops.all_to_host(arrays), values, strict=True):
        assert (copy.shape, copy.dtype) == (value.shape, value.dtype)
        np.testing.assert_array_equal(copy, value)
    np.testing.assert_array_equal(ops.to_host(arrays[0]), values[0])
    assert fake_cupy.counts().pinned_allocations <= 8


def test_copy_waits_for_the_target_device(fake_gpus: Any, ops: CupyOps, gate: Gate) -> None:
    array = ops.zeros((100,), FLOAT, 0)
    late = ops.pinned(400)
    late.view(FLOAT)[:] = 3
    gate.hold(ops.current_stream(0))
    ops.copy_to_device(array, late, ops.current_stream(0))
    copy = ops.copy(array, 1)
    gate.open()
    np.testing.assert_array_equal(ops.to_host(copy), np.full(100, 3, FLOAT))


def test_copied_source_may_be_overwritten(fake_gpus: Any, ops: CupyOps, gate: Gate) -> None:
    array = ops.from_host(np.full(100, 3, FLOAT), 0)
    other = ops.pinned(400)
    other.view(FLOAT)[:] = -1
    gate.hold(ops.current_stream(1))
    copy = ops.copy(array, 1)
    ops.copy_to_device(array, other, ops.current_stream(0))
    gate.open()
    np.testing.assert_array_equal(ops.to_host(copy), np.full(100, 3, FLOAT))


def test_copied_source_may_be_dropped(fake_gpus: Any, ops: CupyOps, gate: Gate) -> None:
    array = ops.from_host(np.arange(200, dtype=FLOAT).reshape(10, 20), 0)
    gate.hold(ops.current_stream(1))
    with ops.on(0):
        copy = ops.copy(array.T, 1)
    del array
    gate.open()
    np.testing.assert_array_equal(ops.to_host(copy), np.arange(200, dtype=FLOAT).reshape(10, 20).T)


def test_reading_waits_for_the_arrays_stream(fake_gpus: Any, ops: CupyOps, gate: Gate) -> None:
    array = ops.zeros((100,), FLOAT, 1)
    ops.current_stream(1).synchronize()
    stream = ops.stream(1)
    late = ops.pinned(400)
    late.view(FLOAT)[:] = 4
    gate.hold(stream)
    ops.copy_to_device(array, late, stream)
    opening = threading.Timer(0.2, gate.open)
    opening.start()
    with stream, ops.on(0):
        np.testing.assert_array_equal(ops.to_host(array), np.full(100, 4, FLOAT))
    opening.join()


def test_copies_while_another_device_is_current(fake_gpus: Any, ops: CupyOps) -> None:
    array = ops.from_host(np.arange(100, dtype=FLOAT), 1)
    for stream in (ops.stream(1), ops.current_stream(1)):
        stream.wait(ops.current_stream(1).record())
        host = ops.pinned(400)
        ops.copy_to_host(host, array, stream)
        stream.synchronize()
        np.testing.assert_array_equal(host.view(FLOAT), np.arange(100, dtype=FLOAT))


def test_threads_have_their_own_device_and_stream(fake_gpus: Any, ops: CupyOps) -> None:
    seen = []

    def look() -> None:
        seen.append((fake_gpus.cuda.runtime.getDevice(), ops.current_stream(1).handle))

    with ops.stream(1):
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
    assert seen == [(0, 0)]
