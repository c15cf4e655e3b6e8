"""Lost ranks: how MPI reports them, and how a job goes on (ULFM). ULFM is the fault tolerance of MPI 5.

Open MPI 5 can go on without a lost process when it was started with ``mpirun --with-ft ulfm``; any other MPI ends the
job.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpi4py import MPI

_FT_VARIABLE = "OMPI_MCA_mpi_ft_enable"  # set by mpirun --with-ft
_NAMES = ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED")


def is_fault_tolerant() -> bool:
    """Return whether the launcher was asked for fault tolerance; MPI need not run."""
    return os.environ.get(_FT_VARIABLE, "0") in ("1", "true")


def can_go_on() -> bool:
    """Return whether MPI, which runs, lets the other ranks survive the loss of one."""
    mpi = sys.modules["mpi4py.MPI"]
    return is_fault_tolerant() and hasattr(mpi.Comm, "Shrink")


def says_rank_is_lost(error: BaseException) -> bool:
    """Return whether MPI's ``error`` means a lost process or a revoked communicator."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not isinstance(error, mpi.Exception):
        return False
    return error.Get_error_class() in [getattr(mpi, name) for name in _NAMES if hasattr(mpi, name)]


def lost_ranks(comm: MPI.Intracomm) -> set[int]:
    """Return the ranks of ``comm`` whose processes are known to be gone (MPI_Comm_get_failed); local."""
    gone = comm.Get_failed()
    own = comm.Get_group()
    ranks = set(gone.Translate_ranks(None, own))
    gone.Free()
    own.Free()
    return ranks


def means_loss(error: BaseException, comm: MPI.Intracomm) -> bool:
    """Return whether ``error`` of a call on ``comm`` comes from a lost rank.

    Open MPI calls it an internal error where a collective that does not block meets a rank that is lost.
    """
    if says_rank_is_lost(error):
        return True
    is_of_mpi = isinstance(error, sys.modules["mpi4py.MPI"].Exception)
    return is_of_mpi and (comm.Is_revoked() or comm.Get_failed().Get_size() > 0)


def revoke(comm: MPI.Intracomm) -> None:
    """Give every rank that waits on ``comm``, now or later, an error (MPI_Comm_revoke). Local."""
    if can_go_on() and not comm.Is_revoked():
        comm.Revoke()


def agree(comm: MPI.Intracomm, mine: bool) -> bool:
    """Return whether all ranks of ``comm`` pass True and none is lost (collective).

    It is the same on all, also where ``comm`` is revoked.
    """
    try:
        return bool(comm.Agree(int(mine)))
    except sys.modules["mpi4py.MPI"].Exception as error:
        if says_rank_is_lost(error):
            return False
        raise


@contextmanager
def revoking(comm: MPI.Intracomm) -> Iterator[None]:
    """Revoke ``comm`` where MPI fails in the block. Ranks that wait there for this one then get an error, too."""
    try:
        yield
    except sys.modules["mpi4py.MPI"].Exception:
        revoke(comm)
        raise
