"""Import CuPy on demand, and manage CUDA streams, events, current devices and page-locked memory.

cudaSetDevice creates a context of hundreds of MiB, and fails on a GPU that another process uses exclusively. A new
thread has GPU 0 current without a context. A block that restores the previous device, like CuPy's, would therefore
create a context on GPU 0 for every rank. CurrentDevice avoids that, because querying the current device creates none.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections import deque
from contextlib import AbstractContextManager
from functools import cache, cached_property
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mpidist.arrays.dtypes import Array
from mpidist.core.concurrency import is_own_thread
from mpidist.core.errors import DeviceError
from mpidist.core.text import pip_install

if TYPE_CHECKING:
    import cupy

# Files of NVIDIA's driver: the control device, its folder, and the device in WSL.
_DRIVER_FILES = ("/dev/nvidiactl", "/proc/driver/nvidia", "/dev/dxg")
# Values of CUDA_VISIBLE_DEVICES that hide every GPU. Slurm sets the last one on nodes without GPUs.
_NO_DEVICES = ("", "-1", "NoDevFiles")


class CupyState(NamedTuple):
    """Describe the CuPy of this process. ``problem`` has the reason and fix if it cannot be used."""

    module: ModuleType | None
    problem: str
    is_installed: bool = True


@cache
def find_cupy() -> CupyState:
    """Import CuPy and query it for GPUs. The result is cached for the life of the process."""
    try:
        import cupy
    except ModuleNotFoundError as error:
        if error.name != "cupy":
            return CupyState(None, _broken(error))
        return CupyState(None, _missing(), is_installed=False)
    except ImportError as error:
        return CupyState(None, _broken(error))
    try:
        # Before version 14 CuPy could raise here. Any error means that no GPU is usable.
        usable = bool(cupy.cuda.is_available())
    except Exception as error:
        return CupyState(None, _no_gpu(cupy, error))
    if not usable:
        return CupyState(None, _no_gpu(cupy, _reason(cupy)))
    return CupyState(cupy, "")


def require_cupy() -> ModuleType:
    """Return the module ``cupy``, or raise DeviceError."""
    state = find_cupy()
    if state.module is None:
        raise DeviceError(state.problem)
    return state.module


def loaded_cupy() -> ModuleType | None:
    """Return CuPy if it is imported and usable, or None. Imports nothing."""
    if sys.modules.get("cupy") is None:
        return None
    return find_cupy().module


def gpus_may_be_present() -> bool:
    """Return True if an NVIDIA driver with visible GPUs exists. Does not import CuPy."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in _NO_DEVICES:
        return False
    return loaded_cupy() is not None or any(os.path.exists(path) for path in _DRIVER_FILES)


def _missing() -> str:
    seen = "" if gpus_may_be_present() else " This machine has no NVIDIA driver either."
    return (
        f"arrays on a GPU need CuPy, which is not installed; type: {pip_install('cuda13')}, or "
        f"use cuda12 for a driver of CUDA 12 (nvidia-smi shows the version).{seen}"
    )


def _broken(error: ImportError) -> str:
    return (
        f"CuPy is installed and does not load: {str(error).strip()}. Reinstall exactly one cupy-cuda package that fits "
        "this Python and NumPy (pip list | grep cupy lists them)"
    )


def _no_gpu(cupy: ModuleType, reason: Exception | str) -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    hidden = "" if visible is None else f" CUDA_VISIBLE_DEVICES is {visible!r}."
    return (
        f"CuPy {cupy.__version__} is installed and sees no GPU: {reason}.{hidden} It needs a driver at least as new as "
        "its CUDA. Compare `nvidia-smi` with `python -c 'import cupy; cupy.show_config()'`. Under Slurm request GPUs, "
        "for example with --gpus-per-task=1"
    )


def _reason(cupy: ModuleType) -> Exception | str:
    # is_available() does not return the reason.
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:
        return error
    return f"it counts {count}"


