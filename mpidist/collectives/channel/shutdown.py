"""Leaving: the open channels of this process, and how it takes leave of the other ranks when its program ends."""

from __future__ import annotations

import atexit
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mpidist.collectives.channel.progress import progress
from mpidist.collectives.mpi.waiting import Deadline, Steps, drive
from mpidist.collectives.watch.recorder import finish_recording
from mpidist.collectives.watch.side_thread import side_thread
from mpidist.core import settings
from mpidist.core.errors import MismatchError, PeerError
from mpidist.topology import end_job, import_mpi

if TYPE_CHECKING:
    from mpidist.collectives.channel.channel import Channel

# How long a rank that leaves waits for others to catch up with what was given up, so that MPI can end in order.
EXIT_SECONDS = 5.0
FORKED = (
    "this process was forked from a rank, which takes part in collectives itself; expected that the rank makes them, "
    "and that a child gets what it needs from it, or is started anew (subprocess, multiprocessing's 'spawn')"
)
open_channels: list[Channel] = []
# Given up with a rank that was lost.
abandoned_channels: list[Channel] = []
_keyvals: list[int] = []
_first_acts: list[Callable[[], None]] = []
# Where this process was forked from one that had started MPI.
_forked: list[bool] = []


def _disown_all() -> None:
    """Let a forked child take no part: it has not left, and what it wrote into shared memory would be its parent's."""
    if "mpi4py.MPI" in sys.modules and _mpi_runs():
        _forked.append(True)
    for channel in open_channels:
        channel.disown()
    open_channels.clear()
    _first_acts.clear()


os.register_at_fork(after_in_child=_disown_all)


def check_not_forked() -> None:
    """Raise RuntimeError in a forked child of a rank, whose MPI is its parent's."""
    if _forked:
        raise RuntimeError(FORKED)


def abandon_all() -> None:
    """Give all channels up that have not been closed, as a rank was lost."""
    for channel in list(open_channels):
        channel.abandon()


def carry_through(steps: Steps[Any], otherwise: Callable[[], None]) -> Steps[None]:
    """Go on with the steps of what was given up while the other ranks catch up; ``otherwise`` ends the job."""
    give_up = time.monotonic() + EXIT_SECONDS
    try:
        for _ in steps:
            if time.monotonic() > give_up:
                otherwise()
            yield
    except (MismatchError, PeerError):
        # The caller had its error; all ranks have now taken part, which is what matters here.
        return


def abort_job(rank: int, reason: str | None) -> None:
    """End the job where MPI_Finalize would wait for ever, say for a collective that was given up."""
    print(f"mpidist: rank {rank} ends the job: {reason}", file=sys.stderr, flush=True)
    end_job()


def before_the_end(act: Callable[[], None]) -> None:
    """Have ``act`` called where this process takes leave, before anything else is closed."""
    _first_acts.append(act)
    see_to_the_end()


def see_to_the_end() -> None:
    """Have this process take leave where its program ends, or where it calls MPI_Finalize itself."""
    if not _keyvals:
        mpi = import_mpi()
        # MPI_Finalize begins with the attributes of MPI_COMM_SELF, while everything else still works.
        _keyvals.append(mpi.Comm.Create_keyval(delete_fn=lambda *_: leave_all()))
        mpi.COMM_SELF.Set_attr(_keyvals[0], None)


@atexit.register
def leave_all() -> None:
    """Tell the other ranks that this program has ended, before MPI_Finalize waits for theirs in silence.

    A rank that leaves early, by sys.exit() for example, so gives the others a PeerError in their next collective.
    How long the other programs still run is their own affair, so this wait has no deadline, only a report.
    """
    while _first_acts and _mpi_runs():
        _first_acts.pop()()
    progress.stop()
    several = [channel for channel in open_channels if channel.size > 1]
    try:
        if several and _mpi_runs():
            rank = several[0].rank

            def say_that_it_waits(_: float) -> None:
                text = f"mpidist: rank {rank} has ended its program, and waits for the other ranks to end theirs"
                print(text, file=sys.stderr, flush=True)

            drive(
                _together([channel.leave() for channel in several]),
                lambda: Deadline(math.inf, settings.WARN_AFTER.read(), say_that_it_waits, lambda _: None),
            )
    finally:
        side_thread.stop()
        for channel in open_channels:
            for act in channel.at_exit:
                act()
        open_channels.clear()
        finish_recording()


def _together(all_steps: Sequence[Steps[None]]) -> Steps[None]:
    going = list(all_steps)
    while going:
        going = [steps for steps in going if next(steps, going) is not going]
        yield


def _mpi_runs() -> bool:
    mpi = sys.modules["mpi4py.MPI"]
    return bool(mpi.Is_initialized() and not mpi.Is_finalized())
