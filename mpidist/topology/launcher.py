"""The launcher's meaning for this process: MPI's variables at its start, and the launch check."""

from __future__ import annotations

import multiprocessing.process
import os
import sys
import warnings
from types import ModuleType

from mpidist.core import settings
from mpidist.core.errors import LaunchError
from mpidist.topology import environments
from mpidist.topology.environments import LauncherInfo, read_launcher
from mpidist.topology.faults import is_fault_tolerant
from mpidist.topology.finalize import own_finalize
from mpidist.topology.mpi_library import library_of, loaded_library, no_library
from mpidist.topology.roll_call import start_answering
from mpidist.topology.start_watch import watch_start


def allowed_cores() -> tuple[int, ...]:
    """Return the cores that this process may run on. macOS binds no process, so there it is all of them."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def cores_are_short(threads: int = 1) -> bool:
    """Return whether this node has more ranks than this process has cores. False where the launcher does not say.

    Ranks that are bound to one core each see one core and are counted as too many.

    Args:
        threads: Of each rank, that are to have a core each.
    """
    info = read_launcher()
    if info is None or info.local_size is None:
        return False
    return info.local_size * threads > len(allowed_cores())


def _needed_environment() -> dict[str, str]:
    # Open MPI's wheel prints an error about its "ucx" one-sided component with every shared window.
    needed = {"OMPI_MCA_osc": "^ucx"}
    if is_fault_tolerant():
        # Its meeting at the end of MPI_Finalize may wait for a rank that was lost.
        needed["OMPI_MCA_async_mpi_finalize"] = "1"
    # Waiting ranks poll; with more ranks than cores that takes the core from the rank they wait for. A needless
    # yield costs under 1 us. MPICH needs nothing: it yields in blocking calls only (MPIR_CVAR_POLLS_BEFORE_YIELD), and
    # in between mpidist does it (mpidist.collectives.mpi.waiting).
    if cores_are_short():
        needed["OMPI_MCA_mpi_yield_when_idle"] = "1"
    return needed


def _quicker(info: LauncherInfo | None) -> dict[str, str]:
    """Return the variables that only make MPI start or send sooner.

    Over TCP, Open MPI sends messages above 64 KiB as if the network had remote memory access: in pieces that it asks
    the other side for. On a wire of 1 Gbit/s these take 1.4 to 1.7 times as long as those that are simply sent.

    Where there is no fabric, its "ofi" component sleeps for a second as it is closed again. It carries one-sided
    messages between nodes, so a job on one node loses nothing without it.

    Only where a launcher has started the job: a process without one may be about to start others, on several nodes too,
    and hands its environment on, where it would come before the files in which Open MPI's users keep their settings.
    """
    if info is None or info.size is None:
        return {}
    quicker = {"OMPI_MCA_btl_tcp_flags": "send,inplace"}
    if info.local_size == info.size and "SLURM_HET_SIZE" not in os.environ:
        quicker["OMPI_MCA_btl"] = "^ofi"
    return quicker


def prepare_environment() -> None:
    """Set the variables that MPI reads at its start, unless the user has. It does not start MPI.

    ``OMPI_MCA_osc=^ucx`` always, ``OMPI_MCA_btl_tcp_flags=send,inplace`` in a job that a launcher started,
    ``OMPI_MCA_mpi_yield_when_idle=1`` where it put more ranks on this node than this process has cores,
    ``OMPI_MCA_async_mpi_finalize=1`` under ``mpirun --with-ft``, and ``OMPI_MCA_btl=^ofi`` where the launcher put all
    ranks on one node, which may save a second. Other MPI libraries ignore these variables. Has the start watched, too
    (``start_watch``). ``import mpidist`` calls this.

    Raises:
        LauncherVariableError: A launcher's variable is malformed, and MPI runs already; before that
            :func:`import_mpi` raises it.

    Warns:
        RuntimeWarning: A job of several ranks has started Open MPI already, without these variables; the text
            says which line to type.
    """
    mpi = sys.modules.get("mpi4py.MPI")
    try:
        info = read_launcher()
        needed = _needed_environment()
    except environments.LauncherVariableError:
        if mpi is not None:
            raise
        # import_mpi raises it before MPI starts; here, doctor could not be imported to say what is wrong.
        return
    missing = {name: value for name, value in needed.items() if name not in os.environ}
    if mpi is None or not mpi.Is_initialized():
        os.environ.update({**_quicker(info), **missing, **os.environ})
        watch_start(info)
        if mpi is None:
            own_finalize()
        return
    start_answering()
    if missing and info is not None and info.size != 1 and mpi.Get_library_version().startswith("Open MPI"):
        export = " ".join(f"{name}='{value}'" for name, value in missing.items())
        warnings.warn(
            f"MPI was started before mpidist could set {' and '.join(missing)}. Expected: 'import mpidist' "
            f"comes before 'from mpi4py import MPI'; or type before the launcher: export {export}",
            RuntimeWarning,
            stacklevel=3,
        )


def import_mpi() -> ModuleType:
    """Return the module ``mpi4py.MPI``; the first call in a process starts MPI (``MPI_Init_thread``).

    With some launchers all ranks must start MPI for any of them to come back. As root Open MPI needs
    ``OMPI_ALLOW_RUN_AS_ROOT=1`` and ``OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1`` for ``mpirun``, but not for a
    process that was started without it.

    Raises:
        LaunchError: There is no MPI library that mpi4py can load, MPI is not running, a launcher's variable is
            malformed, or a process of ``multiprocessing`` imports the program.
        ValueError: ``MPIDIST_ABORT_ON_EXCEPTION`` is neither 0 nor 1.
    """
    if "mpi4py.MPI" not in sys.modules:
        if getattr(multiprocessing.process.current_process(), "_inheriting", False):
            raise LaunchError(
                "MPI was to start in a worker process, which only imports the program that started it, so that the job "
                "would have this rank twice. Expected: what a program does, below if __name__ == '__main__':"
            )
        # What `import mpidist` left to this place: MPI does not start in an environment that cannot be right.
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
            "MPI is not started, because mpi4py.rc.initialize is False. Expected: MPI runs before mpidist "
            "uses it; type: from mpi4py import MPI; MPI.Init_thread()"
        )
    if MPI.Is_finalized():
        raise LaunchError("MPI has been shut down (MPI_Finalize). Expected: mpidist is used before that.")
    return MPI


def check_world(size: int) -> None:
    """Raise if the launcher started more ranks than the MPI world has; local.

    A launcher and an MPI library that do not understand each other give N worlds of one rank each: N
    trainings that do not know of each other, and exit code 0. A launcher that does not start MPI, such as torchrun,
    gives the same.

    Args:
        size: The size of ``MPI.COMM_WORLD``.

    Raises:
        LaunchError: The world is smaller than the job, or has one rank although WORLD_SIZE is more. A larger world is
            no error: the parts of a heterogeneous Slurm job are told only their own size. Where the launcher tells the
            ranks but not their number, those whose rank is beyond the world raise.
        ValueError: ``MPIDIST_ABORT_ON_EXCEPTION`` is neither 0 nor 1.
    """
    # `import mpidist` leaves this to here where the user imports MPI after it.
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
        f"{info.name} started {started} ({info.size_variable}={value}), but the MPI world of "
        f"this process has {size}: it does not know of the others. Expected: one world of all of them. "
        f"mpi4py loaded {library}{place}. {environments.one_world(info, library)} If separate programs are what you "
        f"want: env -u {info.size_variable} python ..."
    )


def _check_world_size_variable() -> None:
    """Raise LaunchError if WORLD_SIZE announces several processes to this world of one rank."""
    count, by_torchrun = os.environ.get("WORLD_SIZE", ""), "TORCHELASTIC_RUN_ID" in os.environ
    is_own = count == os.environ.get(environments.OWN_WORLD_SIZE) and not by_torchrun
    if is_own or not count.isdecimal() or int(count) < 2:
        return
    names = [name for name in ("RANK", "WORLD_SIZE") if name in os.environ]
    found = " and ".join(f"{name}={os.environ[name]}" for name in names)
    error = trains_alone(found, count)
    raise LaunchError(f"{error} If one process alone is intended, type: unset {' '.join(names)}")


def trains_alone(place: str, count: int | str) -> LaunchError:
    """Return the error for one of several processes that MPI did not start.

    Args:
        place: Rank and number of processes, as another launcher or the program has them.
        count: Number of processes.
    """
    starter, fix = "This process was started", "Start"
    if "TORCHELASTIC_RUN_ID" in os.environ:
        starter = "torchrun started this process"
    elif multiprocessing.process.parent_process() is not None:
        starter = "multiprocessing (such as torch.multiprocessing.spawn) started this process"
        fix = "Call the training function once, without spawn(), and start"
    return LaunchError(
        f"{starter} with {place}, but MPI did not: its MPI world has 1 rank, so each process would train alone. {fix} "
        f"the program with mpirun, srun or `python -m mpidist launch -n {count} train.py`."
    )
