"""MirroredStrategy: the devices of one process, or the ranks of one node; OneDeviceStrategy: one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mpidist.collectives import Communicator
from mpidist.cross_device_ops import CrossDeviceOps
from mpidist.strategies.base import Strategy
from mpidist.strategies.replica_devices import check_device, check_devices
from mpidist.strategies.replicated import ReplicatedExtended
from mpidist.topology import world_topology
from mpidist.values import select_replica

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


def ranks_of_node(strategy: str, instead: str) -> MPI.Intracomm:
    """Return the ranks of the node, which are all of the job.

    Args:
        strategy: Name of the strategy, for the message.
        instead: The strategy for several nodes.

    Raises:
        ValueError: The job has several nodes.
    """
    topology = world_topology()
    if topology.num_nodes > 1:
        raise ValueError(
            f"{strategy} is for one node, and this job has {topology.size} ranks on {topology.num_nodes} nodes; "
            f"use {instead}"
        )
    return topology.node


class OneDeviceExtended(ReplicatedExtended):
    """One replica on one device of this process."""

    def distribute_values(self, value_fn: Callable[..., object]) -> Any:
        """See ``StrategyExtended``: the bare value, as in TensorFlow."""
        return select_replica(0, super().distribute_values(value_fn))


class OneDeviceStrategy(Strategy):
    """Runs on one device (tf.distribute.OneDeviceStrategy); for testing code that is to be distributed later.

    Args:
        device: The device string, such as ``"cpu:0"`` or ``"gpu:1"``.

    Raises:
        ValueError: Not a device of this process.
        DeviceError: A GPU, and there is no usable CuPy.

    >>> OneDeviceStrategy("cpu:0").run(lambda x: 2 * x, args=(21,))
    42
    """

    def __init__(self, device: str) -> None:
        super().__init__(OneDeviceExtended(self, (check_device(device),), None))
