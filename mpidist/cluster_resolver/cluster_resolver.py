"""ClusterResolver, and the resolvers that need neither MPI nor Slurm."""

from __future__ import annotations

import json
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from mpidist.cluster_resolver.cluster_spec import TASK_TYPES, ClusterSpec
from mpidist.topology.topology import visible_devices


class ClusterResolver(ABC):
    """The cluster, and the task of this process in it.

    For a source of your own, derive a class that implements :meth:`cluster_spec` and :meth:`master`, and set
    ``task_type`` and ``task_id``. Source: ``tf.distribute.cluster_resolver.ClusterResolver``.

    >>> class OneHost(ClusterResolver):
    ...     def cluster_spec(self):
    ...         return ClusterSpec({"worker": ["localhost:1"]})
    ...     def master(self, task_type=None, task_id=None, rpc_layer=None):
    ...         return "localhost:1"
    >>> resolver = OneHost()
    >>> resolver.task_type, resolver.task_id = "worker", 0
    >>> resolver.cluster_spec().task_address(resolver.task_type, resolver.task_id)
    'localhost:1'
    """

    _task_type: str | None = None
    _task_id: int | None = None
    _rpc_layer: str | None = None
    _environment: str | None = None

    @abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Return the present cluster."""

    @abstractmethod
    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the address of a task, with ``rpc_layer`` as its scheme if there is one."""

    def tasks(self) -> list[tuple[str, int]]:
        """Return the job and the index of every task. Local.

        >>> from mpidist.cluster_resolver import SimpleClusterResolver
        >>> SimpleClusterResolver(ClusterSpec({"ps": ["a:1"], "worker": ["b:1"]})).tasks()
        [('ps', 0), ('worker', 0)]
        """
        spec = self.cluster_spec()
        return [(job, index) for job in spec.jobs for index in spec.task_indices(job)]

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.task_type} {self.task_id}>"

    def num_accelerators(self, task_type: str | None = None, task_id: int | None = None) -> dict[str, int]:
        """Return ``{"GPU": k}`` for the k CUDA devices of this process, ``{}`` for none.

        Imports CuPy if the machine has an NVIDIA driver.

        Args:
            task_type: Return ``{}`` unless this process is of this type.
            task_id: Return ``{}`` unless this process has this id. Devices of other processes are unknown.
        """
        other_type = task_type is not None and task_type != self.task_type
        other_id = task_id is not None and task_id != self.task_id
        devices = () if other_type or other_id else visible_devices()
        return {"GPU": len(devices)} if devices else {}

    @property
    def environment(self) -> str:
        """The environment of the program, such as a cloud. Empty if unknown."""
        return self._environment or ""

    @property
    def task_type(self) -> str | None:
        """The job of this process: ``chief``, ``worker``, ``ps`` or ``evaluator``. None if unknown. Can be set."""
        return self._own_task()[0] if self._task_type is None else self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """The index of this process in its job. None if unknown. Can be set."""
        return self._own_task()[1] if self._task_id is None else self._task_id

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    @property
    def rpc_layer(self) -> str | None:
        """The scheme of the addresses that :meth:`master` returns, or None. Can be set."""
        return self._own_rpc_layer() if self._rpc_layer is None else self._rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    def _own_task(self) -> tuple[str | None, int | None]:
        return None, None

    def _own_rpc_layer(self) -> str | None:
        return None


def task_text(resolver: ClusterResolver) -> str:
    """Return the task of this rank as text, for messages."""
    if resolver.task_type is None or resolver.task_id is None:
        return f"the {type(resolver).__name__} does not say which task this rank is"
    return f"this rank is {resolver.task_type}:{resolver.task_id} by its {type(resolver).__name__}"


def format_master_url(master: str, rpc_layer: str | None = None) -> str:
    """Return ``"rpc_layer://master"``, or ``master`` alone without a scheme.

    >>> format_master_url("node7:3", "mpi")
    'mpi://node7:3'
    """
    return f"{rpc_layer}://{master}" if rpc_layer else master


