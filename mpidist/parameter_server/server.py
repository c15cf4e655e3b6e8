"""Server: a rank that serves trainers or a coordinator until the job is over."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NoReturn

import numpy as np

from mpidist.arrays.dtypes import Array
from mpidist.cluster_resolver import ClusterResolver, ClusterSpec, SimpleClusterResolver
from mpidist.collectives.mpi.waiting import Naps, drive
from mpidist.core import context, message_tags
from mpidist.core.concurrency import Deadline
from mpidist.core.context import variable_creator_scope
from mpidist.core.errors import RankLostError
from mpidist.input import Dataset, DistributedDataset
from mpidist.parameter_server.dispatcher import Recipe
from mpidist.parameter_server.link import SERVER, Link, Task, resolver_of, served, survey
from mpidist.parameter_server.parameter_server_strategy import CoordinatedExtended, ParameterServerStrategy
from mpidist.parameter_server.pickling import pack, pack_error, unpack
from mpidist.parameter_server.store import Service
from mpidist.parameter_server.transport import MessagePipe, PackedMessage
from mpidist.strategies.base import Strategy
from mpidist.topology.exit import says_rank_is_lost, signals_left_to_others

_index: ContextVar[int | None] = ContextVar("mpidist_worker_index", default=None)


def _report_only(what: str) -> Deadline:
    """Return a deadline that only reports, for a wait for another program."""
    return Deadline(lambda waited: f"waited {waited:.0f} s for {what}, and goes on waiting")


def current_worker_index() -> int:
    """Return the index of the worker that executes the calling scheduled function.

    Raises:
        RuntimeError: The caller is not in a scheduled function.
    """
    index = _index.get()
    if index is None:
        raise RuntimeError(
            "experimental_get_current_worker_index() was called outside a scheduled function; expected: inside fn of "
            "coordinator.schedule(fn)"
        )
    return index


class WorkerTwinExtended(CoordinatedExtended):
    """The worker's part: the coordinator's strategy as scheduled functions see it."""

    def __init__(self, strategy: Strategy, worker: WorkerLoop, number: int) -> None:
        super().__init__(strategy, worker.link, None, worker.resolver, False, worker.extended_of, number=number)
        self._worker = worker

    def own_value(self, number: int) -> object:
        """Return this worker's value of a PerWorkerValues."""
        return self._worker.own_value(number)

    @property
    def should_checkpoint(self) -> bool:
        """False: the coordinator writes checkpoints."""
        return False

    def create_variable(self, array: Array, **properties: object) -> NoReturn:
        """Raise ValueError: the coordinator creates variables."""
        raise ValueError(
            f"variable {properties['name']!r} was created in a scheduled function. Create it on the coordinator, "
            "inside `with strategy.scope():`, and use it in the function. To create the variables of an optimizer, "
            "call optimizer.build(variables) on the coordinator"
        )


class WorkerTwin(Strategy):
    """The copy of a coordinator's strategy on a worker, with the same number."""

    def __init__(self, worker: WorkerLoop, number: int) -> None:
        super().__init__(WorkerTwinExtended(self, worker, number))


# Error messages name the class that the program knows.
WorkerTwin.__name__ = ParameterServerStrategy.__name__


class WorkerLoop:
    """The loop of a worker, which executes functions for the coordinators of the chief."""

    def __init__(self, link: Link, resolver: ClusterResolver) -> None:
        self.link = link
        self.resolver = resolver
        self._strategies: dict[int, WorkerTwinExtended] = {}
        self._pipe = MessagePipe(link.comm, link.workers[0], message_tags.FROM_WORKER, message_tags.TO_WORKER)
        self._recipes: dict[int, Recipe] = {}
        self._own: dict[int, object] = {}

    def run(self) -> None:
        """Execute functions until the coordinator ends the loop.

        Raises:
            RankLostError: The coordinator failed.
        """
        _index.set(self.link.task.number)
        pipe = self._pipe
        try:
            while True:
                pipe.expect()
                naps = Naps()
                while not pipe.first.Test():
                    naps.take()
                drive(pipe.until_come(), lambda: _report_only("the rest of a function"))
                if pipe.content is None:
                    break
                arrays, pipe.arrays = pipe.arrays, []
                result, failure = self._answer(arrays, *pipe.content)
                del arrays
                pipe.send(PackedMessage(failure, [] if failure else [np.frombuffer(result, np.uint8)]))
                drive(pipe.until_sent(), lambda: _report_only("the coordinator to take a result"))
            pipe.close()
        except Exception as error:
            if not says_rank_is_lost(error):
                raise
            raise RankLostError(
                f"the coordinator was lost, and {self.link.task} has nothing more to do; start the job again and "
                "restore the newest checkpoint"
            ) from error
        finally:
            _index.set(None)

    def _answer(
        self, arrays: Sequence[Array], strategy: int, gone: list[tuple[str, int]], built_in: dict[int, int]
    ) -> tuple[bytes, tuple[object, ...] | None]:
        """Return the packed result of a function, and None, or its error.

        The arrays are the packed function, and the recipes of the values ``built_in`` strategies.
        """
        for kind, number in gone:
            if kind == "value":
                self._recipes.pop(number, None)
                self._own.pop(number, None)
            elif number in self._strategies:
                self._strategies.pop(number).close()
        extended = self.extended_of(strategy)
        for (number, builder), recipe in zip(built_in.items(), arrays[1:], strict=True):
            self._recipes[number] = builder, recipe.tobytes()
        try:
            with extended.strategy.scope():
                fn, args, kwargs = unpack(arrays[0].data, extended.find)
                result = fn(*args, **kwargs)
            name = getattr(fn, "__qualname__", repr(fn))
            return pack(result, extended.name_of, f"the result of {name}, {type(result).__name__},"), None
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            return b"", tuple(pack_error(error, extended.name_of))

    def extended_of(self, strategy: int) -> WorkerTwinExtended:
        """Return this worker's copy of a strategy, created at the first use."""
        if strategy not in self._strategies:
            extended = WorkerTwin(self, strategy).extended
            assert isinstance(extended, WorkerTwinExtended)
            self._strategies[strategy] = extended
        return self._strategies[strategy]

    def own_value(self, number: int) -> object:
        """Return this worker's value of a PerWorkerValues, built at the first use."""
        if number not in self._own:
            strategy, recipe = self._recipes[number]
            extended = self.extended_of(strategy)
            # A function of another strategy may use this value.
            with context.outside(), extended.strategy.scope():
                kind, given = unpack(recipe, extended.find)
                self._own[number] = _BUILDERS[kind](given)
        return self._own[number]


