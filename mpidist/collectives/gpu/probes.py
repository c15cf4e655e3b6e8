"""Detect whether MPI accepts GPU memory, and whether NCCL has RDMA.

MPI libraries without GPU support crash on device pointers, so they are queried, never tried. NCCL has no query, so this
module searches for the same files: a plugin (``libnccl-net*.so``), such as the one for libfabric, then for InfiniBand
and RoCE. Without them NCCL silently uses sockets.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from mpidist.collectives.mpi.exchange import agreed_minimum
from mpidist.collectives.mpi.waiting import Comm, Steps
from mpidist.core import settings
from mpidist.topology import import_mpi

# GPU memory in MPI ----------------------------------------------------------------------------------------------------


_log = logging.getLogger("mpidist")
_MPI_SUCCESS, _MPIX_GPU_SUPPORT_CUDA = 0, 0
_CRAY = "CRAY MPICH"
_GTL = "libmpi_gtl_cuda"
# Variables that enable GPU support in libraries without a query, keyed by a part of their name. Some derive from MPICH
# and export its query, which gives a wrong answer or ends the process.
_SWITCHES = (
    ("MVAPICH2", "MV2_USE_CUDA"),
    ("MVAPICH", "MVP_USE_CUDA"),
    ("ParaStation", "PSP_CUDA"),
    ("Intel(R) MPI", "I_MPI_OFFLOAD"),
)


def takes_device_memory(comm: Comm) -> Steps[bool]:
    """Return True if MPI accepts CUDA pointers on all ranks (collective).

    ``MPIDIST_GPU_AWARE_MPI`` overrides the detection of each library (docs/gpu.md). The default is False if unsure.
    """
    answer, why = answer_here()
    everywhere = bool((yield from agreed_minimum(comm, int(answer))))
    if comm.Get_rank() == 0:
        place = "directly from GPU memory" if everywhere else "through page-locked host memory"
        _log.info("mpidist: arrays on GPUs go between nodes %s (%s; MPIDIST_GPU_AWARE_MPI=0 or 1 says so)", place, why)
    return everywhere


def answer_here() -> tuple[bool, str]:
    """Return this rank's answer and its reason."""
    override: bool | None = settings.GPU_AWARE_MPI.read()
    if override is not None:
        return override, "as MPIDIST_GPU_AWARE_MPI says"
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
    # MPIX_GPU_query_support reports MPICH's GPU support, which Cray replaces with its own.
    if _is_set("MPICH_RDMA_ENABLED_CUDA"):
        return True, "MPICH_RDMA_ENABLED_CUDA is set"
    if not _is_set("MPICH_GPU_SUPPORT_ENABLED"):
        return False, "MPICH_GPU_SUPPORT_ENABLED is not set"
    if not _is_loaded(_GTL):
        return False, f"MPICH_GPU_SUPPORT_ENABLED is set, but Cray's {_GTL}.so is not loaded: docs/gpu.md"
    return True, f"MPICH_GPU_SUPPORT_ENABLED is set and {_GTL}.so is loaded"


def _mpich(mpi: ModuleType) -> tuple[bool, str]:
    # MPIX_Query_cuda_support ends the process in MPICH 3.4, because an assertion there is inverted.
    query, flag = _function(mpi, "MPIX_GPU_query_support"), ctypes.c_int(0)
    if query is None:
        return False, "this MPICH has no MPIX_GPU_query_support"
    status = query(_MPIX_GPU_SUPPORT_CUDA, ctypes.byref(flag))
    if status != _MPI_SUCCESS:
        return False, f"MPIX_GPU_query_support failed with error {status}"
    answer = bool(flag.value)
    return answer, f"MPIX_GPU_query_support says {'yes' if answer else 'no'}; MPIR_CVAR_ENABLE_GPU switches it on"


def _open_mpi(mpi: ModuleType) -> tuple[bool, str]:
    query = _function(mpi, "MPIX_Query_cuda_support")
    if query is None:
        return False, "MPI does not say whether it accepts GPU memory"
    answer = query() == 1
    return answer, f"MPIX_Query_cuda_support says {'yes' if answer else 'no'}"


def _function(mpi: ModuleType, name: str) -> Callable[..., int] | None:
    """Look up a function of the library that mpi4py is linked to, or None."""
    return getattr(ctypes.CDLL(mpi.__file__), name, None)


def _is_set(variable: str) -> bool:
    return os.environ.get(variable, "0") not in ("", "0")


def _is_loaded(library: str) -> bool:
    maps = Path("/proc/self/maps")
    return maps.exists() and f"/{library}." in maps.read_text()


# RDMA in NCCL ---------------------------------------------------------------------------------------------------------


