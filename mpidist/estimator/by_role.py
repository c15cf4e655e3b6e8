"""Run each rank by its role: ``train_and_evaluate``, and ``launch`` for programs without an evaluator."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from mpidist.checkpoint.writer import finish_writing
from mpidist.cluster_resolver import ClusterResolver, MPIClusterResolver
from mpidist.cluster_resolver.mpi_cluster_resolver import TRAINING_JOBS, checked_resolver
from mpidist.collectives import Communicator
from mpidist.collectives.mpi.exchange import Mailbox, drain
from mpidist.core import message_tags
from mpidist.core.concurrency import Deadline, wait_at_most, wait_until
from mpidist.core.errors import PeerError, RankLostError
from mpidist.core.text import error_text, names_text, said_lines, user_call_site
from mpidist.estimator.evaluations import Evaluations
from mpidist.estimator.specs import EvalResult, EvalSpec, TrainContext, TrainSpec, check_function, check_train_jobs
from mpidist.parameter_server.link import release_servers
from mpidist.parameter_server.server import Server
from mpidist.topology import world_topology
from mpidist.topology.exit import signals_left_to_others
from mpidist.topology.start import duplicate

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")
_JOBS = (*TRAINING_JOBS, "evaluator", "ps")
_NAPS_SECONDS = 0.001, 0.05
# A rank that fails delays its error at most this long, until its message has been sent.
_SEND_SECONDS = 0.5
Told = tuple[str | None, int | None, str]
"""Type and index of a rank's task, and its directory of checkpoints."""


def launch(
    main_fn: Callable[[], T],
    roles: Sequence[str] = ("chief", "worker"),
    cluster_resolver: ClusterResolver | None = None,
) -> T | None:
    """Call ``main_fn`` on the ranks of some ``roles``. The other ranks serve them.

    Call it on every rank of the job. ``ps`` ranks serve, and with ``roles=("chief",)``, for a coordinator, workers too.
    With an evaluator use ``train_and_evaluate``.

    Args:
        main_fn: The program, which creates the strategy.
        roles: The jobs that call it.
        cluster_resolver: Resolver of the roles. By default ``MPIDIST_JOBS`` defines them.

    Returns:
        The result of ``main_fn``, or None on ranks that serve.

    Raises:
        TypeError: ``main_fn`` is no function, or ``cluster_resolver`` no resolver.
        ValueError: ``roles`` has other jobs than chief and worker, or this rank is an evaluator.

    Source: ``run_distribute_coordinator`` of TensorFlow's ``distribute_coordinator``.

    >>> launch(lambda: 42)
    42
    """
    check_function("main_fn", main_fn, "def main(): ...")
    check_train_jobs("roles", roles)
    resolver = checked_resolver(cluster_resolver, "a resolver: MPIClusterResolver()", TypeError)
    if resolver.task_type == "evaluator":
        raise ValueError("this rank is an evaluator, for which launch() has nothing; use mpidist.train_and_evaluate()")
    if resolver.task_type in (None, *roles):
        return _and_release(main_fn)
    Server(resolver).join()
    return None