def _build_dataset(given: object) -> object:
    with variable_creator_scope(_refuse_variable):
        dataset = given() if callable(given) else given
    if not isinstance(dataset, (Dataset, DistributedDataset)):
        raise TypeError(f"the function of a per-worker dataset returned {dataset!r}; expected a Dataset")
    return dataset


def _refuse_variable(_: Callable[..., object], **arguments: object) -> NoReturn:
    raise ValueError(
        f"variable {arguments['name']!r} was created in the function of a per-worker dataset; create variables on the "
        "coordinator, inside `with strategy.scope():`"
    )


_BUILDERS: dict[str, Callable[[Any], object]] = {
    "dataset": _build_dataset,
    "iterator": iter,
    "resource": lambda given: given(),
}


class Server:
    """The task of this rank in a cluster with parameter servers.

    ``ps`` ranks, and with a coordinator also ``worker`` ranks, create a server and call :meth:`join`. It returns when
    the job is over (TensorFlow's never returns). End the program there, or put the other ranks' program under
    ``else:``. Collective: at the same time the chief and the workers construct their ParameterServerStrategy.

    Args:
        server_or_cluster_def: A cluster resolver, such as ``MPIClusterResolver(jobs={"ps": 1, "worker": 3})``; or a
            ClusterSpec or a dict, whose tasks are the tasks of the ranks.
        job_name: The job of this rank. By default the job of the resolver, or the only job.
        task_index: Its index in the job. By default the index of the resolver, or the only index.
        protocol: Ignored, because messages use MPI.
        config: Ignored.
        start: Whether to connect at once. If not, :meth:`start` does. :attr:`server_def` is local in both cases.

    Raises:
        ValueError: The cluster lacks this task, this rank has another one, or job or index cannot be inferred.
        TypeError: The argument is neither a resolver nor a cluster.
        CollectiveTimeoutError: Some ranks of the cluster did not arrive.

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
        self._resolver = _resolver_of(server_or_cluster_def, job_name, task_index)
        self._link: Link | None = None
        self._has_served = False
        if start:
            self.start()
        else:
            survey(self._resolver)

    def __repr__(self) -> str:
        state = "not started" if self._link is None else "started"
        return f"<Server {self._resolver.task_type} {self._resolver.task_id}, {state}>"

    def start(self) -> None:
        """Connect with the other ranks (collective), unless that was done."""
        if self._link is None and self._resolver.task_type != _LOCAL:
            self._link = Link(self._resolver, SERVER)

    def join(self) -> None:
        """Serve until the program ends on the other ranks, then return. Later calls return at once.

        With a coordinator, the server waits for the program of the chief. Without one, it waits for the programs of all
        workers. A program may create any number of strategies. To continue on all ranks afterwards, pass the part with
        the strategies to ``mpidist.launch(main, ("chief",))`` on every rank. ``join`` then returns when ``main`` does.

        A parameter server keeps variables and applies updates. A worker executes the functions that the coordinator
        schedules. A lost client is reported. If MPI survives the loss, the server continues to serve the others.
        SIGTERM and SIGUSR1, which ask a job to save, are ignored here unless the program handles them.

        Raises:
            RankLostError: The coordinator was lost.
        """
        if self._has_served:
            return
        self.start()
        if self._link is None:
            return
        link, self._link = self._link, None
        self._has_served = True
        if link.task.job == "ps":
            clients = [(rank, link.name(rank)) for rank in link.workers]
            coordinator = link.workers[0] if link.is_coordinated else None
            loop: Service | WorkerLoop = Service(link.comm, clients, coordinator)
        else:
            loop = WorkerLoop(link, self._resolver)
        with signals_left_to_others():
            loop.run()
        link.leave()
        served.add(link.task)

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
        """Return the server of a single process. Its :meth:`join` returns at once."""
        return Server({_LOCAL: ["localhost:0"]}, config=config, start=start)


_LOCAL = "local"


def _resolver_of(given: object, job_name: str | None, task_index: int | None) -> ClusterResolver:
    if isinstance(given, ClusterResolver):
        resolver = resolver_of(given)
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
