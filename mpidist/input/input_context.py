"""InputContext and ValueContext: what dataset_fn and value_fn are told about their place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class InputContext:
    """Tells ``dataset_fn`` which input pipeline it builds (tf.distribute.InputContext).

    Args:
        num_input_pipelines: Number of pipelines, one for each rank, or for each replica with PER_REPLICA.
        input_pipeline_id: Which of them this is.
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
    """Tells ``value_fn`` which replica its value is for (tf.distribute.experimental.ValueContext).

    Args:
        replica_id_in_sync_group: Global id of the replica.
        num_replicas_in_sync: Number of replicas whose values are combined.

    >>> ValueContext(2, 4)
    ValueContext(replica_id_in_sync_group=2, num_replicas_in_sync=4)
    """

    replica_id_in_sync_group: int = 0
    num_replicas_in_sync: int = 1
