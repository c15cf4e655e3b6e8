"""Streams, events and devices as a program sees them, and which stream is current in a thread."""

from __future__ import annotations

import itertools
import threading
import warnings
import weakref
from collections.abc import Callable
from operator import index
from typing import Any

from tests.support.fake_cupy.captures import CAPTURED_EVENT, RELAXED
from tests.support.fake_cupy.devices import (
    NOT_READY,
    SUCCESS,
    Worker,
    check_status,
    cuda_error,
    current_device,
    machine,
    on_device,
    set_device,
    touch,
)

_LOOK_SECONDS = 0.05
# Of GPUs from Volta on; lower numbers are higher.
HIGHEST_PRIORITY = -5
_event_numbers = itertools.count(0x7E0000001000, 0x10)


class Device:
    """``cupy.cuda.Device``."""

    def __init__(self, device: Any = None) -> None:
        self.id = current_device() if device is None else int(device)

    def __int__(self) -> int:
        return self.id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Device) and self.id == other.id

    def __hash__(self) -> int:
        return hash(self.id)

    def __repr__(self) -> str:
        return f"<CUDA Device {self.id}>"

    def __enter__(self) -> Device:
        stack = machine().local.__dict__.setdefault("devices", [])
        stack.append(current_device())
        if self.id != stack[-1]:
            set_device(self.id)
        return self

    def __exit__(self, *args: object) -> None:
        set_device(machine().local.devices.pop())

    def use(self) -> Device:
        set_device(self.id)
        return self

    def synchronize(self) -> None:
        machine().counts.add("synchronizations")
        with on_device(self.id):
            for worker in list(machine().workers.values()):
                if worker.device == self.id:
                    worker.drain()

    @property
    def pci_bus_id(self) -> str:
        return f"0000:{self.id + 1:02X}:00.0"

    @property
    def compute_capability(self) -> str:
        return "90"

    @property
    def mem_info(self) -> tuple[int, int]:
        return (1 << 34, 1 << 34)

    @property
    def attributes(self) -> dict[str, int]:
        return {"MultiProcessorCount": 4, "WarpSize": 32, "MaxThreadsPerBlock": 1024}


class Event:
    """``cupy.cuda.Event``."""

    def __init__(self, block: bool = False, disable_timing: bool = False, interprocess: bool = False) -> None:
        touch()
        self._device = current_device()
        self._blocks = block
        self._happened: threading.Event | None = None
        self._is_captured = False
        self.ptr = next(_event_numbers)
        machine().events[self.ptr] = self

    @property
    def done(self) -> bool:
        return event_query(self.ptr) == SUCCESS

    def record(self, stream: Any = None) -> None:
        worker = _worker_of(get_current_stream() if stream is None else stream)
        if worker.device != self._device:
            raise cuda_error(400, f"event of gpu:{self._device}, stream of gpu:{worker.device}")
        worker.raise_error()
        self._is_captured = worker.machine.captures.has(worker.handle)
        happened = self._happened = threading.Event()

        def job() -> None:  # not happened.set itself: an event may be late
            happened.set()

        worker.enqueue(job)

    def synchronize(self) -> None:
        touch()
        machine().counts.add("synchronizations")
        if not self._blocks:
            machine().counts.add("spins")
        self.capture()()

    def capture(self) -> Callable[[], None]:
        """Return a wait for what has been recorded until now; a later record does not move it."""
        happened, device = self._happened, self._device

        def wait() -> None:
            here = machine()
            while not (happened is None or happened.wait(_LOOK_SECONDS)):
                if here.closed:
                    raise RuntimeError("somebody waits for an event that never happens")
                _raise_failure(device)
            _raise_failure(device)

        return wait


