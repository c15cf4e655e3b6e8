"""Launchers and batch systems: their variables, their commands, and Slurm's lists.

Only this table knows the variables of launchers. Those of Slurm, Open MPI, MPICH and Intel MPI were recorded in jobs.
Those of Flux, PBS, LSF and PALS come from manuals (tests/topology/test_launchers.py quotes them).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from itertools import product
from typing import NamedTuple

from mpidist.core.errors import LaunchError
from mpidist.core.text import whole_number
from mpidist.topology.mpi_library import CRAY_MPICH, INTEL_MPI, MPICH, MVAPICH, OPEN_MPI, MpiLibrary, mpirun_beside

Environ = Mapping[str, str]


class LauncherVariableError(LaunchError):
    """A launcher's variable has a value that no launcher writes. ``variable`` is the one to unset."""

    def __init__(self, variable: str, text: str) -> None:
        super().__init__(f"{text}; type: unset {variable}")
        self.variable = variable


class LauncherInfo(NamedTuple):
    """The facts of a launcher about this process. Unknown ones are None."""

    name: str  # key in LAUNCHERS
    rank: int
    size: int | None
    local_rank: int | None
    local_size: int | None
    size_variable: str  # variable of the rank if the size is unknown


class Launcher(NamedTuple):
    """A launcher: the variables of its ranks, and its commands."""

    name: str
    rank: str
    size: str | None
    local_rank: str | None = None
    local_size: str | None = None
    # Further variables that every process of this launcher has.
    needs: tuple[str, ...] = ()
    # Commands that start ranks as one world, by vendor of the MPI library. Others need their own mpirun.
    starts: Mapping[str, str] = {}
    # Variable of the chosen way to start ranks, such as srun's --mpi.
    kind: str | None = None
    # Variable of an interactive shell that it started as a rank.
    shell: str | None = None
    # The only MPI library that it starts.
    library: str | None = None
    # Command for libraries that ``starts`` lacks.
    command: str = "mpirun"
    # Options for {ranks} ranks, {each} on each of {hosts} hosts, that may run on any core.
    unbound: str = "-n {ranks}"
    # Option that passes {variable} (NAME=VALUE, or NAME) to all ranks. Without {variable} it passes all variables.
    passes: str = ""
    # Options that show {gpus} GPUs of the node to each rank, and that place ranks in the order of the GPUs.
    all_gpus: str = ""
    near_gpus: str = ""
    as_root: str = ""
    # Variables to start more ranks than cores, unbound, by the first major version of the library that reads them.
    own_machine: Mapping[int, Mapping[str, str]] = {}


class BatchSystem(NamedTuple):
    """A system that assigns hosts to jobs, with any launcher."""

    name: str
    job: str  # variable of every process of a job
    hosts: str  # variable with the hosts, or with the name of a file that lists them
    launcher: str | None  # None if it has several
    without: str = ""  # command that submits a job without {host}


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
# Launchers run inside one another, so the innermost comes first. Under mpirun in a Slurm job, SLURM_* describe mpirun's
# daemon or the batch script, in which every rank is task 0. srun --mpi=pmi2, flux run and PALS set PMI_RANK, too.
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
        # Open MPI 5 reads the variables of PRRTE, 4 its own.
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
    # Starts resource sets, by default of one task and one core. --bind applies to the cores inside a set.
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
    # With --pmi=pmix or --pmi=none, PMI_SIZE is missing.
    Launcher(
        "PALS mpiexec",
        "PALS_RANKID",
        "PMI_SIZE",
        "PALS_LOCAL_RANKID",
        "PALS_LOCAL_SIZE",
        starts={OPEN_MPI: "mpiexec --pmi=pmix", MPICH: "mpiexec --pmi=pmix", CRAY_MPICH: "mpiexec --pmi=cray"},
        command="mpiexec",
        unbound="-n {ranks} --cpu-bind none",
        passes="--envall",
    ),
    # Needs the variables of a step. Batch scripts and interactive shells have SLURM_PROCID and SLURM_NTASKS, too.
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
        command="srun",
        unbound="-n {ranks} --cpu-bind=none",
        passes="--export=ALL",
        all_gpus="--gpus-per-node={gpus} --gpu-bind=none",
        near_gpus="--distribution=block:block --mem-bind=local",
    ),
    _MPICH._replace(local_rank="PMI_LOCAL_RANK", local_size="PMI_LOCAL_SIZE", needs=(), library=None),
    Launcher("a PMIx launcher", "PMIX_RANK", None),
)

