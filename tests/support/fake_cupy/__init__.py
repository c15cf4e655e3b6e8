"""A stand-in for CuPy on machines without a GPU: devices are NumPy buffers, streams are threads that are late.

``install()`` puts it into ``sys.modules``, ``uninstall()`` takes it out; the pytest fixture ``fake_gpus`` does both.
``python -m tests.support.fake_cupy script.py`` runs a program on it. What shows on a GPU only by bad luck shows here
as a rule: memory starts as NaN, freed memory is spoiled and soon somebody else's, NumPy operands are refused, work of
one stream that does not wait for another meets memory as it was, NCCL runs one call at a time on each GPU, and a GPU
on which anything failed does nothing more.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

from mpidist.arrays import device_ops
from mpidist.arrays import streams as array_streams
from mpidist.collectives.gpu import nccl as nccl_module
from tests.support.fake_cupy import devices as gpus
from tests.support.fake_cupy import driver, module
from tests.support.fake_cupy.memory import PinnedMemoryPool, fail_allocations
from tests.support.fake_cupy.nccl_kernels import Kernels

__all__ = ["counts", "fail_allocations", "install", "uninstall"]

_hidden: dict[str, ModuleType | None] = {}
_load_driver = array_streams.load_driver


def install(
    devices: int = 2, jitter: float = 0.0, nccl: bool = True, serial_nccl: bool = True, ptds: bool = False
) -> ModuleType:
    """Pretend that this process has CuPy and GPUs.

    Args:
        devices: How many GPUs.
        jitter: Seconds by which each job of a stream is late at most.
        nccl: Whether NCCL is there.
        serial_nccl: Whether a GPU runs one kernel of NCCL at a time, in the order in which they were launched.
        ptds: Whether each thread has a default stream of its own (CUPY_CUDA_PER_THREAD_DEFAULT_STREAM=1).

    Returns:
        The module ``cupy``.
    """
    if gpus.installed() is not None:
        raise RuntimeError("fake_cupy is installed already; uninstall() it first")
    machine = gpus.Machine(devices, jitter, ptds)
    machine.pinned = PinnedMemoryPool()
    machine.nccl_kernels = [Kernels(serial_nccl) for _ in range(devices)]
    gpus.set_machine(machine)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("cupy", "cupyx")]:
        _hidden[name] = sys.modules.pop(name)
    modules = module.build()
    modules["cupy.cuda.nccl"] = modules["cupy.cuda"].nccl = _nccl(nccl)  # type: ignore[attr-defined]
    sys.modules.update(modules)
    array_streams.load_driver = driver.Library
    _forget()
    return modules["cupy"]


def uninstall() -> None:
    """Take it out again, and raise an error of a stream that nobody has seen."""
    machine = gpus.installed()
    if machine is None:
        return
    for name in [name for name in sys.modules if name.partition(".")[0] in ("cupy", "cupyx")]:
        del sys.modules[name]
    sys.modules.update(_hidden)  # type: ignore[arg-type]
    _hidden.clear()
    array_streams.load_driver = _load_driver
    _forget()
    try:
        machine.close()
    finally:
        gpus.set_machine(None)


def counts() -> gpus.Counts:
    """Return what the program has asked of CUDA so far in this process."""
    return gpus.machine().counts


def _nccl(there: bool) -> ModuleType:
    # Without libnccl the module has this one name.
    absent = ModuleType("cupy.cuda.nccl")
    absent.available = False  # type: ignore[attr-defined]
    if not there or importlib.util.find_spec("tests.support.fake_cupy.nccl") is None:
        return absent
    return importlib.import_module("tests.support.fake_cupy.nccl")


def _forget() -> None:
    array_streams.find_cupy.cache_clear()
    device_ops.gpu_ops.cache_clear()
    nccl_module.forget_shares()
