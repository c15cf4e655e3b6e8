"""Whether the MPI library takes pointers to GPU memory: one that does not crashes on them, so it is not tried."""

from __future__ import annotations

import ctypes
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpidist.collectives.mpi.gathering import agreed_minimum
from mpidist.collectives.mpi.waiting import Steps
from mpidist.core import settings
from mpidist.topology import import_mpi

if TYPE_CHECKING:
    from mpi4py import MPI

_log = logging.getLogger("mpidist")
_MPI_SUCCESS, _MPIX_GPU_SUPPORT_CUDA = 0, 0
_CRAY = "CRAY MPICH"
_GTL = "libmpi_gtl_cuda"
# What switches it on in libraries that cannot be asked, by a part of their names. Some are built on MPICH, and have its
# functions, too, which answer for something else or end the process.
_SWITCHES = (
    ("MVAPICH2", "MV2_USE_CUDA"),
    ("MVAPICH", "MVP_USE_CUDA"),
    ("ParaStation", "PSP_CUDA"),
    ("Intel(R) MPI", "I_MPI_OFFLOAD"),
)


def takes_device_memory(comm: MPI.Intracomm) -> Steps[bool]:
    """Return whether MPI takes pointers to CUDA memory on all ranks (collective).

    ``MPIDIST_GPU_AWARE_MPI`` has the last word. Otherwise each library is asked in its own way (docs/gpu.md); no in
    doubt.
    """
    answer, why = answer_here()
    everywhere = bool((yield from agreed_minimum(comm, int(answer))))
    if comm.Get_rank() == 0:
        place = "straight to and from GPU memory" if everywhere else "by way of page-locked host memory"
        _log.info("mpidist: arrays on GPUs go between nodes %s (%s; MPIDIST_GPU_AWARE_MPI=0 or 1 says so)", place, why)
    return everywhere


def answer_here() -> tuple[bool, str]:
    """Return this rank's answer, and what it comes from."""
    given: bool | None = settings.GPU_AWARE_MPI.read()
    if given is not None:
        return given, "as MPIDIST_GPU_AWARE_MPI says"
    mpi = import_mpi()
    version = mpi.Get_library_version().lower()
    if _CRAY.lower() in version:
        return _cray()
    kinds = mpi.COMM_WORLD.Get_info().Get("mpi_memory_alloc_kinds")
    if kinds is not None:
        return "cuda" in kinds, f"MPI's memory kinds are {kinds}"
    for name, variable in _SWITCHES:
        if name.lower() in version:
            return _is_set(variable), f"{variable} is {'set' if _is_set(variable) else 'not set'}"
    return _mpich(mpi) if "mpich" in version else _open_mpi(mpi)


def _cray() -> tuple[bool, str]:
    # Its MPIX_GPU_query_support answers for MPICH's own way to GPUs, which Cray's takes the place of.
    if _is_set("MPICH_RDMA_ENABLED_CUDA"):
        return True, "MPICH_RDMA_ENABLED_CUDA is set"
    if not _is_set("MPICH_GPU_SUPPORT_ENABLED"):
        return False, "MPICH_GPU_SUPPORT_ENABLED is not set"
    if not _is_loaded(_GTL):
        return False, f"MPICH_GPU_SUPPORT_ENABLED is set, but Cray's {_GTL}.so is not loaded: docs/gpu.md"
    return True, f"MPICH_GPU_SUPPORT_ENABLED is set and {_GTL}.so is loaded"


def _mpich(mpi: Any) -> tuple[bool, str]:
    # Its MPIX_Query_cuda_support ends the process in MPICH 3.4, by an assertion the wrong way round.
    query, flag = _function(mpi, "MPIX_GPU_query_support"), ctypes.c_int(0)
    if query is None:
        return False, "this MPICH has no MPIX_GPU_query_support"
    status = query(_MPIX_GPU_SUPPORT_CUDA, ctypes.byref(flag))
    if status != _MPI_SUCCESS:
        return False, f"MPIX_GPU_query_support failed with error {status}"
    answer = bool(flag.value)
    return answer, f"MPIX_GPU_query_support says {'yes' if answer else 'no'}; MPIR_CVAR_ENABLE_GPU switches it on"


def _open_mpi(mpi: Any) -> tuple[bool, str]:
    query = _function(mpi, "MPIX_Query_cuda_support")
    if query is None:
        return False, "MPI does not say that it takes it"
    answer = query() == 1
    return answer, f"MPIX_Query_cuda_support says {'yes' if answer else 'no'}"


def _function(mpi: Any, name: str) -> Any:
    """Return a function of the library that mpi4py's module is linked to, None where it has none of that name."""
    return getattr(ctypes.CDLL(mpi.__file__), name, None)


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "0") not in ("", "0")


def _is_loaded(library: str) -> bool:
    """Whether this process has loaded a library, from the beginning of its file name."""
    maps = Path("/proc/self/maps")
    return maps.exists() and f"/{library}." in maps.read_text()
