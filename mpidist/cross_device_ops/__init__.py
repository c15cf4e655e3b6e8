"""The reduction classes of tf.distribute: from values of replicas to values on destinations."""

from mpidist.cross_device_ops.cross_device_ops import (
    AllReduceCrossDeviceOps,
    CollectiveAllReduce,
    CrossDeviceOps,
    HierarchicalCopyAllReduce,
    NcclAllReduce,
    Pairs,
    ReductionToOneDevice,
    select_cross_device_ops,
)

__all__ = [
    "AllReduceCrossDeviceOps",
    "CollectiveAllReduce",
    "CrossDeviceOps",
    "HierarchicalCopyAllReduce",
    "NcclAllReduce",
    "Pairs",
    "ReductionToOneDevice",
    "select_cross_device_ops",
]
