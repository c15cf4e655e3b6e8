"""The functions of CUDA's driver library (libcuda.so.1) that mpidist calls, with arguments as ctypes takes them."""

from __future__ import annotations

import ctypes
from typing import Any

from tests.support.fake_cupy.devices import SUCCESS, machine

_INVALID_DEVICE = 101


class Library:
    """What ``ctypes.CDLL("libcuda.so.1")`` is."""

    def cuInit(self, flags: int) -> int:  # noqa: N802
        assert flags == 0
        return SUCCESS

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:  # noqa: N802
        if not 0 <= ordinal < machine().devices:
            return _INVALID_DEVICE
        _pointed(device, ctypes.c_int).value = ordinal
        return SUCCESS

    def cuDevicePrimaryCtxGetState(self, device: Any, flags: Any, active: Any) -> int:  # noqa: N802
        assert isinstance(device, ctypes.c_int)
        _pointed(flags, ctypes.c_uint).value = 0
        _pointed(active, ctypes.c_int).value = int(device.value in machine().contexts.devices)
        return SUCCESS

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:  # noqa: N802
        pointed = _pointed(mode, ctypes.c_int)
        pointed.value = machine().captures.exchange_mode(pointed.value)
        return SUCCESS


def _pointed(argument: Any, kind: type) -> Any:
    """Return what ``byref`` was given."""
    assert type(argument._obj) is kind, f"a pointer to {type(argument._obj).__name__}; expected one to {kind.__name__}"
    return argument._obj
