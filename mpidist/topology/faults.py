"""Lost ranks: how MPI says that a process is gone, and what can be done then (ULFM, MPI 5's fault tolerance).

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
    """Whether the launcher was asked for fault tolerance; MPI need not run."""
    return os.environ.get(_FT_VARIABLE, "0") in ("1", "true")


def can_go_on() -> bool:
    """Whether MPI, which runs, lets the other ranks go on when one is lost."""
    mpi = sys.modules["mpi4py.MPI"]
    return is_fault_tolerant() and hasattr(mpi.Comm, "Shrink")


def says_rank_is_lost(error: BaseException) -> bool:
    """Whether ``error`` is MPI's, and means that a process is gone or that others have given a communicator up."""
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
    """Whether ``error``, of a call on ``comm``, comes of a rank that is gone.

    Open MPI calls it an internal error where a collective that does not block meets a rank that is lost.
    """
    if says_rank_is_lost(error):
        return True
    is_of_mpi = isinstance(error, sys.modules["mpi4py.MPI"].Exception)
    return is_of_mpi and (comm.Is_revoked() or comm.Get_failed().Get_size() > 0)


def revoke(comm: MPI.Intracomm) -> None:
    """Let every rank of ``comm`` that waits on it, now or later, get an error (MPI_Comm_revoke); local."""
    if can_go_on() and not comm.Is_revoked():
        comm.Revoke()


def agree(comm: MPI.Intracomm, mine: bool) -> bool:
    """Whether all ranks of ``comm`` say so and none is lost; the same on all, also where it is revoked (collective)."""
    try:
        return bool(comm.Agree(int(mine)))
    except sys.modules["mpi4py.MPI"].Exception as error:
        if says_rank_is_lost(error):
            return False
        raise


@contextmanager
def revoking(comm: MPI.Intracomm) -> Iterator[None]:
    """A block of calls on ``comm``: where MPI fails in it, ranks that wait there for this one get an error, too."""
    try:
        yield
    except sys.modules["mpi4py.MPI"].Exception:
        revoke(comm)
        raise
