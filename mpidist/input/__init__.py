"""The input of replicas: Dataset, InputContext, the dealing rules and DistributedDataset."""

from mpidist.input.dataset import Dataset, TextLineDataset
from mpidist.input.distribute import distribute_dataset, distribute_from_function, distribute_values
from mpidist.input.distributed_dataset import DistributedDataset, DistributedIterator
from mpidist.input.elements import ArraySpec, DatasetSpec, PerReplicaSpec
from mpidist.input.input_options import (
    SHARD_HINT,
    AutoShardPolicy,
    InputContext,
    InputOptions,
    InputReplicationMode,
    InputWorkers,
    Options,
    ValueContext,
)
from mpidist.input.iteration import DatasetIterator, Optional
from mpidist.input.threads import AUTOTUNE

__all__ = [
    "AUTOTUNE",
    "SHARD_HINT",
    "ArraySpec",
    "AutoShardPolicy",
    "Dataset",
    "DatasetIterator",
    "DatasetSpec",
    "DistributedDataset",
    "DistributedIterator",
    "InputContext",
    "InputOptions",
    "InputReplicationMode",
    "InputWorkers",
    "Optional",
    "Options",
    "PerReplicaSpec",
    "TextLineDataset",
    "ValueContext",
    "distribute_dataset",
    "distribute_from_function",
    "distribute_values",
]
