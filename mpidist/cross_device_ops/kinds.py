"""The reduction classes that are offered, and the choice among them."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from mpidist.arrays.convert import restorer, to_array
from mpidist.arrays.device_ops import is_device_array
from mpidist.arrays.dtypes import Array
from mpidist.collectives import Communicator
from mpidist.collectives.gpu.nccl import nccl_problem
from mpidist.core.options import CallOptions, CommunicationOptions, ReduceOp
from mpidist.core.text import parse_device
from mpidist.cross_device_ops.cross_device_ops import CrossDeviceOps, Pairs
from mpidist.cross_device_ops.local_nccl import LocalAllReduce
from mpidist.cross_device_ops.local_values import AccumulationFn, check_alike, destination_devices, divided, put
from mpidist.values import Mirrored, PerReplica, ReplicaValues
from mpidist.values.placement import place_of

_log = logging.getLogger("mpidist")
_ONE_PACK_EACH = CommunicationOptions(bytes_per_pack=1)


class AllReduceCrossDeviceOps(CrossDeviceOps):
    """All-reduce in a fixed number of packs.

    Args:
        num_packs: The arrays are flattened into one vector per dtype, which is cut into this many pieces, the
            last with the remainder; 0 sends every array by itself.
        comm: See ``CrossDeviceOps``.

    Raises:
        ValueError: ``num_packs`` is negative.
    """

    def __init__(self, num_packs: int = 1, comm: Communicator | None = None) -> None:
        if num_packs < 0:
            raise ValueError(f"num_packs is {num_packs}; expected 0 (no packing) or more")
        super().__init__(comm)
        self.num_packs = num_packs

    def _is_plain(self) -> bool:
        return self.num_packs == 1

    def between_ranks_implementation(
        self, reduce_op: ReduceOp, arrays: list[Array], divisor: int, options: CallOptions, structure: str = ""
    ) -> list[Array]:
        """See ``CrossDeviceOps``."""
        if self.num_packs == 1:
            return super().between_ranks_implementation(reduce_op, arrays, divisor, options, structure)
        each = _ONE_PACK_EACH if options is None else replace(options, bytes_per_pack=1)
        if self.num_packs == 0:
            return super().between_ranks_implementation(reduce_op, arrays, divisor, each, structure)
        results: list[Array] = [arrays[0]] * len(arrays)
        kinds = [(array.dtype, place_of(array)) for array in arrays]
        for kind in dict.fromkeys(kinds):
            indices = [i for i, own in enumerate(kinds) if own == kind]
            with kind[1].current():
                flat = np.concatenate([arrays[i].reshape(-1) for i in indices])
            cut = split_flat(flat, self.num_packs)
            pieces = super().between_ranks_implementation(reduce_op, cut, divisor, each, structure)
            with kind[1].current():
                total = np.concatenate(pieces)
            start = 0
            for i in indices:
                results[i] = total[start : start + arrays[i].size].reshape(arrays[i].shape)
                start += arrays[i].size
        return results


def split_flat(flat: Array, num_packs: int) -> list[Array]:
    """Cut a flat array into ``num_packs`` pieces of equal length, the last with the remainder.

    >>> [len(piece) for piece in split_flat(np.arange(5), 2)]
    [2, 3]
    """
    length = len(flat) // num_packs
    cuts = [length * k for k in range(num_packs)] + [len(flat)]
    return [flat[a:b] for a, b in pairwise(cuts)]


class HierarchicalCopyAllReduce(AllReduceCrossDeviceOps):
    """Reduces inside each node, then between the nodes (tf.distribute.HierarchicalCopyAllReduce).

    Args:
        num_packs: See ``AllReduceCrossDeviceOps``.
        comm: See ``CrossDeviceOps``.
    """

    algorithm = device_algorithm = "hierarchical"


class NcclAllReduce(AllReduceCrossDeviceOps):
    """All-reduce by NCCL between GPUs (tf.distribute.NcclAllReduce); arrays in host memory go by MPI.

    A warning, once, says so when an array in host memory is reduced by a strategy of CPUs.

    Args:
        num_packs: See ``AllReduceCrossDeviceOps``.
        comm: See ``CrossDeviceOps``.
    """

    def __init__(self, num_packs: int = 1, comm: Communicator | None = None) -> None:
        super().__init__(num_packs, comm)
        self._has_warned = False
        self._local: LocalAllReduce | None = None

    def close(self) -> None:
        """Free the NCCL communicator of this process's GPUs."""
        if self._local is not None:
            self._local.close()
            self._local = None

    def _among_devices(self, op: ReduceOp, pairs: Pairs, divisor: int, options: CallOptions) -> list[object] | None:
        columns = [[to_array(part) for part in value.values] for value, _ in pairs]
        if not columns or len(columns[0]) < 2 or not all(is_device_array(a) for column in columns for a in column):
            return None
        if options is not None and options.deterministic:
            return None  # the copies to one device are added in a fixed order
        for column in columns:
            check_alike(column)
        devices = [place_of(array).number for array in columns[0]]
        if len(set(devices)) < len(devices):
            return None
        if self._local is None or self._local.devices != devices:
            self.close()
            self._local = LocalAllReduce(devices, self.num_packs > 0)
        if not self._local.suits(columns, op):
            return None
        reduced = self._local.all_reduce(columns, op, divisor)
        return [_delivered(arrays, pair) for arrays, pair in zip(reduced, pairs, strict=True)]

    def _is_plain(self) -> bool:
        # What is in host memory under a strategy of CPUs must pass by the warning.
        return self._on_gpus and super()._is_plain()

    def between_ranks_implementation(
        self, reduce_op: ReduceOp, arrays: list[Array], divisor: int, options: CallOptions, structure: str = ""
    ) -> list[Array]:
        """See ``CrossDeviceOps``."""
        if not self._on_gpus and not self._has_warned and not any(is_device_array(array) for array in arrays):
            self._has_warned = True
            warnings.warn(
                "NcclAllReduce was given arrays in host memory, which NCCL cannot reduce: they go by MPI. "
                "Use CollectiveAllReduce or HierarchicalCopyAllReduce for arrays on the CPU",
                stacklevel=2,
            )
        return super().between_ranks_implementation(reduce_op, arrays, divisor, options, structure)


