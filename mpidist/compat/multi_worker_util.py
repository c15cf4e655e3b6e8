"""TensorFlow's ``multi_worker_util``: the chief and the workers of a cluster. All functions are local."""

from __future__ import annotations

from collections.abc import Mapping

from mpidist.cluster_resolver.cluster_spec import TASK_TYPES, ClusterSpec, Tasks

Cluster = ClusterSpec | Mapping[str, Tasks]


def normalize_cluster_spec(cluster_spec: Cluster | None) -> ClusterSpec:
    """Return ``cluster_spec``, a ClusterSpec or a dict of jobs, as a ClusterSpec."""
    if not isinstance(cluster_spec, ClusterSpec | Mapping):
        raise ValueError(f"cluster_spec is {cluster_spec!r}; expected a ClusterSpec or a dict of jobs")
    return cluster_spec if isinstance(cluster_spec, ClusterSpec) else ClusterSpec(cluster_spec)


def task_count(cluster_spec: Cluster, task_type: str) -> int:
    """Return the number of tasks of one job, 0 for an unknown job.

    >>> task_count({"worker": ["a:1", "b:1"]}, "worker"), task_count({"worker": ["a:1"]}, "ps")
    (2, 0)
    """
    spec = normalize_cluster_spec(cluster_spec)
    return spec.num_tasks(task_type) if task_type in spec.jobs else 0


def _validated(cluster_spec: Cluster | None, task_type: str | None, task_id: int | None) -> tuple[ClusterSpec, int]:
    if cluster_spec is None or task_type is None or task_id is None:
        raise ValueError(
            f"cluster_spec={cluster_spec!r}, task_type={task_type!r}, task_id={task_id!r}; expected all "
            "three, none of them None, for example resolver.cluster_spec(), resolver.task_type, "
            "resolver.task_id"
        )
    spec = normalize_cluster_spec(cluster_spec)
    unknown = [job for job in spec.jobs if job not in TASK_TYPES]
    if unknown:
        raise ValueError(f"cluster_spec has the jobs {unknown}; expected only {', '.join(TASK_TYPES)}")
    if task_type not in TASK_TYPES:
        raise ValueError(f"task_type is {task_type!r}; expected one of {', '.join(TASK_TYPES)}")
    if task_type == "evaluator" and task_type not in spec.jobs:
        return spec, task_id
    if task_type not in spec.jobs:
        raise ValueError(f"task_type is {task_type!r}; expected a job of the cluster: {', '.join(spec.jobs)}")
    for job in ("chief", "evaluator"):
        if task_count(spec, job) > 1:
            raise ValueError(f"cluster_spec has {task_count(spec, job)} tasks {job!r}; expected at most one")
    if not 0 <= task_id < spec.num_tasks(task_type):
        raise ValueError(
            f"task_id is {task_id}; {task_type!r} has {spec.num_tasks(task_type)} tasks, so expected "
            f"0 to {spec.num_tasks(task_type) - 1}"
        )
    return spec, task_id


def is_chief(cluster_spec: Cluster | None = None, task_type: str | None = None, task_id: int | None = None) -> bool:
    """Return whether a task is the chief: ``chief``, or worker 0 without one.

    The evaluator is outside the training cluster, and so the chief of its own.

    Raises:
        ValueError: An argument is missing, the job is unknown or not in the cluster, the id is too large, or the
            cluster has more than one chief or evaluator.

    >>> is_chief({"worker": ["a:1", "b:1"]}, "worker", 0), is_chief({"worker": ["a:1", "b:1"]}, "worker", 1)
    (True, False)
    """
    spec, task_id = _validated(cluster_spec, task_type, task_id)
    if task_type in ("chief", "evaluator"):
        return True
    return task_type == "worker" and task_id == 0 and "chief" not in spec.jobs


def worker_count(cluster_spec: Cluster, task_type: str) -> int:
    """Return the number of workers with the chief, or the number of evaluators for ``"evaluator"``.

    Raises:
        ValueError: As :func:`is_chief`, or the task is a parameter server.

    >>> worker_count({"chief": ["a:1"], "worker": ["b:1", "c:1"]}, "worker")
    3
    """
    spec, _ = _validated(cluster_spec, task_type, 0)
    if task_type == "ps":
        raise ValueError("task_type is 'ps'; expected chief, worker or evaluator, as only these are counted")
    if task_type == "evaluator":
        return spec.num_tasks("evaluator")
    return task_count(spec, "chief") + task_count(spec, "worker")


def id_in_cluster(cluster_spec: Cluster, task_type: str, task_id: int) -> int:
    """Return the number of a task among the workers: chief 0, then the workers.

    Raises:
        ValueError: As :func:`worker_count`.

    >>> id_in_cluster({"chief": ["a:1"], "worker": ["b:1", "c:1"]}, "worker", 1)
    2
    """
    spec, task_id = _validated(cluster_spec, task_type, task_id)
    if task_type == "ps":
        raise ValueError("task_type is 'ps'; expected chief, worker or evaluator, as only these are numbered")
    return task_id + (task_count(spec, "chief") if task_type == "worker" else 0)


def has_worker(cluster_spec: Cluster) -> bool:
    """Return whether the cluster has a chief or a worker.

    >>> has_worker({"ps": ["a:1"]})
    False
    """
    return task_count(cluster_spec, "chief") + task_count(cluster_spec, "worker") > 0


def collective_leader(cluster_spec: Cluster, task_type: str, task_id: int) -> str:
    """Return the device path of the chief or worker 0, or ``""`` without one.

    Raises:
        ValueError: As :func:`is_chief`.

    >>> collective_leader({"worker": ["a:1", "b:1"]}, "worker", 1)
    '/job:worker/replica:0/task:0'
    """
    if not normalize_cluster_spec(cluster_spec):
        return ""
    spec, _ = _validated(cluster_spec, task_type, task_id)
    if task_type == "evaluator":
        return ""
    return f"/job:{'chief' if task_count(spec, 'chief') else 'worker'}/replica:0/task:0"
