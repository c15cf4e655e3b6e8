"""The names of ``tf.compat.v1.distribute``."""

from typing import TYPE_CHECKING

from mpidist import cluster_resolver
from mpidist.compat.v1_strategies import InputIterator, get_strategy
from mpidist.compat.v1_strategies import MirroredStrategyV1 as MirroredStrategy
from mpidist.compat.v1_strategies import OneDeviceStrategyV1 as OneDeviceStrategy
from mpidist.compat.v1_strategies import StrategyV1 as Strategy
from mpidist.core.context import (
    experimental_set_strategy,
    get_loss_reduction,
    has_strategy,
    in_cross_replica_context,
)
from mpidist.core.options import ReduceOp, RunOptions
from mpidist.cross_device_ops import CrossDeviceOps, HierarchicalCopyAllReduce, NcclAllReduce, ReductionToOneDevice
from mpidist.input import InputContext, InputReplicationMode
from mpidist.parameter_server.server import Server
from mpidist.strategies import ReplicaContext, StrategyExtended
from mpidist.v1 import experimental
from mpidist.values import DistributedValues

if TYPE_CHECKING:

    def get_replica_context() -> ReplicaContext | None:
        """Return the context of the replica that runs, or None in cross-replica context."""
else:
    from mpidist.core.context import get_replica_context

del TYPE_CHECKING

__all__ = [
    "CrossDeviceOps",
    "DistributedValues",
    "HierarchicalCopyAllReduce",
    "InputContext",
    "InputIterator",
    "InputReplicationMode",
    "MirroredStrategy",
    "NcclAllReduce",
    "OneDeviceStrategy",
    "ReduceOp",
    "ReductionToOneDevice",
    "ReplicaContext",
    "RunOptions",
    "Server",
    "Strategy",
    "StrategyExtended",
    "cluster_resolver",
    "experimental",
    "experimental_set_strategy",
    "get_loss_reduction",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
]