def _delivered(arrays: Sequence[Array], pair: tuple[ReplicaValues, object]) -> object:
    """Return one result on its destinations.

    Nothing is copied where that is an array's own device.
    """
    value, destinations = pair
    restore = restorer(value.values[0])
    by_device = {place_of(array).device: array for array in arrays}
    results = []
    for device in destination_devices(destinations):
        array = by_device.pop(device, None)
        own = put(arrays[0], device, copies=True) if array is None else array
        results.append(own if restore is None else restore(own))
    return results[0] if len(results) == 1 else Mirrored(results)


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
        self.devices = tuple(str(parse_device(device)) for device in devices)
        self._num_replicas = group_size
        self._options = options

    def reduce_pairs(
        self, op: ReduceOp, pairs: Pairs, divisor: int, options: CallOptions, structure: str = ""
    ) -> list[object]:
        """See ``CrossDeviceOps``."""
        if self.ranks is None and self._num_replicas != len(self.devices):
            raise ValueError(
                f"group_size is {self._num_replicas} and this rank has {len(self.devices)} devices; to reduce over the "
                "other workers give them: CollectiveAllReduce(devices, group_size, comm=mpidist.Communicator())"
            )
        return super().reduce_pairs(op, pairs, divisor, options, structure)

    def with_algorithm(self, options: CallOptions, on_device: bool = False) -> CallOptions:
        """Return ``options`` laid over those of the object."""
        return options if self._options is None else self._options.merge(options)


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
        self.reduce_to_device = None if reduce_to_device is None else str(parse_device(reduce_to_device))
        self.accumulation_fn = accumulation_fn

    def _is_plain(self) -> bool:
        return self.accumulation_fn is None and not self._on_gpus

    def reduce_implementation(
        self, reduce_op: ReduceOp, per_replica_value: PerReplica, destinations: object, options: CallOptions
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
        self, reduce_op: ReduceOp, arrays: list[Array], divisor: int, options: CallOptions, structure: str = ""
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

    def _gathered(self, value: ReplicaValues, destinations: object) -> list[Array]:
        return super()._gathered(value, self.reduce_to_device or destinations)


def select_cross_device_ops(devices: Sequence[str], num_replicas: int, comm: Communicator | None) -> CrossDeviceOps:
    """Return the class that suits a strategy.

    ``CollectiveAllReduce`` where several ranks take part; inside one process ``NcclAllReduce`` for several GPUs where
    NCCL can be used, which the log says where it cannot, and otherwise ``ReductionToOneDevice``.
    """
    if comm is not None and comm.size > 1:
        return CollectiveAllReduce(devices, num_replicas, comm=comm)
    if len(devices) > 1 and all(parse_device(device).kind == "gpu" for device in devices):
        problem = nccl_problem()
        if problem is None:
            return NcclAllReduce(num_packs=1)
        _log.warning("mpidist: %s. Until then the GPUs %s are reduced by copies", problem, list(devices))
    return ReductionToOneDevice()
