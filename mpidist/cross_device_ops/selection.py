"""Which reduction class a strategy uses when the user names none."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from mpidist.collectives import Communicator
from mpidist.collectives.gpu.nccl_library import nccl_problem
from mpidist.core.devices import parse_device
from mpidist.core.options import CommunicationOptions
from mpidist.cross_device_ops.all_reduce import NcclAllReduce
from mpidist.cross_device_ops.collective_all_reduce import CollectiveAllReduce
from mpidist.cross_device_ops.cross_device_ops import CrossDeviceOps
from mpidist.cross_device_ops.reduction_to_one_device import ReductionToOneDevice

_log = logging.getLogger("mpidist")


def select_cross_device_ops(
    devices: Sequence[str],
    num_replicas: int,
    comm: Communicator | None,
    options: CommunicationOptions | None = None,
) -> CrossDeviceOps:
    """Return the class that suits a strategy.

    ``CollectiveAllReduce`` where several ranks take part; inside one process ``NcclAllReduce`` for several GPUs where
    NCCL can be used, which the log says where it cannot, and otherwise ``ReductionToOneDevice``.
    """
    if comm is not None and comm.size > 1:
        return CollectiveAllReduce(devices, num_replicas, options, comm)
    if len(devices) > 1 and all(parse_device(device).kind == "gpu" for device in devices):
        problem = nccl_problem()
        if problem is None:
            return NcclAllReduce(num_packs=1)
        _log.warning("mpidist: %s. Until then the GPUs %s are reduced by copies", problem, list(devices))
    return ReductionToOneDevice()