def train_and_evaluate(
    train_spec: TrainSpec, eval_spec: EvalSpec, cluster_resolver: ClusterResolver | None = None
) -> Any:
    """Train on the ranks that train, while the evaluator evaluates the newest checkpoint (tf.estimator).

    Collective: call it on every rank of the job, with the same arguments. The resolver defines the role of each rank.
    ``chief`` and ``worker`` call ``train_fn(context)`` and wait for the last evaluation. During the training, the
    ``evaluator`` calls ``eval_fn(path)`` for each new checkpoint, and at the end for the final one. Other ranks serve
    (``mpidist.Server(resolver).join()``): ``ps``, and with ``TrainSpec(train_jobs=("chief",))`` also ``worker``.

    Without an evaluator the chief (or the first worker) evaluates the final checkpoint after training, and others when
    ``train_fn`` calls ``context.evaluate()``. Each result is also a line in ``eval/metrics.jsonl`` in the directory of
    the checkpoints. A restarted job appends to it.

    A strategy that ``train_fn`` creates from ``context.cluster_resolver`` or ``MPIDIST_JOBS`` has only the training
    ranks. If a checkpoint is removed during its evaluation (``max_to_keep``), the next newest one is evaluated. Saves
    with ``async_save`` are finished before the last evaluation.

    An exception of ``train_fn`` or ``eval_fn`` on one rank is a PeerError on ranks that wait for it. If all training
    ranks leave by ``sys.exit``, as after a save of PreemptionCheckpointHandler, the evaluator finishes its current
    evaluation and leaves with the chief's code. It ignores the signals that request such a save.

    Do not use it with ``mpidist.elastic.run``, whose ranks are all ranks of the job.

    Args:
        train_spec: The training.
        eval_spec: The evaluation.
        cluster_resolver: Resolver of the roles. By default ``MPIDIST_JOBS="chief:1,worker:2,evaluator:1"`` defines
            them. Without it all ranks are workers.

    Returns:
        The result of ``train_fn`` on training ranks, a list of EvalResult on the evaluator, None on ranks that serve.

    Raises:
        TypeError: An argument has another type.
        ValueError: There are two evaluators or chiefs, no rank trains, or directories differ. All ranks raise it.
        FileNotFoundError: After the training, the evaluator does not see the last checkpoint of the chief, or any.
            Other ranks raise PeerError.
        PeerError: Another rank has failed.

    Source: ``tf.estimator.train_and_evaluate``.

    >>> import tempfile
    >>> import mpidist
    >>> def train(context):
    ...     weight = mpidist.Variable(0.0)
    ...     checkpoint = mpidist.Checkpoint(weight=weight)
    ...     for _ in range(context.max_steps):
    ...         weight.assign_add(1.0)
    ...     checkpoint.save(context.checkpoint_dir + "/ckpt")
    ...     return weight.numpy()
    >>> def evaluate(path):
    ...     weight = mpidist.Variable(0.0)
    ...     mpidist.Checkpoint(weight=weight).restore(path).assert_consumed()
    ...     return {"loss": (weight.numpy() - 3.0) ** 2}
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     specs = TrainSpec(train, directory, max_steps=2), EvalSpec(evaluate, on_result=lambda it: print(it.metrics))
    ...     float(train_and_evaluate(*specs))
    {'loss': 1.0}
    2.0
    """
    for name, value, kind in (("train_spec", train_spec, TrainSpec), ("eval_spec", eval_spec, EvalSpec)):
        if not isinstance(value, kind):
            got = f"{value!r} of type {type(value).__name__}"
            raise TypeError(f"{name} is {got}; expected mpidist.{kind.__name__}(...)")
    example = "an object such as mpidist.cluster_resolver.MPIClusterResolver(jobs={'chief': 1, 'evaluator': 1})"
    resolver = checked_resolver(cluster_resolver, example, TypeError)
    comm = resolver.comm if isinstance(resolver, MPIClusterResolver) else world_topology().world
    told: Told = resolver.task_type, resolver.task_id, os.path.abspath(train_spec.checkpoint_dir)
    everyone = [told]
    if comm.Get_size() > 1:
        with Communicator(comm, owner="train_and_evaluate") as ranks:
            everyone = ranks.all_gather_object(told)
    cast = cast_of(everyone, comm.Get_rank(), tuple(train_spec.train_jobs))
    rank = RankRole(comm, cast, resolver, train_spec, eval_spec)
    try:
        result = rank.run()
    except SystemExit as error:
        rank.give_up(_News.LEFT, error.code)
        raise
    except BaseException as error:
        rank.give_up(_News.FAILED, error_text(error))
        raise
    rank.close()
    return result


def _and_release(program: Callable[[], T]) -> T:
    """Call ``program``, then release the ranks that serve it.

    Errors other than SystemExit end the job. Releasing first would wait for running functions, and hide the error.
    """
    try:
        result = program()
    except SystemExit:
        release_servers()
        raise
    release_servers()
    return result


# Roles --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cast:
    """The roles of all ranks, the same on all except for ``rank``. Without an evaluator the chief evaluates."""

    tasks: tuple[tuple[str, int], ...]
    rank: int
    trainers: list[int]
    chief: int
    evaluator: int

    @property
    def trains(self) -> bool:
        """Whether this rank trains."""
        return self.rank in self.trainers

    @property
    def evaluates(self) -> bool:
        """Whether this rank evaluates."""
        return self.rank == self.evaluator

    def name(self, rank: int) -> str:
        """Return the name of a rank in messages: ``worker 1 (rank 2)``."""
        job, index = self.tasks[rank]
        return f"{job} {index} (rank {rank})"


