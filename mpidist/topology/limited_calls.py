"""Blocking MPI calls that report and give up.

Before calls that MPI offers in a blocking form only, ranks wait for all to come, with a report and a deadline.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mpidist.core import message_tags, settings
from mpidist.core.callsite import user_call_site
from mpidist.core.daemon_thread import start_daemon
from mpidist.core.deadline import Deadline
from mpidist.core.errors import CollectiveTimeoutError, RankLostError
from mpidist.core.wording import tell_user
from mpidist.topology.abort import end_job
from mpidist.topology.faults import agree, can_go_on, means_loss, revoke
from mpidist.topology.launcher import import_mpi

if TYPE_CHECKING:
    from mpi4py import MPI

# Ranks that are about to come do so in less; after that the wait takes naps.
_BUSY_SECONDS, _NAP_SECONDS = 1.0, 1e-4


def duplicate(
    comm: MPI.Intracomm, doing: str, absent: Callable[[MPI.Intracomm], str | None] = lambda _: None
) -> MPI.Intracomm:
    """Return a duplicate of ``comm`` (collective; MPI_Comm_idup).

    Args:
        comm: The communicator.
        doing: The purpose of the duplicate, for the report.
        absent: Returns lines about the ranks that did not come, for the error.

    Raises:
        CollectiveTimeoutError: Not all ranks came within ``MPIDIST_TIMEOUT``.
        RankLostError: A rank was lost meanwhile; on all ranks, so that none goes on with a duplicate that others lack.
    """
    copy, request = comm.Idup()
    if not can_go_on():
        finish(request, comm, doing, absent)
        return copy
    lost: BaseException | None = None
    try:
        finish(request, comm, doing, absent)
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


def finish(
    request: MPI.Request,
    comm: MPI.Intracomm,
    doing: str,
    absent: Callable[[MPI.Intracomm], str | None] = lambda _: None,
) -> None:
    """Wait for a request of a collective on ``comm``; arguments as of :func:`duplicate`.

    Raises:
        CollectiveTimeoutError: Not all ranks came within ``MPIDIST_TIMEOUT``.
    """
    deadline = Deadline(
        lambda waited: (
            f"rank {comm.Get_rank()} of {comm.Get_size()} has waited {waited:.0f} s for the other ranks in {doing}, at "
            f"{user_call_site()}"
        ),
        lambda waited: CollectiveTimeoutError(doing, 0, waited, comm.Get_rank(), absent(comm)),
    )
    while not request.Test():
        if deadline.check() > _BUSY_SECONDS:
            time.sleep(_NAP_SECONDS)


def create_group(comm: MPI.Intracomm, ranks: Sequence[int], name: str) -> MPI.Intracomm:
    """Return a communicator of some ranks of ``comm``, in this order (collective over them; MPI_Comm_create_group).

    MPI has only a blocking form. If a rank never arrives, the others report it and end the job.

    Args:
        comm: The communicator.
        ranks: Ranks of ``comm``, the caller among them.
        name: Name of the group in the report.
    """
    everyone = comm.Get_group()
    group = everyone.Incl(ranks)
    with limited(f"waiting for all {len(ranks)} ranks of {name} to make a communicator"):
        part: MPI.Intracomm = comm.Create_group(group, message_tags.GROUPS)
    group.Free()
    everyone.Free()
    return part


@contextmanager
def limited(doing: str) -> Iterator[None]:
    """Return a block around a blocking MPI call that reports, then ends the job.

    It reports after ``MPIDIST_WARN_AFTER`` and ends the job after ``MPIDIST_TIMEOUT``: a thread in such a call can get
    no exception.

    Args:
        doing: The block's work, after "is".
    """
    site, limit = user_call_site(), settings.TIMEOUT.read()
    over = threading.Event()
    deadline = Deadline(
        lambda _: f"{_rank_of_size()} is still {doing}, at {site}",
        lambda _: TimeoutError(f"is not done with {doing} after {limit:g} s, at {site}, and ends the job"),
        limit,
    )

    def watch() -> None:
        try:
            while not over.wait(deadline.next_seconds):
                deadline.check()
        except TimeoutError as error:
            tell_user(f"{_rank_of_size()} {error}")
            end_job()

    start_daemon("limit", watch)
    try:
        yield
    finally:
        over.set()


def _rank_of_size() -> str:
    world = import_mpi().COMM_WORLD
    return f"rank {world.Get_rank()} of {world.Get_size()}"
