"""CollectiveAllReduce: the reduction of every strategy with several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mpidist.collectives import Communicator
from mpidist.core.devices import canonical_device
from mpidist.core.enums import ReduceOp
from mpidist.core.options import CommunicationOptions
from mpidist.cross_device_ops.cross_device_ops import CrossDeviceOps
from mpidist.values import ReplicaValues


class CollectiveAllReduce(CrossDeviceOps):
    """All-reduce among the devices of all workers, by whatever algorithm the engine's table picks.

    Args:
        devices: Devices of this worker.
        group_size: Replicas in sync, over all workers.
        options: Defaults for every reduction.
        comm: The workers; without one every worker is taken to have as many devices as this one.

    Raises:
        ValueError: ``group_size`` cannot be made up of workers like this one.
    """

    def __init__(
        self,
        devices: Sequence[str],
        group_size: int,
        options: CommunicationOptions | None = None,
        comm: Communicator | None = None,
    ) -> None:
        if comm is None and (not devices or group_size % len(devices)):
            raise ValueError(f"group_size is {group_size}; expected a multiple of the {len(devices)} local devices")
        super().__init__(comm)
        self.devices = tuple(canonical_device(device) for device in devices)
        self._num_replicas = group_size
        self._options = options or CommunicationOptions()

    def reduce_pairs(
        self,
        op: ReduceOp,
        pairs: Sequence[tuple[ReplicaValues, Any]],
        divisor: int,
        options: CommunicationOptions | None,
        structure: str = "",
    ) -> list[Any]:
        """See ``CrossDeviceOps``."""
        if not self.crosses_ranks and self._num_replicas != len(self.devices):
            raise ValueError(
                f"group_size is {self._num_replicas} and this rank has {len(self.devices)} devices; to reduce over the "
                "other workers give them: CollectiveAllReduce(devices, group_size, comm=mpidist.Communicator())"
            )
        return super().reduce_pairs(op, pairs, divisor, options, structure)

    def with_algorithm(
        self, options: CommunicationOptions | None, on_device: bool = False
    ) -> CommunicationOptions | None:
        """Return ``options`` laid over those of the object."""
        return self._options if options is None else self._options.merge(options)
