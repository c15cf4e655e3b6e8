"""MPIClusterResolver: the ranks of an MPI job as the tasks of a cluster; the default."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from mpidist.cluster_resolver.cluster_resolver import ClusterResolver, RankedResolver, TFConfigClusterResolver
from mpidist.cluster_resolver.cluster_spec import deal_tasks
from mpidist.core.errors import LaunchError
from mpidist.topology.start import check_world, create_group, duplicate, import_mpi
from mpidist.topology.topology import Topology, devices_of_each, has_world, visible_devices, world_topology

if TYPE_CHECKING:
    from mpi4py import MPI
# The jobs whose tasks train, in the order of their ranks.
TRAINING_JOBS = ("chief", "worker")


class MPIClusterResolver(RankedResolver):
    """The ranks of a communicator as tasks, in rank order.

    Without ``jobs`` every rank is a worker, and worker 0 is the chief. Addresses are ``"host:rank"``. The constructor,
    :attr:`task_type`, :attr:`task_id`, ``rank`` and ``size`` are local. The first use of :meth:`cluster_spec`,
    :meth:`master`, :attr:`local_rank` or :attr:`num_nodes` is collective. Later uses are local, also after a strategy
    with this resolver was created on all ranks. The first :meth:`num_accelerators` is collective, too.

    Args:
        comm: An mpi4py intracommunicator, or None for all ranks of the job. The program may continue to use it.
        jobs: ``{job: number of tasks}`` for all ranks. With ``{"ps": 1, "worker": 3}``, rank 0 is ps 0, and ranks 1 to
            3 are workers 0 to 2. None reads ``MPIDIST_JOBS="ps:1,worker:3"``.
        port_base: The address of rank r is ``"host:(port_base + r)"``.

    Raises:
        TypeError: An argument has another type.
        ValueError: A count is less than 1, a task type is unknown, or counts do not add up to the size of ``comm``.
        LaunchError: The MPI library is missing, or the launcher started more ranks than the world has.

    Extension. TensorFlow's resolver for Slurm has the same order of ranks and jobs.

    >>> resolver = MPIClusterResolver(jobs={"worker": 1})
    >>> resolver.task_type, resolver.task_id, resolver.cluster_spec().num_tasks("worker")
    ('worker', 0, 1)
    """

    _rpc_layer = "mpi"

    def __init__(
        self, comm: MPI.Intracomm | None = None, jobs: Mapping[str, int] | None = None, port_base: int = 0
    ) -> None:
        if isinstance(port_base, bool) or not isinstance(port_base, int) or port_base < 0:
            raise ValueError(f"port_base is {port_base!r}; expected a whole number of at least 0")
        self._port_base = port_base
        mpi = import_mpi()
        if comm is not None and not isinstance(comm, mpi.Intracomm):
            raise TypeError(f"comm is {comm!r}; expected an mpi4py intracommunicator, or None for all ranks")
        self._comm = comm
        if comm is None:
            check_world(mpi.COMM_WORLD.Get_size())
        shown = self._ranks()
        self.rank = shown.Get_rank()
        self.size = shown.Get_size()
        self._tasks = deal_tasks(jobs, self.size)
        self._topology: Topology | None = None
        self._shares: dict[int, int] | None = None

    @property
    def comm(self) -> MPI.Intracomm:
        """The given communicator, or mpidist's world (collective the first time)."""
        return world_topology().world if self._comm is None else self._comm

    @property
    def local_rank(self) -> int:
        """The position of this rank on its node. Collective the first time: read it on every rank."""
        nodes = self._ask().node_of_rank
        return nodes[: self.rank].count(nodes[self.rank])

    @property
    def num_nodes(self) -> int:
        """The number of nodes. Ranks of a node share memory. Collective the first time: read it on every rank."""
        return len(set(self._ask().node_of_rank))

    def _addresses(self) -> Iterator[str]:
        return (f"{host}:{self._port_base + rank}" for rank, host in enumerate(self._ask().host_of_rank))

    def num_accelerators(self, task_type: str | None = None, task_id: int | None = None) -> dict[str, int]:
        """Return ``{"GPU": k}`` for a task's share of CUDA devices, ``{}`` for none.

        Collective the first time: call it on every rank, in the same order. Ranks of one node that see the same
        devices share them. Imports CuPy if the machine has an NVIDIA driver.

        Args:
            task_type: Job of the task. By default, the job of this rank.
            task_id: Index in the job. By default, the index of this rank.

        Raises:
            ValueError: The task is unknown.
        """
        task = self._named_task(task_type, task_id)
        if task not in self._tasks:
            raise ValueError(f"the task is {task!r}; the tasks of this cluster are {self._tasks}")
        share = self._share_of_ranks()[self._tasks.index(task)]
        return {"GPU": share} if share else {}

    def is_made_of(self, jobs: Sequence[str]) -> bool:
        """Return whether every rank has one of ``jobs``, and any chief is rank 0. Local."""
        names = [job for job, _ in self._tasks]
        return all(name in jobs for name in names) and "chief" not in names[1:]

    def is_of(self, comm: MPI.Intracomm) -> bool:
        """Return whether ``comm`` has the ranks of this resolver. Local."""
        mpi = import_mpi()
        return bool(mpi.Comm.Compare(comm, self._ranks()) != mpi.UNEQUAL)

    def _ranks(self) -> MPI.Intracomm:
        """Return a communicator of the ranks of this resolver, not for messages. Local."""
        if self._comm is None and has_world():
            # Ranks may have been lost.
            return world_topology().world
        ranks: MPI.Intracomm = import_mpi().COMM_WORLD if self._comm is None else self._comm
        return ranks

    def comm_of(self, jobs: Sequence[str]) -> MPI.Intracomm:
        """Return a new communicator of the ranks of ``jobs``, chief first (collective over them)."""
        members = [(job != "chief", job, index, rank) for rank, (job, index) in enumerate(self._tasks) if job in jobs]
        base = import_mpi().COMM_WORLD if self._comm is None else self._comm
        return create_group(base, [rank for *_, rank in sorted(members)], " and ".join(jobs))

    def _ask(self) -> Topology:
        """Return the hosts and nodes of all ranks."""
        if self._topology is None and self._comm is not None:
            self._topology = Topology(duplicate(self._comm, "finding out which ranks share a node"))
            # Its facts about the ranks stay.
            self._topology.close()
            self._topology.world.Free()
        return world_topology() if self._topology is None else self._topology

    def _share_of_ranks(self) -> dict[int, int]:
        if self._shares is None:
            nodes = self._ask().node_of_rank
            duplicate = self.comm.Dup()
            seen = duplicate.allgather(visible_devices())
            duplicate.Free()
            self._shares = {}
            for node in set(nodes):
                ranks = [rank for rank in range(self.size) if nodes[rank] == node]
                self._shares.update(zip(ranks, map(len, devices_of_each([seen[rank] for rank in ranks])), strict=True))
        return self._shares


