"""Calls of the NVIDIA driver's own library, for which CuPy has no name."""

from __future__ import annotations

import ctypes
from functools import cached_property

from mpidist.core.errors import DeviceError


def load() -> ctypes.CDLL:
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
        library = load()
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
