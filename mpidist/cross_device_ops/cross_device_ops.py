"""The reduction classes.

A reduction has two levels. ``reduce_implementation`` combines the values of this rank's replicas, and
``between_ranks_implementation`` the results of the ranks, by the communicator unless a subclass replaces it. The total
is copied to the destinations.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from mpidist.arrays.convert import restorer, to_array
from mpidist.arrays.device_ops import is_device_array
from mpidist.arrays.dtypes import Array, DType, reduction_dtypes
from mpidist.collectives import Communicator, FinishedWork, Work
from mpidist.collectives.gpu.nccl import nccl_problem
from mpidist.core.options import CallOptions, CommunicationOptions, ReduceOp
from mpidist.core.text import parse_device
from mpidist.cross_device_ops import local_values
from mpidist.cross_device_ops.local_nccl import LocalAllReduce
from mpidist.cross_device_ops.local_values import AccumulationFn, destination_devices, divided
from mpidist.values import IndexedSlices, Mirrored, PerReplica, ReplicaValues
from mpidist.values.indexed_slices import concatenate
from mpidist.values.placement import place_at, place_of

_log = logging.getLogger("mpidist")
# The names of the steps on a rank, and of the step between ranks.
_ON_A_RANK = ("reduce_implementation", "batch_reduce_implementation")
_BETWEEN_RANKS = "between_ranks_implementation"
_ARGUMENTS = "reduce_op, arrays, divisor, options, structure"

# Values of replicas, and the destination of each result.
Pairs: TypeAlias = Sequence[tuple[ReplicaValues, object]]


class CrossDeviceOps:
    """Reduces and copies values across devices and ranks (tf.distribute.CrossDeviceOps).

    To change how the values of a rank's replicas are combined, override ``reduce_implementation`` or
    ``batch_reduce_implementation``, as in TensorFlow. Strategies of several ranks also need
    ``between_ranks_implementation``, an extension that combines the results of the ranks. These methods are not called
    for IndexedSlices, or for a single replica in all.

    Args:
        comm: The ranks to combine. A strategy sets its own. By default only the replicas of this rank are combined.

    Raises:
        TypeError: The class overrides the step on a rank and not the one between ranks, and there are several.

    >>> class Clipped(CrossDeviceOps):
    ...     def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
    ...         clipped = PerReplica([np.clip(value, -1, 1) for value in per_replica_value.values])
    ...         return super().reduce_implementation(reduce_op, clipped, destinations, options)
    ...
    ...     def between_ranks_implementation(self, reduce_op, arrays, divisor, options, structure=""):
    ...         return super().between_ranks_implementation(reduce_op, arrays, divisor, options, structure)
    >>> Clipped().reduce("SUM", PerReplica((3.0, 0.5)), "cpu:0")
    np.float64(1.5)
    """

    algorithm: str | None = None
    """Algorithm between ranks; None leaves the choice to the communicator."""
    device_algorithm: str | None = None
    """The same for arrays on devices."""
    # Defaults of the options of each call.
    _options: CommunicationOptions | None = None

    def __init__(self, comm: Communicator | None = None) -> None:
        self._comm = comm
        self._num_replicas: int | None = None
        self._is_bound = False
        self._on_gpus = False
        self._has_own_steps = bool(_own(type(self), *_ON_A_RANK, _BETWEEN_RANKS))
        _check_steps(type(self), comm)

    def bind(self, comm: Communicator | None, num_replicas: int, devices: Sequence[str] = ()) -> None:
        """Attach to the ranks of a strategy, unless the object has its own.

        Raises:
            ValueError: It is attached to another strategy already.
            TypeError: As for the class.
        """
        _check_steps(type(self), comm)
        if self._is_bound and self._comm is not comm:
            raise ValueError(f"this {type(self).__name__} belongs to another strategy; make one for each strategy")
        self._on_gpus = bool(devices) and all(parse_device(device).kind == "gpu" for device in devices)
        if self._comm is None:
            self._comm = comm
            self._num_replicas = num_replicas
            self._is_bound = comm is not None

    def __repr__(self) -> str:
        replicas = "no strategy yet" if self._num_replicas is None else f"{self._num_replicas} replicas"
        return f"<{type(self).__name__} of {replicas if self._comm is None else self._comm}>"

    # What users call ----------------------------------------------------------------------------------------

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        per_replica_value: object,
        destinations: object,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Combine the values of all replicas on ``destinations`` (collective over the ranks).

        Args:
            reduce_op: The operation, or its name.
            per_replica_value: A PerReplica of arrays, numbers or IndexedSlices, or the value of a single replica.
            destinations: Variable, distributed value, array or device string.
            options: Packing, deadline and algorithm.

        Returns:
            A Mirrored with a copy per destination, or the bare value for a single destination.

        Raises:
            ValueError: Unknown operation or destination, or replicas that differ in shape or dtype.

        >>> CrossDeviceOps().reduce("SUM", PerReplica((1.0, 2.0)), "cpu:0")
        np.float64(3.0)
        """
        return self.batch_reduce(reduce_op, [(per_replica_value, destinations)], options)[0]

    def batch_reduce(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Sequence[tuple[object, object]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Reduce many values in as few messages as ``options.bytes_per_pack`` allows (collective over the ranks).

        Returns the results in the order of the pairs; errors as in :meth:`reduce`.
        """
        op = ReduceOp.of(reduce_op)
        pairs = _check_pairs(value_destination_pairs)
        divisor = self._total_replicas(len(pairs[0][0].values)) if pairs and op is ReduceOp.MEAN else 1
        return self.reduce_pairs(op, pairs, divisor, options)

    def broadcast(self, tensor: object, destinations: object) -> Any:
        """Copy ``tensor`` to ``destinations`` of this rank."""
        destination_devices(destinations)
        return self.broadcast_implementation(tensor, destinations)

    # Extension points ---------------------------------------------------------------------------------------

    def reduce_implementation(
        self, reduce_op: ReduceOp, per_replica_value: PerReplica, destinations: object, options: CallOptions
    ) -> Any:
        """Combine the values of this rank's replicas and copy the result to ``destinations``.

        A strategy passes SUM for a MEAN: it divides once, by the number of all replicas.
        """
        arrays = self._gathered(per_replica_value, destinations)
        total = local_values.accumulate(arrays, reduce_op)
        if reduce_op is ReduceOp.MEAN:
            total = divided(total, len(arrays))
        return self.broadcast_implementation(total, destinations)

    def batch_reduce_implementation(
        self, reduce_op: ReduceOp, value_destination_pairs: Sequence[tuple[PerReplica, object]], options: CallOptions
    ) -> list[Any]:
        """Combine many values of this rank's replicas."""
        return [self.reduce_implementation(reduce_op, v, d, options) for v, d in value_destination_pairs]

    def broadcast_implementation(self, tensor: object, destinations: object) -> Any:
        """Return a copy of ``tensor`` for each destination of this rank."""
        return local_values.place(tensor, destination_devices(destinations))

    def between_ranks_implementation(
        self, reduce_op: ReduceOp, arrays: list[Array], divisor: int, options: CallOptions, structure: str = ""
    ) -> list[Array]:
        """Combine this rank's results with those of the other ranks (collective). Extension.

        Args:
            reduce_op: The operation, also MEAN.
            arrays: This rank's results, one array for each value.
            divisor: The number of replicas, by which a mean divides the sum over the ranks.
            options: Packing, deadline and algorithm.
            structure: Nest of the arrays, as text that the ranks compare. Pass it on.

        Returns:
            The totals, arrays of the same shapes and dtypes, the same on every rank.
        """
        assert self._comm is not None
        results = list(arrays)
        differ = self.device_algorithm != self.algorithm
        kinds = [is_device_array(array) if differ else False for array in arrays]
        for on_device in sorted(set(kinds)):
            indices = [i for i, kind in enumerate(kinds) if kind is on_device]
            own = self.with_algorithm(options, on_device)
            given = [arrays[i] for i in indices]
            totals = self._comm.reduce_arrays(reduce_op, given, divisor, options=own, note=structure)
            for i, total in zip(indices, totals, strict=True):
                results[i] = total
        return results

    # For strategies -----------------------------------------------------------------------------------------

    @property
    def leaves_all_to_engine(self) -> bool:
        """Whether the communicator's all-reduce is the whole reduction of ranks with one replica each."""
        return not self._has_own_steps and not (self._on_gpus and self.device_algorithm != self.algorithm)

    @property
    def ranks(self) -> Communicator | None:
        """The communicator of several ranks, or None."""
        return self._comm if self._comm is not None and self._comm.size > 1 else None

    def with_algorithm(self, options: CallOptions, on_device: bool = False) -> CallOptions:
        """Return ``options`` with the defaults of this object."""
        algorithm = self.device_algorithm if on_device else self.algorithm
        return _merged(algorithm, self._options, options)

    def reduce_pairs(
        self, op: ReduceOp, pairs: Pairs, divisor: int, options: CallOptions, structure: str = ""
    ) -> list[object]:
        """Reduce checked pairs. A mean divides by ``divisor``, and the ranks compare ``structure``."""
        results: list[object] = [None] * len(pairs)
        dense = [i for i, (value, _) in enumerate(pairs) if not isinstance(value.values[0], IndexedSlices)]
        if dense:
            batch = self._dense(op, [pairs[i] for i in dense], divisor, options, structure)
            for i, result in zip(dense, batch, strict=True):
                results[i] = result
        for i in sorted(set(range(len(pairs))) - set(dense)):
            value, destinations = pairs[i]
            total = self._sparse(op, value, divisor, options)
            results[i] = local_values.place(total, destination_devices(destinations))
        return results

    def reduce_pairs_async(
        self, op: ReduceOp, pairs: Pairs, divisor: int, options: CallOptions, structure: str = ""
    ) -> Work | FinishedWork:
        """Start :meth:`reduce_pairs`. Steps other than the communicator's are done at once."""
        has_sparse = any(isinstance(value.values[0], IndexedSlices) for value, _ in pairs)
        if self.ranks is None or not self.leaves_all_to_engine or has_sparse:
            return FinishedWork(self.reduce_pairs(op, pairs, divisor, options, structure))
        work: Work | FinishedWork = self._dense(op, pairs, divisor, options, structure, starts=True)
        return work

    def _dense(
        self, op: ReduceOp, pairs: Pairs, divisor: int, options: CallOptions, structure: str, starts: bool = False
    ) -> Any:
        """Return the results for dense values. With ``starts``, the communicator starts, and a handle is returned."""
        comm = self.ranks
        replicas, dtypes = self._of_replicas(op, pairs)
        are_on_host = not any(is_device_array(array) for arrays in replicas for array in arrays)
        if comm is not None and self.leaves_all_to_engine and (are_on_host or starts):
            arrays, *more = replicas if are_on_host else [self._combined(op, replicas, pairs, options)]
            own = self.with_algorithm(options)
            if starts:
                work = comm.reduce_arrays_async(op, arrays, divisor, options=own, note=structure, more=more)
                return work.then(lambda totals: _delivered(pairs, [[total] for total in totals], dtypes))
            totals = comm.reduce_arrays(op, arrays, divisor, options=own, note=structure, more=more)
            return _delivered(pairs, [[total] for total in totals], dtypes)
        by_device = self._among_devices(op, replicas, options) if comm is None and not self._has_own_steps else []
        totals = self._combined(op, replicas, pairs, options) if not by_device else []
        if comm is not None:
            totals = self.between_ranks_implementation(op, totals, divisor, options, structure)
        by_device = by_device or [[total] for total in totals]
        if comm is None and op is ReduceOp.MEAN:
            by_device = [[divided(total, divisor) for total in copies] for copies in by_device]
        return _delivered(pairs, by_device, dtypes)

    def _among_devices(self, op: ReduceOp, replicas: list[list[Array]], options: CallOptions) -> list[list[Array]]:
        """Return totals on all devices of this process, if the class can reduce between them."""
        return []

    def _of_replicas(self, op: ReduceOp, pairs: Pairs) -> tuple[list[list[Array]], list[DType]]:
        """Return each replica's arrays in the dtype of the sum, and the dtypes of results."""
        with self._shared_errors("the values of its replicas"):
            local: list[list[Array]] = []
            dtypes = []
            for value, _ in pairs:
                arrays = [to_array(component) for component in value.values]
                local_values.check_alike(arrays)
                dtypes.append(reduction_dtypes(arrays[0].dtype, op)[1])
                local.append([local_values.formed(array, op) for array in arrays])
            return [list(arrays) for arrays in zip(*local, strict=True)] or [[]], dtypes

    def _combined(self, op: ReduceOp, replicas: list[list[Array]], pairs: Pairs, options: CallOptions) -> list[Array]:
        """Return the combined arrays of this rank's replicas."""
        if len(replicas) == 1 and not self._has_own_steps:
            return replicas[0]
        with self._shared_errors("the values of its replicas"):
            values = [PerReplica(arrays, pairs[0][0].replica_ids) for arrays in zip(*replicas, strict=True)]
            to_first = [(value, local_values.device_of(value.values[0])) for value in values]
            # The mean divides once, at the end, by the number of all replicas.
            local_op = ReduceOp.SUM if op is ReduceOp.MEAN else op
            reduced = self.batch_reduce_implementation(local_op, to_first, options)
            return [to_array(r.values[0] if isinstance(r, ReplicaValues) else r) for r in reduced]

    def _gathered(self, value: ReplicaValues, destinations: object) -> list[Array]:
        """Return copies of the arrays of this rank's replicas at the first destination."""
        where = place_at(destination_devices(destinations)[0])
        return [where.brings(to_array(array)) for array in value.values]

    def _sparse(self, op: ReduceOp, value: ReplicaValues, divisor: int, options: CallOptions) -> IndexedSlices:
        with self._shared_errors("the IndexedSlices of its replicas"):
            if op not in (ReduceOp.SUM, ReduceOp.MEAN):
                raise NotImplementedError(f"{op.name} of IndexedSlices is not offered; expected SUM or MEAN")
            slices = concatenate(value.values)
        if self.ranks is not None:
            note = f"IndexedSlices of {slices.dense_shape}"
            wide = place_of(slices.indices).casts(slices.indices, np.dtype(np.int64))
            values, indices = self.ranks.gather_arrays([slices.values, wide], 0, options=options, note=note)
            slices = IndexedSlices(values, indices, slices.dense_shape)
        if op is ReduceOp.MEAN:
            result = reduction_dtypes(slices.dtype, op)[1]
            mean = place_of(slices.values).casts(divided(slices.values, divisor), result)
            slices = IndexedSlices(mean, slices.indices, slices.dense_shape)
        return slices

    def _total_replicas(self, local: int) -> int:
        if self.ranks is None:
            return local
        if self._num_replicas is None:
            self._num_replicas = int(self.ranks.all_reduce(ReduceOp.SUM, local))
        return self._num_replicas

    def close(self) -> None:
        """Free the resources of devices. A strategy closes the object that it was given."""

    def _shared_errors(self, doing: str) -> AbstractContextManager[None]:
        return nullcontext() if self.ranks is None else self.ranks.shared_errors(doing)


class AllReduceCrossDeviceOps(CrossDeviceOps):
    """All-reduce of packed arrays.

    Args:
        num_packs: 0 sends every array in a message of its own. Other numbers pack arrays, in as many messages as
            ``CommunicationOptions.bytes_per_pack`` allows.
        comm: See ``CrossDeviceOps``.

    Raises:
        ValueError: ``num_packs`` is negative.
    """

    def __init__(self, num_packs: int = 1, comm: Communicator | None = None) -> None:
        if num_packs < 0:
            raise ValueError(f"num_packs is {num_packs}; expected 0 (no packing) or more")
        super().__init__(comm)
        self.num_packs = num_packs
        if num_packs == 0:
            self._options = CommunicationOptions(bytes_per_pack=1)


class HierarchicalCopyAllReduce(AllReduceCrossDeviceOps):
    """Reduces inside each node, then between the nodes (tf.distribute.HierarchicalCopyAllReduce).

    Args:
        num_packs: See ``AllReduceCrossDeviceOps``.
        comm: See ``CrossDeviceOps``.
    """

    algorithm = device_algorithm = "hierarchical"


class NcclAllReduce(AllReduceCrossDeviceOps):
    """All-reduce by NCCL between GPUs (tf.distribute.NcclAllReduce). Arrays in host memory are reduced by MPI.

    A strategy of several ranks and CPUs warns about that when it is created.

    Args:
        num_packs: See ``AllReduceCrossDeviceOps``.
        comm: See ``CrossDeviceOps``.
    """

    _local: LocalAllReduce | None = None

    def bind(self, comm: Communicator | None, num_replicas: int, devices: Sequence[str] = ()) -> None:
        """See ``CrossDeviceOps``."""
        super().bind(comm, num_replicas, devices)
        if comm is not None and not self._on_gpus:
            warnings.warn(
                f"NcclAllReduce was given to a strategy of {list(devices)}. NCCL cannot reduce arrays in host memory: "
                "they go by MPI. Use CollectiveAllReduce or HierarchicalCopyAllReduce for arrays on the CPU",
                stacklevel=2,
            )

    def close(self) -> None:
        """Free the NCCL communicator of this process's GPUs."""
        if self._local is not None:
            self._local.close()
            self._local = None

    def _among_devices(self, op: ReduceOp, replicas: list[list[Array]], options: CallOptions) -> list[list[Array]]:
        columns = [list(column) for column in zip(*replicas, strict=True)]
        # With ``deterministic``, the copies to one device are added in a fixed order.
        is_ordered = options is not None and options.deterministic
        if (
            len(replicas) > 1
            and not is_ordered
            and all(is_device_array(array) for column in columns for array in column)
        ):
            devices = [place_of(array).number for array in columns[0]]
            if self._local is None or self._local.devices != devices:
                self.close()
                self._local = LocalAllReduce(devices) if len(set(devices)) == len(devices) else None
            if self._local is not None and self._local.suits(columns, op):
                return self._local.all_reduce(columns, op)
        return []


class CollectiveAllReduce(CrossDeviceOps):
    """All-reduce among the devices of all workers, by the algorithm that the communicator chooses.

    Args:
        devices: Devices of this worker.
        group_size: Replicas in sync, over all workers.
        options: Defaults for every reduction.
        comm: The workers. Without it, every worker must have as many devices as this one.

    Raises:
        ValueError: ``group_size`` is no multiple of the number of devices.
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
        self._num_replicas, self._options = group_size, options

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


class ReductionToOneDevice(CrossDeviceOps):
    """Reduces on one device and on one rank, then copies (tf.distribute.ReductionToOneDevice).

    Between ranks it uses MPI_Reduce to rank 0, then MPI_Bcast. Arrays on devices pass through host memory.

    Args:
        reduce_to_device: Device of the addition; the first destination by default.
        accumulation_fn: Returns the sum of a list of all replicas' arrays, instead of addition. It runs on every rank,
            with the arrays of all ranks.
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
        self._has_own_steps |= accumulation_fn is not None

    def reduce_implementation(
        self, reduce_op: ReduceOp, per_replica_value: PerReplica, destinations: object, options: CallOptions
    ) -> Any:
        """See ``CrossDeviceOps``."""
        arrays = self._gathered(per_replica_value, destinations)
        if len(arrays) == 1 or not self._accumulates(reduce_op):
            return super().reduce_implementation(reduce_op, per_replica_value, destinations, options)
        return self.broadcast_implementation(self._accumulated(reduce_op, arrays, len(arrays)), destinations)

    def between_ranks_implementation(
        self, reduce_op: ReduceOp, arrays: list[Array], divisor: int, options: CallOptions, structure: str = ""
    ) -> list[Array]:
        """See ``CrossDeviceOps``."""
        if not self._accumulates(reduce_op):
            return super().between_ranks_implementation(reduce_op, arrays, divisor, options, structure)
        assert self._comm is not None
        stacks = self._comm.gather_arrays([array[np.newaxis] for array in arrays], 0, options=options, note=structure)
        return [self._accumulated(reduce_op, list(stack), divisor) for stack in stacks]

    def _accumulates(self, op: ReduceOp) -> bool:
        return self.accumulation_fn is not None and op in (ReduceOp.SUM, ReduceOp.MEAN)

    def _accumulated(self, op: ReduceOp, arrays: list[Array], divisor: int) -> Array:
        assert self.accumulation_fn is not None
        with place_of(arrays[0]).current():
            total = to_array(self.accumulation_fn(arrays))
        return divided(total, divisor) if op is ReduceOp.MEAN else total

    def _gathered(self, value: ReplicaValues, destinations: object) -> list[Array]:
        return super()._gathered(value, self.reduce_to_device or destinations)


def select_cross_device_ops(devices: Sequence[str], num_replicas: int, comm: Communicator | None) -> CrossDeviceOps:
    """Return ``CollectiveAllReduce`` for several ranks, ``NcclAllReduce`` for GPUs, else ``ReductionToOneDevice``.

    If NCCL is missing for several GPUs, a warning is logged.
    """
    if comm is not None and comm.size > 1:
        return CollectiveAllReduce(devices, num_replicas, comm=comm)
    if len(devices) > 1 and all(parse_device(device).kind == "gpu" for device in devices):
        problem = nccl_problem()
        if problem is None:
            return NcclAllReduce(num_packs=1)
        _log.warning("mpidist: %s. Until then the GPUs %s are reduced by copies", problem, list(devices))
    return ReductionToOneDevice()


@lru_cache(maxsize=256)
def _merged(algorithm: str | None, defaults: CommunicationOptions | None, options: CallOptions) -> CallOptions:
    """Return ``options``, merged into ``defaults`` and the algorithm of a class."""
    if algorithm is not None:
        defaults = CommunicationOptions(algorithm=algorithm).merge(defaults)
    return options if defaults is None else defaults.merge(options)


def _unchanged(array: Any) -> Any:
    return array


def _delivered(pairs: Pairs, totals: Sequence[Sequence[Array]], dtypes: Sequence[DType]) -> list[object]:
    """Return totals in their final dtype and kind on their destinations."""
    results = []
    for (value, destinations), copies, dtype in zip(pairs, totals, dtypes, strict=True):
        finals = []
        for total in copies:
            # The caller gets an array of its own, never one of the inputs.
            is_input = any(_share_memory(total, to_array(component)) for component in value.values)
            here = place_of(total)
            finals.append(here.copies(total) if is_input and total.dtype == dtype else here.casts(total, dtype))
        restore = restorer(value.values[0]) or _unchanged
        devices = destination_devices(destinations)
        if len(finals) == 1:
            results.append(local_values.place(restore(finals[0]), devices))
            continue
        on = {place_of(array).device: array for array in finals}
        parts = [restore(on.pop(d) if d in on else local_values.put(finals[0], d, copies=True)) for d in devices]
        results.append(parts[0] if len(parts) == 1 else Mirrored(parts))
    return results


def _share_memory(one: Array, other: Array) -> bool:
    return place_of(one) == place_of(other) and np.may_share_memory(one, other)


def _check_pairs(pairs: object) -> list[tuple[ReplicaValues, object]]:
    if not isinstance(pairs, (list, tuple)) or any(not isinstance(p, (list, tuple)) or len(p) != 2 for p in pairs):
        raise ValueError(f"value_destination_pairs is {pairs!r}; expected a list of (value, destinations) tuples")
    for _, destinations in pairs:
        destination_devices(destinations)
    checked = [(v if isinstance(v, ReplicaValues) else PerReplica((v,)), destinations) for v, destinations in pairs]
    counts = {len(value.values) for value, _ in checked}
    if len(counts) > 1:
        raise ValueError(
            f"the values of one batch come from {sorted(counts)} replicas; expected all on the same devices"
        )
    return checked


def _own(kind: type, *steps: str) -> list[str]:
    """Return the steps that a class outside of mpidist overrides. Classes of mpidist set ``_has_own_steps``."""
    return [step for step in steps if not getattr(kind, step).__module__.startswith("mpidist.")]


def _check_steps(kind: type, comm: Communicator | None) -> None:
    """Raise TypeError if a class of several ranks replaces only the step on one.

    It would work on one rank, and be ignored if each rank has one replica.
    """
    on_a_rank = _own(kind, *_ON_A_RANK)
    if comm is not None and comm.size > 1 and on_a_rank and not _own(kind, _BETWEEN_RANKS):
        raise TypeError(
            f"{kind.__name__} overrides {on_a_rank[0]}, which combines the replicas of one rank, and not "
            f"{_BETWEEN_RANKS}, which combines the results of the {comm.size} ranks. Expected both: def "
            f"{_BETWEEN_RANKS}(self, {_ARGUMENTS}=''), which returns super().{_BETWEEN_RANKS}({_ARGUMENTS}) for a "
            "plain sum"
        )
