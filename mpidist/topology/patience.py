"""Waiting for all ranks to come, with a report and a deadline, before calls that MPI offers in a blocking form only."""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING

from mpidist.core import settings
from mpidist.core.callsite import user_call_site
from mpidist.core.errors import CollectiveTimeoutError, RankLostError
from mpidist.topology.abort import end_job
from mpidist.topology.faults import agree, can_go_on, means_loss, revoke
from mpidist.topology.launcher import import_mpi

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
        RankLostError: A rank was lost meanwhile; on all ranks, so that none goes on with a duplicate that others lack.
    """
    copy, request = comm.Idup()
    if not can_go_on():
        _wait(request, comm, doing)
        return copy
    lost: BaseException | None = None
    try:
        _wait(request, comm, doing)
    except import_mpi().Exception as error:
        if not means_loss(error, comm):
            raise
        lost = error
        revoke(comm)
    with limited(f"agreeing on {doing}"):
        all_have_it = agree(comm, lost is None)
    if not all_have_it:
        raise RankLostError(f"a rank was lost in {doing}") from lost
    return copy


def _wait(request: MPI.Request, comm: MPI.Intracomm, doing: str) -> None:
    limit, warn_after = settings.TIMEOUT.read(), settings.WARN_AFTER.read()
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


class limited:  # noqa: N801 - a block, like contextlib's
    """A block around a call that MPI offers in a blocking form only: reports when it takes long, then ends the job.

    It reports after ``MPIDIST_WARN_AFTER`` and ends the job after ``MPIDIST_TIMEOUT``: what waits in such a call
    can get no exception.

    Args:
        doing: What the block does, after "is".
    """

    def __init__(self, doing: str) -> None:
        site, limit = user_call_site(), settings.TIMEOUT.read()
        self._timers = [
            threading.Timer(settings.WARN_AFTER.read(), self._say, (f"is still {doing}, at {site}",)),
            threading.Timer(
                limit, self._end, (f"is not done with {doing} after {limit:g} s, at {site}, and ends the job",)
            ),
        ]

    def __enter__(self) -> None:
        for timer in self._timers:
            timer.daemon = True
            timer.start()

    def __exit__(self, *_: object) -> None:
        for timer in self._timers:
            timer.cancel()

    def _say(self, what: str) -> None:
        world = import_mpi().COMM_WORLD
        print(f"mpidist: rank {world.Get_rank()} of {world.Get_size()} {what}", file=sys.stderr, flush=True)

    def _end(self, what: str) -> None:
        self._say(what)
        end_job()
