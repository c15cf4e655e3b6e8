"""SimpleClusterResolver: a cluster that the program itself describes."""

from __future__ import annotations

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