def cast_of(told: Sequence[Told], rank: int, train_jobs: tuple[str, ...] = TRAINING_JOBS) -> Cast:
    """Return the roles of all ranks, or raise ValueError if they do not fit.

    >>> cast_of([("chief", 0, "/out"), ("worker", 0, "/out"), ("evaluator", 0, "/out")], rank=1).evaluator
    2
    """
    is_unknown = all(job is None for job, _, _ in told)
    tasks = tuple(
        ("worker", number) if is_unknown else (str(job), -1 if index is None else index)
        for number, (job, index, _) in enumerate(told)
    )
    text = ", ".join(said_lines(enumerate(job for job, _ in tasks)))
    first: dict[tuple[str, int], int] = {}
    for number, (job, index) in enumerate(tasks):
        if job not in _JOBS or index < 0:
            raise ValueError(
                f"rank {number} is {told[number][0]}:{told[number][1]} by its cluster resolver; expected one of "
                f"{', '.join(_JOBS)}, with an index: MPIDIST_JOBS='chief:1,worker:2,evaluator:1'"
            )
        if first.setdefault((job, index), number) != number:
            raise ValueError(
                f"ranks {first[job, index]} and {number} are both {job} {index} by their cluster resolvers; "
                "expected a task of its own for each rank: set TF_CONFIG for each rank by itself, not before mpirun"
            )
    jobs = [job for job, _ in tasks]
    for job in ("chief", "evaluator"):
        if jobs.count(job) > 1:
            raise ValueError(f"there are {jobs.count(job)} tasks {job!r} ({text}); expected at most one")
    if not any(job in train_jobs for job in jobs):
        raise ValueError(
            f"no rank trains ({text}). At least one rank must have the job {' or '.join(train_jobs)}. For example: "
            f"export MPIDIST_JOBS='{train_jobs[0]}:1,evaluator:1'"
        )
    directories = list(dict.fromkeys(directory for _, _, directory in told))
    if len(directories) > 1:
        raise ValueError(
            f"ranks were given different checkpoint_dir: {names_text(directories)}; expected the same on all ranks"
        )
    trainers = [number for number, job in enumerate(jobs) if job in train_jobs]
    chief = min(trainers, key=lambda number: tasks[number])
    evaluator = jobs.index("evaluator") if "evaluator" in jobs else chief
    return Cast(tasks, rank, trainers, chief, evaluator)


class _News(Enum):
    """A message of a rank to others."""

    TRAINED = auto()
    """It has trained. Content: the newest checkpoint, from the chief."""
    EVALUATED = auto()
    """The last evaluation has ended."""
    LEFT = auto()
    """Its program ends by sys.exit(). Content: the code."""
    FAILED = auto()
    """It has failed. Content: the error as text."""


# Ranks that gave up, because MPI may still read their messages.
_given_up: list[RankRole] = []


