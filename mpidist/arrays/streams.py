"""Streams and events, and the page-locked memory that they read and write.

The streams of the CPU are the base of a device's.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections import deque
from functools import cache, cached_property
from types import ModuleType, TracebackType
from typing import NamedTuple

import numpy as np

from mpidist.arrays.dtypes import Array
from mpidist.core.concurrency import is_own_thread
from mpidist.core.errors import DeviceError
from mpidist.core.text import pip_install

# What NVIDIA's driver puts into a Linux machine: the control device, its folder, and the device of WSL.
_DRIVER_FILES = ("/dev/nvidiactl", "/proc/driver/nvidia", "/dev/dxg")
# Values of CUDA_VISIBLE_DEVICES that hide every GPU; Slurm sets the last one on nodes without.
_NO_DEVICES = ("", "-1", "NoDevFiles")


class CupyState(NamedTuple):
    """The CuPy of this process, or the reason why it cannot be used.

    Args:
        module: The module ``cupy``; None where it cannot be used.
        problem: The reason and the command that helps; empty where CuPy can be used.
        is_installed: Whether there is one.
    """

    module: ModuleType | None
    problem: str
    is_installed: bool = True


@cache
def find_cupy() -> CupyState:
    """Import CuPy and ask it for GPUs. The answer is kept for the life of the process."""
    try:
        import cupy
    except ModuleNotFoundError as error:
        if error.name != "cupy":
            return CupyState(None, _broken(error))
        return CupyState(None, _missing(), is_installed=False)
    except ImportError as error:
        return CupyState(None, _broken(error))
    try:
        # Before version 14 CuPy could raise here; anything it raises means that there is nothing to compute on.
        usable = bool(cupy.cuda.is_available())
    except Exception as error:
        return CupyState(None, _no_gpu(cupy, error))
    if not usable:
        return CupyState(None, _no_gpu(cupy, _reason(cupy)))
    return CupyState(cupy, "")


def require_cupy() -> ModuleType:
    """Return the module ``cupy``.

    Raises:
        DeviceError: It cannot be used in this process.
    """
    state = find_cupy()
    if state.module is None:
        raise DeviceError(state.problem)
    return state.module


def loaded_cupy() -> ModuleType | None:
    """Return CuPy where something has imported it already and it can be used. Imports nothing."""
    if sys.modules.get("cupy") is None:
        return None
    return find_cupy().module


def gpus_may_be_present() -> bool:
    """Return whether there is an NVIDIA driver whose GPUs this process may see.

    Does not import CuPy.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in _NO_DEVICES:
        return False
    return loaded_cupy() is not None or any(os.path.exists(path) for path in _DRIVER_FILES)


def _missing() -> str:
    seen = "" if gpus_may_be_present() else " This machine shows no NVIDIA driver, either."
    return (
        f"arrays on a GPU need CuPy, which is not installed; type: {pip_install('cuda13')}, or "
        f"cuda12 in its place for a driver of CUDA 12 (nvidia-smi shows which).{seen}"
    )


def _broken(error: ImportError) -> str:
    return (
        f"CuPy is installed and does not load; reinstall one cupy-cuda package that fits this Python and NumPy "
        f"(pip list | grep cupy shows what is there). Its error: {str(error).strip()}"
    )


def _no_gpu(cupy: ModuleType, reason: Exception | str) -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    hidden = "" if visible is None else f" CUDA_VISIBLE_DEVICES is {visible!r}."
    return (
        f"CuPy {cupy.__version__} is installed and sees no GPU: {reason}.{hidden} Expected: a GPU and a driver at "
        "least as new as CuPy's CUDA, which `nvidia-smi` and `python -c 'import cupy; cupy.show_config()'` show; "
        "under Slurm ask for GPUs, for example with --gpus-per-task=1"
    )


def _reason(cupy: ModuleType) -> Exception | str:
    # is_available() keeps the reason to itself.
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except Exception as error:
        return error
    return f"it counts {count}"


def load_driver() -> ctypes.CDLL:
    """Return the library, which CuPy has loaded already where it sees a GPU."""
    return ctypes.CDLL("libcuda.so.1")


# CU_STREAM_CAPTURE_MODE_RELAXED.
_RELAXED = 2


