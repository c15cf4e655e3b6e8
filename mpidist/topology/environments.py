"""The one table of launch environments: the variables and start commands of each launcher.

By it ``read_launcher`` returns the facts that the launcher gave this process, ``read_batch_system`` the system whose
job it is in, and ``command_for`` the command that starts ranks as one world. The launch check, ``doctor`` and
``launch`` use nothing else.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mpidist.core.errors import LaunchError
from mpidist.core.wording import whole_number
from mpidist.topology.mpi_library import CRAY_MPICH, INTEL_MPI, MPICH, MVAPICH, OPEN_MPI, MpiLibrary, mpirun_beside
from mpidist.topology.slurm_lists import expand_tasks_per_node

Environ = Mapping[str, str]


class LauncherVariableError(LaunchError):
    """A launcher's variable has a value that no launcher writes. ``variable`` is the one to unset."""

    def __init__(self, variable: str, text: str) -> None:
        super().__init__(f"{text}; type: unset {variable}")
        self.variable = variable


@dataclass(frozen=True)
class LauncherInfo:
    """The facts that a launcher put into the environment of this process.

    Attributes:
        name: The launcher; ``LAUNCHERS[name]`` is its row of the table.
        rank: Rank of this process in the job.
        size: Number of ranks of the job; None where the launcher does not say.
        local_rank: Rank among the processes of this node; None where the launcher does not say.
        local_size: Number of processes of this node; None where the launcher does not say.
        size_variable: The environment variable that ``size`` was read from, or ``rank`` where there is no size.
    """

    name: str
    rank: int
    size: int | None
    local_rank: int | None
    local_size: int | None
    size_variable: str


