"""The end of a process: lost ranks, signals, aborts, and uncaught errors.

Without an abort, the other ranks wait for a failed rank forever.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, NoReturn, TextIO

from mpidist.core import settings
from mpidist.core.errors import LaunchError, PeerError, prints_here
from mpidist.core.text import is_of_package, is_of_program, path_in_package
from mpidist.topology.launchers import read_launcher

if TYPE_CHECKING:
    from traceback import StackSummary, TracebackException
    from types import TracebackType

    from mpi4py import MPI

EXIT_CODE = 1
STDERR = 2
# SIGUSR1 because Slurm users ask for it: sbatch --signal=USR1@120.
SIGNALS_TO_SAVE = (signal.SIGTERM, signal.SIGUSR1)
_FT_VARIABLE = "OMPI_MCA_mpi_ft_enable"  # set by mpirun --with-ft
_LOST_RANK_ERRORS = ("ERR_PROC_FAILED", "ERR_PROC_FAILED_PENDING", "ERR_REVOKED")
# Launchers drop output that they have not read from their ranks' pipes when a rank aborts.
_LAUNCHER_READS_SECONDS = 0.2
# Limit for MPI_Abort, which waits for the launcher.
_ABORT_SECONDS = 5
_DAEMONS_OF_OPEN_MPI_5 = ("prterun", "prted")
# mpirun --with-ft of Open MPI 5 may hang, or return 0, if two ranks abort at the same time.
_APART_SECONDS, _MOST_APART = 0.3, 8
# Time for the rank that prints the traceback to end the job. An abort by another rank would cut off its output.
# Rank 0 waits less than the others. It then speaks for all ranks that a failed peer has reached.
_OTHERS_SECONDS, _FIRST_RANK_SECONDS = 2.75, 2.0


# Lost ranks (ULFM, the fault tolerance of MPI 5) ----------------------------------------------------------------


def is_fault_tolerant() -> bool:
    """Return whether the launcher was started with fault tolerance. Does not need MPI."""
    return os.environ.get(_FT_VARIABLE, "0") in ("1", "true")


def can_go_on() -> bool:
    """Return whether the other ranks survive the loss of one. MPI must run."""
    return is_fault_tolerant() and hasattr(sys.modules["mpi4py.MPI"].Comm, "Shrink")


def says_rank_is_lost(error: BaseException) -> bool:
    """Return whether an error of MPI means a lost process or a revoked communicator."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not isinstance(error, mpi.Exception):
        return False
    return error.Get_error_class() in [getattr(mpi, name) for name in _LOST_RANK_ERRORS if hasattr(mpi, name)]


def lost_ranks(comm: MPI.Intracomm) -> set[int]:
    """Return the ranks of ``comm`` that are known to be lost (MPI_Comm_get_failed). Local."""
    lost, own = comm.Get_failed(), comm.Get_group()
    ranks = set(lost.Translate_ranks(None, own))
    lost.Free()
    own.Free()
    return ranks


def means_loss(error: BaseException, comm: MPI.Intracomm) -> bool:
    """Return whether an error of a call on ``comm`` comes from a lost rank."""
    if says_rank_is_lost(error):
        return True
    # Open MPI reports an internal error if a nonblocking collective meets a lost rank.
    is_of_mpi = isinstance(error, sys.modules["mpi4py.MPI"].Exception)
    return is_of_mpi and (comm.Is_revoked() or comm.Get_failed().Get_size() > 0)


def revoke(comm: MPI.Intracomm) -> None:
    """Raise an error in every present and later call on ``comm``, on all ranks (MPI_Comm_revoke). Local."""
    if can_go_on() and not comm.Is_revoked():
        comm.Revoke()


def agree(comm: MPI.Intracomm, mine: bool) -> bool:
    """Return whether all ranks pass True and no rank is lost (collective). Works on a revoked ``comm``."""
    try:
        return bool(comm.Agree(int(mine)))
    except sys.modules["mpi4py.MPI"].Exception as error:
        if says_rank_is_lost(error):
            return False
        raise


@contextmanager
def revoking(comm: MPI.Intracomm) -> Iterator[None]:
    """Revoke ``comm`` if MPI fails in the block, because other ranks may wait there."""
    try:
        yield
    except sys.modules["mpi4py.MPI"].Exception:
        revoke(comm)
        raise