class RankedResolver(ClusterResolver):
    """The base of resolvers that assign tasks to ranks. A subclass knows their addresses.

    Attributes:
        rank: Rank of this process.
    """

    rank: int
    _tasks: list[tuple[str, int]]

    def _addresses(self) -> Iterable[str]:
        """Return the address of each rank."""
        raise NotImplementedError

    def _own_task(self) -> tuple[str | None, int | None]:
        return self._tasks[self.rank]

    def tasks(self) -> list[tuple[str, int]]:
        """Return the job and the index of every rank. Local."""
        return list(self._tasks)

    def get_task_info(self) -> tuple[str | None, int | None]:
        """Return ``(task_type, task_id)`` of this rank. Local."""
        return self.task_type, self.task_id

    def cluster_spec(self) -> ClusterSpec:
        """Return the jobs and the addresses of all tasks, the same on every rank.

        The first call on an MPIClusterResolver is collective: call it on every rank, in the same order. Later calls are
        local, because neither the ranks of an MPI communicator nor their hosts change.
        """
        cluster: dict[str, list[str]] = {}
        for address, (job, _) in zip(self._addresses(), self._tasks, strict=True):
            cluster.setdefault(job, []).append(address)
        return ClusterSpec(cluster)

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the address of a task, such as ``"mpi://node7:3"``. Collective as :meth:`cluster_spec`.

        Args:
            task_type: Job of the task. By default, the job of this rank.
            task_id: Index in the job. By default, the index of this rank.
            rpc_layer: Scheme to use instead of the property :attr:`rpc_layer`.

        Raises:
            ValueError: The task is unknown.
        """
        address = self.cluster_spec().task_address(*self._named_task(task_type, task_id))
        return format_master_url(address, rpc_layer or self.rpc_layer)

    def _named_task(self, task_type: str | None, task_id: int | None) -> tuple[str, int]:
        job, index = self._tasks[self.rank]
        given = self._task_id if task_id is None else task_id
        return task_type or self._task_type or job, index if given is None else given


class SimpleClusterResolver(ClusterResolver):
    """A resolver that returns its arguments. Local.

    Args:
        cluster_spec: The cluster.
        master: Result of :meth:`master` if no task is named.
        task_type: Job of this process.
        task_id: Index of this process in its job.
        environment: Value of :attr:`environment`.
        num_accelerators: Result of :meth:`num_accelerators`, such as ``{"GPU": 4}``. None means ``{}``.
        rpc_layer: Scheme of addresses.

    Raises:
        TypeError: ``cluster_spec`` is not a ClusterSpec, or ``master`` not a string.

    Source: ``tf.distribute.cluster_resolver.SimpleClusterResolver``.

    >>> spec = ClusterSpec({"worker": ["a:1", "b:1"]})
    >>> SimpleClusterResolver(spec, task_type="worker", task_id=0).master("worker", 1, rpc_layer="mpi")
    'mpi://b:1'
    """

    def __init__(
        self,
        cluster_spec: ClusterSpec,
        master: str = "",
        task_type: str | None = None,
        task_id: int | None = None,
        environment: str = "",
        num_accelerators: dict[str, int] | None = None,
        rpc_layer: str | None = None,
    ) -> None:
        if not isinstance(cluster_spec, ClusterSpec):
            raise TypeError(
                f"cluster_spec is {cluster_spec!r} of type {type(cluster_spec).__name__}; expected a ClusterSpec: "
                "mpidist.ClusterSpec({'worker': ['host0:1', 'host1:1']})"
            )
        if not isinstance(master, str):
            raise TypeError(f"master is {master!r} of type {type(master).__name__}; expected an address as a string")
        self._cluster_spec, self._master = cluster_spec, master
        self._task_type, self._task_id, self._rpc_layer = task_type, task_id, rpc_layer
        self._environment, self._num_accelerators = environment, num_accelerators

    def cluster_spec(self) -> ClusterSpec:
        """Return the given cluster."""
        return self._cluster_spec

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the address of the task of both arguments, or the given ``master``.

        Raises:
            ValueError: The task is unknown.
        """
        is_named = task_type is not None and task_id is not None
        address = self._cluster_spec.task_address(str(task_type), int(task_id or 0)) if is_named else self._master
        return format_master_url(address, rpc_layer or self._rpc_layer) if address else ""

    def num_accelerators(self, task_type: str | None = None, task_id: int | None = None) -> dict[str, int]:
        """Return the given ``num_accelerators``, for every task."""
        return {} if self._num_accelerators is None else self._num_accelerators


