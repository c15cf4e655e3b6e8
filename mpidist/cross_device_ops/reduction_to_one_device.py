"""ReductionToOneDevice: all values to one place, added there in order, and copied back."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpidist.arrays.convert import Array, to_array
from mpidist.collectives import Communicator
from mpidist.core.devices import canonical_device
from mpidist.core.enums import ReduceOp
from mpidist.core.options import CommunicationOptions
from mpidist.cross_device_ops.cross_device_ops import CrossDeviceOps
from mpidist.cross_device_ops.local_reduction import AccumulationFn, divided
from mpidist.values import PerReplica, ReplicaValues
from mpidist.values.placement import place_of


class ReductionToOneDevice(CrossDeviceOps):
    """Reduces on one device and on one rank, then copies (tf.distribute.ReductionToOneDevice).

    Between ranks: MPI_Reduce to rank 0, then MPI_Bcast; arrays on devices pass through host memory.

    Args:
        reduce_to_device: Where to add; the first destination by default.
        accumulation_fn: Takes the list of all replicas' arrays and returns their sum, in place of addition. The
            arrays of all ranks are gathered for it, and it runs on every rank.
        comm: See ``CrossDeviceOps``.

    >>> ReductionToOneDevice().reduce("MEAN", PerReplica((np.ones(2), np.zeros(2))), "cpu:0")
    array([0.5, 0.5])
    """

    algorithm = "reduce_broadcast"
    device_algorithm = "staged"

    def __init__(
        self,
        reduce_to_device: str | None = None,
        accumulation_fn: AccumulationFn | None = None,
        comm: Communicator | None = None,
    ) -> None:
        super().__init__(comm)
        self.reduce_to_device = None if reduce_to_device is None else canonical_device(reduce_to_device)
        self.accumulation_fn = accumulation_fn

    def _is_plain(self) -> bool:
        return self.accumulation_fn is None and not self._on_gpus

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: PerReplica,
        destinations: Any,
        options: CommunicationOptions | None,
    ) -> Any:
        """See ``CrossDeviceOps``."""
        if self.accumulation_fn is None or reduce_op not in (ReduceOp.SUM, ReduceOp.MEAN):
            return super().reduce_implementation(reduce_op, per_replica_value, destinations, options)
        arrays = self._gathered(per_replica_value, destinations)
        with place_of(arrays[0]).current():
            total = to_array(self.accumulation_fn(arrays))
        if reduce_op is ReduceOp.MEAN:
            total = divided(total, len(arrays))
        return self.broadcast_implementation(total, destinations)

    def between_ranks_implementation(
        self,
        reduce_op: ReduceOp,
        arrays: list[Array],
        divisor: int,
        options: CommunicationOptions | None,
        structure: str = "",
    ) -> list[Array]:
        """See ``CrossDeviceOps``."""
        if self.accumulation_fn is None or reduce_op not in (ReduceOp.SUM, ReduceOp.MEAN):
            return super().between_ranks_implementation(reduce_op, arrays, divisor, options, structure)
        assert self._comm is not None
        stacks = self._comm.gather_arrays([array[np.newaxis] for array in arrays], 0, options=options, note=structure)
        totals = []
        for stack in stacks:
            with place_of(stack).current():
                totals.append(to_array(self.accumulation_fn(list(stack))))
        return [divided(total, divisor) for total in totals] if reduce_op is ReduceOp.MEAN else totals

    def _gathered(self, value: ReplicaValues, destinations: Any) -> list[Array]:
        return super()._gathered(value, self.reduce_to_device or destinations)
