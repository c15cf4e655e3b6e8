"""Shutdown: the last acts of this process, and the refusal of forked children."""

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

# How long a rank that leaves waits for others to catch up with what was given up, so that MPI can end in order.
EXIT_SECONDS = 5.0
FORKED = (
    "this process was forked from a rank, which takes part in collectives itself; expected that the rank makes them, "
    "and that a child gets what it needs from it, or is started anew (subprocess, multiprocessing's 'spawn')"
)
_log = logging.getLogger("mpidist")
_keyvals: list[int] = []
_hooks: list[_ActingHook] = []
# The acts at the end of a program: first ones, those that tell the other ranks, last ones.
_first_acts: list[Callable[[], None]] = []
_telling_acts: list[Callable[[], bool]] = []
_last_acts: list[Callable[[], None]] = []
# The acts before the hook for uncaught errors, which may end the job.
_acts_on_errors: list[Callable[[BaseException], None]] = []
# Where this process was forked from one that had started MPI.
_forked: list[bool] = []


def _disown() -> None:
    """Keep a forked child out: it has not left, and shared memory is its parent's."""
    if "mpi4py.MPI" in sys.modules and mpi_runs():
        _forked.append(True)
    _first_acts.clear()
    _last_acts.clear()
    _acts_on_errors.clear()


os.register_at_fork(after_in_child=_disown)


def check_not_forked() -> None:
    """Raise RuntimeError in a forked child of a rank, whose MPI is its parent's."""
    if _forked:
        raise RuntimeError(FORKED)


def finish_given_up(steps: Steps[object], otherwise: Callable[[], None]) -> Steps[None]:
    """Finish steps that were given up if the others catch up; else end the job.

    Args:
        steps: Of the collective.
        otherwise: Ends the job.
    """
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
        # The caller had its error; all ranks have now taken part, which is all that matters here.
        return


def abort_job(rank: int, reason: str | None) -> None:
    """End the job where MPI_Finalize would wait for ever, after telling the user the reason."""
    tell_user(f"rank {rank} ends the job: {reason}")
    end_job()


def before_the_end(act: Callable[[], None]) -> None:
    """Have ``act`` called when the program ends, before channels are closed; the last one first."""
    _first_acts.append(act)
    install()


def at_the_end(act: Callable[[], bool]) -> None:
    """Register ``act`` to announce the end of this program to the other ranks. Forked processes keep it.

    ``act`` returns whether all ranks of the job have ended their programs.
    """
    _telling_acts.append(act)


def after_the_end(act: Callable[[], None]) -> None:
    """Have ``act`` called once after the last exchange with other ranks; the last one first."""
    if act not in _last_acts:
        _last_acts.append(act)


def before_an_uncaught_error(act: Callable[[BaseException], None]) -> None:
    """Have ``act`` called on an uncaught error of the main thread, before the job ends."""
    if not _hooks:
        _hooks.append(_ActingHook(sys.excepthook))
        sys.excepthook = _hooks[0]
    if act not in _acts_on_errors:
        _acts_on_errors.append(act)


class _ActingHook:
    """A ``sys.excepthook`` that acts before ``previous``, which may end the job."""

    def __init__(self, previous: Callable[..., object]) -> None:
        self._previous = previous

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        try:
            for act in _acts_on_errors:
                self._try(act, error)
        finally:
            self._previous(kind, error, trace)

    def _try(self, act: Callable[[BaseException], None], error: BaseException) -> None:
        try:
            act(error)
        except Exception:  # the program's own error is what has to be told, and ends the job
            _log.exception("an act before the end of the program failed")


def install() -> None:
    """Have the acts called when the program ends or calls MPI_Finalize itself."""
    if not _keyvals:
        mpi = import_mpi()
        # MPI_Finalize begins with the attributes of MPI_COMM_SELF, while everything else still works.
        _keyvals.append(mpi.Comm.Create_keyval(delete_fn=lambda *_: leave_all()))
        mpi.COMM_SELF.Set_attr(_keyvals[0], None)


@atexit.register
def _leave_at_exit() -> None:
    """Leave, and set a deadline for MPI_Finalize if all programs have ended."""
    if leave_all() and not _forked and mpi_runs():
        world = import_mpi().COMM_WORLD
        limit_finalize(world.Get_rank(), world.Get_size())


def leave_all() -> bool:
    """Tell the other ranks that this program has ended, before MPI_Finalize waits in silence.

    A rank that leaves early, by sys.exit() for example, so gives the others a PeerError in their next collective.
    Returns whether all ranks of the job are known to have ended their programs.
    """
    while _first_acts and mpi_runs():
        _first_acts.pop()()
    try:
        return any([act() for act in _telling_acts])
    finally:
        while _last_acts:
            _last_acts.pop()()


def mpi_runs() -> bool:
    """Return whether MPI has been started and not been ended."""
    mpi = sys.modules["mpi4py.MPI"]
    return bool(mpi.Is_initialized() and not mpi.Is_finalized())
