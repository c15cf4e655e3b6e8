"""The GPU that is current in each thread, without contexts on GPUs of other processes.

cudaSetDevice makes a context, of hundreds of MiB, and fails on a GPU that is another process's alone. A new thread has
GPU 0 current without a context there, so a block that goes back to the device before, as CuPy's does, would make one
on GPU 0 for every rank. Asking which is current makes none.
"""

from __future__ import annotations

import threading
from types import ModuleType, TracebackType

from mpidist.arrays.cuda_driver import CudaDriver
from mpidist.core.concurrency import is_own_thread


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
