"""The watch over MPI's start.

A rank that never comes leaves the others in MPI_Init for ever, where no thread of theirs can speak.

mpi4py keeps Python's lock while MPI starts, so no thread could act. A child process does: it says which rank, on which
host, has waited for ``MPIDIST_WARN_AFTER`` seconds, and ends it after ``MPIDIST_TIMEOUT``. It lives until MPI has
started; making it takes a few milliseconds.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import select
import signal
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NoReturn

from mpidist.core import settings
from mpidist.core.deadline import POLL_SECONDS, Stopwatch
from mpidist.core.errors import LaunchError
from mpidist.topology.environments import LAUNCHERS, LauncherInfo, one_world
from mpidist.topology.finalize import note_abort_status
from mpidist.topology.mpi_library import MPICH, MVAPICH, OPEN_MPI, library_before_start, may_have_pmix
from mpidist.topology.roll_call import start_answering

_MODULE = "mpi4py.MPI"
_STDERR = 2
_CAUSE = (
    "another rank has ended before, was killed, or has not come to it. Expected: every rank imports mpi4py.MPI or "
    "makes its strategy; python -m mpidist doctor examines how the job was started"
)
# The other ranks have no program, so this wait most likely never ends.
_STDIN_SECONDS = 5.0


def watch_start(info: LauncherInfo | None) -> None:
    """Watch the start of MPI, unless this rank is alone or MPI runs already."""
    if info is None or info.size == 1 or _MODULE in sys.modules:
        return
    try:
        seconds = settings.WARN_AFTER.read(), settings.TIMEOUT.read()
    except ValueError:
        # Not here: whatever reads it next says what is wrong with it, and doctor could not be imported to do so.
        return
    if not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch(info, seconds))


class _Watch(MetaPathFinder, Loader):
    """The finder of mpi4py.MPI alone, and its loader, which has the start watched."""

    def __init__(self, info: LauncherInfo, seconds: tuple[float, float]) -> None:
        self._info = info
        self._seconds = seconds
        self._asks_others = False
        self._loader: Loader
        self._end_of_watch: int | None = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _MODULE or self._asks_others:
            return None
        self._asks_others = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._asks_others = False
        if spec is not None and spec.loader is not None:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        # Here, where the module is not among the others yet, whom a fork would find it half made.
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]
        self._end_of_watch = _begin(self._info, self._seconds)
        try:
            return self._loader.create_module(spec)
        except BaseException:  # the library cannot be loaded, and the program may go on without
            self._stop()
            raise

    def exec_module(self, module: ModuleType) -> None:
        try:
            _check_library(self._info, str(module.__file__))
            self._loader.exec_module(module)
        finally:
            self._stop()
        note_abort_status(module)
        start_answering()

    def _stop(self) -> None:
        if self._end_of_watch is not None:
            os.close(self._end_of_watch)
            self._end_of_watch = None


def _check_library(info: LauncherInfo, module: str) -> None:
    """Raise LaunchError if Open MPI's mpirun started a rank whose MPICH has no PMIx. MPI_Init would abort it."""
    if LAUNCHERS[info.name].library != OPEN_MPI:
        return
    library = library_before_start(module)
    if library is None or library.vendor not in (MPICH, MVAPICH) or may_have_pmix():
        return
    raise LaunchError(
        f"{info.name} started {info.size} ranks, but mpi4py loaded {library} from {library.path}, which cannot join "
        f"them. {one_world(info, library)}"
    )


def _begin(info: LauncherInfo, seconds: tuple[float, float]) -> int | None:
    """Begin to watch, and return a descriptor that ends the watch when closed. Also where this process is killed.

    A process that may have no more children or descriptors starts MPI all the same; None then.
    """
    me = f"mpidist: rank {info.rank}{'' if info.size is None else f' of {info.size}'} on host {os.uname().nodename}"
    try:
        reading, writing = os.pipe()
    except OSError:
        return None
    cause = _CAUSE
    if sys.argv[:1] in (["-"], [""]) and LAUNCHERS[info.name].library is not None and not os.isatty(0):
        cause = (
            f"the program came from standard input, which {info.name} passes to rank 0 alone. Write it to a file, and "
            "name the file: mpirun -n 2 python train.py"
        )
        seconds = min(seconds[0], _STDIN_SECONDS), seconds[1]
    try:
        _start(reading, writing, seconds, (me, cause))
    except OSError:
        os.close(writing)
        return None
    finally:
        os.close(reading)
    return writing


def _start(reading: int, writing: int, seconds: tuple[float, float], said: tuple[str, str]) -> None:
    rank = os.getpid()
    with warnings.catch_warnings():
        # Python 3.12 warns of threads, such as those of a BLAS, and JAX of its own: the child has no use for them.
        for category in (DeprecationWarning, RuntimeWarning):
            warnings.simplefilter("ignore", category)
        child = os.fork()
    if child:
        # Gone already where the program ignores SIGCHLD.
        with contextlib.suppress(ChildProcessError):
            os.waitpid(child, 0)
        return
    try:
        warnings.simplefilter("ignore")
        # A child of a child, so that nobody has to wait for it, in a group of its own.
        if os.fork() == 0:
            os.setsid()
            os.close(writing)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
                signal.signal(number, signal.SIG_IGN)
            _watch(reading, rank, seconds, said)
    finally:
        os._exit(0)


def _watch(reading: int, rank: int, seconds: tuple[float, float], said: tuple[str, str]) -> NoReturn:
    (warn_after, limit), (me, cause) = seconds, said
    stopwatch = Stopwatch()
    for until, and_then in ((min(warn_after, limit), ""), (limit, ", and ends")):
        while (left := until - stopwatch.seconds) > 0:
            if select.select([reading], [], [], min(left, POLL_SECONDS))[0]:
                os._exit(0)
        os.write(_STDERR, f"{me} has waited {until:g} s for MPI to start{and_then}: {cause}\n".encode())
    os.kill(rank, signal.SIGKILL)
    os._exit(0)
