"""NCCL between several GPUs of one process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from mpidist.arrays.device_ops import ops_for
from mpidist.collectives.gpu.nccl_comm import NcclComm
from mpidist.collectives.gpu.nccl_library import failure, nccl_binding, nccl_problem
from mpidist.collectives.reduce.nccl_types import nccl_reduction
from mpidist.core.enums import ReduceOp
from mpidist.core.errors import DeviceError

if TYPE_CHECKING:
    from mpidist.arrays.convert import Array
    from mpidist.arrays.device_ops import Stream


class LocalNccl:
    """The GPUs of one process, joined by NCCL; waits for no other process. Has to be closed before it is dropped.

    Methods take one array and one stream per GPU, in the order of ``devices``, enqueue, and return before anything is
    done: the arrays must live, and stay as they are, until the streams are past it.

    Args:
        devices: Numbers of the GPUs, each once.

    Attributes:
        devices: The same.
        comms: The end of the communicator on each GPU; calls of several go into one ``group()`` of any of them.

    Raises:
        DeviceError: NCCL cannot be used in this process; the text says what to type.
        NcclFailure: NCCL refused.
    """

    def __init__(self, devices: Sequence[int]) -> None:
        self.devices = [int(device) for device in devices]
        if not self.devices or len(set(self.devices)) < len(self.devices):
            raise ValueError(f"devices are {self.devices}; expected at least one GPU, and each once")
        problem = nccl_problem()
        if problem is not None:
            raise DeviceError(problem)
        binding, ops, size = nccl_binding(), ops_for("gpu"), len(self.devices)
        try:
            with ops.on(self.devices[0]):
                raw = binding.NcclCommunicator.initAll(self.devices)
        except (binding.NcclError, KeyError) as error:
            raise failure(binding, f"NCCL could not join the GPUs {self.devices} of one process", error) from error
        self._on_first = partial(ops.on, self.devices[0])
        self.comms = [NcclComm(binding, raw[i], device, i, size, ops) for i, device in enumerate(self.devices)]

    def __repr__(self) -> str:
        state = ", closed" if self.comms[0].is_closed else ""
        return f"<LocalNccl of GPUs {self.devices}{state}>"

    def all_reduce(
        self,
        arrays: Sequence[Array],
        op: ReduceOp,
        streams: Sequence[Stream],
        targets: Sequence[Array] | None = None,
    ) -> None:
        """Put the reduction of ``arrays`` into each of ``targets``, or in place; raises what ``NcclComm`` does."""
        targets = arrays if targets is None else targets
        self._check("all_reduce", streams, arrays, targets)
        nccl_reduction(arrays[0].dtype, op)
        with self._on_first(), self.comms[0].group():
            for comm, array, target, stream in zip(self.comms, arrays, targets, streams, strict=True):
                comm.all_reduce(array, target, op, stream)

    def close(self) -> None:
        """Free it; any number of times. All that was enqueued must be done."""
        with self._on_first(), self.comms[0].group():
            for comm in self.comms:
                comm.close()

    def _check(self, name: str, streams: Sequence[Stream], *lists: Sequence[Array]) -> None:
        # Within a group it would be too late: what was called already runs, and waits for the rest.
        for given in (streams, *lists):
            if len(given) != len(self.comms):
                raise ValueError(
                    f"{name}: {len(given)} arrays or streams were given for {len(self.comms)} GPUs; expected one of "
                    "each for each GPU"
                )
        first = lists[0][0]
        for arrays in lists:
            for comm, array in zip(self.comms, arrays, strict=True):
                comm.address(name, f"the array of place {comm.rank}", array)
                if (array.size, array.dtype) != (first.size, first.dtype):
                    raise ValueError(
                        f"{name}: the array of place {comm.rank} has {array.size} elements of {array.dtype}, that of "
                        f"place 0 {first.size} of {first.dtype}; expected equal numbers of one dtype"
                    )
