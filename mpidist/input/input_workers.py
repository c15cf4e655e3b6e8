"""The workers that share the input, and the contexts that functions of users get."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpidist.collectives.communicator import Communicator


@dataclass(frozen=True)
class WorkerLayout:
    """The number of replicas of each worker, and one of the workers.

    Args:
        num_workers: Number of workers, W.
        worker_id: The number of one of them, 0 ... W - 1.
        replica_counts: Local replicas of every worker.

    Raises:
        ValueError: Numbers that do not fit together.

    >>> WorkerLayout(2, 1, (1, 2)).local_replica_ids
    (1, 2)
    """

    num_workers: int
    worker_id: int
    replica_counts: tuple[int, ...]

    def __post_init__(self) -> None:
        counts = self.replica_counts
        if len(counts) != self.num_workers or min(counts, default=0) < 1 or not 0 <= self.worker_id < len(counts):
            raise ValueError(
                f"num_workers is {self.num_workers}, worker_id {self.worker_id} and replica_counts {counts}; "
                "expected a count of at least 1 for every worker, and 0 <= worker_id < num_workers"
            )

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas of all workers."""
        return sum(self.replica_counts)

    @property
    def num_local_replicas(self) -> int:
        """Number of replicas of this worker."""
        return self.replica_counts[self.worker_id]

    @property
    def local_replica_ids(self) -> tuple[int, ...]:
        """Global ids of the replicas of this worker."""
        first = sum(self.replica_counts[: self.worker_id])
        return tuple(range(first, first + self.num_local_replicas))


@dataclass(frozen=True)
class InputWorkers(WorkerLayout):
    """The workers (ranks) that share the input; ``worker_id`` is this process.

    Args:
        communicator: Joins the workers in the order of their ids; None where there is only one.
        wrap: Whether elements come as PerReplica values also for a lone local replica.
        devices: Device strings of this worker's replicas; the CPU by default.
        first_given: For several programs that share the data without meeting: returns the argument of the program that
            was the first to make this n-th call.

    Raises:
        ValueError: Numbers that do not fit together, or several workers without a communicator.

    >>> InputWorkers(1, 0, (2,), None, True).local_replica_ids
    (0, 1)
    """

    communicator: Communicator | None
    wrap: bool
    devices: tuple[str, ...] = ()
    first_given: Callable[[object], Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.num_workers > 1) != (self.communicator is not None):
            raise ValueError(
                f"{self.num_workers} workers were given with communicator={self.communicator!r}; expected a "
                "Communicator for several workers and None for one"
            )
        if not self.wrap and self.num_replicas_in_sync > 1:
            raise ValueError("wrap is False with several replicas; only a lone replica gets bare elements")

    def shared_errors(self, doing: str) -> AbstractContextManager[None]:
        """Return the context that brings an error of this worker to all workers."""
        return nullcontext() if self.communicator is None else self.communicator.shared_errors(doing)


@dataclass(frozen=True)
class InputContext:
    """The input pipeline that ``dataset_fn`` builds (tf.distribute.InputContext).

    Args:
        num_input_pipelines: Number of pipelines, one for each rank, or for each replica with PER_REPLICA.
        input_pipeline_id: The number of this one.
        num_replicas_in_sync: Number of replicas whose values are combined.

    >>> InputContext(2, 1, 4)
    InputContext(num_input_pipelines=2, input_pipeline_id=1, num_replicas_in_sync=4)
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Return the batch size of one replica.

        Args:
            global_batch_size: Rows that all replicas take together in a step.

        Raises:
            ValueError: It is not a multiple of the number of replicas.

        >>> InputContext(1, 0, 4).get_per_replica_batch_size(8)
        2
        """
        if global_batch_size % self.num_replicas_in_sync:
            raise ValueError(
                f"global_batch_size is {global_batch_size}, which {self.num_replicas_in_sync} replicas in "
                "sync cannot share equally; expected a multiple of num_replicas_in_sync "
                f"({self.num_replicas_in_sync})"
            )
        return global_batch_size // self.num_replicas_in_sync


@dataclass(frozen=True)
class ValueContext:
    """The replica for which ``value_fn`` is called (tf.distribute.experimental.ValueContext).

    Args:
        replica_id_in_sync_group: Global id of the replica.
        num_replicas_in_sync: Number of replicas whose values are combined.

    >>> ValueContext(2, 4)
    ValueContext(replica_id_in_sync_group=2, num_replicas_in_sync=4)
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1
