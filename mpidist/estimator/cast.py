"""The roles of the ranks of a job in training and evaluation."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpidist.cluster_resolver import ClusterResolver, MPIClusterResolver
from mpidist.cluster_resolver.job_resolver import TRAINING_JOBS
from mpidist.collectives import Communicator
from mpidist.estimator.specs import TrainSpec
from mpidist.topology import world_topology

if TYPE_CHECKING:
    from mpi4py import MPI

_JOBS = (*TRAINING_JOBS, "evaluator", "ps")
# The type and index of a rank's task, and the directory of checkpoints that it was given.
Told = tuple[str | None, int | None, str]


@dataclass(frozen=True)
class Cast:
    """The roles of all ranks, the same on all but for ``rank``.

    Args:
        tasks: Job and index of every rank.
        rank: This one.
        train_jobs: The jobs whose ranks train.
    """

    tasks: tuple[tuple[str, int], ...]
    rank: int
    train_jobs: tuple[str, ...] = TRAINING_JOBS

    @property
    def trains(self) -> bool:
        """Whether this rank trains."""
        return self.rank in self.trainers

    @property
    def evaluates(self) -> bool:
        """Whether this rank evaluates."""
        return self.rank == self.evaluator

    @property
    def trainers(self) -> list[int]:
        """The ranks that train."""
        return [rank for rank, (job, _) in enumerate(self.tasks) if job in self.train_jobs]

    @property
    def chief(self) -> int:
        """The rank of the chief, else of the first worker."""
        return min(self.trainers, key=lambda rank: self.tasks[rank])

    @property
    def evaluator(self) -> int:
        """The rank that evaluates: the evaluator, else the chief."""
        jobs = [job for job, _ in self.tasks]
        return jobs.index("evaluator") if "evaluator" in jobs else self.chief

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
    text = ", ".join(f"rank {number}: {job} {index}" for number, (job, index) in enumerate(tasks))
    for number, (job, index) in enumerate(tasks):
        if job not in _JOBS or index < 0:
            raise ValueError(
                f"rank {number} is {told[number][0]}:{told[number][1]} by its cluster resolver; expected one of "
                f"{', '.join(_JOBS)}, with an index: MPIDIST_JOBS='chief:1,worker:2,evaluator:1'"
            )
        if tasks.index((job, index)) != number:
            raise ValueError(
                f"ranks {tasks.index((job, index))} and {number} are both {job} {index} by their cluster resolvers; "
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
            f"ranks were given different checkpoint_dir: {', '.join(directories)}; expected the same on all ranks"
        )
    return Cast(tasks, rank, train_jobs)
