"""ClusterSpec: the jobs of a cluster, the addresses of their tasks, and their ranks."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from mpidist.core import settings
from mpidist.core.text import whole_number

TASK_TYPES = ("chief", "worker", "evaluator", "ps")

Tasks = Sequence[str] | Mapping[int, str]


class ClusterSpec:
    """The jobs of a cluster and the address of each of their tasks (``tf.train.ClusterSpec``).

    Args:
        cluster: ``{job: ["host:port", ...]}``, or ``{job: {index: "host:port"}}`` if some tasks are unknown, or a
            ClusterSpec to copy.

    Raises:
        TypeError: ``cluster`` has another form.
        ValueError: A task index is negative or given twice, or an address is empty.

    >>> spec = ClusterSpec({"chief": ["a:1"], "worker": {1: "b:1"}})
    >>> spec
    ClusterSpec({'chief': ['a:1'], 'worker': {1: 'b:1'}})
    >>> spec.job_tasks("worker")
    [None, 'b:1']
    """

    # Equal specs compare equal, also with a dict, and a dict has no hash.
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, cluster: Mapping[str, Tasks] | ClusterSpec) -> None:
        self._jobs: dict[str, dict[int, str]]
        if isinstance(cluster, ClusterSpec):
            self._jobs = {job: dict(tasks) for job, tasks in cluster._jobs.items()}
        elif isinstance(cluster, Mapping):
            self._jobs = {job: _tasks_by_index(job, tasks) for job, tasks in cluster.items()}
        else:
            raise TypeError(
                f"cluster is {cluster!r} of type {type(cluster).__name__}; expected a dict from job names to "
                "lists of addresses such as {'worker': ['host0:1', 'host1:1']}, or a ClusterSpec"
            )

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, ClusterSpec):
            return self._jobs == other._jobs
        try:
            return self == ClusterSpec(other) if isinstance(other, Mapping) else NotImplemented
        except (TypeError, ValueError):
            return False

    def __repr__(self) -> str:
        return f"ClusterSpec({dict(sorted(self.as_dict().items()))!r})"

    @property
    def jobs(self) -> list[str]:
        """The names of the jobs, in the order given."""
        return list(self._jobs)

    def as_dict(self) -> dict[str, list[str] | dict[int, str]]:
        """Return ``{job: [address, ...]}``, or ``{job: {index: address}}`` for a job with gaps."""
        found: dict[str, list[str] | dict[int, str]] = {}
        for job, tasks in self._jobs.items():
            indices = sorted(tasks)
            is_dense = bool(indices) and indices == list(range(len(indices)))
            in_order = {index: tasks[index] for index in indices}
            found[job] = list(in_order.values()) if is_dense else in_order
        return found

    def as_cluster_def(self) -> dict[str, dict[int, str]]:
        """Return ``{job: {index: address}}``, the content of a ClusterDef message, in sorted order."""
        return {job: dict(sorted(self._jobs[job].items())) for job in sorted(self._jobs)}

    def num_tasks(self, job_name: str) -> int:
        """Return the number of known tasks of ``job_name``.

        Raises:
            ValueError: The job is unknown.
        """
        return len(self._job(job_name))

    def task_indices(self, job_name: str) -> list[int]:
        """Return the indices of the known tasks of ``job_name``, ascending.

        Raises:
            ValueError: The job is unknown.
        """
        return sorted(self._job(job_name))

    def task_address(self, job_name: str, task_index: int) -> str:
        """Return the address of one task.

        Raises:
            ValueError: The job or the task is unknown.
        """
        tasks = self._job(job_name)
        if task_index not in tasks:
            raise ValueError(f"task_index is {task_index!r}; job {job_name!r} has the tasks {sorted(tasks)}")
        return tasks[task_index]

    def job_tasks(self, job_name: str) -> list[str | None]:
        """Return the addresses of ``job_name`` by task index, None for unknown tasks.

        Raises:
            ValueError: The job is unknown.
        """
        tasks = self._job(job_name)
        return [tasks.get(index) for index in range(max(tasks, default=-1) + 1)]

    def _job(self, job_name: str) -> dict[int, str]:
        if job_name not in self._jobs:
            raise ValueError(f"job_name is {job_name!r}; the jobs of this cluster are {self.jobs}")
        return self._jobs[job_name]


def _tasks_by_index(job: object, tasks: object) -> dict[int, str]:
    if not isinstance(job, str):
        raise TypeError(f"a job is named {job!r} ({type(job).__name__}); expected a string such as 'worker'")
    if not isinstance(tasks, list | tuple | Mapping):
        raise TypeError(
            f"the tasks of job {job!r} are {tasks!r} of type {type(tasks).__name__}; expected a list of "
            "addresses or a dict from task index to address"
        )
    found: dict[int, str] = {}
    for given, address in tasks.items() if isinstance(tasks, Mapping) else enumerate(tasks):
        index = _task_index(job, given)
        if index in found:
            raise ValueError(f"job {job!r} has task {index} twice, in {tasks!r}. Each index must be there once")
        if not isinstance(address, str) or not address.strip():
            kind = ValueError if isinstance(address, str) else TypeError
            raise kind(f"an address of job {job!r} is {address!r}; expected a string such as 'host:port'")
        found[index] = address
    return found


def _task_index(job: str, index: Any) -> int:
    try:
        # JSON, as in TF_CONFIG, has only strings as keys.
        number = whole_number(index) if isinstance(index, str) else operator.index(index)
    except (TypeError, ValueError):
        raise TypeError(f"a task index of job {job!r} is {index!r}; expected a whole number") from None
    if number < 0:
        raise ValueError(f"a task index of job {job!r} is {number}; expected at least 0")
    return number


def deal_tasks(jobs: Mapping[str, int] | None, size: int, source: str = "jobs") -> list[tuple[str, int]]:
    """Return the task of every rank, in rank order. ``source`` is the origin of ``jobs``, for errors.

    ``jobs=None`` reads ``MPIDIST_JOBS``. Without it, every rank is a worker.

    >>> deal_tasks({"ps": 1, "worker": 2}, 3)
    [('ps', 0), ('worker', 0), ('worker', 1)]
    """
    if jobs is None:
        jobs, source = settings.JOBS.read(), settings.JOBS.name
    if jobs is None:
        return [("worker", rank) for rank in range(size)]
    if not isinstance(jobs, Mapping):
        raise TypeError(f"jobs is {jobs!r}; expected a dict such as {{'ps': 1, 'worker': 3}}")
    for job, count in jobs.items():
        if not isinstance(job, str) or isinstance(count, bool) or not isinstance(count, int):
            raise TypeError(f"{source} has {job!r}: {count!r}; expected the name of a job and a whole number")
        if job not in TASK_TYPES:
            raise ValueError(f"{source} has the task type {job!r}; expected one of {', '.join(TASK_TYPES)}")
        if count < 1:
            raise ValueError(f"{source} has {count} tasks of {job!r}; expected at least 1")
    if not jobs:
        raise ValueError(
            f"{source} is {jobs!r}. Each of the {size} ranks needs a task, such as {{'worker': {size}}}. Without "
            f"{source}, all ranks are workers"
        )
    total = sum(jobs.values())
    if total != size:
        raise ValueError(
            f"{source} has {' + '.join(f'{count} {job}' for job, count in jobs.items())} = {total} tasks, and there "
            f"are {size} ranks. Each rank needs one task. Type: mpirun -n {total} ..., or change {source}"
        )
    return [(job, index) for job, count in jobs.items() for index in range(count)]
