"""The end of the whole job when one rank fails. Otherwise the other ranks would wait for it for ever."""

from __future__ import annotations

import faulthandler
import importlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

from mpidist.core import settings
from mpidist.core.errors import LaunchError, PeerError, is_left_to_others, shared_text
from mpidist.core.wording import numbered_ranks
from mpidist.topology import last_output
from mpidist.topology.environments import read_launcher
from mpidist.topology.faults import can_go_on, is_fault_tolerant, lost_ranks

if TYPE_CHECKING:
    from mpi4py import MPI

EXIT_CODE = 1
# Launchers drop output that they have not read from their ranks' pipes when a rank aborts.
_LAUNCHER_READS_SECONDS = 0.2
# How long MPI may take to hand the news to the launcher.
_ABORT_SECONDS = 5
_DAEMONS_OF_OPEN_MPI_5 = ("prterun", "prted")
# mpirun --with-ft of Open MPI 5 may hang, or return 0, where two ranks abort at the same time.
_APART_SECONDS, _MOST_APART = 0.3, 8
# How long a rank that an error of another has reached, or that has the same error as others, leaves it to these to tell
# of it and to end the job; the first rank, which then speaks for all that another's has reached, so much less that the
# job has ended before they speak.
_OTHERS_SECONDS, _FIRST_RANK_SECONDS = 2.75, 2.0


def end_job(code: int = EXIT_CODE) -> NoReturn:
    """End the job with ``code``, which is not 0, or at least this process.

    This process ends also where nobody can be told of it.

    As a child of mpirun of Open MPI 5 the rank exits, and mpirun ends the others. Anywhere else it calls MPI_Abort. On
    a host that the network has lost MPI_Abort waits for an answer of the launcher that never comes, and it keeps
    Python's lock. So a thread of faulthandler, which does not need it, ends this process after 5 s, under a line
    "Timeout (0:00:05)!" and the stacks of its threads on stderr. Where the launcher can be told it is quicker.
    """
    world = sys.modules["mpi4py.MPI"].COMM_WORLD
    if can_go_on() and len(lost_ranks(world)) == world.Get_size() - 1:
        # mpirun --with-ft of Open MPI 5 returns 0 where the last rank aborts.
        os._exit(code)
    if _mpirun_sees_the_end_of_this_process() and not is_fault_tolerant():
        # Its mpirun 5.0.11 deadlocks in one job of 40 where ranks abort while others end: PMIx_server_deregister_client
        # waits for a thread of PMIx that waits for it. Where they exit it does not, and ends the job as well.
        os._exit(code)
    faulthandler.dump_traceback_later(_ABORT_SECONDS, exit=True, file=last_output.STDERR)
    world.Abort(code)
    raise AssertionError("MPI_Abort came back")


def end_job_after_output(code: int = EXIT_CODE) -> NoReturn:
    """Flush this process's output, leave the launcher time to read it, and end the job."""
    last_output.flush_output()
    time.sleep(_LAUNCHER_READS_SECONDS)
    end_job(code)


def _mpirun_sees_the_end_of_this_process() -> bool:
    """Return whether mpirun of Open MPI 5 has started this process itself. A script in between may go on without it."""
    try:
        parent = Path("/proc", str(os.getppid()), "comm").read_text().strip()
    except OSError:
        # It is gone, or there is no /proc.
        return False
    return parent in _DAEMONS_OF_OPEN_MPI_5


def status_of_failure(code: int) -> int:
    """Return ``code`` for a command that failed here; with other ranks, end the job.

    They may have started MPI, and wait for this one. It imports mpi4py, which starts MPI: the launcher of Open MPI
    5.0.11 hangs where a rank exits with an error while another one starts MPI.
    """
    try:
        launcher = read_launcher()
        if launcher is None or launcher.size == 1:
            return code
        mpi = importlib.import_module("mpi4py.MPI")
    except (LaunchError, ImportError, RuntimeError):
        # There is no world that this rank could end.
        return code
    if not mpi.Is_initialized() or mpi.Is_finalized() or mpi.COMM_WORLD.Get_size() == 1:
        return code
    end_job_after_output(code)