class CudaDriver:
    """The driver's library; any thread may call."""

    def __init__(self) -> None:
        self._with_context: set[int] = set()

    @cached_property
    def _library(self) -> ctypes.CDLL:
        library = load_driver()
        _check("cuInit", library.cuInit(0))
        return library

    def has_context(self, device: int) -> bool:
        """Return whether this process has a context on CuPy's device ``device``; makes none."""
        if device not in self._with_context:
            handle, flags, is_active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
            library = self._library
            _check("cuDeviceGet", library.cuDeviceGet(ctypes.byref(handle), device))
            status = library.cuDevicePrimaryCtxGetState(handle, ctypes.byref(flags), ctypes.byref(is_active))
            _check("cuDevicePrimaryCtxGetState", status)
            if not is_active.value:
                return False
            self._with_context.add(device)
        return True

    def relax_capture_mode(self) -> None:
        """Relax the capture mode of this thread.

        Calls that would fail, and spoil the graph, while another thread records a CUDA graph are then allowed.
        """
        mode = ctypes.c_int(_RELAXED)
        status = self._library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        _check("cuThreadExchangeStreamCaptureMode", status)


def _check(name: str, status: int) -> None:
    if status:
        raise DeviceError(f"{name} of the NVIDIA driver failed with status {status}; look at what `nvidia-smi` says")


class _Thread(threading.local):
    """Flags of this thread: started by mpidist, has used a GPU."""

    has_begun = False


_thread = _Thread()


class CurrentDevice:
    """The GPU that is current, in each thread.

    Args:
        cupy: The module, which sees a GPU.
    """

    def __init__(self, cupy: ModuleType) -> None:
        self._runtime = cupy.cuda.runtime
        self._driver = CudaDriver()

    def on(self, device: int) -> _Block:
        """Return a block in which ``device`` is current; to be entered once.

        The device before is current again afterwards, if this process has a context there.
        """
        return _Block(self, device)

    def enter(self, device: int) -> int:
        """Make ``device`` current, and return the device to go back to."""
        is_first = is_own_thread() and not _thread.has_begun
        if is_first:
            self._driver.relax_capture_mode()
            _thread.has_begun = True
        before: int = self._runtime.getDevice()
        if before != device:
            self._runtime.setDevice(device)
        # In a new thread nobody has chosen 0.
        return device if is_first and before == 0 else before

    def leave(self, before: int) -> None:
        """Go back to the device ``before``."""
        if self._runtime.getDevice() != before and self._driver.has_context(before):
            self._runtime.setDevice(before)


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


# Of copies between the host and GPUs that are on their way at a time.
MOST_STAGED_BYTES = 32 << 20


class Event:
    """A point in a stream; on the CPU it has passed."""

    @property
    def is_done(self) -> bool:
        """Whether everything before the point has happened; never waits. Raises where the device has failed."""
        return True

    def synchronize(self) -> None:
        """Block the calling thread until everything before the point has happened."""


class Stream:
    """Work that a device does in the order given; ``with stream:`` makes it current.

    The one stream of the CPU has never anything left to do.

    Attributes:
        device: The number of the device.
        raw: The stream of CuPy; None for the CPU.
    """

    device: int = 0
    raw: object = None

    @property
    def handle(self) -> int:
        """The number by which NCCL knows the stream."""
        return 0

    @property
    def is_capturing(self) -> bool:
        """Whether the stream records its work as a CUDA graph, or would spoil one."""
        return False

    def record(self, *, blocks: bool = False) -> Event:
        """Return an event after all work given so far.

        A thread sleeps while it waits for an event that ``blocks``.
        """
        return Event()

    def wait(self, event: Event) -> None:
        """Let later work wait for ``event``, of any device.

        Only on the CPU the caller waits.
        """
        event.synchronize()

    def synchronize(self) -> None:
        """Block the calling thread until everything has happened."""

    def __enter__(self) -> object:
        """Make the stream and its device current in this thread."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Return to the stream and device that were current before."""


class Staging:
    """Pinned memory that a GPU may still be reading or writing.

    CuPy's pool would hand it out again without looking. Memory that is pinned stays with the pool for good, so there is
    a limit to the bytes on their way at a time.

    Args:
        cupy: The module.
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
        """Return pinned memory, once enough earlier copies have arrived."""
        oldest = self._oldest(nbytes)
        while oldest is not None:
            oldest[0].synchronize()
            oldest = self._oldest(nbytes)
        return self.pinned(nbytes)

    def _oldest(self, nbytes: int) -> tuple[Event, Array] | None:
        """Return the oldest copy that has to arrive before ``nbytes`` are sent, or None.

        Lets go of those that have arrived.
        """
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
