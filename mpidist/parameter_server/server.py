"""Server: a rank that serves the trainers until the job is over (tf.distribute.Server)."""

from __future__ import annotations

from collections.abc import Mapping

from mpidist.cluster_resolver import ClusterResolver, ClusterSpec, SimpleClusterResolver
from mpidist.parameter_server.link import SERVER, Link, Task, checked_resolver, note_served, survey
from mpidist.parameter_server.parameter_server_strategy import WorkerTwin
from mpidist.parameter_server.service import Service
from mpidist.parameter_server.store import Store
from mpidist.parameter_server.worker_loop import WorkerLoop
from mpidist.topology.signals import signals_left_to_others


class Server:
    """The task of this rank in a cluster with parameter servers.

    Ranks that are ``ps``, and under a coordinator also those that are ``worker``, make a server and call
    :meth:`join`, which returns when the job is over (TensorFlow's never returns): end the program there, or put that of
    the others under ``else:``. Collective: at the same time the chief and the workers construct their
    ParameterServerStrategy.

    Args:
        server_or_cluster_def: A cluster resolver, such as ``MPIClusterResolver(jobs={"ps": 1, "worker": 3})``; or a
            ClusterSpec or the dict of one, whose tasks are those of the ranks.
        job_name: The job of this rank; that of the resolver, or the only job there is, by default.
        task_index: Its index in the job; that of the resolver, or the only one there is, by default.
        protocol: Ignored: messages go by MPI.
        config: Ignored.
        start: Whether to connect at once; otherwise :meth:`start` does, and :attr:`server_def` is local all the same.

    Raises:
        ValueError: A task that the cluster does not have, or that this rank is not; job or index cannot be inferred.
        TypeError: Something else than a resolver or a cluster.
        CollectiveTimeoutError: Not all ranks of the cluster came.

    Source: https://www.tensorflow.org/api_docs/python/tf/distribute/Server

    >>> server = Server.create_local_server()
    >>> server.target
    'mpi://0'
    >>> server.join()
    """

    def __init__(
        self,
        server_or_cluster_def: ClusterResolver | ClusterSpec | Mapping[str, object],
        job_name: str | None = None,
        task_index: int | None = None,
        protocol: str | None = None,
        config: object = None,
        start: bool = True,
    ) -> None:
        del protocol, config
        self._resolver = _resolver_of(server_or_cluster_def, job_name, task_index)
        self._link: Link | None = None
        if start:
            self.start()
        else:
            survey(self._resolver)

    def __repr__(self) -> str:
        state = "not started" if self._link is None else "started"
        return f"<Server {self._resolver.task_type} {self._resolver.task_id}, {state}>"

    def start(self) -> None:
        """Connect with the other ranks (collective); nothing if it has been done."""
        if self._link is None and self._resolver.task_type != _LOCAL:
            self._link = Link(self._resolver, SERVER)

    def join(self) -> None:
        """Serve until the chief and all workers have finished, then return.

        They finish by closing their strategies or ending their programs.

        A parameter server keeps variables and applies updates; a worker carries out the functions that the
        coordinator schedules. A client that is lost is reported, and served no more where MPI survives it. SIGTERM and
        SIGUSR1, which ask a job to save, are for the others, unless the program has handlers of its own for them.

        Raises:
            RankLostError: The coordinator was lost.
            RuntimeError: This rank is the chief or an evaluator, which run a program of their own.
        """
        self.start()
        if self._link is None:
            return
        link, self._link = self._link, None
        if link.task.job == "ps":
            clients = [(rank, f"{link.tasks[rank]} (rank {rank})") for rank in link.workers]
            coordinator = link.workers[0] if link.is_coordinated else None
            with signals_left_to_others():
                Service(link.comm, clients, Store(link.workers), coordinator).run()
            link.leave()
            note_served(link.task)
            return
        if link.task.job == "worker":
            twin = WorkerTwin(link, self._resolver)
            with signals_left_to_others():
                WorkerLoop(link, twin).run()
            twin.close()
            note_served(link.task)
            return
        raise RuntimeError(
            f"Server.join() was called on {link.task}, which runs the program itself; expected: the ps ranks join, and "
            "the workers where there is a coordinator"
        )

    @property
    def target(self) -> str:
        """The address of this rank."""
        return f"mpi://{0 if self._link is None else self._link.rank}"

    @property
    def server_def(self) -> dict[str, object]:
        """Cluster, job and index, as a dict."""
        return {
            "cluster": self._resolver.cluster_spec().as_dict(),
            "job_name": self._resolver.task_type,
            "task_index": self._resolver.task_id,
        }

    @staticmethod
    def create_local_server(config: object = None, start: bool = True) -> Server:
        """Return the server of a process that is alone. Its :meth:`join` returns at once, as nobody can ask it."""
        return Server({_LOCAL: ["localhost:0"]}, config=config, start=start)


_LOCAL = "local"


def _resolver_of(given: object, job_name: str | None, task_index: int | None) -> ClusterResolver:
    if isinstance(given, ClusterResolver):
        resolver = checked_resolver(given)
        asked = Task(job_name or resolver.task_type or "", resolver.task_id or 0 if task_index is None else task_index)
        if asked != (resolver.task_type, resolver.task_id):
            raise ValueError(
                f"Server was made for {asked}, and this rank is {resolver.task_type} {resolver.task_id} by its "
                f"{type(resolver).__name__}; leave job_name and task_index out"
            )
        return resolver
    if not isinstance(given, (ClusterSpec, Mapping)):
        raise TypeError(
            f"Server was given {given!r}; expected a cluster resolver, a ClusterSpec, or a dict such as "
            "{'ps': ['host0:1'], 'worker': ['host1:1']}"
        )
    spec = ClusterSpec(given)
    if job_name is None:
        if len(spec.jobs) != 1:
            raise ValueError(f"the cluster has the jobs {spec.jobs}; expected an explicit job_name")
        job_name = spec.jobs[0]
    if task_index is None:
        if spec.num_tasks(job_name) != 1:
            raise ValueError(
                f"the job {job_name!r} has {spec.num_tasks(job_name)} tasks; expected an explicit task_index"
            )
        task_index = spec.task_indices(job_name)[0]
    spec.task_address(job_name, task_index)
    return SimpleClusterResolver(spec, task_type=job_name, task_id=task_index)
