"""SlurmClusterResolver: the tasks of a Slurm job, their hosts and GPUs, by environment variables alone."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeVar

from mpidist.cluster_resolver.cluster_resolver import RankedResolver
from mpidist.cluster_resolver.cluster_spec import deal_tasks
from mpidist.core.errors import LaunchError
from mpidist.core.text import whole_number
from mpidist.topology.launchers import MOST_TASKS, LauncherInfo, expand_hostlist, expand_tasks_per_node, read_launcher

_List = TypeVar("_List")
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_ON_NODE = "SLURM_GPUS_ON_NODE"
# The GPUs of the node that Slurm shows to this task: all GPUs of the job there, or the GPUs that are bound to the task.
_OF_STEP = "SLURM_STEP_GPUS"
# CUDA_VISIBLE_DEVICES as a resolver of this process has set it: GPUs of this task alone.
_left: str | None = None
_ASK_THE_RANKS = "Or use MPIClusterResolver(), which asks the ranks for their hosts"

# The host of each rank, and its position among the tasks of that host.
Places = Sequence[tuple[str, int]]


def _read_places(info: LauncherInfo, size: int, tasks_per_node: int | Mapping[str, int] | None) -> Places:
    """Return the place of each rank. ``tasks_per_node`` replaces Slurm's numbers."""
    by_srun = info.name == "srun"
    if size > MOST_TASKS:
        raise ValueError(f"{info.size_variable}={size}; expected at most {MOST_TASKS} tasks")
    names = ("SLURM_STEP_NODELIST",) if by_srun else ("SLURM_JOB_NODELIST", "SLURM_NODELIST")
    name, hosts = _expanded(names, expand_hostlist)
    twice = sorted(host for host, count in Counter(hosts).items() if count > 1)
    if twice:
        raise ValueError(f"{name} has {_some(twice)} more than once. Each host must be there once")
    if tasks_per_node is not None:
        counts, source = _given_counts(tasks_per_node, hosts), f"tasks_per_node={tasks_per_node!r}"
    elif by_srun:
        name, counts = _expanded(("SLURM_STEP_TASKS_PER_NODE",), expand_tasks_per_node)
        source = f"{name}={os.environ[name]!r}"
    else:
        counts, source = _even_counts(info, size, hosts), f"{info.size_variable}={size}"
    if len(counts) != len(hosts):
        raise ValueError(
            f"{source} has {len(counts)} nodes, but the job has the hosts {_some(hosts)}. Both numbers must be equal"
        )
    if sum(counts) != size:
        raise ValueError(
            f"{source} adds up to {sum(counts)} tasks, but {info.size_variable}={size}. Both numbers must be equal"
        )
    places = [(host, local) for host, count in zip(hosts, counts, strict=True) for local in range(count)]
    distribution = os.environ.get("SLURM_DISTRIBUTION", "") if by_srun else ""
    between_nodes = distribution.split(":")[0].split(",")[0].lower()
    if between_nodes == "cyclic":
        order = {host: number for number, host in enumerate(hosts)}
        places.sort(key=lambda place: (place[1], order[place[0]]))
    elif between_nodes not in ("", "*", "block", "pack", "nopack"):
        raise ValueError(
            f"SLURM_DISTRIBUTION={distribution!r} is not supported. Type: srun --distribution=block, or cyclic. "
            f"{_ASK_THE_RANKS}"
        )
    _check_place(info, hosts, *places[info.rank])
    return places


def _launcher() -> tuple[LauncherInfo, int]:
    """Return the launcher's facts, and the number of tasks."""
    try:
        info = read_launcher()
    except LaunchError as error:
        raise ValueError(str(error)) from None
    if info is None or info.size is None:
        found = {name: os.environ.get(name) for name in ("SLURM_JOB_ID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")}
        raise ValueError(
            f"this process is no task of a Slurm job step: {found}. Start the program with srun or mpirun inside a "
            "Slurm job: srun -n 4 python ... Outside of Slurm, use MPIClusterResolver()"
        )
    return info, info.size


