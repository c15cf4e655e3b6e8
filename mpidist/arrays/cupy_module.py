"""Import CuPy where it is asked for, and explain why it cannot be used."""

from __future__ import annotations

import os
import sys
from functools import cache
from types import ModuleType
from typing import NamedTuple

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