def install_excepthook() -> None:
    """Make an uncaught exception on one rank end the whole MPI job. ``import mpidist`` calls this.

    The rank prints ``rank 1 of 4 on host node7:`` and the traceback on stderr, flushes its output and ends the job
    (:func:`end_job`). Of ranks of a node with the same traceback one prints it, and names the others; other nodes leave
    a MismatchError, and a CollectiveTimeoutError with a report, to the first one, for 2.75 s. Frames inside mpidist are
    one line (``MPIDIST_FULL_TRACEBACK=1``: all of it, on every rank). Where another library has a buffer in
    ``sys.stderr`` it is printed on file descriptor 2. The launcher ends the other ranks and returns a code that is not
    0. It acts where MPI runs with more than one rank, for KeyboardInterrupt too, and not at an interactive prompt nor
    in a forked child. The hook that was there before is called in all cases but one: Python's own, where the job is
    ended. ``MPIDIST_ABORT_ON_EXCEPTION=0`` (read here, once) turns it off. A second call changes nothing.

    An uncaught exception in a thread ends the job, too: other ranks may wait for the thread's work. A rank that
    ends only because of the error of another (PeerError) leaves it to that one to print its traceback and end the job;
    if the job goes on it reports the error in one line. Errors that Python ignores, those in ``__del__`` and in
    functions of ``atexit``, are printed with the rank, and ignored.

    ``sys.exit(code)`` is no exception, and no hook sees it. A rank whose program ends tells the others, whose next
    collective then raises PeerError, which this hook sees (``mpidist.collectives.channel.shutdown``). Ranks that are in
    no collective of mpidist wait in MPI_Finalize.

    Raises:
        ValueError: ``MPIDIST_ABORT_ON_EXCEPTION`` is neither 0 nor 1, and MPI runs already; before that
            ``import_mpi`` raises it.

    Source: ChainerMN's ``global_except_hook``.
    """
    try:
        wanted = settings.ABORT_ON_EXCEPTION.read()
    except ValueError:
        if "mpi4py.MPI" in sys.modules:
            raise
        # import_mpi raises it before MPI starts; here, doctor could not be imported to say what is wrong.
        wanted = True
    if not wanted or isinstance(sys.excepthook, _AbortHook):
        return
    sys.excepthook = _AbortHook(sys.excepthook)
    threading.excepthook = _ThreadHook(threading.excepthook)
    sys.unraisablehook = _NamingHook(sys.unraisablehook)


def is_interactive() -> bool:
    """Return whether an uncaught exception leads back to a prompt."""
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = None if get_shell is None else get_shell()
    # IPython sets sys.ps1 for scripts, too.
    runs_script = shell is not None and not getattr(shell.parent, "interact", True)
    return (hasattr(sys, "ps1") and not runs_script) or bool(sys.flags.inspect)


