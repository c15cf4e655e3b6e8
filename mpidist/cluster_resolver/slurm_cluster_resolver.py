"""SlurmClusterResolver: the tasks of a Slurm job, their hosts and GPUs, by environment variables alone."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from mpidist.cluster_resolver.cluster_resolver import RankedResolver
from mpidist.cluster_resolver.cluster_spec import deal_tasks
from mpidist.core.errors import LaunchError
from mpidist.core.text import whole_number
from mpidist.topology.launchers import MOST_TASKS, LauncherInfo, expand_hostlist, expand_tasks_per_node, read_launcher

_List = TypeVar("_List")
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_ON_NODE = "SLURM_GPUS_ON_NODE"
# The GPUs of the node that Slurm shows to this task: all that the job has there, or those that it has bound to it.
_OF_STEP = "SLURM_STEP_GPUS"
# The content of CUDA_VISIBLE_DEVICES by a resolver of this process: GPUs of the task, not to be shared out again.
_left: str | None = None
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


def read_layout(tasks_per_node: int | Mapping[str, int] | None) -> SlurmLayout:
    """Return the layout of the job of this process.

    Args:
        tasks_per_node: Tasks of each node, or ``{host: tasks}``, instead of Slurm's numbers.

    Raises:
        TypeError: ``tasks_per_node`` is neither.
        ValueError: Variables are missing, malformed or contradict each other.
    """
    info = _launcher()
    by_srun = info.name == "srun"
    size = info.size
    assert size is not None  # _launcher has seen to it
    if size > MOST_TASKS:
        raise ValueError(f"{info.size_variable}={size}; expected at most {MOST_TASKS} tasks")
    hosts = _hosts(("SLURM_STEP_NODELIST",) if by_srun else ("SLURM_JOB_NODELIST", "SLURM_NODELIST"))
    if tasks_per_node is not None:
        counts = _counts_given(tasks_per_node, hosts)
        source = f"tasks_per_node={tasks_per_node!r}"
    elif by_srun:
        name, counts = _expanded(("SLURM_STEP_TASKS_PER_NODE",), expand_tasks_per_node)
        source = f"{name}={os.environ[name]!r}"
    else:
        counts, source = _even_counts(info, size, hosts), f"{info.size_variable}={size}"
    if len(counts) != len(hosts):
        raise ValueError(
            f"{source} tells of {len(counts)} nodes, but the job has the hosts {_some(hosts)}; expected as many"
        )
    if sum(counts) != size:
        raise ValueError(f"{source} adds up to {sum(counts)} tasks, but {info.size_variable}={size}; expected one sum")
    tasks_of_hosts = dict(zip(hosts, counts, strict=True))
    places = _places(tasks_of_hosts, os.environ.get("SLURM_DISTRIBUTION", "") if by_srun else "")
    _check_place(info, hosts, places[info.rank])
    return SlurmLayout(info.rank, size, tasks_of_hosts, places)


def _launcher() -> LauncherInfo:
    try:
        info = read_launcher()
    except LaunchError as error:
        raise ValueError(str(error)) from None
    if info is None or info.size is None:
        found = {name: os.environ.get(name) for name in ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")}
        raise ValueError(
            f"this process is no task of a Slurm job step: {found}. Expected: a program that srun or mpirun started "
            "inside a Slurm job; type: srun -n 4 python ..., or outside of Slurm use MPIClusterResolver()"
        )
    return info


def _expanded(names: Sequence[str], expand: Callable[[str], _List]) -> tuple[str, _List]:
    """Return the name of the variable that is set, and its list."""
    name = next((name for name in names if os.environ.get(name)), None)
    if name is None:
        raise ValueError(
            f"{' and '.join(names)} is not set; expected what Slurm writes there for the tasks of a job: start the "
            f"program by srun, or by mpirun inside a Slurm job, {_ASK_THE_RANKS}"
        )
    try:
        return name, expand(os.environ[name])
    except ValueError as error:
        raise ValueError(f"{name}: {error}; give what Slurm writes there, {_ASK_THE_RANKS}") from None


def _hosts(names: Sequence[str]) -> list[str]:
    name, hosts = _expanded(names, expand_hostlist)
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


def _check_place(info: LauncherInfo, hosts: Sequence[str], place: tuple[str, int]) -> None:
    host, local = place
    if info.local_rank is not None and info.local_rank != local:
        raise ValueError(
            f"rank {info.rank} is number {info.local_rank} on its host, and number {local} of {host} if ranks fill the "
            f"hosts in order; expected them to agree: give tasks_per_node=, {_ASK_THE_RANKS}"
        )
    node = os.environ.get("SLURM_NODEID", "")
    if info.name == "srun" and node and int(node) != hosts.index(host):
        raise ValueError(
            f"SLURM_NODEID={node!r} and SLURM_PROCID={info.rank} contradict the other variables, by which this task is "
            f"on {host!r}, node {hosts.index(host)}; expected what srun writes, {_ASK_THE_RANKS}"
        )


def gpus_of_task(layout: SlurmLayout, gpus_per_node: int | None, gpus_per_task: int | None) -> list[str]:
    """Return the GPUs of this task, as CUDA_VISIBLE_DEVICES names them.

    Empty where none are counted.

    Args:
        layout: The hosts of the tasks.
        gpus_per_node: GPUs of each node, instead of Slurm's number; 0, 1, ... where CUDA_VISIBLE_DEVICES shows another
            number of them.
        gpus_per_task: The number of GPUs for the task; all that are its own by default.

    Raises:
        ValueError: There are fewer than asked for, or a variable is malformed.
    """
    most_tasks = max(layout.tasks_of_hosts.values())
    on_node = _on_node() if gpus_per_node is None else gpus_per_node
    if gpus_per_task is not None:
        _check_enough(most_tasks, gpus_per_node, gpus_per_task, on_node)
    if not on_node:
        return []
    visible = _visible(on_node)
    is_own = _are_own(on_node)
    if gpus_per_node not in (None, len(visible)) and not is_own:
        visible = [str(gpu) for gpu in range(on_node)]
    tasks, place = (1, 0) if is_own else (most_tasks, layout.places[layout.rank][1])
    each = len(visible) // tasks if gpus_per_task is None else gpus_per_task
    if each * tasks > len(visible):
        raise ValueError(
            f"{_VISIBLE}={os.environ.get(_VISIBLE)!r} shows {len(visible)} GPUs to {tasks} task(s); expected "
            f"{each * tasks} with gpus_per_task={each}"
        )
    return visible[place * each : (place + 1) * each]


def leave_gpus(gpus: list[str]) -> None:
    """Hide all GPUs but these from this process."""
    global _left
    _left = os.environ[_VISIBLE] = ",".join(gpus)


def _on_node() -> int:
    text = os.environ.get(_ON_NODE)
    try:
        return whole_number(text) if text else 0
    except ValueError:
        raise ValueError(f"{_ON_NODE}={text!r}; expected a whole number: type: unset {_ON_NODE}") from None


def _visible(on_node: int) -> list[str]:
    text = os.environ.get(_VISIBLE)
    if text is None:
        return [str(gpu) for gpu in range(on_node)]
    names = [name.strip() for name in text.split(",")]
    # As CUDA reads it: devices after one that cannot be are hidden.
    end = next((place for place, name in enumerate(names) if name in ("", "-1", "NoDevFiles")), len(names))
    return names[:end]


def _are_own(on_node: int) -> bool:
    """Return whether the GPUs that this process sees are its task's alone.

    Otherwise all tasks of the node see them.
    """
    if _left is not None and os.environ.get(_VISIBLE) == _left:
        return True
    shown = os.environ.get(_OF_STEP)
    return bool(shown) and len(str(shown).split(",")) < on_node


def _check_enough(most_tasks: int, gpus_per_node: int | None, gpus_per_task: int, on_node: int) -> None:
    if gpus_per_node is None and _ON_NODE not in os.environ:
        raise ValueError(f"gpus_per_task is {gpus_per_task} and {_ON_NODE} is not set; expected gpus_per_node=")
    if gpus_per_task * most_tasks > on_node:
        raise ValueError(
            f"{most_tasks} tasks on a node with gpus_per_task={gpus_per_task} need {gpus_per_task * most_tasks} GPUs; "
            f"expected at most the {on_node} that a node has"
        )


class SlurmClusterResolver(RankedResolver):
    """The tasks of a Slurm job step, in the order of their ranks. Everything is local.

    It works without MPI, but not everywhere: under ``mpirun`` Slurm's variables are those of mpirun's daemons, so the
    rank and the size come from ``OMPI_*`` or ``PMI_*``, and equal numbers of ranks on each host are assumed, unless
    ``tasks_per_node`` says otherwise. MPIClusterResolver, the default of all strategies, asks the ranks themselves.

    Args:
        jobs: ``{job: number of tasks}``, which together are all tasks, dealt out in this order (TensorFlow sorts the
            names); None reads ``MPIDIST_JOBS="ps:1,worker:3"``; without it all are workers.
        port_base: The address of the i-th task on a host is ``"host:(port_base + i)"``.
        gpus_per_node: GPUs of each node; by default ``SLURM_GPUS_ON_NODE``, else none are counted.
        gpus_per_task: GPUs of each task; by default all that Slurm has bound to this task (``--gpus-per-task``,
            ``--gpu-bind``), else those of its node that ``CUDA_VISIBLE_DEVICES`` shows, shared out evenly.
        tasks_per_node: Tasks of each node, or ``{host: tasks}``; by default Slurm's numbers.
        auto_set_gpu: Set ``CUDA_VISIBLE_DEVICES`` of this process to the GPUs of its task, unless there are fewer GPUs
            than tasks. Ranks that do not see one another's GPUs cannot copy between
            them: with False the strategies share the GPUs out and all ranks see all.
        rpc_layer: The scheme of the addresses.

    Raises:
        TypeError: An argument of another type.
        ValueError: This process is in no Slurm job, variables are missing, malformed or contradict each other, jobs do
            not add up to the number of tasks, a task type does not exist, or more GPUs are asked for than a node
            has or this process sees.

    Source: ``tf.distribute.cluster_resolver.SlurmClusterResolver``. There the task is known only after
    :meth:`cluster_spec`, and errors are RuntimeError.
    """

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = 8888,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | Mapping[str, int] | None = None,
        auto_set_gpu: bool = True,
        rpc_layer: str = "grpc",
    ) -> None:
        given = {"port_base": port_base, "gpus_per_node": gpus_per_node, "gpus_per_task": gpus_per_task}
        for name, number in given.items():
            if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 0):
                raise ValueError(f"{name} is {number!r}; expected a whole number of at least 0")
        self._layout = read_layout(tasks_per_node)
        self._port_base = port_base
        self._rpc_layer = rpc_layer
        self._tasks = deal_tasks(jobs, self._layout.size)
        self.rank = self._layout.rank
        mine = gpus_of_task(self._layout, gpus_per_node, gpus_per_task)
        self._gpus_per_task = len(mine)
        if auto_set_gpu and mine:
            leave_gpus(mine)

    def _addresses(self) -> Iterator[str]:
        return (f"{host}:{self._port_base + local}" for host, local in self._layout.places)

    def num_accelerators(self, task_type: str | None = None, task_id: int | None = None) -> dict[str, int]:
        """Return ``{"GPU": k}`` for the k GPUs of each task.

        Where none are counted, those that this process sees.
        """
        if self._gpus_per_task:
            return {"GPU": self._gpus_per_task}
        return super().num_accelerators(task_type, task_id)