OWN_WORLD_SIZE = "WORLD_SIZE_OF_MPIDIST"
"""The WORLD_SIZE that mpidist set for programs of PyTorch. Child processes of a rank inherit both variables."""

# First number of steps that Slurm creates itself, for the batch script, salloc and others.
_STEPS_OF_SLURM_ITSELF = 0xFFFFFFF0
# Launchers that may omit the variable of the size.
_MAY_OMIT_SIZE = ("PALS mpiexec",)

LAUNCHERS: Mapping[str, Launcher] = {row.name: row for row in reversed(_LAUNCHERS)}
"""The rows of the table by name."""

BATCH_SYSTEMS: tuple[BatchSystem, ...] = (
    # First, because Flux often runs in a job of another system.
    BatchSystem("Flux", "FLUX_URI", "FLUX_JOB_NNODES", "flux run"),
    BatchSystem("Slurm", "SLURM_JOB_ID", "SLURM_JOB_NODELIST", "srun", "sbatch --exclude={host} job.sbatch"),
    BatchSystem("PBS", "PBS_JOBID", "PBS_NODEFILE", None),
    BatchSystem("LSF", "LSB_JOBID", "LSB_MCPU_HOSTS", "LSF jsrun"),
)
"""In the order of precedence."""

LAUNCHER_VARIABLES: frozenset[str] = frozenset(
    name
    for row in _LAUNCHERS
    for name in (row.rank, row.size, row.local_rank, row.local_size, row.kind, row.shell, *row.needs)
    if name is not None
)
"""All variables of the table."""


def read_launcher(environ: Environ = os.environ) -> LauncherInfo | None:
    """Return the launcher's facts about this process. None without a launcher."""
    for row in _LAUNCHERS:
        if not all(environ.get(name) for name in (row.rank, *row.needs)):
            continue
        rank, size = _number(environ, row.rank), _number(environ, row.size)
        if rank is None or (size is None and row.size is not None and row.name not in _MAY_OMIT_SIZE):
            continue
        local_rank, local_size = _number(environ, row.local_rank), _number(environ, row.local_size)
        if row.name == "srun":
            local_size = _tasks_of_this_node(environ)
        _check_rank(row.rank, rank, row.size, size)
        _check_rank(str(row.local_rank), local_rank, row.local_size or "SLURM_STEP_TASKS_PER_NODE", local_size)
        counted = row.rank if size is None or row.size is None else row.size
        return LauncherInfo(row.name, rank, size, local_rank, local_size, counted)
    return None


def _number(environ: Environ, name: str | None) -> int | None:
    text = environ.get(name) if name else None
    try:
        return whole_number(text) if text else None
    except ValueError:
        raise LauncherVariableError(str(name), f"{name}={text!r}: expected a whole number, digits alone") from None


def _check_rank(rank_variable: str, rank: int | None, size_variable: str | None, size: int | None) -> None:
    if rank is not None and size is not None and rank >= size:
        raise LauncherVariableError(
            rank_variable,
            f"{rank_variable}={rank} and {size_variable}={size} contradict each other: a rank is less than the number "
            "of ranks. They come from another job, or were set by hand",
        )


def _tasks_of_this_node(environ: Environ) -> int | None:
    name = "SLURM_STEP_TASKS_PER_NODE"
    node, text = _number(environ, "SLURM_NODEID"), environ.get(name)
    if node is None or not text:
        return None
    try:
        tasks = expand_tasks_per_node(text)
    except ValueError as error:
        raise LauncherVariableError(name, f"{name}: {error}") from None
    return tasks[node] if node < len(tasks) else None