class RankRole:
    """This rank in its role, and its messages to the other ranks (collective)."""

    def __init__(
        self, comm: MPI.Intracomm, cast: Cast, resolver: ClusterResolver, train_spec: TrainSpec, eval_spec: EvalSpec
    ) -> None:
        self._cast, self._resolver, self._train_spec = cast, resolver, train_spec
        self._directory = os.path.abspath(train_spec.checkpoint_dir)
        self._evaluations = Evaluations(eval_spec, Path(self._directory))
        self._comm = duplicate(comm, "train_and_evaluate()")
        self._mailbox = Mailbox(self._comm, message_tags.ROLES, self._raise_loss)
        # Content of TRAINED and of LEFT, by rank.
        self._trained: dict[int, Any] = {}
        self._left: dict[int, Any] = {}
        self._is_evaluated = False
        # Whether the others need no message about the failure.
        self._is_known_to_fail = False

    def run(self) -> object:
        """Train, evaluate or serve, and return when all ranks have finished."""
        cast = self._cast
        if cast.trains:
            return self._train()
        if cast.evaluates:
            with signals_left_to_others():
                # Without a report, because the training may take any time.
                self._evaluate_to_the_end("", self._evaluations.evaluate_if_due)
            return self._evaluations.results
        Server(self._resolver).join()
        self._await_evaluation()
        return None

    def close(self) -> None:
        """Free the communicator after all ranks have finished (collective)."""
        drain(self._comm, [self._mailbox.count], "ending train_and_evaluate()")
        self._comm.Free()

    def give_up(self, news: _News, content: Any) -> None:
        """Send the reason to all others, if they do not know it, and return soon."""
        _given_up.append(self)
        # The error that led here must be raised, not the loss of another rank.
        with suppress(RankLostError):
            if not self._is_known_to_fail:
                self._send(news, content)
            wait_at_most(_SEND_SECONDS, self._mailbox.all_sent, _NAPS_SECONDS[0])

    def _train(self) -> object:
        cast, evaluations, spec = self._cast, self._evaluations, self._train_spec
        job, index = cast.tasks[cast.rank]
        is_chief = cast.rank == cast.chief
        evaluate: Callable[[], EvalResult | None] = evaluations.evaluate_if_due if cast.evaluates else lambda: None
        context = TrainContext(self._directory, spec.max_steps, self._resolver, job, index, is_chief, evaluate)
        result = _and_release(lambda: spec.train_fn(context))
        finish_writing()
        if cast.evaluates:
            self._evaluate_to_the_end("the other ranks to end their training")
            return result
        self._send(_News.TRAINED, evaluations.newest_id() if is_chief else None, cast.evaluator)
        self._await_evaluation()
        return result

    def _evaluate_to_the_end(self, waiting_for: str, meanwhile: Callable[[], object] = lambda: None) -> None:
        """Wait until all have trained, evaluate the final checkpoint, and release the others."""
        cast, left = self._cast, self._left
        others = {rank for rank in cast.trainers if rank != cast.rank}
        self._wait(lambda: others <= self._trained.keys() | left.keys(), waiting_for, meanwhile)
        if others and others <= left.keys() and cast.chief in others:
            raise SystemExit(left[cast.chief])
        if left:
            raise self._left_alone()
        self._evaluations.evaluate_last(self._trained.get(cast.chief))
        self._send(_News.EVALUATED, None)

    def _await_evaluation(self) -> None:
        evaluator = self._cast.evaluator
        waiting_for = f"{self._cast.name(evaluator)} to evaluate the final checkpoint"
        self._wait(lambda: self._is_evaluated or evaluator in self._left, waiting_for)
        if not self._is_evaluated:
            raise self._left_alone()

    def _left_alone(self) -> PeerError:
        left = names_text(f"{self._cast.name(rank)} by sys.exit({code!r})" for rank, code in sorted(self._left.items()))
        return PeerError(f"ranks have left the program in train_and_evaluate(), and others have not: {left}")

    # Messages -------------------------------------------------------------------------------------------------

    def _send(self, news: _News, content: Any, *ranks: int) -> None:
        """Send a message to ``ranks``, or to all others."""
        for rank in ranks or range(self._comm.Get_size()):
            if rank != self._cast.rank:
                self._mailbox.send(rank, (news, content))

    def _wait(
        self, is_over: Callable[[], bool], waiting_for: str, meanwhile: Callable[[], object] = lambda: None
    ) -> None:
        """Receive messages until ``is_over``. Long waits are reported unless ``waiting_for`` is empty."""
        me, site = self._cast.name(self._cast.rank), user_call_site()

        def is_received() -> bool:
            for rank, (news, content) in self._mailbox.received():
                self._receive(rank, news, content)
            return is_over()

        def report(waited: float) -> str | None:
            return f"{me} has waited {waited:.0f} s for {waiting_for}, at {site}" if waiting_for else None

        wait_until(is_received, Deadline(report, meanwhile=meanwhile), *_NAPS_SECONDS)

    def _receive(self, rank: int, news: _News, content: Any) -> None:
        if news is _News.TRAINED:
            self._trained[rank] = content
        elif news is _News.LEFT:
            self._left[rank] = content
        elif news is _News.EVALUATED:
            self._is_evaluated = True
        else:
            self._is_known_to_fail = True
            raise PeerError(f"{self._cast.name(rank)} has failed in train_and_evaluate(): {content}")

    def _raise_loss(self, error: Exception) -> NoReturn:
        self._is_known_to_fail = True
        me = self._cast.name(self._cast.rank)
        raise RankLostError(f"a rank was lost while {me} waited in train_and_evaluate(): {error}") from error
