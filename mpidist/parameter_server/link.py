"""Link: the communicator between the workers and servers of one cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from mpidist.cluster_resolver import ClusterResolver, MPIClusterResolver
from mpidist.cluster_resolver.cluster_resolver import task_text
from mpidist.cluster_resolver.mpi_cluster_resolver import checked_resolver
from mpidist.collectives import Communicator
from mpidist.collectives.channel.shutdown import abort_job, before_shutdown
from mpidist.core import settings
from mpidist.core.errors import CollectiveTimeoutError, RankLostError
from mpidist.core.text import names_text
from mpidist.parameter_server.transport import Connection
from mpidist.strategies.replica_devices import agreed_devices
from mpidist.topology import world_topology
from mpidist.topology.start import duplicate

if TYPE_CHECKING:
    from mpi4py import MPI

JOBS = ("chief", "worker", "ps")
# What a rank makes.
SERVER = "Server"
COORDINATED = "ParameterServerStrategy"
EVERY_WORKER = "v1.experimental.ParameterServerStrategy"
_EXAMPLE = "an object such as mpidist.cluster_resolver.MPIClusterResolver(jobs={'ps': 1, 'worker': 3})"
_JOBS_EXAMPLES = {
    COORDINATED: "MPIDIST_JOBS=chief:1,ps:1,worker:2 mpirun -n 4 python ...",
    EVERY_WORKER: "MPIDIST_JOBS=ps:1,worker:3 mpirun -n 4 python ...",
}


class Task(NamedTuple):
    """A job and the index in it."""

    job: str
    number: int

    def __str__(self) -> str:
        return f"{self.job} {self.number}"


class Link:
    """The connection of this rank to its cluster. Collective over the ranks that are chief, worker or ps.

    ``owner`` is the kind of object that this rank creates: SERVER, COORDINATED or EVERY_WORKER. All ranks raise
    ValueError if the tasks do not form a cluster, or workers of a coordinator differ in their number of devices.
    """

    def __init__(self, resolver: ClusterResolver, owner: str) -> None:
        self.owner = owner
        survey(resolver)
        self.comm = _duplicate(resolver, owner)
        with Communicator(self.comm, owner="cluster with parameter servers") as exchange:
            with exchange.shared_errors(f"making a {owner}"):
                self.task = _task_of(resolver, owner)
                replicas = 0 if self.task.job == "ps" else len(agreed_devices(None, None)[0])
            everyone: list[tuple[str, int, str, int]] = exchange.all_gather_object((*self.task, owner, replicas))
        # The task of every rank of `comm`.
        self.tasks = [Task(job, number) for job, number, _, _ in everyone]
        owners = [owner for _, _, owner, _ in everyone]
        check_tasks(self.tasks, owners)
        self.is_coordinated = COORDINATED in owners
        self.replicas = _common_replicas(self.tasks, [each[3] for each in everyone]) if self.is_coordinated else 0
        self.rank = self.tasks.index(self.task)
        by_task = sorted((task, rank) for rank, task in enumerate(self.tasks))
        self.servers = [rank for task, rank in by_task if task.job == "ps"]
        # With the chief first, if any.
        self.workers = [rank for task, rank in by_task if task.job != "ps"]
        timeout: float = settings.TIMEOUT.read()
        self.connections = [
            Connection(self.comm, rank, self.name(rank), timeout) for rank in self.servers if self.task.job != "ps"
        ]
        self._opened = 0
        self.is_open = True
        self._callbacks: list[Callable[[], None]] = []
        before_shutdown(self.leave)

    def name(self, rank: int) -> str:
        """Return the name of a rank in messages: ``worker 1 (rank 2)``."""
        return f"{self.tasks[rank]} (rank {rank})"

    def before_leaving(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` before this process leaves."""
        self._callbacks.append(callback)

    def open(self) -> int:
        """Return the number of a new strategy, the same on all workers."""
        self._opened += 1
        return self._opened - 1

    def agree(self, key: tuple[object, ...], value: object, doing: str) -> Any:
        """Return the value that the first worker sent for ``key``."""
        return self.connections[0].control("agree", key, value, doing=doing)

    def close(self, number: int) -> None:
        """Close a strategy: servers stop waiting for this process in it. Variables stay readable."""
        for connection in self.connections if self.is_open else ():
            if not connection.is_lost:
                connection.control("close", number, self.rank, doing="closing a strategy")

    def leave(self) -> None:
        """Release the servers. ``Server.join`` returns there when all clients have left."""
        if not self.is_open:
            return
        self.is_open = False
        callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()
        for connection in self.connections:
            try:
                connection.leave()
            except RankLostError:
                continue  # an earlier request has reported it
            except (RuntimeError, CollectiveTimeoutError) as error:
                # The server would serve this process forever, and MPI_Finalize would wait for it.
                abort_job(self.rank, f"it could not take leave of {connection.name}: {error}")


