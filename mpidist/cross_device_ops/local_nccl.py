"""All-reduce between the GPUs of one process by NCCL."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence

from mpidist.arrays.device_ops import gpu_ops
from mpidist.arrays.dtypes import Array
from mpidist.arrays.streams import Event
from mpidist.collectives.gpu.nccl import NcclComm, join_local_gpus, nccl_dtype
from mpidist.core.errors import DeviceError, NcclFailure
from mpidist.core.options import ReduceOp

_log = logging.getLogger("mpidist")
# For each value, the arrays of all GPUs in order.
Columns = Sequence[Sequence[Array]]


class LocalAllReduce:
    """All-reduce among the GPUs of one process. If NCCL cannot be used, logs a warning, and ``suits`` is False.

    Closes itself when it is dropped, or at the end of the program.
    """

    def __init__(self, devices: Sequence[int]) -> None:
        self.devices = list(devices)
        self._comms: list[NcclComm] = []
        self._last: list[Event] = []
        try:
            self._comms = join_local_gpus(self.devices)
        except (DeviceError, NcclFailure) as error:
            _log.warning("mpidist: %s. The GPUs %s are reduced by copies to the first of them", error, self.devices)
        # CuPy would destroy NCCL's communicators during garbage collection, even with work in flight.
        self._release = weakref.finalize(self, _free, self._comms, self._last)

    def suits(self, columns: Columns, op: ReduceOp) -> bool:
        """Return True if NCCL can reduce values: columns of an array per GPU, in order."""
        return bool(self._comms) and all(
            [gpu_ops().device_of(array) for array in column] == self.devices
            and nccl_dtype(column[0].dtype, op) is not None
            for column in columns
        )

    def all_reduce(self, columns: Columns, op: ReduceOp) -> list[list[Array]]:
        """Return new arrays, one per GPU for each of ``columns``. A MEAN is a SUM.

        They have NCCL's dtype, and are ordered on the current stream of each GPU.
        """
        ops, op = gpu_ops(), ReduceOp.SUM if op is ReduceOp.MEAN else op
        streams = [ops.current_stream(device) for device in self.devices]
        inputs: list[list[Array]] = []
        results: list[list[Array]] = []
        for column in columns:
            inputs.append([])
            results.append([])
            for device, array in zip(self.devices, column, strict=True):
                with ops.on(device):
                    cast = array.astype(nccl_dtype(array.dtype, op), copy=False)
                    inputs[-1].append(cast if cast.flags.c_contiguous else ops.copy(cast))
                    results[-1].append(ops.empty(cast.shape, cast.dtype, device))
        with ops.on(self.devices[0]), self._comms[0].group():
            for sources, targets in zip(inputs, results, strict=True):
                for parts in zip(self._comms, sources, targets, streams, strict=True):
                    comm, source, target, stream = parts
                    comm.all_reduce(source.reshape(-1), target.reshape(-1), op, stream)
        self._last[:] = [stream.record(blocks=True) for stream in streams]
        return results

    def close(self) -> None:
        """Free NCCL's resources, once its work is done (idempotent)."""
        self._release()


def _free(comms: list[NcclComm], last: Sequence[Event]) -> None:
    for event in last:
        event.synchronize()
    if comms:
        with gpu_ops().on(comms[0].device), comms[0].group():
            for comm in comms:
                comm.close()
        comms.clear()
