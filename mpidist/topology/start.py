"""The start of MPI, with a watchdog, and blocking MPI calls with a deadline."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING

from mpidist.core import message_tags, settings
from mpidist.core.concurrency import Deadline, start_daemon
from mpidist.core.errors import CollectiveTimeoutError, LaunchError, RankLostError
from mpidist.core.lazy import hook_loader
from mpidist.core.text import tell_user, user_call_site
from mpidist.topology.exit import agree, can_go_on, end_job, is_fault_tolerant, means_loss, revoke
from mpidist.topology.finalize import note_abort_status, own_finalize
from mpidist.topology.launchers import (
    LAUNCHERS,
    OWN_WORLD_SIZE,
    LauncherInfo,
    LauncherVariableError,
    one_world,
    read_launcher,
)
from mpidist.topology.mpi_library import (
    MPICH,
    MVAPICH,
    OPEN_MPI,
    library_before_start,
    library_of,
    loaded_library,
    may_have_pmix,
    no_library,
)
from mpidist.topology.roll_call import start_answering
from mpidist.topology.watchdog import Stage, Watchdog

if TYPE_CHECKING:
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec

    from mpi4py import MPI

_MODULE = "mpi4py.MPI"
_CAUSE = (
    "another rank has ended, was killed, or has not started MPI yet. Import mpi4py.MPI or create the strategy on every "
    "rank. To examine the start of the job: python -m mpidist doctor"
)
# If only rank 0 has a program, this wait most likely never ends.
_STDIN_SECONDS = 5.0
# Ranks usually arrive in less. After that, waiting backs off.
_BUSY_SECONDS, _BACK_OFF_SECONDS = 1.0, 1e-4


# Environment ----------------------------------------------------------------------------------------------------


def allowed_cores() -> tuple[int, ...]:
    """Return the cores that this process may run on. On macOS, which binds no process, these are all cores."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def cores_are_short(threads: int = 1) -> bool:
    """Return whether this node has more ranks than this process has cores. False if unknown.

    Ranks that are bound to one core each see one core, and count as too many.

    Args:
        threads: Number of threads per rank. Each needs a core.
    """
    info = read_launcher()
    if info is None or info.local_size is None:
        return False
    return info.local_size * threads > len(allowed_cores())


def _required_variables() -> dict[str, str]:
    # Open MPI's wheel prints an error about its "ucx" one-sided component with every shared window.
    required = {"OMPI_MCA_osc": "^ucx"}
    if is_fault_tolerant():
        # Otherwise MPI_Finalize ends with a barrier that may wait for a lost rank.
        required["OMPI_MCA_async_mpi_finalize"] = "1"
    # Waiting ranks poll. On oversubscribed cores that takes the core from the rank they wait for. A needless yield
    # costs under 1 us. MPICH yields in blocking calls only (MPIR_CVAR_POLLS_BEFORE_YIELD). Between them,
    # mpidist.collectives.mpi.waiting yields.
    if cores_are_short():
        required["OMPI_MCA_mpi_yield_when_idle"] = "1"
    return required


def _faster_variables(info: LauncherInfo | None) -> dict[str, str]:
    """Return the variables that only make MPI start or send faster.

    Open MPI sends messages above 64 KiB over TCP in pieces that the receiver requests. On 1 Gbit/s that takes 1.4 to
    1.7 times as long as plain sends. Without a fabric, closing its "ofi" component takes a second. That component
    carries one-sided messages between nodes, so a job on one node does not need it.
    """
    # Only in a rank: another process may start jobs on several nodes, and its environment would override the files
    # with its user's settings of Open MPI.
    if info is None or info.size is None:
        return {}
    faster = {"OMPI_MCA_btl_tcp_flags": "send,inplace"}
    # A part of a heterogeneous Slurm job knows only its own size.
    if info.local_size == info.size and "SLURM_HET_SIZE" not in os.environ:
        faster["OMPI_MCA_btl"] = "^ofi"
    return faster