@dataclass(frozen=True)
class Launcher:
    """One row of the table: a launcher, its variables, and its commands.

    Attributes:
        name: For messages.
        rank: Variable of the rank; a process without it is none of this launcher's.
        size: Variable of the number of ranks; None where there is none.
        local_rank: Variable of the rank on this node; None where there is none.
        local_size: Variable of the number of ranks on this node; None where there is none.
        needs: Further variables without which a process is none of this launcher's.
        needs_size: Whether that holds for ``size``, too; where not, the size is unknown without the variable.
        starts: The command that starts ranks of an MPI library (by vendor) as one world, without ``-n`` and program.
            An MPI library that is missing here needs its own mpirun.
        kind: Variable that says which of several ways of starting was taken, such as srun's ``--mpi``; or None.
        shell: Variable that an interactive shell and its children have if this launcher started the shell as a rank; or
            None.
        from_shell: The option with which it starts ranks from such a shell, which holds the job's resources.
        library: The MPI library that it belongs to, and that alone it starts; or None.
        command: The command that starts ranks where ``starts`` does not have the library.
        unbound: The options for ``{ranks}`` ranks, ``{each}`` on each of ``{hosts}`` hosts, that may run on any core.
        passes: The option that gives all ranks ``{variable}``, which is NAME=VALUE, or NAME for that of the shell; one
            without ``{variable}`` gives them all that the shell has, empty where that needs no option.
        all_gpus: The options with which each rank sees ``{gpus}`` GPUs of its node; empty where it hides none.
        near_gpus: The options that deal ranks over the sockets of a node in order, as GPUs are; or empty.
        as_root: The option without which root may not use it; empty where root may.
        own_machine: Variables with which it starts more ranks than there are cores, and binds none of them, by the
            first major version of its MPI library that reads them. An option of the user's has precedence.
    """

    name: str
    rank: str
    size: str | None
    local_rank: str | None = None
    local_size: str | None = None
    needs: tuple[str, ...] = ()
    needs_size: bool = True
    starts: Mapping[str, str] = field(default_factory=dict)
    kind: str | None = None
    shell: str | None = None
    from_shell: str = ""
    library: str | None = None
    command: str = "mpirun"
    unbound: str = "-n {ranks}"
    passes: str = ""
    all_gpus: str = ""
    near_gpus: str = ""
    as_root: str = ""
    own_machine: Mapping[int, Mapping[str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class BatchSystem:
    """A system that gives hosts to jobs, whichever command starts the ranks.

    Attributes:
        name: For messages.
        job: Variable that a process in a job of this system has.
        hosts: Variable with the hosts of the job, or with the name of a file that lists them.
        launcher: The row of its own launcher; None where that is one of several.
        without: The command that submits a job without ``{host}``; empty where there is no such option.
    """

    name: str
    job: str
    hosts: str
    launcher: str | None
    without: str = ""


_MPICH = Launcher(
    "MPICH mpiexec",
    "PMI_RANK",
    "PMI_SIZE",
    "MPI_LOCALRANKID",
    "MPI_LOCALNRANKS",
    needs=("MPI_LOCALRANKID",),
    library=MPICH,
    command="mpiexec",
    unbound="-n {ranks} -bind-to none",
    passes="-genvall",
)
# Under mpirun in a Slurm job the SLURM_* of a rank are those of mpirun's own daemon or of the batch script (every rank
# is task 0), and srun --mpi=pmi2, flux run and PALS write PMI_RANK too: so the order is from the launcher that is
# started last to the one that is started first, and bare PMI and PMIx come at the end.
_LAUNCHERS = (
    Launcher(
        "Open MPI mpirun",  # Spectrum MPI and its jsrun as well
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        library=OPEN_MPI,
        unbound="-n {ranks} --bind-to none",
        passes="-x {variable}",
        as_root="--allow-run-as-root",
        # 5 reads the variables of PRRTE, 4 its own.
        own_machine={
            0: {"OMPI_MCA_rmaps_base_oversubscribe": "1", "OMPI_MCA_hwloc_base_binding_policy": "none"},
            5: {
                "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
                "PRTE_MCA_hwloc_default_binding_policy": "none",
            },
        },
    ),
    Launcher(
        "Intel MPI mpiexec",
        "PMI_RANK",
        "PMI_SIZE",
        "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
        needs=("MPI_LOCALRANKID", "I_MPI_HYDRA_UUID"),
        library=INTEL_MPI,
        unbound="-n {ranks} -genv I_MPI_PIN off",
        passes="-genvall",
        own_machine={0: {"I_MPI_PIN": "off"}},
    ),
    _MPICH,
    # It starts resource sets, by default of one task and one core each; --bind is about the cores inside of a set.
    Launcher(
        "LSF jsrun",
        "JSM_NAMESPACE_RANK",
        "JSM_NAMESPACE_SIZE",
        "JSM_NAMESPACE_LOCAL_RANK",
        "JSM_NAMESPACE_LOCAL_SIZE",
        command="jsrun",
        unbound="--nrs {hosts} --rs_per_host 1 --tasks_per_rs {each} --cpu_per_rs ALL_CPUS --bind none",
        passes="--env {variable}",
    ),
    Launcher(
        "flux run",
        "FLUX_TASK_RANK",
        "FLUX_JOB_SIZE",
        "FLUX_TASK_LOCAL_ID",
        starts={
            OPEN_MPI: "flux run -o pmi=pmix",
            MPICH: "flux run -o pmi=simple",
            MVAPICH: "flux run -o pmi=simple",
            INTEL_MPI: "flux run -o pmi=simple",
            CRAY_MPICH: "flux run -o pmi=cray-pals",
        },
        command="flux run",
        unbound="-n {ranks} -o cpu-affinity=off",
        all_gpus="-o gpu-affinity=off",
    ),
    # Its PMI adds PMI_SIZE where the ranks use it; with --pmi=pmix or --pmi=none nothing says how many there are.
    Launcher(
        "PALS mpiexec",
        "PALS_RANKID",
        "PMI_SIZE",
        "PALS_LOCAL_RANKID",
        "PALS_LOCAL_SIZE",
        needs_size=False,
        starts={OPEN_MPI: "mpiexec --pmi=pmix", MPICH: "mpiexec --pmi=pmix", CRAY_MPICH: "mpiexec --pmi=cray"},
        command="mpiexec",
        unbound="-n {ranks} --cpu-bind none",
        passes="--envall",
    ),
    # A batch script and an interactive shell have SLURM_PROCID and SLURM_NTASKS of the whole allocation although one
    # process runs; only the variables of a step tell of processes that srun started.
    Launcher(
        "srun",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID",
        starts={
            OPEN_MPI: "srun --mpi=pmix",
            MPICH: "srun --mpi=pmi2",
            MVAPICH: "srun --mpi=pmi2",
            INTEL_MPI: "srun --mpi=pmi2",
            CRAY_MPICH: "srun --mpi=cray_shasta",
        },
        kind="SLURM_MPI_TYPE",
        shell="SLURM_PTY_PORT",
        from_shell="--overlap",
        command="srun",
        unbound="-n {ranks} --cpu-bind=none",
        passes="--export=ALL",
        all_gpus="--gpus-per-node={gpus} --gpu-bind=none",
        near_gpus="--distribution=block:block --mem-bind=local",
    ),
    replace(_MPICH, local_rank="PMI_LOCAL_RANK", local_size="PMI_LOCAL_SIZE", needs=(), library=None),
    Launcher("a PMIx launcher", "PMIX_RANK", None),
)

OWN_WORLD_SIZE = "WORLD_SIZE_OF_MPIDIST"
"""The WORLD_SIZE that mpidist set for programs of PyTorch. Child processes of a rank inherit both variables."""

# From here on it numbers the steps that are not started by a user's srun: of the batch script, of salloc, and others.
_STEPS_OF_SLURM_ITSELF = 0xFFFFFFF0

LAUNCHERS: Mapping[str, Launcher] = {row.name: row for row in reversed(_LAUNCHERS)}
"""The rows of the table by name. ``read_launcher`` has an order of its own."""

BATCH_SYSTEMS: tuple[BatchSystem, ...] = (
    # An instance of Flux often lives in a job of another system, so it is asked first.
    BatchSystem("Flux", "FLUX_URI", "FLUX_JOB_NNODES", "flux run"),
    BatchSystem("Slurm", "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "srun", "sbatch --exclude={host} job.sbatch"),
    BatchSystem("PBS", "PBS_JOBID", "PBS_NODEFILE", None),
    BatchSystem("LSF", "LSB_JOBID", "LSB_MCPU_HOSTS", "LSF jsrun"),
)
"""In the order in which ``read_batch_system`` looks for them."""

LAUNCHER_VARIABLES: frozenset[str] = frozenset(
    name
    for row in _LAUNCHERS
    for name in (row.rank, row.size, row.local_rank, row.local_size, row.kind, row.shell, *row.needs)
    if name is not None
)
"""Every variable of the table."""


def read_launcher(environ: Environ = os.environ) -> LauncherInfo | None:
    """Return the launcher's facts about this process, or None without a launcher.

    Args:
        environ: The environment to read; ``os.environ`` by default.

    Raises:
        LauncherVariableError: One of the variables holds something other than a whole number, or two contradict each
            other.

    >>> read_launcher({"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}).size
    4
    """
    for row in _LAUNCHERS:
        if all(environ.get(name) for name in (row.rank, *row.needs)):
            info = _read(row, environ)
            if info is not None:
                return info
    return None


def _read(row: Launcher, environ: Environ) -> LauncherInfo | None:
    rank, size = _number(environ, row.rank), _number(environ, row.size)
    if rank is None or (size is None and row.size is not None and row.needs_size):
        return None
    local_rank, local_size = _number(environ, row.local_rank), _number(environ, row.local_size)
    if row.name == "srun":
        local_size = _tasks_of_this_node(environ)
    _check_rank(row.rank, rank, row.size, size)
    if local_rank is not None:
        _check_rank(str(row.local_rank), local_rank, row.local_size, local_size)
    counted = row.rank if size is None or row.size is None else row.size
    return LauncherInfo(row.name, rank, size, local_rank, local_size, counted)


def _number(environ: Environ, name: str | None) -> int | None:
    text = environ.get(name) if name else None
    if not text:
        return None
    try:
        return whole_number(text)
    except ValueError:
        raise LauncherVariableError(
            str(name), f"{name}={text!r}: expected the whole number that a launcher writes there, digits alone"
        ) from None


def _check_rank(rank_variable: str, rank: int, size_variable: str | None, size: int | None) -> None:
    if size is not None and rank >= size:
        raise LauncherVariableError(
            rank_variable,
            f"{rank_variable}={rank} and {size_variable or 'SLURM_STEP_TASKS_PER_NODE'}={size} contradict each other: "
            "a rank is less than the number of ranks. They are left over from another job, or were set by hand",
        )


def _tasks_of_this_node(environ: Environ) -> int | None:
    node, text = _number(environ, "SLURM_NODEID"), environ.get("SLURM_STEP_TASKS_PER_NODE")
    if node is None or not text:
        return None
    try:
        tasks = expand_tasks_per_node(text)
    except ValueError as error:
        name = "SLURM_STEP_TASKS_PER_NODE"
        raise LauncherVariableError(name, f"{name}: {error}") from None
    return tasks[node] if node < len(tasks) else None


def read_batch_system(environ: Environ = os.environ) -> BatchSystem | None:
    """Return the batch system in whose job this process is, or None outside of one.

    Args:
        environ: The environment to read; ``os.environ`` by default.

    >>> read_batch_system({"PBS_JOBID": "7.head", "PBS_NODEFILE": "/var/spool/7"}).name
    'PBS'
    """
    return next((system for system in BATCH_SYSTEMS if environ.get(system.job)), None)


def in_shell(launcher: str, environ: Environ = os.environ) -> bool:
    """Return whether this process is in a shell that a launcher started as a rank.

    Such as that of ``srun --pty bash``. The job's resources belong to that shell, and commands that start ranks wait
    for it, an mpirun for ever. The shell that ``salloc`` starts by srun, on sites that are set up so, holds nothing.

    Args:
        launcher: The name of a row of ``LAUNCHERS``.
        environ: The environment to read; ``os.environ`` by default.

    >>> in_shell("srun", {"SLURM_PTY_PORT": "39465", "SLURM_STEP_ID": "0"})
    True
    """
    row = LAUNCHERS[launcher]
    if row.shell is None or not environ.get(row.shell):
        return False
    return (_number(environ, "SLURM_STEP_ID") or 0) < _STEPS_OF_SLURM_ITSELF


def command_for(launcher: str, vendor: str, environ: Environ = os.environ) -> str | None:
    """Return the command that starts ranks of an MPI library as one world. ``-n`` follows.

    Args:
        launcher: The name of a row of ``LAUNCHERS``, as in ``LauncherInfo.name``.
        vendor: The MPI library, as ``mpidist.topology.mpi_library.vendor_of`` names it.
        environ: The environment to read; ``os.environ`` by default.

    Returns:
        None where this launcher does not start that library (use the library's own mpirun), or where the job was
        started in just this way already, so that the command cannot have been missing.

    >>> command_for("srun", "Open MPI", {})
    'srun --mpi=pmix'
    """
    row = LAUNCHERS[launcher]
    command = row.starts.get(vendor)
    taken = environ.get(row.kind) if row.kind else None
    if command is None or (taken and command.endswith("=" + taken.partition("_v")[0])):
        return None
    return f"{command} {row.from_shell}" if in_shell(launcher, environ) else command


def has_loose_barriers(environ: Environ = os.environ) -> bool:
    """Return whether PMIx's barriers of this job hold the ranks of one node only.

    Slurm's collectives without data go up a tree that is no tree where the job has fewer nodes than TreeWidth: every
    node is its root, and waits for nobody (``reverse_tree_info`` in Slurm's src/common/reverse_tree.c). So one rank is
    out of MPI_Init and sends while another is still in it, where Open MPI crashes (open-mpi/ompi issue 12495). In a
    ring they are barriers.

    >>> has_loose_barriers({"PMIX_NAMESPACE": "slurm.pmix.7.0"})
    True
    >>> has_loose_barriers({"PMIX_NAMESPACE": "slurm.pmix.7.0", "SLURM_PMIX_FENCE": "ring"})
    False
    """
    return environ.get("PMIX_NAMESPACE", "").startswith("slurm.pmix") and environ.get("SLURM_PMIX_FENCE") != "ring"


def mpirun_of(vendor: str) -> Launcher | None:
    """Return the row of the mpirun that belongs to an MPI library, or None.

    >>> mpirun_of("Open MPI").command
    'mpirun'
    """
    return next((row for row in LAUNCHERS.values() if row.library == vendor), None)


def own_machine(vendor: str, version: tuple[int, ...]) -> Mapping[str, str]:
    """Return the variables with which mpirun fits a machine of one's own; see ``Launcher``.

    >>> own_machine("Intel MPI", (2021, 18)), own_machine("MPICH", (5, 0))
    ({'I_MPI_PIN': 'off'}, {})
    """
    row = mpirun_of(vendor)
    major = version[0] if version else 0
    known = {} if row is None else {first: names for first, names in row.own_machine.items() if first <= major}
    return known[max(known)] if known else {}


def one_world(info: LauncherInfo, library: MpiLibrary) -> str:
    """Return sentences with the commands that make one world of a launcher's ranks."""
    count = "" if info.size is None else f" -n {info.size}"
    command = command_for(info.name, library.vendor)
    if command is not None:
        shows = " ('srun --mpi=list' shows what this Slurm has)" if info.name == "srun" else ""
        instead = "after 'exit', in salloc, use" if in_shell(info.name) else "use"
        return f"Type: {command}{count} python ...{shows}; or {instead} {_own_mpirun(library)}{count} python ..."
    kind = LAUNCHERS[info.name].kind
    taken = os.environ.get(kind) if kind else None
    tried = f"It was {info.name} --mpi={taken} already, which this library does not understand here. " if taken else ""
    found = shutil.which("mpirun")
    which = f"The mpirun in PATH is {found}. " if found else "There is no mpirun in PATH. "
    system = read_batch_system()
    where = "" if system is None else f" inside the {system.name} job"
    if in_shell(info.name):
        where = " in salloc, after 'exit' from this shell,"
    return (
        f"{tried}{which}Start the job{where} with the launcher of the library: {_own_mpirun(library)}{count} python ..."
    )


def _own_mpirun(library: MpiLibrary) -> str:
    own = mpirun_beside(library)
    return f"the mpirun that belongs to {library} (compare: which mpirun)" if own is None else str(own)
