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
from mpidist.parameter_server.connection import Connection
from mpidist.strategies.replica_devices import agreed_devices
from mpidist.topology import world_topology
from mpidist.topology.start import duplicate

if TYPE_CHECKING:
    from mpi4py import MPI

JOBS = ("chief", "worker", "ps")
SERVER = "Server"
COORDINATED = "ParameterServerStrategy"
EVERY_WORKER = "v1.experimental.ParameterServerStrategy"


class Task(NamedTuple):
    """A job and the index in it."""

    job: str
    number: int

    def __str__(self) -> str:
        return f"{self.job} {self.number}"


class Link:
    """The connection of this rank to its cluster. Collective over the ranks that are chief, worker or ps.

    Args:
        resolver: Who is who.
        owner: The kind of object that this rank makes: SERVER, COORDINATED or EVERY_WORKER.

    Attributes:
        owner: As given.
        comm: A communicator of all ranks of the link.
        tasks: The task of every rank of ``comm``.
        task: That of this rank.
        rank: The number of this rank in ``comm``.
        servers: The ranks of the servers, by their index.
        workers: The ranks of the chief, if there is one, and of the workers, in that order.
        is_coordinated: Whether a coordinator speaks of all workers as one.
        replicas: How many each worker has, where that is so.
        is_open: Whether this process has not taken leave yet.

    Raises:
        ValueError: The tasks of the ranks are not those of a cluster with servers and workers; workers under a
            coordinator that have different numbers of devices.
        CollectiveTimeoutError: Not all ranks came.
    """

    def __init__(self, resolver: ClusterResolver, owner: str) -> None:
        self.owner = owner
        survey(resolver)
        self.comm = _duplicate(resolver, owner)
        exchange = Communicator(self.comm, owner="cluster with parameter servers")
        with exchange.shared_errors(f"making a {owner}"):
            self.task = _task_of(resolver, owner)
            replicas = 0 if self.task.job == "ps" else len(agreed_devices(None, None)[0])
        told: list[tuple[str, int, str, int]] = exchange.all_gather_object((*self.task, owner, replicas))
        exchange.close()
        self.tasks = [Task(job, number) for job, number, _, _ in told]
        self.rank = self.tasks.index(self.task)
        by_task = {task: rank for rank, task in enumerate(self.tasks)}
        owners = [owner for _, _, owner, _ in told]
        check_tasks(self.tasks, owners)
        self.is_coordinated = COORDINATED in owners
        self.replicas = 0
        if self.is_coordinated:
            self.replicas = common_replicas(self.tasks, [count for *_, count in told])
        ordered = sorted(by_task)
        self.servers = [by_task[task] for task in ordered if task.job == "ps"]
        self.workers = [by_task[task] for task in ordered if task.job != "ps"]
        self.timeout: float = settings.TIMEOUT.read()
        self._connections: list[Connection] | None = None
        self._opened = 0
        self.is_open = True
        self._acts: list[Callable[[], None]] = []
        before_shutdown(self.leave)

    @property
    def connections(self) -> list[Connection]:
        """To each server, by its index; made the first time."""
        if self._connections is None:
            self._connections = [
                Connection(self.comm, rank, f"ps {index} (rank {rank})", self.timeout)
                for index, rank in enumerate(self.servers)
            ]
        return self._connections

    def before_leaving(self, act: Callable[[], None]) -> None:
        """Have ``act`` called before this process takes leave."""
        self._acts.append(act)

    def open(self) -> int:
        """Return the number of a new strategy; the same on all workers."""
        number = self._opened
        self._opened += 1
        return number

    def agree(self, key: tuple[object, ...], value: object, doing: str) -> Any:
        """Return the first worker's value for ``key``, so that all have the same."""
        return self.connections[0].control("agree", key, value, doing=doing)

    def close(self, number: int) -> None:
        """Tell the servers not to wait for this process in one of its strategies. Variables stay readable."""
        for connection in self.connections if self.is_open else ():
            try:
                connection.control("close", number, self.rank, doing="closing a strategy")
            except RankLostError:
                continue  # the last request to that server reported it

    def leave(self) -> None:
        """Release the servers. A server returns from join() when all of its clients called this."""
        if not self.is_open:
            return
        self.is_open = False
        acts, self._acts = self._acts, []
        for act in acts:
            act()
        for connection in self.connections if self.task.job != "ps" else ():
            try:
                connection.leave()
            except RankLostError:
                continue  # whoever asked it last has been told
            except (RuntimeError, CollectiveTimeoutError) as error:
                # It would serve this process for ever, and MPI_Finalize would wait for it.
                abort_job(self.rank, f"it could not take leave of {connection.name}: {error}")