def read_batch_system(environ: Environ = os.environ) -> BatchSystem | None:
    """Return the batch system of this process's job. None outside of a job."""
    return next((system for system in BATCH_SYSTEMS if environ.get(system.job)), None)


def in_shell(launcher: str, environ: Environ = os.environ) -> bool:
    """Return whether this process runs in a shell that a launcher started as a rank.

    A shell of ``srun --pty bash`` holds the job's resources, so commands that start ranks wait for it, and an mpirun
    forever. A shell that ``salloc`` starts by srun, as some sites configure it, holds no resources.
    """
    shell = LAUNCHERS[launcher].shell
    return bool(shell and environ.get(shell)) and (_number(environ, "SLURM_STEP_ID") or 0) < _STEPS_OF_SLURM_ITSELF


def command_for(launcher: str, vendor: str, environ: Environ = os.environ) -> str | None:
    """Return the command, without ``-n``, that starts ranks of an MPI library as one world.

    None if the launcher does not start that library, or if the job was started by this very command.
    """
    row = LAUNCHERS[launcher]
    command = row.starts.get(vendor)
    used = environ.get(row.kind) if row.kind else None
    if command is None or (used and command.endswith("=" + used.partition("_v")[0])):
        return None
    # srun waits for its shell without --overlap.
    return f"{command} --overlap" if in_shell(launcher, environ) else command


def has_loose_barriers(environ: Environ = os.environ) -> bool:
    """Return whether PMIx's barriers of this job hold the ranks of one node only.

    If a job has fewer nodes than TreeWidth, Slurm treats each node as the root of the tree, so its barriers do not wait
    for other nodes (``reverse_tree_info`` in Slurm's src/common/reverse_tree.c). A rank then leaves MPI_Init and sends
    while another one is still in it, and Open MPI crashes (open-mpi/ompi issue 12495). With a ring they wait.
    """
    return environ.get("PMIX_NAMESPACE", "").startswith("slurm.pmix") and environ.get("SLURM_PMIX_FENCE") != "ring"


def mpirun_of(vendor: str) -> Launcher | None:
    """Return the row of the mpirun of an MPI library, or None."""
    return next((row for row in LAUNCHERS.values() if row.library == vendor), None)


def own_machine(vendor: str, version: tuple[int, ...]) -> Mapping[str, str]:
    """Return the variables with which mpirun fits a personal machine; see ``Launcher``."""
    row, major = mpirun_of(vendor), version[0] if version else 0
    known = {} if row is None else {first: names for first, names in row.own_machine.items() if first <= major}
    return known[max(known)] if known else {}


def one_world(info: LauncherInfo, library: MpiLibrary) -> str:
    """Return sentences with the commands that start the ranks as one world."""
    import shutil

    count = "" if info.size is None else f" -n {info.size}"
    own = mpirun_beside(library)
    own_mpirun = f"the mpirun that belongs to {library} (compare: which mpirun)" if own is None else str(own)
    command = command_for(info.name, library.vendor)
    if command is not None:
        lists = " ('srun --mpi=list' lists the values of this Slurm)" if info.name == "srun" else ""
        instead = "after 'exit', in salloc, use" if in_shell(info.name) else "use"
        return f"Type: {command}{count} python ...{lists}; or {instead} {own_mpirun}{count} python ..."
    kind = LAUNCHERS[info.name].kind
    used = os.environ.get(kind) if kind else None
    tried = f"It was {info.name} --mpi={used} already, which this library does not support here. " if used else ""
    found = shutil.which("mpirun")
    on_path = f"The mpirun in PATH is {found}. " if found else "PATH has no mpirun. "
    system = read_batch_system()
    place = "" if system is None else f" inside the {system.name} job"
    if in_shell(info.name):
        place = " in salloc, after 'exit' from this shell,"
    return f"{tried}{on_path}Start the job{place} with the launcher of the library: {own_mpirun}{count} python ..."


# Slurm's compressed lists ---------------------------------------------------------------------------------------

