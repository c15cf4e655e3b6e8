"""The NCCL library of this process: its state and its errors."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Protocol

from mpidist.arrays.cupy_module import find_cupy, require_cupy
from mpidist.core.errors import NcclFailure

IN_PROGRESS = 7
"""ncclInProgress: no error, but that NCCL is at work. CuPy has no name for it."""


class NcclCommunicator(Protocol):
    """The interface of CuPy's NcclCommunicator, one rank's end."""

    allReduce: Callable[..., None]  # noqa: N815
    allGather: Callable[..., None]  # noqa: N815
    reduceScatter: Callable[..., None]  # noqa: N815
    reduce: Callable[..., None]
    broadcast: Callable[..., None]
    check_async_error: Callable[[], None]
    abort: Callable[[], None]
    destroy: Callable[[], None]


def nccl_problem() -> str | None:
    """Return why NCCL cannot be used here and how to install it, or None."""
    state = find_cupy()
    if state.module is None:
        return state.problem
    binding = nccl_binding()
    if getattr(binding, "available", False):
        return None
    major = state.module.cuda.runtime.runtimeGetVersion() // 1000
    return (
        f"CuPy {state.module.__version__} finds no NCCL library (libnccl.so.2), which reduces between GPUs; type: "
        f"pip install nvidia-nccl-cu{major}, or put the folder of the system's libnccl.so.2 into LD_LIBRARY_PATH "
        "(CUPY_DEBUG_LIBRARY_LOAD=1 shows where CuPy looks)"
    )


def nccl_binding() -> ModuleType:
    """Return the module ``cupy.cuda.nccl``; the first call in a process loads the NCCL library.

    Raises:
        DeviceError: There is no GPU, or no CuPy, that this process can use.
    """
    require_cupy()
    with warnings.catch_warnings():
        # It warns where there is no library, which nccl_problem says where it matters.
        warnings.simplefilter("ignore")
        return importlib.import_module("cupy.cuda.nccl")


def nccl_version(binding: ModuleType) -> str:
    """Return the version of the NCCL library as NVIDIA writes it: "2.28.9"."""
    number = int(binding.get_version())
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def failure(binding: ModuleType, doing: str, error: Exception) -> NcclFailure:
    """Return the error to raise for one of the binding.

    That is an NcclError, or a KeyError for a status that it cannot name.
    """
    if isinstance(error, binding.NcclError):
        return NcclFailure(f"{doing}: {error}", error.status)
    status = error.args[0]
    return NcclFailure(f"{doing}: NCCL returned status {status}, which CuPy has no name for", status)