def prepare_environment() -> None:
    """Set the variables that MPI reads at its start, unless the user has set them. ``import mpidist`` calls this.

    It does not start MPI. It also installs the watchdog of the start. Other libraries than Open MPI ignore the
    variables:

    * ``OMPI_MCA_osc=^ucx``, always
    * ``OMPI_MCA_btl_tcp_flags=send,inplace``, if a launcher started this process
    * ``OMPI_MCA_btl=^ofi``, if the launcher put all ranks on one node
    * ``OMPI_MCA_mpi_yield_when_idle=1``, if this node has more ranks than this process has cores
    * ``OMPI_MCA_async_mpi_finalize=1``, under ``mpirun --with-ft``

    Raises:
        LauncherVariableError: A launcher's variable is malformed, and MPI already runs. Otherwise :func:`import_mpi`
            raises it.

    Warns:
        RuntimeWarning: A job of several ranks has started Open MPI without these variables. The text has the line to
            type.
    """
    mpi = sys.modules.get(_MODULE)
    try:
        info = read_launcher()
        required = _required_variables()
    except LauncherVariableError:
        if mpi is not None:
            raise
        # import_mpi raises it before MPI starts. Raised here, it would keep doctor from running.
        return
    missing = {name: value for name, value in required.items() if name not in os.environ}
    if mpi is None or not mpi.Is_initialized():
        os.environ.update({**_faster_variables(info), **missing, **os.environ})
        watch_start(info)
        if mpi is None:
            own_finalize()
        return
    start_answering()
    if missing and info is not None and info.size != 1 and mpi.Get_library_version().startswith("Open MPI"):
        export = " ".join(f"{name}='{value}'" for name, value in missing.items())
        warnings.warn(
            f"MPI was started before mpidist could set {' and '.join(missing)}. Put 'import mpidist' "
            f"before 'from mpi4py import MPI', or type before the launcher: export {export}",
            RuntimeWarning,
            stacklevel=3,
        )


# MPI and its world ----------------------------------------------------------------------------------------------


def import_mpi() -> ModuleType:
    """Return the module ``mpi4py.MPI``. The first call in a process starts MPI (``MPI_Init_thread``).

    With some launchers all ranks must start MPI before any of them returns. As root, ``mpirun`` of Open MPI needs
    ``OMPI_ALLOW_RUN_AS_ROOT=1`` and ``OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1``. A process without mpirun does not.

    Raises:
        LaunchError: mpi4py cannot load an MPI library, MPI does not run, a launcher's variable is malformed, or a
            process of ``multiprocessing`` imports the program.
        ValueError: ``MPIDIST_ABORT_ON_EXCEPTION`` is neither 0 nor 1.
    """
    if _MODULE not in sys.modules:
        multiprocessing = sys.modules.get("multiprocessing")
        if multiprocessing and getattr(multiprocessing.current_process(), "_inheriting", False):
            raise LaunchError(
                "A worker process of multiprocessing would start MPI while it imports the program, as a second copy of "
                "this rank. Put the program's statements below if __name__ == '__main__':"
            )
        # `import mpidist` left these errors to the start of MPI.
        read_launcher()
        settings.ABORT_ON_EXCEPTION.read()
    try:
        from mpi4py import MPI
    except LaunchError:
        raise
    except (ImportError, RuntimeError) as error:
        raise LaunchError(no_library(str(error))) from None
    if not MPI.Is_initialized():
        raise LaunchError(
            "MPI is not started, because mpi4py.rc.initialize is False. Start it before mpidist: "
            "from mpi4py import MPI; MPI.Init_thread()"
        )
    if MPI.Is_finalized():
        raise LaunchError("MPI has been shut down (MPI_Finalize). Use mpidist before that.")
    return MPI


