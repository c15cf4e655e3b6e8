"""Values of strategies: per-replica and mirrored values, variables, sparse slices."""

from mpidist.values.composite import CompositeVariable
from mpidist.values.distributed import DistributedValues, Mirrored, PerReplica, ReplicaValues, regroup, select_replica
from mpidist.values.indexed_slices import IndexedSlices
from mpidist.values.variable import Variable

__all__ = [
    "CompositeVariable",
    "DistributedValues",
    "IndexedSlices",
    "Mirrored",
    "PerReplica",
    "ReplicaValues",
    "Variable",
    "regroup",
    "select_replica",
]
