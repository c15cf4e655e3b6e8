"""Shutdown: what this process does at its end, and the refusal of forked children."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable
from types import TracebackType

from mpidist.collectives.mpi.waiting import Steps
from mpidist.collectives.node.native import limit_finalize
from mpidist.core.concurrency import Stopwatch
from mpidist.core.errors import MismatchError, PeerError
from mpidist.core.text import tell_user
from mpidist.topology import end_job, import_mpi

EXIT_SECONDS = 5.0
"""How long a rank at its end waits for others to finish a failed collective."""
FORKED = (
    "This process was forked from a rank. Make collectives in the rank itself, and pass the child what it needs, or "
    "start the child anew (subprocess, or multiprocessing with 'spawn')"
)
_log = logging.getLogger("mpidist")
_keyvals: list[int] = []
_hooks: list[_ErrorHook] = []
# Functions to call at the end: before the other ranks are told, to tell them, and afterwards.
_before: list[Callable[[], None]] = []
_shutdowns: list[Callable[[], bool]] = []
_after: list[Callable[[], None]] = []
# Functions to call on an uncaught error, before the hook that may end the job.
_on_errors: list[Callable[[BaseException], None]] = []
# Not empty in a child that was forked after MPI had started.
_forked: list[bool] = []


def _disown() -> None:
    """Leave a forked child out: the ranks and the shared memory belong to its parent."""
    if "mpi4py.MPI" in sys.modules and mpi_runs():
        _forked.append(True)
    _before.clear()
    _after.clear()
    _on_errors.clear()


os.register_at_fork(after_in_child=_disown)


def check_not_forked() -> None:
    """Raise RuntimeError in a forked child of a rank, whose MPI belongs to its parent."""
    if _forked:
        raise RuntimeError(FORKED)


def finish_failed(steps: Steps[object], otherwise: Callable[[], None]) -> Steps[None]:
    """Finish the rest of a failed collective if the other ranks arrive in time. Else call ``otherwise``."""
    stopwatch = Stopwatch()
    try:
        for _ in steps:
            if stopwatch.seconds > EXIT_SECONDS:
                otherwise()
            yield
    except OSError:
        # Another rank has failed in the same collective.
        otherwise()
    except (MismatchError, PeerError):
        # The caller had its error. All ranks have now taken part in the exchange.
        return


def abort_job(rank: int, reason: str) -> None:
    """Tell the user the reason, and end the job, because MPI_Finalize would hang."""
    tell_user(f"rank {rank} ends the job: {reason}")
    end_job()


def before_shutdown(act: Callable[[], None]) -> None:
    """Call ``act`` when the program ends, before channels are closed; the last one first."""
    _before.append(act)
    install()


def at_shutdown(act: Callable[[], bool]) -> None:
    """Call ``act`` to tell other ranks of the end, also in forked processes.

    It returns whether all ranks of the job have ended their programs.
    """
    _shutdowns.append(act)


def after_shutdown(act: Callable[[], None]) -> None:
    """Call ``act`` once after the last exchange with other ranks; the last one first."""
    if act not in _after:
        _after.append(act)


def on_uncaught_error(act: Callable[[BaseException], None]) -> None:
    """Call ``act`` on an uncaught error of the main thread, before the job ends."""
    if not _hooks:
        _hooks.append(_ErrorHook(sys.excepthook))
        sys.excepthook = _hooks[0]
    if act not in _on_errors:
        _on_errors.append(act)


class _ErrorHook:
    """A ``sys.excepthook`` that calls the registered functions before ``previous``, which may end the job."""

    def __init__(self, previous: Callable[..., object]) -> None:
        self._previous = previous

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            for act in _on_errors:
                self._try(act, error)
        finally:
            self._previous(kind, error, trace)

    def _try(self, act: Callable[[BaseException], None], error: BaseException) -> None:
        try:
            act(error)
        except Exception:  # the program's own error must be printed, and ends the job
            _log.exception("a function to call before the end of the program failed")


def install() -> None:
    """Shut down when the program ends or calls MPI_Finalize itself."""
    if not _keyvals:
        mpi = import_mpi()
        # MPI_Finalize first deletes the attributes of MPI_COMM_SELF, while everything else still works.
        _keyvals.append(mpi.Comm.Create_keyval(delete_fn=lambda *_: shut_down()))
        mpi.COMM_SELF.Set_attr(_keyvals[0], None)


@atexit.register
def _shut_down_at_exit() -> None:
    """Shut down, and set a deadline for MPI_Finalize if all programs have ended."""
    if shut_down() and not _forked and mpi_runs():
        world = import_mpi().COMM_WORLD
        limit_finalize(world.Get_rank(), world.Get_size())


def shut_down() -> bool:
    """Tell the other ranks that this program has ended, before MPI_Finalize waits in silence.

    So a rank that leaves early, for example by sys.exit(), gives the others a PeerError in their next collective.
    Returns whether all ranks of the job are known to have ended their programs.
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
