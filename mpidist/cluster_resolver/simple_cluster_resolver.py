"""SimpleClusterResolver: a cluster that the program itself describes; UnionResolver: several resolvers as one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpidist.cluster_resolver.cluster_resolver import ClusterResolver, format_master_url
from mpidist.cluster_resolver.cluster_spec import ClusterSpec


class SimpleClusterResolver(ClusterResolver):
    """A resolver with given answers; nothing is looked up. Everything is local.

    Args:
        cluster_spec: The cluster.
        master: The result of :meth:`master` where it is not asked for one task.
        task_type: The job of this process.
        task_id: The index of this process in its job.
        environment: The value of :attr:`environment`.
        num_accelerators: The result of :meth:`num_accelerators`, such as ``{"GPU": 4}``; None for ``{}``.
        rpc_layer: The scheme of addresses.

    Raises:
        TypeError: ``cluster_spec`` is no ClusterSpec, or ``master`` no string.

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
        self._cluster_spec = cluster_spec
        self._master = master
        self._task_type = task_type
        self._task_id = task_id
        self._environment = environment
        self._num_accelerators = num_accelerators
        self._rpc_layer = rpc_layer

    def cluster_spec(self) -> ClusterSpec:
        """Return the cluster given."""
        return self._cluster_spec

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the address of the task named, or the ``master`` given.

        A task is named by both arguments.

        Raises:
            ValueError: No such task.
        """
        if task_type is not None and task_id is not None:
            address = self._cluster_spec.task_address(task_type, task_id)
        else:
            address = self._master
        return format_master_url(address, rpc_layer or self._rpc_layer) if address else ""

    def num_accelerators(self, task_type: str | None = None, task_id: int | None = None) -> dict[str, int]:
        """Return the ``num_accelerators`` given, for every task."""
        return {} if self._num_accelerators is None else self._num_accelerators

    @property
    def environment(self) -> str:
        """The ``environment`` given."""
        return self._environment


class UnionResolver(ClusterResolver):
    """Several resolvers as one; the first answers all but the merged cluster.

    Collective where a resolver in it is.

    Args:
        *resolvers: At least one.
        **kwargs: ``rpc_layer``, ``task_type``, ``task_id``: used instead of those of the first resolver. A
            ``task_id`` of 0 counts, which TensorFlow ignores.

    Raises:
        TypeError: Something that is no ClusterResolver.
        ValueError: No resolver, or a keyword that is not known.

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
            raise ValueError("there is no resolver; expected at least one ClusterResolver")
        for resolver in resolvers:
            if not isinstance(resolver, ClusterResolver):
                raise TypeError(f"{resolver!r} is of type {type(resolver).__name__}; expected ClusterResolver")
        self._resolvers = resolvers

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {', '.join(map(repr, self._resolvers))}>"

    def cluster_spec(self) -> ClusterSpec:
        """Return the jobs of all resolvers.

        Lists of one job are appended in the order of the resolvers; where one of them is a dict from task index to
        address, they are merged by index.

        Raises:
            KeyError: Two resolvers have a task with the same index, and one of them is a dict.
        """
        found = [resolver.cluster_spec().as_dict() for resolver in self._resolvers]
        jobs = dict.fromkeys(job for cluster in found for job in cluster)
        return ClusterSpec({job: _merge(job, [cluster[job] for cluster in found if job in cluster]) for job in jobs})

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the address of the task named, or the first resolver's master.

        A task is named by both arguments.

        Raises:
            ValueError: No such task.
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
            raise KeyError(f"job {job!r} has the tasks {twice} in two resolvers; expected every index once")
        merged.update(tasks)
    return merged
