"""Ending the whole job when one rank fails, so that the other ranks do not wait for it for ever."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING

from mpidist.core import settings

if TYPE_CHECKING:
    from mpi4py import MPI

EXIT_CODE = 1
_LAUNCHER_READS_SECONDS = 0.2
ExceptHook = Callable[[type[BaseException], BaseException, TracebackType | None], object]


def install_excepthook() -> None:
    """Make an uncaught exception on one rank end the whole MPI job (``import mpidist`` calls this).

    The rank prints ``rank 1 of 4 on host node7:`` and the traceback on stderr, once, flushes its output and
    calls ``MPI_Abort``; the launcher ends the other ranks and returns a code that is not 0. It acts where MPI
    runs with more than one rank, for KeyboardInterrupt too, and not at an interactive prompt nor in a forked
    child. The hook that was there before is called in all cases but one: Python's own, where the job is
    aborted. ``MPIDIST_ABORT_ON_EXCEPTION=0`` (read here, once) turns it off. A second call changes nothing.

    Two ways to leave are not uncaught exceptions, and no hook sees them: ``sys.exit(code)``, and an error in
    a thread. A rank whose program ends tells the others, whose next collective then raises PeerError, which this
    hook sees (``mpidist.collectives.channel``). Ranks that are in no collective of mpidist wait in MPI_Finalize.

    Raises:
        ValueError: ``MPIDIST_ABORT_ON_EXCEPTION`` is neither 0 nor 1.

    Source: ChainerMN's ``global_except_hook``.
    """
    if not settings.ABORT_ON_EXCEPTION.read() or isinstance(sys.excepthook, _AbortHook):
        return
    sys.excepthook = _AbortHook(sys.excepthook)


class _AbortHook:
    """A ``sys.excepthook`` that prints what ``previous`` prints and then aborts the MPI job."""

    def __init__(self, previous: ExceptHook) -> None:
        self.previous = previous
        self.process = os.getpid()

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        world = self._world()
        if world is None:
            # A rank that fails before it starts MPI simply ends, with code 1. mpirun of Open MPI then ends
            # the job. MPICH's mpiexec and srun do not (srun -K does); starting MPI here only to abort it
            # could wait for ever itself, for ranks that failed in the same way.
            self.previous(kind, error, trace)
            return
        try:
            self._report(world, kind, error, trace)
        finally:
            # Launchers drop what they have not read from their ranks' pipes when a rank aborts.
            time.sleep(_LAUNCHER_READS_SECONDS)
            world.Abort(EXIT_CODE)

    def _world(self) -> MPI.Intracomm | None:
        """Return the communicator to abort; None where the job is to go on."""
        mpi = sys.modules.get("mpi4py.MPI")
        if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
            return None
        interactive = hasattr(sys, "ps1") or sys.flags.inspect
        forked = os.getpid() != self.process
        world: MPI.Intracomm = mpi.COMM_WORLD
        return None if interactive or forked or world.Get_size() == 1 else world

    def _report(
        self,
        world: MPI.Intracomm,
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
    ) -> None:
        host = sys.modules["mpi4py.MPI"].Get_processor_name()
        header = f"rank {world.Get_rank()} of {world.Get_size()} on host {host}:\n"
        try:
            if self.previous is sys.__excepthook__:
                # One write, because the lines of several failing ranks would mingle.
                sys.stderr.write(header + "".join(traceback.format_exception(kind, error, trace)))
            else:
                sys.stderr.write(header)
                self.previous(kind, error, trace)
            sys.stdout.flush()
        finally:
            sys.stderr.flush()
