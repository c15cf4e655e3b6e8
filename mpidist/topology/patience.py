"""Waiting for all ranks to come, with a report and a deadline, before calls that MPI offers in a blocking form only."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from mpidist.core import settings
from mpidist.core.callsite import user_call_site
from mpidist.core.errors import CollectiveTimeoutError

if TYPE_CHECKING:
    from mpi4py import MPI

_NAP_SECONDS = 1e-4


def duplicate(comm: MPI.Intracomm, doing: str) -> MPI.Intracomm:
    """Return a duplicate of ``comm`` (collective; MPI_Comm_idup).

    Args:
        comm: The communicator.
        doing: What the duplicate is for, for the report.

    Raises:
        CollectiveTimeoutError: Not all ranks came within ``MPIDIST_TIMEOUT``.
    """
    limit, warn_after = settings.TIMEOUT.read(), settings.WARN_AFTER.read()
    copy, request = comm.Idup()
    start = time.monotonic()
    has_warned = False
    while not request.Test():
        waited = time.monotonic() - start
        if waited > warn_after and not has_warned:
            has_warned = True
            print(
                f"mpidist: rank {comm.Get_rank()} of {comm.Get_size()} has waited {waited:.0f} s for the other ranks "
                f"in {doing}, at {user_call_site()}",
                file=sys.stderr,
                flush=True,
            )
        if waited > limit:
            raise CollectiveTimeoutError(doing, 0, waited, comm.Get_rank())
        if waited > 1.0:
            time.sleep(_NAP_SECONDS)
    return copy