MOST_TASKS = 1 << 22
"""Limit of the tasks of one job: several times the cores of the largest machines."""
_MOST_HOSTS = 1 << 16  # Slurm's own limit of one list
_MOST_SHOWN = 200
# A part and its end, which is a comma, or a bracket without its pair.
_PART = r"((?:[^\[\],]|\[[^\[\]]*\])*)([,\[\]])"
# Slurm writes "(null)" for unknown values, so names of hosts have no round brackets.
_NAME = r"[^\[\](),\s]*"
_RANGE = r"([0-9]{1,18})(?:-([0-9]{1,18}))?"
_TASKS = r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?"


def expand_hostlist(hostlist: str) -> list[str]:
    """Return the hosts of a list such as ``SLURM_JOB_NODELIST``, in its order, with zero padding.

    Raises:
        ValueError: The list is malformed, or has more than 65,536 hosts.

    >>> expand_hostlist("n[08-10],m5,o[3-4,6]")
    ['n08', 'n09', 'n10', 'm5', 'o3', 'o4', 'o6']
    >>> expand_hostlist("rack[0-1]n[1-2]-ib")
    ['rack0n1-ib', 'rack0n2-ib', 'rack1n1-ib', 'rack1n2-ib']
    """

    def bad(problem: str) -> ValueError:
        return ValueError(f"the list of hosts {_shown(hostlist)} has {problem}; a valid example: 'n[01-03],m5'")

    def expand_bracket(bracket: str) -> list[str]:
        numbers: list[str] = []
        for item in bracket.split(","):
            match = re.fullmatch(_RANGE, item)
            low, high = (match[1], match[2] or match[1]) if match else ("1", "0")
            if int(high) < int(low):
                expected = "where a number, or a range such as 08-10, was expected"
                raise bad(f"{_shown(item)} in the bracket {_shown(f'[{bracket}]')} {expected}")
            if len(numbers) + int(high) - int(low) >= _MOST_HOSTS:
                raise bad(f"more than {_MOST_HOSTS} of them, up to {_shown(item)}")
            numbers += [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
        return numbers

    hosts: list[str] = []
    for match in re.finditer(_PART, f"{hostlist},"):
        part, end = match.groups()
        # Names and the contents of brackets, by turns.
        pieces = re.split(r"\[([^\[\]]*)\]", part)
        if not part or end != "," or not all(re.fullmatch(_NAME, name) for name in pieces[::2]):
            raise bad(f"{_shown(part + end.strip(','))} where the name of a host was expected")
        choices: list[list[str]] = []
        count = 1
        for number, piece in enumerate(pieces):
            choices.append(expand_bracket(piece) if number % 2 else [piece])
            count *= len(choices[-1])
            if len(hosts) + count > _MOST_HOSTS:
                raise bad(f"more than {_MOST_HOSTS} of them, up to {_shown(part)}")
        hosts += map("".join, product(*choices))
    return hosts


def _shown(text: str) -> str:
    """Return a text in quotes, cut if it is long."""
    return repr(text) if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]!r}... ({len(text)} characters)"


def expand_tasks_per_node(tasks_per_node: str) -> list[int]:
    """Return the number of tasks of each node from a list such as ``SLURM_STEP_TASKS_PER_NODE``.

    Raises:
        ValueError: The list is malformed, or has too many nodes or tasks.

    >>> expand_tasks_per_node("3(x2),2,1")
    [3, 3, 2, 1]
    """
    tasks: list[int] = []
    total = 0
    for item in tasks_per_node.split(","):
        match = re.fullmatch(_TASKS, item)
        each, times = (int(match[1]), int(match[2] or 1)) if match else (0, 0)
        total += each * times
        problem = ""
        if times < 1:
            problem = f"{_shown(item)} where a number such as 2 or 3(x2) was expected"
        elif len(tasks) + times > _MOST_HOSTS or total > MOST_TASKS:
            problem = f"more than {_MOST_HOSTS} nodes or {MOST_TASKS} tasks, up to {_shown(item)}"
        if problem:
            raise ValueError(f"the list of tasks per node {_shown(tasks_per_node)} has {problem}")
        tasks += [each] * times
    return tasks
