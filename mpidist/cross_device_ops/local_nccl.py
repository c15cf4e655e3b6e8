"""All-reduce between the GPUs of one process by NCCL."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence

from mpidist.arrays.device_ops import gpu_ops
from mpidist.arrays.dtypes import Array, DType, reduction_dtypes
from mpidist.arrays.streams import Event, Stream
from mpidist.collectives.gpu.device_streams import SMALL_BYTES, DevicePack, DeviceReduction
from mpidist.collectives.gpu.nccl import NcclComm, join_local_gpus, nccl_dtype
from mpidist.collectives.reduce.plan import DeviceGroup
from mpidist.core.errors import DeviceError, NcclFailure
from mpidist.core.options import ReduceOp

_log = logging.getLogger("mpidist")
# For each value, the arrays of all GPUs in order.
Columns = Sequence[Sequence[Array]]


class LocalAllReduce:
    """All-reduce among the GPUs of one process. If NCCL cannot be used, logs a warning, and ``suits`` is False.

    Closes itself when it is dropped, or at the end of the program.
    """

    def __init__(self, devices: Sequence[int], packs_small: bool) -> None:
        self.devices = list(devices)
        self._small_bytes = SMALL_BYTES if packs_small else 0
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
            and nccl_dtype(reduction_dtypes(column[0].dtype, op)[0], op) is not None
            for column in columns
        )

    def all_reduce(self, columns: Columns, op: ReduceOp, divisor: int) -> list[list[Array]]:
        """Return new arrays, one per GPU for each of ``columns``, on the current stream of each GPU."""
        streams = [gpu_ops().current_stream(device) for device in self.devices]
        results: list[list[Array]] = [[] for _ in columns]
        shapes = [column[0].shape for column in columns]
        by_dtype: dict[DType, list[int]] = {}
        for i, column in enumerate(columns):
            by_dtype.setdefault(column[0].dtype, []).append(i)
        for dtype, indices in by_dtype.items():
            group = DeviceGroup(indices, dtype, *reduction_dtypes(dtype, op))
            pack = DevicePack(group, shapes, op, divisor if op is ReduceOp.MEAN else None, self._small_bytes)
            self._reduce_pack(pack, columns, streams, results)
        self._last[:] = [stream.record(blocks=True) for stream in streams]
        return results

    def _reduce_pack(
        self, pack: DevicePack, columns: Columns, streams: Sequence[Stream], results: Sequence[list[Array]]
    ) -> None:
        ops, reductions = gpu_ops(), []
        for k, device in enumerate(self.devices):
            with ops.on(device):
                inputs = {i: columns[i][k] for i in pack.group.indices}
                targets = {i: ops.empty(array.shape, pack.group.result, device) for i, array in inputs.items()}
                inputs = {i: array if array.flags.c_contiguous else ops.copy(array) for i, array in inputs.items()}
                flat = ops.empty((pack.flat_count,), pack.dtype, device) if pack.together else None
                reductions.append(DeviceReduction(pack, inputs, targets, flat, streams[k]))
                reductions[k].load()
            for i, target in targets.items():
                results[i].append(target)
        with ops.on(self.devices[0]), self._comms[0].group():
            for comm, reduction, stream in zip(self._comms, reductions, streams, strict=True):
                for source, target in reduction.pieces:
                    comm.all_reduce(source, target, pack.op, stream)
        for device, reduction in zip(self.devices, reductions, strict=True):
            with ops.on(device):
                reduction.store()

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
