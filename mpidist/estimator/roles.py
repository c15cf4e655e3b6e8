"""The roles of a job's ranks, and Line, which carries the news between them."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, Any, NoReturn

from mpidist.cluster_resolver import ClusterResolver, MPIClusterResolver
from mpidist.cluster_resolver.mpi_cluster_resolver import TRAINING_JOBS
from mpidist.collectives import Communicator
from mpidist.collectives.mpi.exchange import Mailbox, drain
from mpidist.core import message_tags
from mpidist.core.concurrency import Deadline, wait_at_most, wait_until
from mpidist.core.errors import PeerError, RankLostError
from mpidist.core.text import names_text, said_lines, user_call_site
from mpidist.estimator.specs import TrainSpec
from mpidist.topology import world_topology
from mpidist.topology.start import duplicate

if TYPE_CHECKING:
    from mpi4py import MPI

_JOBS = (*TRAINING_JOBS, "evaluator", "ps")
_NAPS_SECONDS = 0.001, 0.05
# How long a rank that fails keeps its error back so that the others hear of it.
_SEND_SECONDS = 0.5
# The type and index of a rank's task, and the directory of checkpoints that it was given.
Told = tuple[str | None, int | None, str]


@dataclass(frozen=True)
class Cast:
    """The roles of all ranks, the same on all but for ``rank``.

    Args:
        tasks: Job and index of every rank.
        rank: This one.
        trainers: The ranks that train.
        chief: The rank of the chief, else of the first worker.
        evaluator: The rank that evaluates: the evaluator, else the chief.
    """

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


def ranks_of(resolver: ClusterResolver) -> MPI.Intracomm:
    """Return the communicator of the ranks that a resolver knows (collective the first time)."""
    return resolver.comm if isinstance(resolver, MPIClusterResolver) else world_topology().world


def find_cast(resolver: ClusterResolver, train_spec: TrainSpec, comm: MPI.Intracomm) -> Cast:
    """Return the roles of all ranks (collective over ``comm``).

    Raises:
        ValueError: The roles do not fit, or ranks were given different directories; on all ranks.
    """
    told: Told = (resolver.task_type, resolver.task_id, os.path.abspath(train_spec.checkpoint_dir))
    if comm.Get_size() == 1:
        everything = [told]
    else:
        with Communicator(comm, owner="train_and_evaluate") as ranks:
            everything = ranks.all_gather_object(told)
    return cast_of(everything, comm.Get_rank(), tuple(train_spec.train_jobs))


def cast_of(told: Sequence[Told], rank: int, train_jobs: tuple[str, ...] = TRAINING_JOBS) -> Cast:
    """Return the roles of all ranks, by the tasks that they told.

    Raises:
        ValueError: The roles do not fit, or ranks were given different directories.

    >>> cast_of([("chief", 0, "/out"), ("worker", 0, "/out"), ("evaluator", 0, "/out")], rank=1).evaluator
    2
    """
    nobody = all(job is None for job, _, _ in told)
    tasks = tuple(
        ("worker", number) if nobody else (str(job), -1 if index is None else index)
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
            f"no rank trains ({text}); expected at least one whose job is {' or '.join(train_jobs)}, such as "
            f"MPIDIST_JOBS='{train_jobs[0]}:1,evaluator:1'"
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


# Lines that were given up with messages on their way, whose buffers MPI may still read.
_given_up: list[Line] = []


class News(Enum):
    """The news of a rank."""

    TRAINED = auto()
    """It has trained; with the newest checkpoint that it sees, if it is the chief."""
    EVALUATED = auto()
    """The last evaluation is done."""
    LEFT = auto()
    """Its program ends by sys.exit(); with the code."""
    FAILED = auto()
    """It has failed; with the error as text."""


class Line:
    """A connection between all ranks (collective).

    Args:
        comm: All of them; it is duplicated.
        cast: Who they are.

    Attributes:
        trained: Content of the news TRAINED, by rank.
        left: With which code each rank has left, by rank.
        evaluated: Whether the evaluator is through.
    """

    def __init__(self, comm: MPI.Intracomm, cast: Cast) -> None:
        self._cast = cast
        self._comm = duplicate(comm, "train_and_evaluate()")
        self._mailbox = Mailbox(self._comm, message_tags.ROLES, self._raise_loss)
        self.trained: dict[int, Any] = {}
        self.left: dict[int, Any] = {}
        self.evaluated = False
        # Whether the others know already, or find out by themselves, that this is over.
        self._is_known_to_fail = False

    def tell(self, news: News, content: Any, *ranks: int) -> None:
        """Send a message to ``ranks``, to all others where none is given; does not wait."""
        for rank in ranks or range(self._comm.Get_size()):
            if rank != self._cast.rank:
                self._mailbox.send(rank, (news, content))

    def wait(
        self, is_over: Callable[[], bool], waiting_for: str, meanwhile: Callable[[], object] = lambda: None
    ) -> None:
        """Hear the news of others until ``is_over``, with a report but no deadline.

        Args:
            is_over: Asked again and again.
            waiting_for: For the report, after ``MPIDIST_WARN_AFTER`` seconds; empty for none.
            meanwhile: Called again and again.

        Raises:
            PeerError: One of them has failed.
            RankLostError: The process of one is gone, and MPI has said so.
            Exception: What ``meanwhile`` raises.
        """
        me, site = self._cast.name(self._cast.rank), user_call_site()

        def is_heard() -> bool:
            for rank, (news, content) in self._mailbox.received():
                self._take(rank, news, content)
            return is_over()

        deadline = Deadline(
            (lambda waited: f"{me} has waited {waited:.0f} s for {waiting_for}, at {site}") if waiting_for else None,
            meanwhile=meanwhile,
        )
        wait_until(is_heard, deadline, *_NAPS_SECONDS)

    def close(self) -> None:
        """Free it, when all ranks have told and heard all they have to (collective)."""
        drain(self._comm, [self._mailbox.count], "ending train_and_evaluate()")
        self._comm.Free()

    def give_up(self, news: News, content: Any) -> None:
        """Tell all others why this rank leaves, if they do not know, and return soon."""
        _given_up.append(self)
        # Those that are left hear of a lost rank by themselves, and the error that led here is the one to raise.
        with suppress(RankLostError):
            if not self._is_known_to_fail:
                self.tell(news, content)
            wait_at_most(_SEND_SECONDS, self._mailbox.all_sent, _NAPS_SECONDS[0])

    def _take(self, rank: int, news: News, content: Any) -> None:
        if news is News.TRAINED:
            self.trained[rank] = content
        elif news is News.LEFT:
            self.left[rank] = content
        elif news is News.EVALUATED:
            self.evaluated = True
        else:
            self._is_known_to_fail = True
            raise PeerError(f"{self._cast.name(rank)} has failed in train_and_evaluate(): {content}")

    def _raise_loss(self, error: Exception) -> NoReturn:
        self._is_known_to_fail = True
        me = self._cast.name(self._cast.rank)
        raise RankLostError(f"a rank was lost while {me} waited in train_and_evaluate(): {error}") from error
