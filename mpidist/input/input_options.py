"""Options of datasets, the workers that share the input, and contexts for user functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpidist.collectives.communicator import Communicator


class InputReplicationMode(Enum):
    """The number of calls of ``dataset_fn`` (tf.distribute.InputReplicationMode).

    ``PER_WORKER``: once on each rank, whose replicas take successive batches. ``PER_REPLICA``: once for each
    replica, each with its own pipeline; MirroredStrategy only.
    """

    PER_WORKER = "PER_WORKER"
    PER_REPLICA = "PER_REPLICA"


class AutoShardPolicy(IntEnum):
    """The division of a dataset over ranks that all have it (tf.data.experimental.AutoShardPolicy).

    ``AUTO``: ``FILE`` if all its sources are files, else ``DATA``. ``FILE``: file i goes to rank i mod W, and each rank
    reads its own files as if there were no others; fewer files than ranks are an error. ``DATA``: each
    global batch is cut into one part for each replica. ``HINT``: a ``shard(SHARD_HINT, SHARD_HINT)`` in the pipeline
    becomes ``shard(W, rank)``. ``OFF``: every rank reads all of its dataset. With ``FILE``, ``HINT`` and ``OFF``
    each rank takes its share of rows of a global batch from its own elements, in every step (rule B).
    """

    OFF = -1
    AUTO = 0
    FILE = 1
    DATA = 2
    HINT = 3


SHARD_HINT = -1
"""Stands for both numbers in ``dataset.shard(SHARD_HINT, SHARD_HINT)``; AutoShardPolicy.HINT fills them in."""


@dataclass(frozen=True)
class InputOptions:
    """Options for the transfer of input to devices (tf.distribute.InputOptions).

    Args:
        experimental_fetch_to_device: Copy NumPy arrays of batches to the replica's GPU ahead of use, read by a thread.
            None means True. False leaves them on the host. Replicas on a CPU have them there anyway.
        experimental_replication_mode: An ``InputReplicationMode``.
        experimental_place_dataset_on_device: The dataset itself yields arrays of the device; only with
            ``PER_REPLICA`` and ``experimental_fetch_to_device=False``.
        experimental_per_replica_buffer_size: Batches kept ready on each replica's GPU, at least 1.

    Raises:
        TypeError: ``experimental_replication_mode`` is no InputReplicationMode.
        ValueError: The buffer is less than 1. Incompatible options raise it when a dataset is distributed.

    >>> InputOptions().experimental_replication_mode
    <InputReplicationMode.PER_WORKER: 'PER_WORKER'>
    """

    experimental_fetch_to_device: bool | None = None
    experimental_replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER
    experimental_place_dataset_on_device: bool = False
    experimental_per_replica_buffer_size: int = 1

    def __post_init__(self) -> None:
        mode, size = self.experimental_replication_mode, self.experimental_per_replica_buffer_size
        if not isinstance(mode, InputReplicationMode):
            raise TypeError(
                f"experimental_replication_mode is {mode!r}; expected InputReplicationMode.PER_WORKER or PER_REPLICA"
            )
        if size < 1:
            raise ValueError(f"experimental_per_replica_buffer_size is {size}; expected 1 or more")


@dataclass(slots=True)
class DistributeOptions:
    """The type of ``Options.experimental_distribute`` (tf.data.experimental.DistributeOptions).

    Attributes:
        auto_shard_policy: An ``AutoShardPolicy``. None keeps the policy of the dataset.
    """

    auto_shard_policy: AutoShardPolicy | None = None


@dataclass(slots=True)
class Options:
    """Options for ``Dataset.with_options`` (tf.data.Options), those of TensorFlow's that mpidist uses.

    Attributes:
        experimental_distribute: The division of a distributed dataset over ranks.

    >>> options = Options()
    >>> options.experimental_distribute.auto_shard_policy = AutoShardPolicy.DATA
    >>> options
    Options(experimental_distribute=DistributeOptions(auto_shard_policy=<AutoShardPolicy.DATA: 2>))
    """

    experimental_distribute: DistributeOptions = field(default_factory=DistributeOptions)


@dataclass(frozen=True)
class DatasetOptions:
    """The options that ``Dataset.with_options`` has set."""

    auto_shard_policy: AutoShardPolicy = AutoShardPolicy.AUTO
    assignment: str | None = None


def common_options(options: Iterable[DatasetOptions], step: str) -> DatasetOptions:
    """Return the options of a dataset that ``step`` makes of several datasets."""
    found = {each for each in options if each != DatasetOptions()}
    if len(found) > 1:
        raise ValueError(f"{step}() got datasets with different options: {found}. Set them after {step}()")
    return found.pop() if found else DatasetOptions()


@dataclass(frozen=True)
class WorkerLayout:
    """The number of replicas of each worker, and one of the workers.

    Args:
        num_workers: Number of workers, W.
        worker_id: The number of one worker, 0 ... W - 1.
        replica_counts: Local replicas of every worker.
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
        communicator: Connects the workers in the order of their ids. None for a single worker.
        wrap: Whether elements of a single local replica are PerReplica values too.
        devices: Device strings of this worker's replicas; the CPU by default.
        first_given: For several programs that share the data without a communicator: returns the argument of the
            program that was the first to make its n-th call.

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
            raise ValueError("wrap is False with several replicas. Only a single replica gets elements without wrapper")

    def shared_errors(self, doing: str) -> AbstractContextManager[None]:
        """Return the context that raises an error of this worker on all workers."""
        return nullcontext() if self.communicator is None else self.communicator.shared_errors(doing)


@dataclass(frozen=True)
class InputContext:
    """The input pipeline that ``dataset_fn`` builds (tf.distribute.InputContext).

    Args:
        num_input_pipelines: Number of pipelines, one for each rank, or for each replica with PER_REPLICA.
        input_pipeline_id: The number of this pipeline.
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
