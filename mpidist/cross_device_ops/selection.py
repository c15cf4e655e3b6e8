"""Which reduction class a strategy uses when the user names none."""

from __future__ import annotations

from collections.abc import Sequence

from mpidist.collectives import Communicator
from mpidist.core.options import CommunicationOptions
from mpidist.cross_device_ops.collective_all_reduce import CollectiveAllReduce
from mpidist.cross_device_ops.cross_device_ops import CrossDeviceOps
from mpidist.cross_device_ops.reduction_to_one_device import ReductionToOneDevice


def select_cross_device_ops(
    devices: Sequence[str],
    num_replicas: int,
    comm: Communicator | None,
    options: CommunicationOptions | None = None,
) -> CrossDeviceOps:
    """Return ``CollectiveAllReduce`` where several ranks take part, ``ReductionToOneDevice`` inside one process."""
    if comm is not None and comm.size > 1:
        return CollectiveAllReduce(devices, num_replicas, options, comm)
    return ReductionToOneDevice()