def check_world(size: int) -> None:
    """Raise LaunchError if the MPI world of ``size`` ranks is smaller than the job. Local.

    If a launcher does not fit the MPI library, or does not start MPI at all (torchrun), N ranks become N worlds of one
    rank. Each would then train alone and exit with code 0. A larger world is valid, because a part of a heterogeneous
    Slurm job knows only its own size.
    """
    # import_mpi has not read it if the program imported MPI after mpidist.
    settings.ABORT_ON_EXCEPTION.read()
    if size == 1:
        _check_world_size_variable()
    info = read_launcher()
    if info is None or (size > info.rank and size >= (info.size or 0)):
        return
    started = "more ranks" if info.size is None else f"{info.size} ranks"
    value = info.rank if info.size is None else info.size
    library = library_of(import_mpi().Get_library_version(), loaded_library())
    place = "" if library.path is None else f" from {library.path}"
    raise LaunchError(
        f"{info.name} started {started} ({info.size_variable}={value}), but the MPI world of this process has {size}: "
        f"each rank would train alone. mpi4py loaded {library}{place}. {one_world(info, library)} To run separate "
        f"programs, type: env -u {info.size_variable} python ..."
    )


def _check_world_size_variable() -> None:
    """Raise LaunchError if WORLD_SIZE announces several processes to this world of one rank."""
    count, by_torchrun = os.environ.get("WORLD_SIZE", ""), "TORCHELASTIC_RUN_ID" in os.environ
    is_own = count == os.environ.get(OWN_WORLD_SIZE) and not by_torchrun
    if is_own or not count.isdecimal() or int(count) < 2:
        return
    names = [name for name in ("RANK", "WORLD_SIZE") if name in os.environ]
    found = " and ".join(f"{name}={os.environ[name]}" for name in names)
    error = trains_alone(found, count)
    raise LaunchError(f"{error} If one process alone is intended, type: unset {' '.join(names)}")


def trains_alone(place: str, count: int | str) -> LaunchError:
    """Return the error for one of several processes that MPI did not start.

    Args:
        place: Rank and number of processes, as set by another launcher or the program.
        count: Number of processes.
    """
    starter, fix = "This process was started", "Start"
    multiprocessing = sys.modules.get("multiprocessing")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        starter = "torchrun started this process"
    elif multiprocessing and multiprocessing.parent_process() is not None:
        starter = "multiprocessing (such as torch.multiprocessing.spawn) started this process"
        fix = "Call the training function once, without spawn(), and start"
    return LaunchError(
        f"{starter} with {place}, but MPI did not: its MPI world has 1 rank, so each process would train alone. {fix} "
        f"the program with mpirun, srun or `python -m mpidist launch -n {count} train.py`."
    )


# The watchdog of the start --------------------------------------------------------------------------------------
#
# If a rank never starts, the others block in MPI_Init. The watchdog reports the wait after MPIDIST_WARN_AFTER, and
# kills this rank after MPIDIST_TIMEOUT.


def watch_start(info: LauncherInfo | None) -> None:
    """Watch the import of mpi4py.MPI, unless this rank is alone or has imported it."""
    if info is None or info.size == 1 or _MODULE in sys.modules:
        return
    try:
        seconds = settings.WARN_AFTER.read(), settings.TIMEOUT.read()
    except ValueError:
        # The next reader raises it. Raised here, it would keep doctor from running.
        return
    hook_loader(_MODULE, partial(_watch_loader, info, seconds))