class UnionResolver(ClusterResolver):
    """Several resolvers as one. The first defines everything but the merged cluster.

    Collective if one of the resolvers is.

    Args:
        *resolvers: One or more resolvers.
        **kwargs: ``rpc_layer``, ``task_type``, ``task_id`` to use instead of those of the first resolver. A
            ``task_id`` of 0 counts, which TensorFlow ignores.

    Raises:
        TypeError: An argument is not a ClusterResolver.
        ValueError: There is no resolver, or a keyword is unknown.

    Source: ``tf.distribute.cluster_resolver.UnionResolver``, also named ``UnionClusterResolver`` there.

    >>> from mpidist.cluster_resolver import SimpleClusterResolver
    >>> workers = SimpleClusterResolver(ClusterSpec({"worker": ["a:1"]}), task_type="worker", task_id=0)
    >>> servers = SimpleClusterResolver(ClusterSpec({"ps": ["b:1"]}))
    >>> UnionResolver(workers, servers).cluster_spec()
    ClusterSpec({'ps': ['b:1'], 'worker': ['a:1']})
    """

    def __init__(self, *resolvers: ClusterResolver, **kwargs: Any) -> None:
        self._rpc_layer = kwargs.pop("rpc_layer", None)
        self._task_type = kwargs.pop("task_type", None)
        self._task_id = kwargs.pop("task_id", None)
        if kwargs:
            raise ValueError(f"the keywords {sorted(kwargs)} are not known; expected rpc_layer, task_type, task_id")
        if not resolvers:
            raise ValueError("UnionResolver() needs at least one ClusterResolver. Pass resolvers")
        for resolver in resolvers:
            if not isinstance(resolver, ClusterResolver):
                raise TypeError(f"{resolver!r} is of type {type(resolver).__name__}; expected ClusterResolver")
        self._resolvers = resolvers

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {', '.join(map(repr, self._resolvers))}>"

    def cluster_spec(self) -> ClusterSpec:
        """Return the jobs of all resolvers.

        Lists of one job are appended in the order of the resolvers. If one of them is a dict from task index to
        address, they are merged by index.

        Raises:
            KeyError: Two resolvers have a task with the same index, and one of them is a dict.
        """
        found = [resolver.cluster_spec().as_dict() for resolver in self._resolvers]
        jobs = dict.fromkeys(job for cluster in found for job in cluster)
        return ClusterSpec({job: _merge(job, [cluster[job] for cluster in found if job in cluster]) for job in jobs})

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the address of the task of both arguments, or the first resolver's master.

        Raises:
            ValueError: The task is unknown.
        """
        rpc_layer = rpc_layer or self.rpc_layer
        if task_type is not None and task_id is not None:
            return format_master_url(self.cluster_spec().task_address(task_type, task_id), rpc_layer)
        return self._resolvers[0].master(rpc_layer=rpc_layer)

    def num_accelerators(self, task_type: str | None = None, task_id: int | None = None) -> dict[str, int]:
        """Return the accelerators of the first resolver."""
        return self._resolvers[0].num_accelerators(task_type, task_id)

    @property
    def environment(self) -> str:
        """The environment of the first resolver."""
        return self._resolvers[0].environment

    def _own_task(self) -> tuple[str | None, int | None]:
        return self._resolvers[0].task_type, self._resolvers[0].task_id

    def _own_rpc_layer(self) -> str | None:
        return self._resolvers[0].rpc_layer


def _merge(job: str, parts: Sequence[list[str] | dict[int, str]]) -> list[str] | dict[int, str]:
    lists = [part for part in parts if isinstance(part, list)]
    if len(lists) == len(parts):
        return [address for part in lists for address in part]
    merged: dict[int, str] = {}
    for part in parts:
        tasks = dict(enumerate(part)) if isinstance(part, list) else part
        twice = sorted(merged.keys() & tasks.keys())
        if twice:
            raise KeyError(f"job {job!r} has the tasks {twice} in two resolvers. Each index must be there once")
        merged.update(tasks)
    return merged


# TF_CONFIG ------------------------------------------------------------------------------------------------------

_VARIABLE = "TF_CONFIG"
_EXAMPLE = '{"cluster": {"worker": ["host0:1", "host1:1"]}, "task": {"type": "worker", "index": 0}}'
# The keys that this class reads, and those that TensorFlow's own RunConfig and Google's cloud add.
_KEYS = "cluster, task, rpc_layer, environment, session_master, eval_session_master, job, model_dir, service"


class TFConfigClusterResolver(ClusterResolver):
    """The cluster that the environment variable ``TF_CONFIG`` describes.

    The variable is JSON with ``cluster``, ``task``, and optionally ``rpc_layer``, ``environment``, ``session_master``.
    Everything is local. The variable is read in each call. It only defines roles: ranks still find each other by MPI.

    Args:
        task_type: Job of this process. It overrides the variable, as the other arguments do.
        task_id: Index of this process in its job.
        rpc_layer: Scheme of addresses.
        environment: Value of :attr:`environment`.

    All methods raise ValueError if the variable is not JSON or has another form, has an unknown or repeated key, an
    unknown job, two chiefs or evaluators, or a task that the cluster does not have. Without the variable the cluster is
    empty.

    Source: ``tf.distribute.cluster_resolver.TFConfigClusterResolver``.

    >>> os.environ["TF_CONFIG"] = '{"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}}'
    >>> resolver = TFConfigClusterResolver()
    >>> resolver.task_type, resolver.task_id, resolver.master()
    ('worker', 1, 'b:1')
    >>> del os.environ["TF_CONFIG"]
    """

    def __init__(
        self,
        task_type: str | None = None,
        task_id: int | None = None,
        rpc_layer: str | None = None,
        environment: str | None = None,
    ) -> None:
        self._task_type, self._task_id = task_type, task_id
        self._rpc_layer, self._environment = rpc_layer, environment

    def __repr__(self) -> str:
        # Without the task, because the variable may be wrong.
        return f"<{type(self).__name__}>"

    def cluster_spec(self) -> ClusterSpec:
        """Return the cluster. It is empty without the variable."""
        return _read_config()[0]

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the ``session_master``, or a task's address.

        It is ``""`` for a cluster of at most one task without ``session_master``.

        Args:
            task_type: Job of the task. By default, the job of this process.
            task_id: Index in the job. By default, the index of this process.
            rpc_layer: Scheme to use instead of the property :attr:`rpc_layer`.

        Raises:
            ValueError: The task is unknown, or neither the arguments nor the variable name one.
        """
        spec, config = _read_config()
        session_master = config.get("session_master")
        if session_master is not None:
            return str(session_master)
        if len(self.tasks()) <= 1:
            return ""
        job = self.task_type if task_type is None else task_type
        index = self.task_id if task_id is None else task_id
        if job is None or index is None:
            raise ValueError(
                f"{_VARIABLE}={os.environ.get(_VARIABLE)!r} does not name the task of this process. A valid example: "
                f"{_EXAMPLE}"
            )
        return format_master_url(spec.task_address(job, index), rpc_layer or self.rpc_layer)

    @property
    def environment(self) -> str:
        """The environment of the program."""
        return str((_read_config()[1].get("environment") if self._environment is None else self._environment) or "")

    def _own_task(self) -> tuple[str | None, int | None]:
        task = _read_config()[1].get("task", {})
        job, index = task.get("type"), task.get("index")
        return None if job is None else str(job), None if index is None else int(index)

    def _own_rpc_layer(self) -> str | None:
        layer = _read_config()[1].get("rpc_layer")
        return None if layer is None else str(layer)