# Signals --------------------------------------------------------------------------------------------------------


@contextmanager
def signals_left_to_others() -> Iterator[None]:
    """Ignore signals that request a save in the block.

    Only other ranks have something to save. Handlers of the program stay. Does nothing outside of the main thread.

    >>> with signals_left_to_others():
    ...     signal.raise_signal(signal.SIGUSR1)
    """
    is_main = threading.current_thread() is threading.main_thread()
    replaced = [number for number in SIGNALS_TO_SAVE if is_main and signal.getsignal(number) is signal.SIG_DFL]
    for number in replaced:
        # Not SIG_IGN, because child processes would inherit it.
        signal.signal(number, lambda *_: None)
    try:
        yield
    finally:
        for number in replaced:
            signal.signal(number, signal.SIG_DFL)


# The abort ------------------------------------------------------------------------------------------------------


def end_job(code: int = EXIT_CODE) -> NoReturn:
    """End the job with ``code``, or at least this process.

    A child of Open MPI 5's mpirun exits, and mpirun ends the other ranks. Any other process calls MPI_Abort. On a host
    without network MPI_Abort never returns and holds Python's lock. A thread of faulthandler then ends this process
    after 5 s. It prints "Timeout (0:00:05)!" and the stacks on stderr.

    Args:
        code: Exit code, not 0.
    """
    world = sys.modules["mpi4py.MPI"].COMM_WORLD
    if can_go_on() and len(lost_ranks(world)) == world.Get_size() - 1:
        # mpirun --with-ft of Open MPI 5 returns 0 if the last rank aborts.
        os._exit(code)
    if _is_child_of_open_mpi_5() and not is_fault_tolerant():
        # mpirun 5.0.11 deadlocks in one job of 40 if ranks abort while others end: PMIx_server_deregister_client waits
        # for a thread of PMIx that waits for it. It does not if ranks exit, and it ends the job as well.
        os._exit(code)
    import faulthandler

    faulthandler.dump_traceback_later(_ABORT_SECONDS, exit=True, file=STDERR)
    world.Abort(code)
    raise AssertionError("MPI_Abort returned")


def end_job_after_output(code: int = EXIT_CODE) -> NoReturn:
    """Flush the output, wait until the launcher has read it, and end the job."""
    flush_output()
    time.sleep(_LAUNCHER_READS_SECONDS)
    end_job(code)


def _is_child_of_open_mpi_5() -> bool:
    # A script between mpirun and this process might continue after its end.
    try:
        with open(f"/proc/{os.getppid()}/comm") as file:
            return file.read().strip() in _DAEMONS_OF_OPEN_MPI_5
    except OSError:  # the parent has ended, or /proc is missing
        return False


def status_of_failure(code: int) -> int:
    """Return ``code`` for a command that failed on this rank. With other ranks, end the job.

    The other ranks may wait in MPI. This imports mpi4py, which starts MPI, because Open MPI 5.0.11 hangs if a rank
    exits with an error while another one starts MPI.
    """
    try:
        launcher = read_launcher()
        if launcher is None or launcher.size == 1:
            return code
        mpi = importlib.import_module("mpi4py.MPI")
    except (LaunchError, ImportError, RuntimeError):  # this rank has no MPI world to end
        return code
    if not mpi.Is_initialized() or mpi.Is_finalized() or mpi.COMM_WORLD.Get_size() == 1:
        return code
    end_job_after_output(code)


# Tracebacks -----------------------------------------------------------------------------------------------------


def traceback_text(error: BaseException) -> str:
    """Return the traceback of an error, with mpidist's frames folded into single lines.

    It has all frames with ``MPIDIST_FULL_TRACEBACK=1``, and if none is of the user's program.
    """
    import traceback

    found = traceback.TracebackException.from_exception(error, compact=True)
    full, problem = _read_full_traceback()
    chain = list(_chain(found))
    if not full and any(is_of_program(frame.filename) for each in chain for frame in each.stack):
        for each in chain:
            # TracebackException.format calls it.
            each.stack.format = partial(_folded, each.stack)  # type: ignore[method-assign]
    return "".join(found.format()) + problem


