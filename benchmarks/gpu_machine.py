"""What results on a GPU say about it, and whether there is one."""

from __future__ import annotations

from typing import Any

from mpidist.arrays.cupy_module import find_cupy, gpus_may_be_present, require_cupy
from mpidist.collectives.gpu.nccl_library import nccl_problem


def gpu_problem() -> str | None:
    """Return why nothing can run on a GPU here, None where it can."""
    if not gpus_may_be_present():
        return "needs a GPU, and this machine shows no NVIDIA driver"
    return find_cupy().problem or None


def describe_gpu() -> dict[str, Any]:
    """Return the first GPU of this process and the versions of what drives it."""
    cupy: Any = require_cupy()
    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(0)
    return {
        "gpu": properties["name"].decode(),
        "gpus": runtime.getDeviceCount(),
        "compute_capability": f"{properties['major']}.{properties['minor']}",
        "gpu_memory_gib": round(properties["totalGlobalMem"] / 2**30, 1),
        "driver_cuda": runtime.driverGetVersion(),
        "runtime_cuda": runtime.runtimeGetVersion(),
        "cupy": cupy.__version__,
        "nccl": nccl_problem() or cupy.cuda.nccl.get_version(),
    }
