"""Components of Open MPI for collectives in shared memory, which one has to ask for; not every build has them."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py import MPI

NAMES = ("xhc", "acoll")


def communicators(base: MPI.Intracomm) -> dict[str, MPI.Intracomm]:
    """Return for each component that this MPI has a communicator that prefers it (collective)."""
    from mpi4py import MPI

    found = {}
    for name in filter(is_there, NAMES):
        info = MPI.Info.Create({"ompi_comm_coll_preference": name})
        found[name] = base.Dup_with_info(info)
        info.Free()
    return found


def is_there(name: str) -> bool:
    """Whether this MPI has a component for collectives: whether it has the variable of its priority."""
    from mpi4py import MPI

    library, index = ctypes.CDLL(MPI.__file__), ctypes.c_int()
    # Open MPI takes the level asked for here as that of the whole process from now on.
    library.MPI_T_init_thread(MPI.Query_thread(), ctypes.byref(ctypes.c_int()))
    failed = library.MPI_T_cvar_get_index(f"coll_{name}_priority".encode(), ctypes.byref(index))
    library.MPI_T_finalize()
    return not failed
