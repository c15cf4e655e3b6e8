"""All-reduce between the GPUs of one process by NCCL, in one flat vector per dtype."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from itertools import pairwise

from mpidist.arrays.device_ops import DeviceOps, ops_for
from mpidist.arrays.dtypes import Array, DType, reduction_dtypes
from mpidist.arrays.streams import Event, Stream
from mpidist.collectives.gpu.nccl_comm import LocalNccl
from mpidist.collectives.reduce.device_packs import SLICE_ALIGNMENT, DevicePack, nccl_dtype
from mpidist.core.errors import DeviceError, NcclFailure
from mpidist.core.options import ReduceOp

_log = logging.getLogger("mpidist")
# Of each value the arrays of all GPUs, in order.
Columns = Sequence[Sequence[Array]]


class LocalAllReduce:
    """The all-reduce among the GPUs of one process.

    Closes itself when it is dropped, or at the end of the program. Where NCCL cannot be used that is said once, and
    :meth:`suits` is False.

    Args:
        devices: Numbers of the GPUs, each once.
        num_packs: In how many pieces a vector is reduced; 0 sends each array by itself.
    """

    def __init__(self, devices: Sequence[int], num_packs: int) -> None:
        self.devices = list(devices)
        self._num_packs = num_packs
        self._ops: DeviceOps = ops_for("gpu")
        self._nccl: LocalNccl | None = None
        self._last: list[Event] = []
        self._release: weakref.finalize[[LocalNccl, Sequence[Event]], LocalAllReduce] | None = None
        try:
            self._nccl = LocalNccl(self.devices)
            # CuPy would destroy it whenever Python happens to collect it, at work or not.
            self._release = weakref.finalize(self, _free, self._nccl, self._last)
        except (DeviceError, NcclFailure) as error:
            _log.warning("mpidist: %s. The GPUs %s are reduced by copies to the first of them", error, self.devices)

    def suits(self, columns: Columns, op: ReduceOp) -> bool:
        """Return whether NCCL can reduce values: columns of an array per GPU, in order."""
        return self._nccl is not None and all(
            [self._ops.device_of(array) for array in column] == self.devices
            and nccl_dtype(reduction_dtypes(column[0].dtype, op)[0], op) is not None
            for column in columns
        )

    def all_reduce(self, columns: Columns, op: ReduceOp, divisor: int) -> list[list[Array]]:
        """Return new arrays, one per GPU for each of ``columns``; a mean divides by ``divisor``.

        The work is on the current stream of each GPU.
        """
        streams = [self._ops.current_stream(device) for device in self.devices]
        results: list[list[Array]] = [[] for _ in columns]
        shapes = [column[0].shape for column in columns]
        by_dtype: dict[DType, list[int]] = {}
        for i, column in enumerate(columns):
            by_dtype.setdefault(column[0].dtype, []).append(i)
        for dtype, indices in by_dtype.items():
            formed, result = reduction_dtypes(dtype, op)
            for group in [[i] for i in indices] if self._num_packs == 0 else [indices]:
                pack = DevicePack(group, shapes, formed, dtype, result, op)
                for arrays in self._reduce_pack(pack, columns, op, divisor, streams):
                    for i, array in zip(pack.indices, pack.parts(arrays, shapes), strict=True):
                        results[i].append(array)
        self._last[:] = [stream.record(blocks=True) for stream in streams]
        return results

    def _reduce_pack(
        self, pack: DevicePack, columns: Columns, op: ReduceOp, divisor: int, streams: Sequence[Stream]
    ) -> list[Array]:
        """Return the pack's flat array of each GPU, reduced."""
        ops = self._ops
        sources, targets, blocks = [], [], []
        for k, device in enumerate(self.devices):
            with ops.on(device):
                given = [columns[i][k] for i in pack.indices]
                own = [array if ops.is_contiguous(array) else ops.copy(array) for array in given]
                flat = block = ops.empty((pack.count,), pack.dtype, device)
                if not pack.is_plain:
                    pack.load(ops, own, flat, streams[k])
                if pack.dtype != pack.result_dtype:
                    block = ops.empty((pack.count,), pack.result_dtype, device)
                sources.append(own[0].reshape(-1) if pack.is_plain else flat)
                targets.append(flat)
                blocks.append(block)
        self._reduce_flat(sources, targets, ReduceOp.SUM if op is ReduceOp.MEAN else op, streams)
        for k, device in enumerate(self.devices):
            if op is ReduceOp.MEAN or blocks[k] is not targets[k]:
                with ops.on(device):
                    ops.unpack(targets[k], [blocks[k]], divisor if op is ReduceOp.MEAN else None, streams[k])
        return blocks

    def _reduce_flat(
        self, sources: Sequence[Array], targets: Sequence[Array], op: ReduceOp, streams: Sequence[Stream]
    ) -> None:
        assert self._nccl is not None
        count, num_pieces = sources[0].size, max(self._num_packs, 1)
        unit = SLICE_ALIGNMENT // sources[0].itemsize
        cuts = [count // num_pieces // unit * unit * k for k in range(num_pieces)] + [count]
        for start, end in pairwise(cuts):
            into = [target[start:end] for target in targets]
            self._nccl.all_reduce([source[start:end] for source in sources], op, streams, into)

    def close(self) -> None:
        """Free NCCL's resources, once its work is done; any number of times."""
        if self._release is not None:
            self._release()
        self._nccl = None


def _free(nccl: LocalNccl, last: Sequence[Event]) -> None:
    for event in last:
        event.synchronize()
    nccl.close()