class BaseStream:
    """``cupy.cuda.stream._BaseStream``."""

    _priority = 0

    def __init__(self, ptr: int, device_id: int) -> None:
        self.ptr = ptr
        self.device_id = device_id

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BaseStream) and self.ptr == other.ptr

    def __hash__(self) -> int:
        return self.ptr

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.ptr} (device {self.device_id})>"

    def __enter__(self) -> BaseStream:
        stacks = machine().local.__dict__.setdefault("streams", [])
        device = self._check_device()
        stacks.append((device, get_current_stream(device)))
        _current_streams()[device] = self
        return self

    def __exit__(self, *args: object) -> None:
        device, stream = machine().local.streams.pop()
        _current_streams()[device] = stream

    def use(self) -> BaseStream:
        _current_streams()[self._check_device()] = self
        return self

    def _check_device(self) -> int:
        current = current_device()
        if self.device_id not in (-1, current):
            raise RuntimeError(
                f"The device that the stream is created on ({self.device_id}) does not match with the current "
                f"device ({current})"
            )
        return current

    @property
    def done(self) -> bool:
        worker = _worker_of(self)
        return worker.is_idle and worker.device not in machine().failures

    def synchronize(self) -> None:
        stream_synchronize(self.ptr)

    def launch_host_func(self, callback: Callable[[Any], None], arg: Any) -> None:
        _worker_of(self).enqueue(lambda: callback(arg))

    def record(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    @property
    def priority(self) -> int:
        return self._priority

    def wait_event(self, event: Event) -> None:
        _worker_of(self).enqueue(event.capture())

    def begin_capture(self, mode: int | None = None) -> None:
        if self.ptr in (0, 1):
            raise RuntimeError("cannot capture on the default (legacy) stream")
        machine().captures.begin(self.ptr, RELAXED if mode is None else mode)

    def end_capture(self) -> None:
        check_status(machine().captures.end(self.ptr))

    def is_capturing(self) -> bool:
        return stream_is_capturing(self.ptr)

    @property
    def is_non_blocking(self) -> bool:
        return bool(self.ptr)


class Stream(BaseStream):
    """``cupy.cuda.Stream``; every one is non-blocking, the default one as well."""

    null: Stream
    ptds: Stream

    def __init__(
        self, null: bool = False, non_blocking: bool = False, ptds: bool = False, priority: int | None = None
    ) -> None:
        if null or ptds:
            super().__init__(0 if null else 2, -1)
        else:
            touch()
            # CUDA takes the nearest priority that the device has.
            self._priority = min(max(index(0 if priority is None else priority), HIGHEST_PRIORITY), 0)
            worker = machine().new_worker(current_device())
            super().__init__(worker.handle, worker.device)
            weakref.finalize(self, worker.stop).atexit = False


Stream.null = Stream(null=True)
Stream.ptds = Stream(ptds=True)


class ExternalStream(BaseStream):
    """``cupy.cuda.ExternalStream``."""

    def __init__(self, ptr: int, device_id: int = -1) -> None:
        warnings.warn("ExternalStream is deprecated. Use Stream.from_external()", DeprecationWarning, stacklevel=2)
        super().__init__(ptr, device_id)


def get_current_stream(device_id: int = -1) -> Any:
    """``cupy.cuda.get_current_stream``."""
    device = current_device() if device_id == -1 else device_id
    return _current_streams().get(device, Stream.ptds if machine().ptds else Stream.null)


def current_worker() -> Worker:
    """Return the stream that is current in this thread on the current device."""
    return _worker_of(get_current_stream())


def _current_streams() -> dict[int, Any]:
    streams: dict[int, Any] = machine().local.__dict__.setdefault("current", {})
    return streams


def worker_of(stream: Any) -> Worker:
    """Return the thread of a stream; None is the current one."""
    return current_worker() if stream is None else _worker_of(stream)


def _worker_of(stream: Any) -> Worker:
    touch()
    return machine().worker(stream.ptr)


def stream_synchronize(stream: int) -> None:
    """``cupy.cuda.runtime.streamSynchronize``."""
    touch()
    machine().counts.add("synchronizations")
    machine().worker(stream).drain()


def stream_is_capturing(stream: int) -> bool:
    """``cupy.cuda.runtime.streamIsCapturing``."""
    touch()
    return machine().captures.has(stream)


def event_query(event: int) -> int:
    """``cupy.cuda.runtime.eventQuery``: a status, which is an error from the moment on when the device has failed."""
    touch()
    known = machine().events[event]
    if known._is_captured:
        return CAPTURED_EVENT
    hindered = machine().captures.try_unsafe()
    if hindered:
        return hindered
    failure = machine().failures.get(known._device)
    if failure is not None:
        failure.was_seen = True
        return failure.status
    return SUCCESS if known._happened is None or known._happened.is_set() else NOT_READY


def _raise_failure(device: int) -> None:
    failure = machine().failures.get(device)
    if failure is not None:
        failure.raise_it()