def _read_full_traceback() -> tuple[bool, str]:
    """Return the setting, and the text about a wrong one. An exception would hide the error to print."""
    try:
        return settings.FULL_TRACEBACK.read(), ""
    except ValueError as problem:
        return True, f"mpidist: {problem}\n"


def _chain(first: TracebackException) -> Iterator[TracebackException]:
    """Yield an error, its causes and contexts, and the members of an exception group."""
    left = [first]
    while left:
        each = left.pop()
        yield each
        # Python 3.10 has no groups.
        others = (each.__cause__, each.__context__, *(getattr(each, "exceptions", None) or ()))
        left += [other for other in others if other is not None]


def _folded(stack: StackSummary, **options: bool) -> list[str]:
    """Return the lines of a traceback. Consecutive frames of mpidist share a line."""
    lines: list[str] = []
    for inside, run in groupby(stack, lambda frame: is_of_package(frame.filename)):
        frames = list(run)
        if inside:
            count = "1 frame" if len(frames) == 1 else f"{len(frames)} frames"
            last = f"{path_in_package(frames[-1].filename)}:{frames[-1].lineno}"
            lines.append(f"  ... {count} inside mpidist, to {last}; MPIDIST_FULL_TRACEBACK=1 shows them\n")
        else:
            lines += type(stack).from_list(frames).format(**options)
    return lines


def _lasts(stream: TextIO) -> bool:
    """Return False for a buffer, such as that of PyTorch's excepthook."""
    try:
        return os.fstat(stream.fileno()).st_nlink > 0
    except (AttributeError, TypeError, ValueError, OSError):  # a buffer, or closed
        return False


def flush_output() -> None:
    """Flush stdout and stderr, even if one of them fails."""
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        with contextlib.suppress(Exception):
            stream.flush()  # type: ignore[union-attr]


# Uncaught errors ------------------------------------------------------------------------------------------------


def install_excepthook() -> None:
    """End the whole MPI job on an uncaught exception of one rank. ``import mpidist`` calls this.

    The rank prints ``rank 1 of 4 on host node7:`` and the traceback on stderr, flushes its output and ends the job
    (:func:`end_job`). Frames inside mpidist take one line. ``MPIDIST_FULL_TRACEBACK=1`` shows all of them, on every
    rank. If ``sys.stderr`` is not a file, the traceback is printed on the stderr with which the process started.

    If all ranks raise the same error, such as MismatchError, rank 0 prints it, and one rank of each differing call. The
    other ranks leave it to those to end the job. A rank that raises PeerError leaves it to the failed rank. If the job
    still runs after about 2 s, these ranks end it, and print the message of the error without a traceback.

    The hook acts if MPI runs with several ranks, for KeyboardInterrupt and uncaught exceptions of threads as well. It
    does not act at an interactive prompt or in a forked child. A hook of another library that was installed before is
    called, too. Errors that Python ignores, in ``__del__`` and in functions of ``atexit``, are printed with the rank
    and ignored. ``sys.exit(code)`` is not an exception: see ``mpidist.collectives.channel.shutdown``.
    ``MPIDIST_ABORT_ON_EXCEPTION=0`` (read here, once) turns the hook off. A second call changes nothing.

    Raises:
        ValueError: ``MPIDIST_ABORT_ON_EXCEPTION`` is neither 0 nor 1, and MPI already runs. Otherwise ``import_mpi``
            raises it.

    Source: ChainerMN's ``global_except_hook``.
    """
    try:
        wanted = settings.ABORT_ON_EXCEPTION.read()
    except ValueError:
        if "mpi4py.MPI" in sys.modules:
            raise
        # import_mpi raises it before MPI starts. Raised here, it would keep doctor from running.
        wanted = True
    if not wanted or isinstance(sys.excepthook, _AbortHook):
        return
    sys.excepthook = _AbortHook(sys.excepthook)
    threading.excepthook = _ThreadHook(threading.excepthook)
    sys.unraisablehook = _NamingHook(sys.unraisablehook)


def is_interactive() -> bool:
    """Return whether an uncaught exception returns to a prompt."""
    get_shell = getattr(sys.modules.get("IPython"), "get_ipython", None)
    shell = None if get_shell is None else get_shell()
    # IPython sets sys.ps1 for scripts, too.
    runs_script = shell is not None and not getattr(shell.parent, "interact", True)
    return (hasattr(sys, "ps1") and not runs_script) or bool(sys.flags.inspect)


