"""MirroredStrategy: the devices of one process, or the ranks of one node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from mpidist.collectives import Communicator
from mpidist.cross_device_ops import CrossDeviceOps
from mpidist.strategies.devices import check_devices
from mpidist.strategies.one_node import ranks_of_node
from mpidist.strategies.replicated import ReplicatedExtended
from mpidist.strategies.strategy import Strategy

if TYPE_CHECKING:
    from mpi4py import MPI


class MirroredStrategy(Strategy):
    """Synchronous training on one node: every replica holds a copy of each variable (tf.distribute.MirroredStrategy).

    Two ways to use it. Several devices in one process, as in TensorFlow: ``MirroredStrategy(["gpu:0", "gpu:1"])``
    under a single rank; CPU devices are virtual replicas. Or the ranks of one node: start with ``mpirun``, and all
    ranks of the node take part, each with its own devices. Collective over those ranks.

    Args:
        devices: Device strings of this rank's replicas; by default its share of the node's GPUs, which is all of them
            in a job of one process, or the CPU where there are none.
        cross_device_ops: How values are reduced, such as ``HierarchicalCopyAllReduce()``.
        communicator: An mpi4py communicator of the ranks that take part. By default all ranks of the node;
            ``MPI.COMM_SELF`` for this process alone.

    Raises:
        ValueError: Wrong devices, or a job of several nodes, which MultiWorkerMirroredStrategy is for.
        DeviceError: A GPU, and there is no usable CuPy.
        TypeError: A ``cross_device_ops`` that is none.
        LaunchError: MPI cannot be started.

    >>> strategy = MirroredStrategy(["cpu:0", "cpu:1"])
    >>> strategy.num_replicas_in_sync
    2
    >>> strategy.close()
    """

    def __init__(
        self,
        devices: Sequence[str] | None = None,
        cross_device_ops: CrossDeviceOps | None = None,
        communicator: MPI.Intracomm | None = None,
    ) -> None:
        local_devices = check_devices(devices)
        if cross_device_ops is not None and not isinstance(cross_device_ops, CrossDeviceOps):
            raise TypeError(
                f"cross_device_ops is {cross_device_ops!r}; expected an object such as "
                "mpidist.HierarchicalCopyAllReduce() or mpidist.ReductionToOneDevice()"
            )
        ranks = communicator
        if ranks is None:
            ranks = ranks_of_node("MirroredStrategy", "mpidist.MultiWorkerMirroredStrategy()")
        comm = Communicator(ranks, owner=type(self).__name__) if ranks.Get_size() > 1 else None
        super().__init__(
            ReplicatedExtended(self, local_devices, comm, cross_device_ops, allows_per_replica_input=comm is None)
        )
