"""Shutdown: the acts of this process at its end, and the refusal of forked children."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable
from functools import cache
from types import TracebackType

from mpidist.collectives.node.native import limit_finalize
from mpidist.core.text import tell_user
from mpidist.topology import end_job, import_mpi

EXIT_SECONDS = 5.0
"""How long a rank at its end waits for others to finish a failed collective."""
FORKED = (
    "This process was forked from a rank. Make collectives in the rank itself, and pass the child what it needs, or "
    "start the child anew (subprocess, or multiprocessing with 'spawn')"
)
_log = logging.getLogger("mpidist")
# Functions to call at the end: before the other ranks are notified, to notify them, and afterwards.
_before: list[Callable[[], None]] = []
_shutdowns: list[Callable[[], bool]] = []
_after: list[Callable[[], None]] = []
_on_errors: list[Callable[[BaseException], None]] = []
# Not empty in a child that was forked after MPI had started.
_forked: list[bool] = []


def _disown() -> None:
    # The ranks and the shared memory belong to the parent.
    if "mpi4py.MPI" in sys.modules and mpi_runs():
        _forked.append(True)
    for acts in (_before, _after, _on_errors):
        acts.clear()


os.register_at_fork(after_in_child=_disown)


def check_not_forked() -> None:
    """Raise RuntimeError in a forked child of a rank, because MPI belongs to its parent."""
    if _forked:
        raise RuntimeError(FORKED)


def abort_job(rank: int, reason: str) -> None:
    """Tell the user the reason, and end the job, because MPI_Finalize would hang."""
    tell_user(f"rank {rank} ends the job: {reason}")
    end_job()


def before_shutdown(act: Callable[[], None]) -> None:
    """Call ``act`` when the program ends, before channels are closed; the last one first."""
    _before.append(act)
    install()


def at_shutdown(act: Callable[[], bool]) -> None:
    """Call ``act`` to notify other ranks, also in forked processes. It returns whether all programs have ended."""
    _shutdowns.append(act)


def after_shutdown(act: Callable[[], None]) -> None:
    """Call ``act`` once after the last exchange with other ranks; the last one first."""
    if act not in _after:
        _after.append(act)


def on_uncaught_error(act: Callable[[BaseException], None]) -> None:
    """Call ``act`` on an uncaught error of the main thread, before the job ends."""
    _install_error_hook()
    if act not in _on_errors:
        _on_errors.append(act)


@cache
def _install_error_hook() -> None:
    previous = sys.excepthook

    def call_all(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            for act in _on_errors:
                try:
                    act(error)
                except Exception:  # the program's own error must be printed, and ends the job
                    _log.exception("a function to call before the end of the program failed")
        finally:
            previous(kind, error, trace)  # may end the job

    sys.excepthook = call_all


@cache
def install() -> None:
    """Shut down when the program ends or calls MPI_Finalize itself."""
    mpi = import_mpi()
    # MPI_Finalize first deletes the attributes of MPI_COMM_SELF, while everything else still works.
    mpi.COMM_SELF.Set_attr(mpi.Comm.Create_keyval(delete_fn=lambda *_: shut_down()), None)


@atexit.register
def _shut_down_at_exit() -> None:
    if shut_down() and not _forked and mpi_runs():
        # All programs have ended, so MPI_Finalize needs no more time than its messages.
        world = import_mpi().COMM_WORLD
        limit_finalize(world.Get_rank(), world.Get_size())


def shut_down() -> bool:
    """Notify the other ranks that this program has ended, before MPI_Finalize waits in silence.

    So a rank that exits early gives the others a PeerError. Returns whether all ranks are known to have ended.
    """
    while _before and mpi_runs():
        _before.pop()()
    try:
        return any([act() for act in _shutdowns])
    finally:
        while _after:
            _after.pop()()


def mpi_runs() -> bool:
    """Return whether MPI is initialized and not finalized."""
    mpi = sys.modules["mpi4py.MPI"]
    return bool(mpi.Is_initialized() and not mpi.Is_finalized())
