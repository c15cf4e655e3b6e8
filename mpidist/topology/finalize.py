"""MPI_Finalize at the end of a rank, and not in the children that it forks.

mpi4py calls it in every process that ends while MPI runs. In a forked child it hangs, and holds the whole job. mpi4py
has no hook for forks, so mpidist calls MPI_Finalize itself, unless the program has set ``mpi4py.rc.finalize``.
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
# Whether mpi4py.run has asked mpi4py to abort the job at its end, where MPI must still run.
_aborts: list[bool] = []


def own_finalize() -> None:
    """Call MPI_Finalize at the end of this process instead of mpi4py; called before MPI starts."""
    rc = importlib.import_module("mpi4py").rc
    if rc.initialize and rc.finalize is None:
        rc.finalize = _FINALIZES
        atexit.register(_finalize_at_exit)


def note_abort_status(mpi: ModuleType) -> None:
    """Record whether mpi4py was given a status with which it aborts the job."""
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
        # As mpi4py does: after all functions of atexit, which may use MPI.
        ctypes.pythonapi.Py_AtExit(ctypes.cast(ctypes.CDLL(mpi.__file__).MPI_Finalize, ctypes.c_void_p))


def _leave_to_parent() -> None:
    """Keep a child from ending the MPI of its parent. A child that was forked before MPI started has its own."""
    if _runs(sys.modules.get("mpi4py.MPI")):
        atexit.unregister(_finalize_at_exit)


os.register_at_fork(after_in_child=_leave_to_parent)