def _expanded(names: Sequence[str], expand: Callable[[str], _List]) -> tuple[str, _List]:
    """Return the name of the variable that is set, and its list."""
    name = next((name for name in names if os.environ.get(name)), None)
    if name is None:
        raise ValueError(
            f"{' and '.join(names)} is not set. Start the program with srun, or with mpirun inside a Slurm job. "
            f"{_ASK_THE_RANKS}"
        )
    try:
        return name, expand(os.environ[name])
    except ValueError as error:
        raise ValueError(f"{name}: {error}. Restore Slurm's value. {_ASK_THE_RANKS}") from None


def _some(hosts: Sequence[str]) -> str:
    """Return a list as text, cut if it is long."""
    return str(list(hosts)) if len(hosts) <= 8 else f"{list(hosts[:8])} and {len(hosts) - 8} more"


def _given_counts(tasks_per_node: int | Mapping[str, int], hosts: Sequence[str]) -> list[int]:
    counts = tasks_per_node if isinstance(tasks_per_node, Mapping) else dict.fromkeys(hosts, tasks_per_node)
    for count in counts.values():
        if isinstance(count, bool) or not isinstance(count, int):
            raise TypeError(f"tasks_per_node is {tasks_per_node!r}; expected a whole number, or a dict of them by host")
        if count < 1:
            raise ValueError(f"tasks_per_node is {tasks_per_node!r}; expected at least 1 on every host")
    if sorted(counts) != sorted(hosts):
        raise ValueError(
            f"tasks_per_node has the hosts {_some(sorted(counts))}, but the job has {_some(sorted(hosts))}. Pass the "
            "hosts of the job"
        )
    return [counts[host] for host in hosts]


def _even_counts(info: LauncherInfo, size: int, hosts: Sequence[str]) -> list[int]:
    """Return equal numbers of ranks on all hosts, unless mpirun's variables disagree."""
    each, rest = divmod(size, len(hosts))
    if rest or (info.local_size is not None and info.local_size != each):
        on_this = "" if info.local_size is None else f", {info.local_size} of them on this host"
        raise ValueError(
            f"{info.name} started {size} ranks ({info.size_variable}={size}){on_this}, and the hosts of the job are "
            f"{_some(hosts)}: their distribution is unknown, because it is uneven. Pass "
            f"tasks_per_node={{host: tasks}}. {_ASK_THE_RANKS}"
        )
    return [each] * len(hosts)


def _check_place(info: LauncherInfo, hosts: Sequence[str], host: str, local: int) -> None:
    if info.local_rank is not None and info.local_rank != local:
        raise ValueError(
            f"rank {info.rank} is number {info.local_rank} on its host, and number {local} of {host} if ranks fill the "
            f"hosts in order. Pass tasks_per_node={{host: tasks}}. {_ASK_THE_RANKS}"
        )
    node = os.environ.get("SLURM_NODEID", "")
    if info.name == "srun" and node and int(node) != hosts.index(host):
        raise ValueError(
            f"SLURM_NODEID={node!r} and SLURM_PROCID={info.rank} contradict the other variables. They place this task "
            f"on {host!r}, node {hosts.index(host)}. Restore srun's values. {_ASK_THE_RANKS}"
        )


def _gpus_of_task(place: int, most_tasks: int, gpus_per_node: int | None, gpus_per_task: int | None) -> list[str]:
    """Return the GPUs of this task, as CUDA_VISIBLE_DEVICES names them. Empty if none are counted.

    Args:
        place: Position of this task on its host.
        most_tasks: Largest number of tasks on a host.
        gpus_per_node: GPUs of each node, instead of Slurm's number.
        gpus_per_task: GPUs of the task. By default, its share of the node's.
    """
    text = os.environ.get(_ON_NODE)
    try:
        on_node = gpus_per_node if gpus_per_node is not None else whole_number(text) if text else 0
    except ValueError:
        raise ValueError(f"{_ON_NODE}={text!r}; expected a whole number: type: unset {_ON_NODE}") from None
    if gpus_per_task is not None and gpus_per_node is None and _ON_NODE not in os.environ:
        raise ValueError(f"gpus_per_task is {gpus_per_task}, but {_ON_NODE} is not set. Pass gpus_per_node, too")
    if gpus_per_task is not None and gpus_per_task * most_tasks > on_node:
        raise ValueError(
            f"{most_tasks} tasks on a node with gpus_per_task={gpus_per_task} need {gpus_per_task * most_tasks} GPUs; "
            f"expected at most the {on_node} that a node has"
        )
    if not on_node:
        return []
    shown = os.environ.get(_VISIBLE)
    numbers = [str(gpu) for gpu in range(on_node)]
    visible = numbers if shown is None else _names_before_gap(shown)
    # Otherwise all tasks of the node see the same GPUs.
    of_step = os.environ.get(_OF_STEP, "")
    is_own = (_left is not None and shown == _left) or 0 < len(of_step.split(",") if of_step else ()) < on_node
    if gpus_per_node not in (None, len(visible)) and not is_own:
        visible = numbers
    tasks, place = (1, 0) if is_own else (most_tasks, place)
    each = len(visible) // tasks if gpus_per_task is None else gpus_per_task
    if each * tasks > len(visible):
        raise ValueError(
            f"{_VISIBLE}={shown!r} shows {len(visible)} GPUs to {tasks} task(s); expected {each * tasks} with "
            f"gpus_per_task={each}"
        )
    return visible[place * each : (place + 1) * each]


