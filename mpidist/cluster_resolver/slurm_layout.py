"""The host of each task of a Slurm job, read from one task's environment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from mpidist.core.errors import LaunchError
from mpidist.topology.environments import LauncherInfo, read_launcher
from mpidist.topology.slurm_lists import MOST_TASKS, expand_hostlist, expand_tasks_per_node

_List = TypeVar("_List")
Environ = Mapping[str, str]
_ASK_THE_RANKS = "or use MPIClusterResolver(), which asks the ranks where they are"


@dataclass(frozen=True)
class SlurmLayout:
    """The tasks of a job and their hosts.

    Attributes:
        rank: The rank of this process.
        size: The number of tasks.
        tasks_of_hosts: ``{host: number of tasks}``, in Slurm's order of hosts.
        places: The host of each rank, and its position among the tasks of that host.
    """

    rank: int
    size: int
    tasks_of_hosts: dict[str, int]
    places: tuple[tuple[str, int], ...]


def read_layout(environ: Environ, tasks_per_node: int | Mapping[str, int] | None) -> SlurmLayout:
    """Return the layout of the job of this process.

    Args:
        environ: The environment to read.
        tasks_per_node: Tasks of each node, or ``{host: tasks}``, instead of Slurm's numbers.

    Raises:
        TypeError: ``tasks_per_node`` is neither.
        ValueError: Variables are missing, malformed or contradict each other.
    """
    info = _launcher(environ)
    by_srun = info.name == "srun"
    size = info.size
    assert size is not None  # _launcher has seen to it
    if size > MOST_TASKS:
        raise ValueError(f"{info.size_variable}={size}; expected at most {MOST_TASKS} tasks")
    hosts = _hosts(environ, ("SLURM_STEP_NODELIST",) if by_srun else ("SLURM_JOB_NODELIST", "SLURM_NODELIST"))
    if tasks_per_node is not None:
        counts = _counts_given(tasks_per_node, hosts)
        source = f"tasks_per_node={tasks_per_node!r}"
    elif by_srun:
        name, counts = _expanded(environ, ("SLURM_STEP_TASKS_PER_NODE",), expand_tasks_per_node)
        source = f"{name}={environ[name]!r}"
    else:
        counts, source = _even_counts(info, size, hosts), f"{info.size_variable}={size}"
    if len(counts) != len(hosts):
        raise ValueError(
            f"{source} tells of {len(counts)} nodes, but the job has the hosts {_some(hosts)}; expected as many"
        )
    if sum(counts) != size:
        raise ValueError(f"{source} adds up to {sum(counts)} tasks, but {info.size_variable}={size}; expected one sum")
    tasks_of_hosts = dict(zip(hosts, counts, strict=True))
    places = _places(tasks_of_hosts, environ.get("SLURM_DISTRIBUTION", "") if by_srun else "")
    _check_place(environ, info, hosts, places[info.rank])
    return SlurmLayout(info.rank, size, tasks_of_hosts, places)


def _launcher(environ: Environ) -> LauncherInfo:
    try:
        info = read_launcher(environ)
    except LaunchError as error:
        raise ValueError(str(error)) from None
    if info is None or info.size is None:
        found = {name: environ.get(name) for name in ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")}
        raise ValueError(
            f"this process is no task of a Slurm job step: {found}. Expected: a program that srun or mpirun started "
            "inside a Slurm job; type: srun -n 4 python ..., or outside of Slurm use MPIClusterResolver()"
        )
    return info


def _expanded(environ: Environ, names: Sequence[str], expand: Callable[[str], _List]) -> tuple[str, _List]:
    """Return the name of the variable that is set, and its list."""
    name = next((name for name in names if environ.get(name)), None)
    if name is None:
        raise ValueError(
            f"{' and '.join(names)} is not set; expected what Slurm writes there for the tasks of a job: start the "
            f"program by srun, or by mpirun inside a Slurm job, {_ASK_THE_RANKS}"
        )
    try:
        return name, expand(environ[name])
    except ValueError as error:
        raise ValueError(f"{name}: {error}; give what Slurm writes there, {_ASK_THE_RANKS}") from None


def _hosts(environ: Environ, names: Sequence[str]) -> list[str]:
    name, hosts = _expanded(environ, names, expand_hostlist)
    twice = sorted(host for host, count in Counter(hosts).items() if count > 1)
    if twice:
        raise ValueError(f"{name} has {_some(twice)} more than once; expected every host once")
    return hosts


def _some(hosts: Sequence[str]) -> str:
    """Return a list as text, cut where it is long."""
    return str(list(hosts)) if len(hosts) <= 8 else f"{list(hosts[:8])} and {len(hosts) - 8} more"


def _counts_given(tasks_per_node: int | Mapping[str, int], hosts: Sequence[str]) -> list[int]:
    counts = tasks_per_node if isinstance(tasks_per_node, Mapping) else dict.fromkeys(hosts, tasks_per_node)
    for count in counts.values():
        if isinstance(count, bool) or not isinstance(count, int):
            raise TypeError(f"tasks_per_node is {tasks_per_node!r}; expected a whole number, or a dict of them by host")
        if count < 1:
            raise ValueError(f"tasks_per_node is {tasks_per_node!r}; expected at least 1 on every host")
    if sorted(counts) != sorted(hosts):
        raise ValueError(
            f"tasks_per_node has the hosts {_some(sorted(counts))}; expected those of the job: {_some(sorted(hosts))}"
        )
    return [counts[host] for host in hosts]


def _even_counts(info: LauncherInfo, size: int, hosts: Sequence[str]) -> list[int]:
    """Return equal numbers of ranks on all hosts.

    Raises ValueError if the variables of mpirun on this one disagree.
    """
    each, rest = divmod(size, len(hosts))
    if rest or (info.local_size is not None and info.local_size != each):
        on_this = "" if info.local_size is None else f", {info.local_size} of them on this host"
        raise ValueError(
            f"{info.name} started {size} ranks ({info.size_variable}={size}){on_this}, and the hosts of the job are "
            f"{_some(hosts)}: they are not spread evenly, and nothing says how. Expected: "
            f"tasks_per_node={{host: tasks}}, {_ASK_THE_RANKS}"
        )
    return [each] * len(hosts)


def _places(tasks_of_hosts: Mapping[str, int], distribution: str) -> tuple[tuple[str, int], ...]:
    """Return the host and the local position of each rank."""
    between_nodes = distribution.split(":")[0].split(",")[0].lower()
    block = [(host, local) for host, tasks in tasks_of_hosts.items() for local in range(tasks)]
    if between_nodes in ("", "*", "block", "pack", "nopack"):
        return tuple(block)
    if between_nodes == "cyclic":
        order = {host: number for number, host in enumerate(tasks_of_hosts)}
        return tuple(sorted(block, key=lambda place: (place[1], order[place[0]])))
    raise ValueError(
        f"SLURM_DISTRIBUTION={distribution!r}: only block and cyclic tell which task is where. Expected: "
        f"srun --distribution=block, {_ASK_THE_RANKS}"
    )


def _check_place(environ: Environ, info: LauncherInfo, hosts: Sequence[str], place: tuple[str, int]) -> None:
    host, local = place
    if info.local_rank is not None and info.local_rank != local:
        raise ValueError(
            f"rank {info.rank} is number {info.local_rank} on its host, and number {local} of {host} if ranks fill the "
            f"hosts in order; expected them to agree: give tasks_per_node=, {_ASK_THE_RANKS}"
        )
    node = environ.get("SLURM_NODEID", "")
    if info.name == "srun" and node and int(node) != hosts.index(host):
        raise ValueError(
            f"SLURM_NODEID={node!r} and SLURM_PROCID={info.rank} contradict the other variables, by which this task is "
            f"on {host!r}, node {hosts.index(host)}; expected what srun writes, {_ASK_THE_RANKS}"
        )