_PORTS = "class/infiniband/*/ports/*"
_SLINGSHOT = "class/cxi/*"
_SLINGSHOT_GIGABITS = 200.0
_VERBS = ("libibverbs.so", "libibverbs.so.1")
_SYS, _VERBS_DEVICES = Path("/sys"), Path("/dev/infiniband")
# NCCL reads variables from these files too.
_FILES = (Path("~/.nccl.conf"), Path("/etc/nccl.conf"))


class Fabric(NamedTuple):
    """Describe a network that NCCL uses without the kernel."""

    name: str
    gigabits: float  # per second, of its fastest port


def rdma_fabric() -> Fabric | None:
    """Return the RDMA network of NCCL between nodes, or None for sockets and if unsure."""
    wanted = setting("NCCL_NET").lower()
    if wanted == "socket":
        return None
    if not wanted.startswith("ib"):
        fabrics = behind_plugins()
        plugin = net_plugin() if fabrics else None
        if plugin is not None:
            return Fabric(f"{fabrics[0].name} by {plugin}", max(fabric.gigabits for fabric in fabrics))
    if wanted not in ("", "ib", "ibext") or setting("NCCL_IB_DISABLE") not in ("", "0"):
        return None
    fabrics = behind_verbs()
    if not fabrics or not has_verbs() or not may_use_verbs():
        return None
    return Fabric(fabrics[0].name, max(fabric.gigabits for fabric in fabrics))


def rdma_everywhere(comm: Comm) -> Steps[bool]:
    """Return True if all ranks have an RDMA network (collective)."""
    return bool((yield from agreed_minimum(comm, int(rdma_fabric() is not None))))


def behind_verbs() -> list[Fabric]:
    """Return the active ports that NCCL drives itself: InfiniBand and RoCE."""
    return _ports("InfiniBand", "Ethernet")


def behind_plugins() -> list[Fabric]:
    """Return the active ports for which NCCL needs a plugin."""
    # Amazon's EFA is listed as an InfiniBand device, with another link layer.
    slingshot = [Fabric(path.name, _SLINGSHOT_GIGABITS) for path in sorted(_SYS.glob(_SLINGSHOT))]
    return slingshot + _ports("Unknown", "Unspecified")


def net_plugin() -> str | None:
    """Return the first network plugin that NCCL would load, or None."""
    return next((name for name in _plugins() if _loads(name)), None)


def has_verbs() -> bool:
    """Return True if the InfiniBand library loads."""
    return any(map(_loads, _VERBS))


def setting(name: str) -> str:
    """Return an NCCL variable of the environment or of NCCL's files, or ""."""
    if name in os.environ:
        return os.environ[name].strip()
    for path in _FILES:
        for line in _read(Path(os.path.expanduser(path))).splitlines():
            key, _, value = line.partition("=")
            if key.strip() == name:
                return value.strip()
    return ""


def _ports(*link_layers: str) -> list[Fabric]:
    """Return the active ports with one of these link layers."""
    found = []
    for port in sorted(_SYS.glob(_PORTS)):
        # Examples: "4: ACTIVE" and "400 Gb/sec (4X NDR)".
        if "ACTIVE" in _read(port / "state") and _read(port / "link_layer") in link_layers:
            found.append(Fabric(port.parents[1].name, float(_read(port / "rate").partition(" ")[0] or 0)))
    return found


def _read(path: Path) -> str:
    # Files may be missing or unreadable, and ports appear and disappear.
    with contextlib.suppress(OSError):
        return path.read_text().strip()
    return ""


def _plugins() -> Iterator[str]:
    """Yield the file names of plugins that NCCL tries."""
    names = setting("NCCL_NET_PLUGIN") or "libnccl-net.so"
    for name in names.split(",") if names.lower() != "none" else ():
        yield name
        if "/" not in name and not (name.startswith("lib") and name.endswith(".so")):
            yield f"libnccl-net-{name}.so"


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def may_use_verbs() -> bool:
    """Return True if this process may open an InfiniBand device. Containers may have none."""
    return any(os.access(path, os.R_OK | os.W_OK) for path in _VERBS_DEVICES.glob("uverbs*"))


# Sending a chunk must take much longer than starting to send it.
_BYTES_BY_GIGABITS = ((200, 16 << 20), (100, 8 << 20), (0, 4 << 20))


def staging_bytes() -> int:
    """Return the maximum number of bytes of a chunk on this rank."""
    nbytes: int | None = settings.STAGING_BYTES.read()
    if nbytes is not None:
        return nbytes
    fabric = rdma_fabric()
    gigabits = 0.0 if fabric is None else fabric.gigabits
    return next(nbytes for least, nbytes in _BYTES_BY_GIGABITS if gigabits >= least)


def agreed_staging_bytes(comm: Comm) -> Steps[int]:
    """Return the smallest ``staging_bytes`` of all ranks (collective)."""
    return (yield from agreed_minimum(comm, staging_bytes()))