def check_tasks(tasks: Sequence[Task], owners: Sequence[str]) -> None:
    """Raise ValueError, the same on all ranks, unless the tasks form a cluster.

    >>> check_tasks([Task("ps", 0), Task("worker", 0)], [SERVER, EVERY_WORKER])
    """
    counts = Counter(task.job for task in tasks)
    text = ",".join(f"{job}:{count}" for job, count in counts.items())
    if len(set(tasks)) < len(tasks):
        same = [task for task, count in Counter(map(str, tasks)).items() if count > 1]
        raise ValueError(f"several ranks have the same task, {names_text(same)}; expected one rank for each task")
    coordinated = COORDINATED in owners
    if not counts["ps"] or not counts["worker"] + (0 if coordinated else counts["chief"]):
        raise ValueError(
            f"the cluster is {text}; expected at least one ps and one worker: {_what_to_type(tasks, owners)}"
        )
    if set(owners) == {SERVER}:
        raise ValueError(
            f"all ranks of the cluster {text} made a {SERVER}, and nobody runs the program; expected: the chief makes "
            f"a {COORDINATED}, or every worker a {EVERY_WORKER}: {_what_to_type(tasks, owners)}"
        )
    for task, owner in zip(tasks, owners, strict=True):
        expected = COORDINATED if task.job == "chief" else SERVER
        if not coordinated and task.job != "ps":
            expected = EVERY_WORKER
        if owner != expected:
            raise ValueError(
                f"{task} made a {owner}; expected that it makes a {expected}: with a coordinator only the chief runs "
                "the program, and ps and worker call mpidist.Server(resolver).join(); without one every worker "
                "runs it, and only ps calls join()"
            )


def _what_to_type(tasks: Sequence[Task], owners: Sequence[str]) -> str:
    """Return the command that assigns the roles, or both commands if unknown."""
    text = f"type {_JOBS_EXAMPLES[COORDINATED if COORDINATED in owners else EVERY_WORKER]}"
    if set(owners) == {SERVER}:
        text = (
            f"type {_JOBS_EXAMPLES[COORDINATED]} if the chief makes a ClusterCoordinator, or "
            f"{_JOBS_EXAMPLES[EVERY_WORKER]} if every worker runs the program ({EVERY_WORKER})"
        )
    if settings.JOBS.read() is None and {task.job for task in tasks} == {"worker"}:
        text += "; MPIDIST_JOBS is not set, and without it, and without jobs= in the program, all ranks are workers"
    return text


def _common_replicas(tasks: Sequence[Task], replicas: Sequence[int]) -> int:
    """Return the number of replicas of each worker."""
    counts = {str(task): count for task, count in sorted(zip(tasks, replicas, strict=True)) if task.job == "worker"}
    if len(set(counts.values())) != 1:
        raise ValueError(f"the workers have different numbers of devices, {counts}; expected as many on each")
    return next(iter(counts.values()))