def check_tasks(tasks: Sequence[Task], owners: Sequence[str]) -> None:
    """Raise ValueError, on all ranks alike, unless the tasks form a cluster.

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
    """Return the command that deals out the roles.

    Both commands where nobody has said whether there is a coordinator.
    """
    lines = {
        COORDINATED: "MPIDIST_JOBS=chief:1,ps:1,worker:2 mpirun -n 4 python ...",
        EVERY_WORKER: "MPIDIST_JOBS=ps:1,worker:3 mpirun -n 4 python ...",
    }
    kind = COORDINATED if COORDINATED in owners else EVERY_WORKER
    typed = f"type {lines[kind]}"
    if set(owners) == {SERVER}:
        typed = (
            f"type {lines[COORDINATED]} where the chief makes a ClusterCoordinator, or {lines[EVERY_WORKER]} where "
            f"every worker runs the program ({EVERY_WORKER})"
        )
    if settings.JOBS.read() is None and {task.job for task in tasks} == {"worker"}:
        typed += "; MPIDIST_JOBS is not set, and without it, and without jobs= in the program, all ranks are workers"
    return typed


def common_replicas(tasks: Sequence[Task], replicas: Sequence[int]) -> int:
    """Return the number of replicas of each worker. Raises ValueError, on all ranks alike, where they differ.

    >>> common_replicas([Task("ps", 0), Task("worker", 0), Task("worker", 1)], [0, 2, 2])
    2
    """
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
    """Let ``resolver`` find all ranks' places, if all belong to the cluster. It is collective then.

    A program asks where one task alone comes. Called first by all that take part, as ``Server(..., start=False)`` does.
    """
    if isinstance(resolver, MPIClusterResolver) and resolver.is_made_of(JOBS):
        resolver.cluster_spec()


def _duplicate(resolver: ClusterResolver, owner: str) -> MPI.Intracomm:
    doing = f"connecting workers and parameter servers ({owner})"
    if _link and not _link[0].is_open:
        doing += (
            ". The ranks that served before continued with their programs. Make the strategy in a function that every "
            "rank passes to mpidist.launch(), or call Server(resolver).join() on the other ranks"
        )
    if isinstance(resolver, MPIClusterResolver) and not resolver.is_made_of(JOBS):
        _task_of(resolver, owner)  # nobody waits for a rank that has no part in this
        members = resolver.comm_of(JOBS)
        try:
            return duplicate(members, doing)
        finally:
            members.Free()
    base = resolver.comm if isinstance(resolver, MPIClusterResolver) else world_topology().world
    return duplicate(base, doing)


# What this process is linked with, as long as anything uses it.
_link: list[Link] = []
# The tasks as which this process has served until the job was over.
served: set[Task] = set()


def check_not_served(resolver: ClusterResolver, owner: str) -> None:
    """Raise RuntimeError where a rank that has served runs the program of its clients.

    Nobody is there any more to meet it, so it would wait in vain. To serve again is no mistake.
    """
    task = Task(resolver.task_type or "", resolver.task_id or 0)
    # A worker of a coordinator may well be one that runs the program later on.
    if task in served and (task.job == "ps" or owner == COORDINATED):
        raise RuntimeError(
            f"{task} has served, its job is over, and now it makes a {owner}, which is for "
            f"{'the chief' if owner == COORDINATED else 'the workers'}: Server.join() returns when the job is over. "
            "Expected: the rank ends there; type sys.exit() after mpidist.Server(resolver).join(), or put the program "
            "under `else:`, or into a function main() and mpidist.launch(main"
            + (', ("chief",))' if owner == COORDINATED else ")")
        )


def link_of(resolver: ClusterResolver, owner: str) -> Link:
    """Return the link of this process, made the first time (collective then). All its strategies share it.

    Raises:
        RuntimeError: The link belongs to another cluster or to the other kind of strategy; or this rank has served,
            and its job is over.
    """
    check_not_served(resolver, owner)
    if not _link or not _link[0].is_open:
        _link[:] = [Link(resolver, owner)]
        return _link[0]
    link = _link[0]
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
    if _link:
        _link[0].leave()


def _counts(tasks: Iterable[Task]) -> str:
    """Return the number of tasks of each job as text, such as ``"chief:1,ps:2,worker:3"``."""
    return ",".join(f"{job}:{count}" for job, count in sorted(Counter(task.job for task in tasks).items()))


def resolver_of(cluster_resolver: ClusterResolver | None) -> ClusterResolver:
    """Return the resolver given, or that of the MPI job.

    Raises:
        ValueError: Not a resolver.
        LaunchError: None is given, and TF_CONFIG tells of another cluster than MPI.
    """
    example = "an object such as mpidist.cluster_resolver.MPIClusterResolver(jobs={'ps': 1, 'worker': 3})"
    return checked_resolver(cluster_resolver, example)