class _Hook:
    def __init__(self, previous: Callable[..., object]) -> None:
        self.previous = previous
        self.process = os.getpid()

    def world(self) -> MPI.Intracomm | None:
        """Return the communicator to abort, or None if the job continues."""
        mpi = sys.modules.get("mpi4py.MPI")
        if mpi is None or not mpi.Is_initialized() or mpi.Is_finalized():
            return None
        is_forked = os.getpid() != self.process
        return None if is_interactive() or is_forked or mpi.COMM_WORLD.Get_size() == 1 else mpi.COMM_WORLD

    def end_job(self, world: MPI.Intracomm, report: Callable[[], object]) -> None:
        """Report the error and end the job, even if the report fails."""
        try:
            try:
                if not _lasts(sys.stderr):
                    sys.stderr = sys.__stderr__
                report()
            finally:
                flush_output()
        finally:
            time.sleep(_LAUNCHER_READS_SECONDS)
            if is_fault_tolerant():
                time.sleep(_APART_SECONDS * min(world.Get_rank(), _MOST_APART))
            end_job()


def _name(world: MPI.Intracomm) -> str:
    host = sys.modules["mpi4py.MPI"].Get_processor_name()
    return f"rank {world.Get_rank()} of {world.Get_size()} on host {host}:\n"


def _report(world: MPI.Intracomm, error: BaseException, title: str = "") -> None:
    """Print an error. Ranks without the traceback give others time to end the job."""
    import traceback

    is_peer, is_full = isinstance(error, PeerError), _read_full_traceback()[0]
    prints = prints_here(error)
    if prints is None:
        prints = not is_peer or world.Get_rank() == 0
    if is_peer or not (prints or is_full):
        time.sleep(_FIRST_RANK_SECONDS if prints else _OTHERS_SECONDS)
    if is_full or (prints and not is_peer):
        text = traceback_text(error)
    else:
        # The job still runs, so the rank with the cause has caught its error.
        text = "".join(traceback.format_exception_only(type(error), error))
    sys.stderr.write(f"{_name(world)}{title}{text}")


class _AbortHook(_Hook):
    """A ``sys.excepthook`` that reports the error and aborts the MPI job."""

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        world, is_pythons = self.world(), self.previous is sys.__excepthook__

        def call_previous() -> None:
            sys.stderr.write(_name(world) if world is not None else "")
            self.previous(kind, error, trace)

        if world is not None:
            self.end_job(world, (lambda: _report(world, error)) if is_pythons else call_previous)
        elif isinstance(error, LaunchError) and is_pythons and sys.stderr is not None:
            # Its cause is in the environment, not in mpidist's frames.
            sys.stderr.write(traceback_text(error))
        else:
            # A rank that fails before it starts MPI exits with code 1. mpirun of Open MPI then ends the job. MPICH's
            # mpiexec and srun do not (srun -K does), but starting MPI only to abort could hang for the same reason.
            self.previous(kind, error, trace)


class _ThreadHook(_Hook):
    """The ``threading.excepthook`` that does the same for threads."""

    def __call__(self, args: threading.ExceptHookArgs) -> None:
        world, error = self.world(), args.exc_value
        # sys.exit() in a thread ends the thread.
        if world is None or issubclass(args.exc_type, SystemExit):
            self.previous(args)
        elif self.previous is threading.__excepthook__ and error is not None:
            name = "that has ended" if args.thread is None else args.thread.name
            self.end_job(world, lambda: _report(world, error, f"Exception in thread {name}:\n"))
        else:
            self.end_job(world, lambda: (sys.stderr.write(_name(world)), self.previous(args)))


class _NamingHook(_Hook):
    """A ``sys.unraisablehook`` that prints the name of the rank first. The job continues."""

    def __init__(self, previous: Callable[[sys.UnraisableHookArgs], object]) -> None:
        super().__init__(previous)
        # Python empties this module before its last unraisable errors.
        self._is_finalizing, self._name = sys.is_finalizing, _name

    def __call__(self, unraisable: sys.UnraisableHookArgs) -> None:
        world = None if self._is_finalizing() else self.world()
        if world is not None and sys.stderr is not None:
            sys.stderr.write(self._name(world))
        self.previous(unraisable)