def load_driver() -> ctypes.CDLL:
    """Load the driver library, which CuPy has already loaded."""
    return ctypes.CDLL("libcuda.so.1")


# CU_STREAM_CAPTURE_MODE_RELAXED.
_RELAXED = 2


class _Thread(threading.local):
    has_begun = False


_thread = _Thread()


class CurrentDevice:
    """Switch the current GPU of a thread without creating contexts on other GPUs (thread-safe)."""

    def __init__(self, cupy: ModuleType) -> None:
        self._runtime = cupy.cuda.runtime
        self._with_context: set[int] = set()

    def on(self, device: int) -> _Block:
        """Return a context in which ``device`` is current. Enter it once."""
        return _Block(self, device)

    def enter(self, device: int) -> int:
        """Make ``device`` current, and return the device to restore."""
        is_first = is_own_thread() and not _thread.has_begun
        if is_first:
            # The calls of this thread could invalidate another thread's CUDA graph.
            self._call("cuThreadExchangeStreamCaptureMode", ctypes.byref(ctypes.c_int(_RELAXED)))
            _thread.has_begun = True
        before: int = self._runtime.getDevice()
        if before != device:
            self._runtime.setDevice(device)
        # In a new thread device 0 is a default, not the program's choice.
        return device if is_first and before == 0 else before

    def leave(self, before: int) -> None:
        """Restore the device ``before``, if this process has a context there."""
        if self._runtime.getDevice() != before and self.has_context(before):
            self._runtime.setDevice(before)

    def has_context(self, device: int) -> bool:
        """Return True if this process has a context on ``device``. Creates none."""
        if device not in self._with_context:
            handle, flags, is_active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
            self._call("cuDeviceGet", ctypes.byref(handle), device)
            self._call("cuDevicePrimaryCtxGetState", handle, ctypes.byref(flags), ctypes.byref(is_active))
            if not is_active.value:
                return False
            self._with_context.add(device)
        return True

    @cached_property
    def _driver(self) -> ctypes.CDLL:
        library = load_driver()
        _check("cuInit", library.cuInit(0))
        return library

    def _call(self, name: str, *arguments: object) -> None:
        """Call a function of the NVIDIA driver that CuPy does not expose."""
        _check(name, getattr(self._driver, name)(*arguments))


def _check(name: str, status: int) -> None:
    if status:
        raise DeviceError(f"{name} of the NVIDIA driver failed with status {status}. Check `nvidia-smi`")


class _Block:
    __slots__ = ("_before", "_current", "_device")

    def __init__(self, current: CurrentDevice, device: int) -> None:
        self._current, self._device = current, device

    def __enter__(self) -> None:
        self._before = self._current.enter(self._device)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._current.leave(self._before)


# Limit for copies in flight between the host and GPUs.
MOST_STAGED_BYTES = 32 << 20
_NOT_READY = 600  # cudaErrorNotReady, which CuPy does not define
# Errors of queries while a graph is recorded: cudaErrorStreamCaptureUnsupported, cudaErrorStreamCaptureInvalidated and
# cudaErrorCapturedEvent. Queries of the default stream return cudaErrorStreamCaptureImplicit.
_NOT_KNOWN, _CAPTURE_IMPLICIT = (900, 901, 907), 906


class Event:
    """Mark a point in a stream, with a CUDA event."""

    def __init__(self, stream: Stream, raw: cupy.cuda.Event) -> None:
        self._runtime = stream.cupy.cuda.runtime
        self._on_device = stream.on_device
        self.raw = raw

    @property
    def is_done(self) -> bool:
        """Return True if all work before the event is done. Raises CUDARuntimeError if the device failed."""
        # CuPy's Event.done hides errors and would stay False. While a graph is recorded CUDA rejects the query.
        with self._on_device():
            status = int(self._runtime.eventQuery(self.raw.ptr))
        if status == _NOT_READY or status in _NOT_KNOWN:
            return False
        if status:
            raise self._runtime.CUDARuntimeError(status)
        return True

    def synchronize(self) -> None:
        """Block until all work before the event is done. Other Python threads run."""
        with self._on_device():
            self.raw.synchronize()


