"""MPI_Finalize at the end of a rank, but not in forked children.

mpi4py calls MPI_Finalize in every process that ends while MPI runs. In a forked child it hangs, and the job with it.
mpi4py has no hook for forks, so mpidist calls MPI_Finalize, unless the program has set ``mpi4py.rc.finalize``.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import os
import sys
from types import ModuleType

# mpi4py reads "no" as False. Another text shows that the program has set the option since.
_FINALIZES = "no"
# Whether mpi4py.run has requested an abort at the end, for which MPI must still run.
_aborts: list[bool] = []


def own_finalize() -> None:
    """Call MPI_Finalize at the end of this process instead of mpi4py. Called before MPI starts."""
    rc = importlib.import_module("mpi4py").rc
    if rc.initialize and rc.finalize is None:
        rc.finalize = _FINALIZES
        atexit.register(_finalize_at_exit)


def note_abort_status(mpi: ModuleType) -> None:
    """Record whether the program sets a status with which mpi4py aborts the job."""
    names = vars(mpi)
    set_status = names.get("_set_abort_status")
    if set_status is not None:

        def set_and_note(status: object) -> None:
            _aborts.append(True)
            set_status(status)

        names["_set_abort_status"] = set_and_note


def _runs(mpi: ModuleType | None) -> bool:
    return mpi is not None and bool(mpi.Is_initialized()) and not mpi.Is_finalized()


def _finalize_at_exit() -> None:
    mpi = sys.modules.get("mpi4py.MPI")
    is_own = importlib.import_module("mpi4py").rc.finalize == _FINALIZES
    if mpi is not None and is_own and _runs(mpi) and not _aborts:
        # Like mpi4py, after all functions of atexit, because these may use MPI.
        ctypes.pythonapi.Py_AtExit(ctypes.cast(ctypes.CDLL(mpi.__file__).MPI_Finalize, ctypes.c_void_p))


def _leave_to_parent() -> None:
    """Unregister in a forked child, unless it was forked before MPI started."""
    if _runs(sys.modules.get("mpi4py.MPI")):
        atexit.unregister(_finalize_at_exit)


os.register_at_fork(after_in_child=_leave_to_parent)