class _ExceptionHook:
    """The base of the hooks: it knows the job to end, and names this rank."""

    def __init__(self, previous: Callable[..., object]) -> None:
        self.previous = previous
        self.process = os.getpid()

    def _world(self) -> MPI.Intracomm | None:
        """Return the communicator to abort; None where the job is to go on."""
        mpi = sys.modules.get("mpi4py.MPI")
        if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
            return None
        forked = os.getpid() != self.process
        world: MPI.Intracomm = mpi.COMM_WORLD
        return None if is_interactive() or forked or world.Get_size() == 1 else world

    def _name_of(self, world: MPI.Intracomm, ranks: Iterable[int]) -> str:
        """Return ranks of this node as text, for messages."""
        host = sys.modules["mpi4py.MPI"].Get_processor_name()
        return f"{numbered_ranks([*ranks])} of {world.Get_size()} on host {host}"

    def _end_job(self, world: MPI.Intracomm, tell: Callable[[], object]) -> None:
        """Print the error by ``tell``, flush, and abort the job whatever happens on the way."""
        try:
            try:
                tell()
            finally:
                last_output.flush_output()
        finally:
            time.sleep(_LAUNCHER_READS_SECONDS)
            if is_fault_tolerant():
                time.sleep(_APART_SECONDS * min(world.Get_rank(), _MOST_APART))
            end_job()

    def _print(self, world: MPI.Intracomm, error: BaseException, title: str = "") -> None:
        """Print an error that this process ends with, under a title."""
        rank = world.Get_rank()
        is_full = last_output.read_setting()[0]
        if is_left_to_others(error) and not is_full and not last_output.own_file():
            # In most cases the job has ended before; where it has not, nobody else may have printed it.
            time.sleep(_OTHERS_SECONDS)
        if isinstance(error, PeerError):
            # The stack here is of no interest, and the rank that has the error must come to print its own.
            time.sleep(_OTHERS_SECONDS if rank else _FIRST_RANK_SECONDS)
            text = title + "".join(traceback.format_exception_only(type(error), error))
        else:
            text = title + last_output.traceback_text(error)
        if is_full:
            last_output.write_last(f"{self._name_of(world, [rank])}:\n{text}")
        else:
            key = last_output.without_folds(shared_text(error, text))
            last_output.print_once(text, key, rank, lambda ranks: self._name_of(world, ranks))

    def _call(self, world: MPI.Intracomm, previous: Callable[[], object]) -> None:
        """Have the previous hook print the error, under the name of this rank."""
        with last_output.lasting_stderr():
            sys.stderr.write(f"{self._name_of(world, [world.Get_rank()])}:\n")
            previous()


class _AbortHook(_ExceptionHook):
    """A ``sys.excepthook`` that calls ``previous`` and then aborts the MPI job."""

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        world = self._world()
        if world is None:
            # A rank that fails before it starts MPI simply ends, with code 1. mpirun of Open MPI then ends
            # the job. MPICH's mpiexec and srun do not (srun -K does); starting MPI here only to abort it
            # could wait for ever itself, for ranks that failed in the same way.
            if isinstance(error, LaunchError) and self.previous is sys.__excepthook__:
                # Its cause is in the environment, and not in mpidist's frames.
                last_output.write_last(last_output.traceback_text(error))
            else:
                self.previous(kind, error, trace)
            return
        if self.previous is sys.__excepthook__:
            self._end_job(world, lambda: self._print(world, error))
        else:
            self._end_job(world, lambda: self._call(world, lambda: self.previous(kind, error, trace)))


class _ThreadHook(_ExceptionHook):
    """A ``threading.excepthook`` that does the same for threads."""

    def __call__(self, args: threading.ExceptHookArgs) -> None:
        world = self._world()
        # sys.exit() in a thread ends the thread.
        if world is None or issubclass(args.exc_type, SystemExit):
            self.previous(args)
        elif self.previous is threading.__excepthook__ and (error := args.exc_value) is not None:
            name = "that has ended" if args.thread is None else args.thread.name
            self._end_job(world, lambda: self._print(world, error, f"Exception in thread {name}:\n"))
        else:
            self._end_job(world, lambda: self._call(world, lambda: self.previous(args)))


class _NamingHook(_ExceptionHook):
    """A ``sys.unraisablehook`` that names the rank above the text of ``previous``. The job goes on."""

    def __init__(self, previous: Callable[[sys.UnraisableHookArgs], object]) -> None:
        super().__init__(previous)
        # Kept: in its last moments Python has emptied this module, too.
        self._is_finalizing = sys.is_finalizing

    def __call__(self, unraisable: sys.UnraisableHookArgs) -> None:
        world = None if self._is_finalizing() else self._world()
        if world is not None and sys.stderr is not None:
            sys.stderr.write(f"{self._name_of(world, [world.Get_rank()])}:\n")
        self.previous(unraisable)