class Stream:
    """Bind a CUDA stream to its device, for any thread. CuPy's default stream has no device.

    ``with stream:`` makes the stream and its device current in this thread.
    """

    def __init__(self, cupy: ModuleType, current: CurrentDevice, device: int, raw: cupy.cuda.Stream) -> None:
        self.cupy = cupy
        self.device = device
        self._current = current
        self.raw = raw
        self._entered = threading.local()

    def on_device(self) -> AbstractContextManager[None]:
        """Return a context in which its device is current."""
        return self._current.on(self.device)

    @property
    def handle(self) -> int:
        """Return the cudaStream_t as a number."""
        return int(self.raw.ptr)

    @property
    def is_capturing(self) -> bool:
        """Return True if work on this stream would join or invalidate a CUDA graph."""
        runtime = self.cupy.cuda.runtime
        with self.on_device():
            try:
                return bool(runtime.streamIsCapturing(self.raw.ptr))
            except runtime.CUDARuntimeError as error:
                if error.status == _CAPTURE_IMPLICIT:
                    return True
                raise

    def record(self, *, blocks: bool = False) -> Event:
        """Return an event after all work so far. Waiting for an event that ``blocks`` sleeps."""
        # An event is created on the current device, which must be the device of its stream.
        with self.on_device():
            event = self.cupy.cuda.Event(block=blocks, disable_timing=True)
            event.record(self.raw)
        return Event(self, event)

    def wait(self, event: Event) -> None:
        """Order later work after ``event``, of any device."""
        with self.on_device():
            self.raw.wait_event(event.raw)

    def synchronize(self) -> None:
        """Block until all work is done."""
        with self.on_device():
            self.raw.synchronize()

    def __enter__(self) -> Stream:
        # CuPy rejects a stream if its device is not current.
        device = self._current.enter(self.device)
        before = self.cupy.cuda.get_current_stream()
        try:
            self.raw.use()
        except BaseException:
            self._current.leave(device)
            raise
        self._entered.__dict__.setdefault("stack", []).append((device, before))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        device, before = self._entered.stack.pop()
        # CuPy's own block would restore the enclosing block's stream, and undo a use() of the program.
        before.use()
        self._current.leave(device)


class Staging:
    """Allocate pinned memory, and keep it while a GPU may use it.

    CuPy's pool would reuse it at once. It never frees pinned memory, so the bytes in flight are limited.
    """

    def __init__(self, cupy: ModuleType) -> None:
        self._cupy = cupy
        self._lock = threading.Lock()
        self._items: deque[tuple[Event, Array]] = deque()

    def pinned(self, nbytes: int) -> Array:
        """Return pinned memory as an array of uint8."""
        if nbytes == 0:
            return np.empty(0, np.uint8)
        return np.frombuffer(self._cupy.cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)

    def room(self, nbytes: int) -> Array:
        """Return pinned memory after enough earlier copies are done."""
        while (oldest := self._oldest(nbytes)) is not None:
            oldest[0].synchronize()
        return self.pinned(nbytes)

    def _oldest(self, nbytes: int) -> tuple[Event, Array] | None:
        """Pop and return the oldest copy if ``nbytes`` exceed the limit, and drop finished copies."""
        with self._lock:
            while self._items and self._items[0][0].is_done:
                self._items.popleft()
            if sum(memory.nbytes for _, memory in self._items) + nbytes <= MOST_STAGED_BYTES or not self._items:
                return None
            return self._items.popleft()

    def keep(self, event: Event, memory: Array) -> None:
        """Keep ``memory`` until ``event`` is done."""
        with self._lock:
            self._items.append((event, memory))
