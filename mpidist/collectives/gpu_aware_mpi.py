"""Whether the MPI library takes pointers to GPU memory: one that does not crashes on them, so it is not tried."""

from __future__ import annotations

import ctypes
import logging
import os
from typing import TYPE_CHECKING

from mpidist.collectives.gathering import agreed_minimum
from mpidist.collectives.waiting import Steps
from mpidist.core import settings
from mpidist.topology import import_mpi

if TYPE_CHECKING:
    from mpi4py import MPI

_log = logging.getLogger("mpidist")
# Libraries that cannot be asked: part of their name, and what switches it on in them.
_SWITCHES = (
    ("CRAY MPICH", "MPICH_GPU_SUPPORT_ENABLED"),
    ("CRAY MPICH", "MPICH_RDMA_ENABLED_CUDA"),
    ("MVAPICH2", "MV2_USE_CUDA"),
    ("MVAPICH", "MVP_USE_CUDA"),
    ("ParaStation", "PSP_CUDA"),
    ("Intel(R) MPI", "I_MPI_OFFLOAD"),
    ("MPICH", "MPIR_CVAR_ENABLE_GPU"),
)


def takes_device_memory(comm: MPI.Intracomm) -> Steps[bool]:
    """Return whether MPI takes pointers to CUDA memory on all ranks (collective).

    ``MPIDIST_GPU_AWARE_MPI`` has the last word. Otherwise: the memory kinds that MPI 4.1 tells
    (``mpi_memory_alloc_kinds``), ``MPIX_Query_cuda_support``, the variables of libraries without either; no in doubt.
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
    kinds = mpi.COMM_WORLD.Get_info().Get("mpi_memory_alloc_kinds")
    if kinds is not None:
        return "cuda" in kinds, f"MPI's memory kinds are {kinds}"
    said = _query(mpi.__file__)
    if said is not None:
        return said, f"MPIX_Query_cuda_support says {'yes' if said else 'no'}"
    version = mpi.Get_library_version().lower()
    for name, variable in _SWITCHES:
        if name.lower() in version and os.environ.get(variable, "0") not in ("", "0"):
            return True, f"{variable} is set"
    return False, "MPI does not say that it takes it"


def _query(path: str | None) -> bool | None:
    """Ask the library that mpi4py's module is linked to; None where it cannot be asked."""
    query = getattr(ctypes.CDLL(path), "MPIX_Query_cuda_support", None) if path else None
    return None if query is None else query() == 1