def _resolver_of_job(communicator: MPI.Intracomm | None) -> MPIClusterResolver:
    """Return the resolver of this job. Raise LaunchError if TF_CONFIG describes another cluster or task (collective).

    Processes that were started one by one for TensorFlow would each train alone. A given ``communicator`` has the ranks
    that take part, so TF_CONFIG is not read.
    """
    resolver = MPIClusterResolver(communicator)
    if communicator is not None:
        return resolver
    config = TFConfigClusterResolver()
    cluster = {job: len(addresses) for job, addresses in config.cluster_spec().as_dict().items()}
    if not cluster:
        return resolver
    world = world_topology()
    count, task = sum(cluster.values()), (config.task_type, config.task_id)
    theirs = (resolver.task_type, resolver.task_id)
    in_order = [(job, index) for job in TRAINING_JOBS for index in range(cluster.get(job, 0))]
    is_in_order = resolver.is_made_of(("worker",)) and in_order[world.rank : world.rank + 1] == [task]
    is_same = config.task_type is None or task == theirs or is_in_order
    if count == world.size and is_same:
        return resolver
    shown = ", ".join(f"{job}:{number}" for job, number in cluster.items())
    mine = "does not name the task of this process" if task[0] is None else f"this process is {task[0]}:{task[1]}"
    raise LaunchError(
        f"TF_CONFIG has {count} tasks ({shown}), and {mine}. MPI has {world.size} ranks, and this process is rank "
        f"{world.rank}, {theirs[0]}:{theirs[1]}. Ranks find each other by MPI, not by TF_CONFIG. Type: unset "
        f"TF_CONFIG; mpirun -n {count} python ... If each rank has a TF_CONFIG of its own, pass the strategy "
        "cluster_resolver=mpidist.cluster_resolver.TFConfigClusterResolver()"
    )


def checked_resolver(
    given: ClusterResolver | None,
    example: str,
    error: type[Exception] = ValueError,
    communicator: MPI.Intracomm | None = None,
) -> ClusterResolver:
    """Return the argument ``cluster_resolver``, or the resolver of the MPI job if it is None.

    Raises ``error``, with ``example``, for any other type. ``communicator`` has the ranks that take part.
    """
    if given is None:
        return _resolver_of_job(communicator)
    if not isinstance(given, ClusterResolver):
        raise error(f"cluster_resolver is {given!r}; expected None or {example}")
    return given
