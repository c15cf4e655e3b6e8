"""ClusterResolver: the questions about a cluster that every resolver answers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import NoReturn

from mpidist.cluster_resolver.cluster_spec import ClusterSpec
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

    @abstractmethod
    def cluster_spec(self) -> ClusterSpec:
        """Return the present cluster."""

    @abstractmethod
    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the address of a task, with ``rpc_layer`` as its scheme where there is one."""

    def tasks(self) -> list[tuple[str, int]]:
        """Return the job and the index of every task; local.

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

        Imports CuPy where the machine has an NVIDIA driver.

        Args:
            task_type: Only count if this process is of this type.
            task_id: Only count if this process has this id. Devices of other processes are not known here:
            {}.
        """
        other_type = task_type is not None and task_type != self.task_type
        other_id = task_id is not None and task_id != self.task_id
        devices = () if other_type or other_id else visible_devices()
        return {"GPU": len(devices)} if devices else {}

    @property
    def environment(self) -> str:
        """The place of the program; empty in all environments that mpidist knows."""
        return ""

    @property
    def task_type(self) -> str | None:
        """The job of this process: ``chief``, ``worker``, ``ps`` or ``evaluator``; None if not known.

        An assigned value takes its place.
        """
        return self._own_task()[0] if self._task_type is None else self._task_type

    @task_type.setter
    def task_type(self, task_type: str | None) -> None:
        self._task_type = task_type

    @property
    def task_id(self) -> int | None:
        """The index of this process in its job; None if not known. An assigned value takes its place."""
        return self._own_task()[1] if self._task_id is None else self._task_id

    @task_id.setter
    def task_id(self, task_id: int | None) -> None:
        self._task_id = task_id

    @property
    def rpc_layer(self) -> str | None:
        """The scheme of the addresses that :meth:`master` returns; None for none."""
        return self._own_rpc_layer() if self._rpc_layer is None else self._rpc_layer

    @rpc_layer.setter
    def rpc_layer(self, rpc_layer: str | None) -> None:
        self._rpc_layer = rpc_layer

    def _own_task(self) -> tuple[str | None, int | None]:
        """Return job and index of this process where none is assigned."""
        return None, None

    def _own_rpc_layer(self) -> str | None:
        """Return the scheme of addresses where none is assigned."""
        return None


def task_text(resolver: ClusterResolver) -> str:
    """Return the task of this rank as text, for messages."""
    if resolver.task_type is None or resolver.task_id is None:
        return f"the {type(resolver).__name__} does not say which task this rank is"
    return f"this rank is {resolver.task_type}:{resolver.task_id} by its {type(resolver).__name__}"


def format_master_url(master: str, rpc_layer: str | None = None) -> str:
    """Return ``"rpc_layer://master"``, or ``master`` alone where there is no scheme.

    >>> format_master_url("node7:3", "mpi")
    'mpi://node7:3'
    """
    return f"{rpc_layer}://{master}" if rpc_layer else master


class RankedResolver(ClusterResolver):
    """The base of resolvers that deal tasks to ranks; a subclass knows their addresses.

    Attributes:
        rank: That of this process.
    """

    rank: int
    _tasks: list[tuple[str, int]]

    def _addresses(self) -> Iterable[str]:
        """Return the address of each rank."""
        raise NotImplementedError

    def _own_task(self) -> tuple[str | None, int | None]:
        return self._tasks[self.rank]

    def tasks(self) -> list[tuple[str, int]]:
        """Return the job and the index of every rank; local."""
        return list(self._tasks)

    def get_task_info(self) -> tuple[str | None, int | None]:
        """Return ``(task_type, task_id)`` of this rank; local."""
        return self.task_type, self.task_id

    def cluster_spec(self) -> ClusterSpec:
        """Return the jobs and the addresses of all tasks, the same on every rank.

        Of an MPIClusterResolver it is collective the first time: call it on every rank, in the same order. Later calls
        are local, as neither the ranks of an MPI communicator nor their places change.
        """
        cluster: dict[str, list[str]] = {}
        for address, (job, _) in zip(self._addresses(), self._tasks, strict=True):
            cluster.setdefault(job, []).append(address)
        return ClusterSpec(cluster)

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Return the address of a task, such as ``"mpi://node7:3"``; collective as :meth:`cluster_spec`.

        Args:
            task_type: The job; that of this rank by default.
            task_id: The index in the job; that of this rank by default.
            rpc_layer: The scheme, instead of the property :attr:`rpc_layer`.

        Raises:
            ValueError: No such task.
        """
        address = self.cluster_spec().task_address(*self._named_task(task_type, task_id))
        return format_master_url(address, rpc_layer or self.rpc_layer)

    def _named_task(self, task_type: str | None, task_id: int | None) -> tuple[str, int]:
        job, index = self._tasks[self.rank]
        given = self._task_id if task_id is None else task_id
        return task_type or self._task_type or job, index if given is None else given


class _NotOffered(ClusterResolver):
    """A resolver that cannot be made."""

    _asks = ""

    def __new__(cls, *args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(
            f"mpidist does not offer {cls.__name__}, which asks {cls._asks} who takes part: here MPI knows. "
            "Expected: the ranks are started by an MPI launcher, and the resolver is MPIClusterResolver(), the "
            "default; or type: SimpleClusterResolver(ClusterSpec({'worker': ['host0:1', 'host1:1']}), ...)"
        )


class KubernetesClusterResolver(_NotOffered):
    """Not offered: raises NotImplementedError, which names alternatives.

    On Kubernetes the MPI operator starts ranks.
    """

    _asks = "a Kubernetes server"


class GCEClusterResolver(_NotOffered):
    """Not offered: raises NotImplementedError, which names alternatives."""

    _asks = "Google Compute Engine"


class TPUClusterResolver(_NotOffered):
    """Not offered: raises NotImplementedError, which names alternatives. There is no support for TPUs."""

    _asks = "Google Cloud's TPU service"


class SageMakerClusterResolver(_NotOffered):
    """Not offered: raises NotImplementedError, which names alternatives. SageMaker has an MPI launcher of its own."""

    _asks = "SageMaker's variables SM_HOSTS and SM_CURRENT_HOST"
