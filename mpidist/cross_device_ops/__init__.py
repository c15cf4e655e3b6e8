"""The reduction classes of tf.distribute: from values of replicas to values on destinations."""

from mpidist.cross_device_ops.all_reduce import AllReduceCrossDeviceOps, HierarchicalCopyAllReduce, NcclAllReduce
from mpidist.cross_device_ops.collective_all_reduce import CollectiveAllReduce
from mpidist.cross_device_ops.cross_device_ops import CrossDeviceOps
from mpidist.cross_device_ops.reduction_to_one_device import ReductionToOneDevice
from mpidist.cross_device_ops.selection import select_cross_device_ops

__all__ = [
    "AllReduceCrossDeviceOps",
    "CollectiveAllReduce",
    "CrossDeviceOps",
    "HierarchicalCopyAllReduce",
    "NcclAllReduce",
    "ReductionToOneDevice",
    "select_cross_device_ops",
]