def _task_of(resolver: ClusterResolver, owner: str) -> Task:
    job, index = resolver.task_type, resolver.task_id
    if job not in JOBS or index is None:
        raise ValueError(
            f"{task_text(resolver)}; {owner} is for the jobs {', '.join(JOBS)}. Set MPIDIST_JOBS, such as "
            "'ps:1,worker:3', the task in TF_CONFIG, or task_type and task_id of the resolver"
        )
    return Task(job, index)


def survey(resolver: ClusterResolver) -> None:
    """Let an MPI resolver find all ranks, if all belong to the cluster (collective).

    Later queries are local then, so one task alone may make them.
    """
    if isinstance(resolver, MPIClusterResolver) and resolver.is_made_of(JOBS):
        resolver.cluster_spec()


def _duplicate(resolver: ClusterResolver, owner: str) -> MPI.Intracomm:
    doing = f"connecting workers and parameter servers ({owner})"
    if _links and not _links[0].is_open:
        doing += (
            ". The ranks that served before continued with their programs. Make the strategy in a function that every "
            "rank passes to mpidist.launch(), or call Server(resolver).join() on the other ranks"
        )
    if isinstance(resolver, MPIClusterResolver) and not resolver.is_made_of(JOBS):
        _task_of(resolver, owner)  # ranks without a role in the cluster must not take part
        members = resolver.comm_of(JOBS)
        try:
            return duplicate(members, doing)
        finally:
            members.Free()
    base = resolver.comm if isinstance(resolver, MPIClusterResolver) else world_topology().world
    return duplicate(base, doing)


# The latest link of this process, and the tasks as which it has served until the end of a job.
_links: list[Link] = []
served: set[Task] = set()


def check_not_served(resolver: ClusterResolver, owner: str) -> None:
    """Raise RuntimeError if a rank that has served makes a strategy. It would wait in vain for the other ranks."""
    task = Task(resolver.task_type or "", resolver.task_id or 0)
    # A worker of a coordinator may run a program of its own later.
    if task in served and (task.job == "ps" or owner == COORDINATED):
        raise RuntimeError(
            f"{task} has served, its job is over, and now it makes a {owner}, which is for "
            f"{'the chief' if owner == COORDINATED else 'the workers'}: Server.join() returns when the job is over. "
            "Expected: the rank ends there; type sys.exit() after mpidist.Server(resolver).join(), or put the program "
            "under `else:`, or into a function main() and mpidist.launch(main"
            + (', ("chief",))' if owner == COORDINATED else ")")
        )


def link_of(resolver: ClusterResolver, owner: str) -> Link:
    """Return the link of all strategies of this process. The first call is collective.

    Raises:
        RuntimeError: The link belongs to another cluster or another kind of strategy, or this rank has served.
    """
    check_not_served(resolver, owner)
    if not _links or not _links[0].is_open:
        _links[:] = [Link(resolver, owner)]
        return _links[0]
    link = _links[0]
    # A resolver of the program's own may know its task only.
    tasks = {Task(job, number) for job, number in resolver.tasks() if job in JOBS} or set(link.tasks)
    if owner != link.owner or tasks != set(link.tasks):
        raise RuntimeError(
            f"a {owner} of the cluster {_counts(tasks)} was made, and this process has a {link.owner} of the cluster "
            f"{_counts(link.tasks)}. The ranks that serve do so for one cluster until the program ends. Use the same "
            "cluster and the same class, or run each program by mpidist.launch(), which releases them when it returns"
        )
    return link


def release_servers() -> None:
    """Let the ranks that serve this process return from ``Server.join``."""
    if _links:
        _links[0].leave()


def _counts(tasks: Iterable[Task]) -> str:
    return ",".join(f"{job}:{count}" for job, count in sorted(Counter(task.job for task in tasks).items()))


def resolver_of(cluster_resolver: ClusterResolver | None) -> ClusterResolver:
    """Return the resolver given, or the one of the MPI job."""
    return checked_resolver(cluster_resolver, _EXAMPLE)