def _names_before_gap(shown: str) -> list[str]:
    """Return the devices that CUDA reads. It hides the devices after an invalid one."""
    names = [name.strip() for name in shown.split(",")]
    end = next((number for number, name in enumerate(names) if name in ("", "-1", "NoDevFiles")), len(names))
    return names[:end]


class SlurmClusterResolver(RankedResolver):
    """The tasks of a Slurm job step, in the order of their ranks. Everything is local.

    It works without MPI. Under ``mpirun``, Slurm's variables describe mpirun's daemons. The rank and the size then come
    from ``OMPI_*`` or ``PMI_*``, and each host must have the same number of ranks, unless ``tasks_per_node`` is given.
    MPIClusterResolver, the default of all strategies, asks the ranks themselves.

    Args:
        jobs: ``{job: number of tasks}`` for all tasks, assigned in this order (TensorFlow sorts the names). None reads
            ``MPIDIST_JOBS="ps:1,worker:3"``. Without it, all tasks are workers.
        port_base: The address of the i-th task on a host is ``"host:(port_base + i)"``.
        gpus_per_node: GPUs of each node. ``SLURM_GPUS_ON_NODE`` by default. Without both, GPUs are not counted.
        gpus_per_task: GPUs of each task. By default, the GPUs that Slurm has bound to this task (``--gpus-per-task``,
            ``--gpu-bind``), or an equal share of the GPUs in ``CUDA_VISIBLE_DEVICES``.
        tasks_per_node: Tasks of each node, or ``{host: tasks}``. Slurm's numbers by default.
        auto_set_gpu: Set ``CUDA_VISIBLE_DEVICES`` of this process to the GPUs of its task, unless there are fewer GPUs
            than tasks. Ranks that do not see each other's GPUs cannot copy between them. With False all ranks see all
            GPUs, and strategies share them.
        rpc_layer: Scheme of the addresses.

    Raises:
        TypeError: An argument has another type.
        ValueError: This process is in no Slurm job, variables are missing, malformed or contradict each other, jobs do
            not add up to the number of tasks, a task type is unknown, or a node or this process has too few GPUs.

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
        info, size = _launcher()
        self._places = _read_places(info, size, tasks_per_node)
        self._port_base = port_base
        self._rpc_layer = rpc_layer
        self._tasks = deal_tasks(jobs, size)
        self.rank = info.rank
        most_tasks = 1 + max(local for _, local in self._places)
        mine = _gpus_of_task(self._places[self.rank][1], most_tasks, gpus_per_node, gpus_per_task)
        self._gpus_per_task = len(mine)
        if auto_set_gpu and mine:
            global _left
            _left = os.environ[_VISIBLE] = ",".join(mine)

    def _addresses(self) -> Iterator[str]:
        return (f"{host}:{self._port_base + local}" for host, local in self._places)

    def num_accelerators(self, task_type: str | None = None, task_id: int | None = None) -> dict[str, int]:
        """Return ``{"GPU": k}`` for the k GPUs of each task. If none are counted, for the GPUs of this process."""
        if self._gpus_per_task:
            return {"GPU": self._gpus_per_task}
        return super().num_accelerators(task_type, task_id)