class _ConfigError(Exception):
    """A problem of the variable, as text."""


def _read_config() -> tuple[ClusterSpec, dict[str, Any]]:
    """Return the cluster and the content of TF_CONFIG, validated."""
    text = os.environ.get(_VARIABLE, "")
    if not text.strip():
        return ClusterSpec({}), {}
    try:
        return _parsed_config(text)
    except _ConfigError as error:
        problem = f"{_VARIABLE}={text!r} {error}. A valid example: {_VARIABLE}='{_EXAMPLE}'"
    raise ValueError(problem)


def _parsed_config(text: str) -> tuple[ClusterSpec, dict[str, Any]]:
    try:
        config = json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise _ConfigError(f"is not JSON ({error})") from None
    if not isinstance(config, dict):
        raise _ConfigError(f"is a {type(config).__name__}")
    unknown = [key for key in config if key not in _KEYS.split(", ")]
    if unknown:
        raise _ConfigError(f"has the unknown keys {unknown}. Known are {_KEYS}")
    try:
        spec = ClusterSpec(config.get("cluster", {}))
    except (TypeError, ValueError) as error:
        raise _ConfigError(f"has no usable 'cluster': {error}") from None
    for job in spec.jobs:
        if not _is_job(job):
            raise _ConfigError(f"has the unknown job {job!r} in its cluster. Known are {', '.join(TASK_TYPES)}")
        if job in ("chief", "evaluator") and spec.num_tasks(job) > 1:
            raise _ConfigError(f"has {spec.num_tasks(job)} tasks {job!r}, but at most one is possible")
    _check_task(spec, config.get("task", {}))
    return spec, config


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return an object of JSON, or raise an error for a repeated key. Python would keep the last value."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _ConfigError(f"has the key {max(keys, key=keys.count)!r} twice in one object")
    return found