def _watch_loader(info: LauncherInfo, seconds: tuple[float, float], loader: Loader) -> None:
    """Run the watchdog while a loader imports mpi4py.MPI."""
    create, execute = loader.create_module, loader.exec_module
    watch = contextlib.ExitStack()

    def create_module(spec: ModuleSpec) -> ModuleType | None:
        # The fork is here because sys.modules does not have the unfinished module yet.
        if not Watchdog.is_running:  # doctor's watches the start, too
            watch.enter_context(Watchdog()).begin(_stages(info, *seconds))
        try:
            return create(spec)
        except BaseException:  # the library cannot be loaded, and the program may continue
            watch.close()
            raise

    def exec_module(module: ModuleType) -> None:
        with watch:
            check_library(info, str(module.__file__))
            execute(module)
        note_abort_status(module)
        start_answering()

    loader.create_module = create_module  # type: ignore[method-assign]
    loader.exec_module = exec_module  # type: ignore[method-assign]


def check_library(info: LauncherInfo, module: str) -> None:
    """Raise LaunchError if Open MPI's mpirun started a rank with an MPICH without PMIx. MPI_Init would abort."""
    if LAUNCHERS[info.name].library != OPEN_MPI:
        return
    library = library_before_start(module)
    if library is None or library.vendor not in (MPICH, MVAPICH) or may_have_pmix():
        return
    raise LaunchError(
        f"{info.name} started {info.size} ranks, but mpi4py loaded {library} from {library.path}, which cannot join "
        f"them. {one_world(info, library)}"
    )


def _stages(info: LauncherInfo, warn_after: float, limit: float) -> list[Stage]:
    """Return the report and the end of a start that takes too long."""
    name = f"mpidist: rank {info.rank}{'' if info.size is None else f' of {info.size}'} on host {os.uname().nodename}"
    cause = _CAUSE
    if sys.argv[:1] in (["-"], [""]) and LAUNCHERS[info.name].library is not None and not os.isatty(0):
        cause = (
            f"the program came from standard input, which {info.name} passes to rank 0 alone. Write it to a file, and "
            "name the file: mpirun -n 2 python train.py"
        )
        warn_after = min(warn_after, _STDIN_SECONDS)
    return [
        Stage(seconds, ("", f"{name} has waited {seconds:g} s for MPI to start{and_then}: {cause}\n"))
        for seconds, and_then in ((min(warn_after, limit), ""), (limit, ", and ends"))
    ]


# Calls with a deadline ------------------------------------------------------------------------------------------


def duplicate(
    comm: MPI.Intracomm, doing: str, absent: Callable[[MPI.Intracomm], str | None] = lambda _: None
) -> MPI.Intracomm:
    """Return a duplicate of ``comm`` (collective; MPI_Comm_idup), or raise RankLostError on all ranks.

    Args:
        comm: Communicator to duplicate.
        doing: Purpose of the duplicate, for the report.
        absent: Returns lines about absent ranks, for the error at the deadline.
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
    # So that no rank keeps a duplicate that others lack.
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
    """Wait for the request of a collective on ``comm``. Arguments as in :func:`duplicate`."""
    deadline = Deadline(
        lambda waited: (
            f"rank {comm.Get_rank()} of {comm.Get_size()} has waited {waited:.0f} s for the other ranks in {doing}, at "
            f"{user_call_site()}"
        ),
        lambda waited: CollectiveTimeoutError(doing, 0, waited, comm.Get_rank(), absent(comm)),
    )
    while not request.Test():
        if deadline.check() > _BUSY_SECONDS:
            time.sleep(_BACK_OFF_SECONDS)


def create_group(comm: MPI.Intracomm, ranks: Sequence[int], name: str) -> MPI.Intracomm:
    """Return a communicator of some ranks of ``comm``, in this order (collective over them)."""
    everyone = comm.Get_group()
    group = everyone.Incl(ranks)
    with limited(f"waiting for all {len(ranks)} ranks of {name} to make a communicator"):
        part: MPI.Intracomm = comm.Create_group(group, message_tags.GROUPS)
    group.Free()
    everyone.Free()
    return part


@contextmanager
def limited(doing: str) -> Iterator[None]:
    """Report a blocking MPI call in the block, and end the job at its deadline.

    A thread in such a call cannot receive an exception. ``doing`` describes the block, after "is".
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