def _check_task(spec: ClusterSpec, task: object) -> None:
    if not isinstance(task, dict):
        raise _ConfigError(f"has 'task': {task!r}")
    job, index = task.get("type"), task.get("index")
    if isinstance(job, int) and not isinstance(job, bool):
        job = str(job)
    if job is not None and not _is_job(job):
        raise _ConfigError(f"has the unknown task type {job!r}. Known are {', '.join(TASK_TYPES)}")
    if index is not None and (isinstance(index, bool | float) or not re.fullmatch(r"[0-9]{1,9}", str(index))):
        raise _ConfigError(f"has the task index {index!r}, which is not a whole number of at least 0")
    # The evaluator is not part of the training cluster, and need not be listed.
    if not spec or job is None or (job == "evaluator" and job not in spec.jobs):
        return
    if job not in spec.jobs:
        raise _ConfigError(f"has a task of type {job!r}, but the jobs of its cluster are {spec.jobs}")
    if index is not None and int(index) not in spec.task_indices(job):
        raise _ConfigError(f"has the task index {index!r}, but job {job!r} has the tasks {spec.task_indices(job)}")


def _is_job(job: object) -> bool:
    """Return whether a job's name is a task type or a number. Some schedulers number jobs."""
    return job in TASK_TYPES or (isinstance(job, str) and job.isdecimal())


# Resolvers of TensorFlow that raise NotImplementedError ---------------------------------------------------------


class _NotOffered(ClusterResolver):
    _asks = ""

    def __new__(cls, *args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"mpidist does not offer {cls.__name__}, which reads the cluster from {cls._asks}. Start the ranks with an "
            "MPI launcher, and use MPIClusterResolver(), the default. Or describe the cluster: "
            "SimpleClusterResolver(ClusterSpec({'worker': ['host0:1', 'host1:1']}), ...)"
        )


class KubernetesClusterResolver(_NotOffered):
    """Not offered. The NotImplementedError names alternatives. On Kubernetes the MPI operator starts ranks."""

    _asks = "a Kubernetes server"


class GCEClusterResolver(_NotOffered):
    """Not offered. The NotImplementedError names alternatives."""

    _asks = "Google Compute Engine"


class TPUClusterResolver(_NotOffered):
    """Not offered. The NotImplementedError names alternatives. TPUs are not supported."""

    _asks = "Google Cloud's TPU service"


class SageMakerClusterResolver(_NotOffered):
    """Not offered. The NotImplementedError names alternatives. SageMaker has an MPI launcher of its own."""

    _asks = "SageMaker's variables SM_HOSTS and SM_CURRENT_HOST"
