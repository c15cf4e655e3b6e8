"""CrossDeviceOps: the base of all reduction classes, with their checks and the order of steps.

A reduction has two levels. The values of this rank's replicas are combined by ``reduce_implementation``, which
a subclass may replace as in TensorFlow; the results of the ranks are then combined by ``between_ranks_implementation``:
by the collectives engine, with the algorithm that the subclass names, unless it replaces that, too. The total is copied
to the destinations.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import numpy as np

from mpidist.arrays.convert import restorer, to_array
from mpidist.arrays.device_ops import is_device_array
from mpidist.arrays.dtypes import Array, DType, reduction_dtypes
from mpidist.collectives import Communicator, FinishedWork, Work
from mpidist.core.options import CallOptions, CommunicationOptions, ReduceOp
from mpidist.core.text import parse_device
from mpidist.cross_device_ops import local_values
from mpidist.values import IndexedSlices, PerReplica, ReplicaValues
from mpidist.values.indexed_slices import concatenate
from mpidist.values.placement import place_at, place_of

# The two names of the step on a rank.
_ON_A_RANK = ("reduce_implementation", "batch_reduce_implementation")
_BETWEEN_RANKS = "between_ranks_implementation"
_ARGUMENTS = "reduce_op, arrays, divisor, options, structure"

# Values of replicas, and where the result of each is to be.
Pairs: TypeAlias = Sequence[tuple[ReplicaValues, object]]

_FORCED_OPTIONS: dict[tuple[str, CommunicationOptions | None], CommunicationOptions] = {}


class CrossDeviceOps:
    """Reduces and copies values across devices and ranks (tf.distribute.CrossDeviceOps).

    A class of your own overrides ``reduce_implementation`` or ``batch_reduce_implementation``, which combine the values
    of a rank's replicas, as in TensorFlow, where there are no others. To be used by several ranks it says also how
    their results are combined: by ``between_ranks_implementation``, an extension. Neither is called for IndexedSlices,
    nor where there is one replica in all.

    Args:
        comm: The ranks to combine; a strategy that is given the object puts in its own. Without one, only the
            replicas of this rank are combined.

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
    """Algorithm of the engine between ranks; None leaves the choice to the engine."""
    device_algorithm: str | None = None
    """The same for arrays on devices."""

    def __init__(self, comm: Communicator | None = None) -> None:
        self._comm = comm
        self._num_replicas: int | None = None
        self._is_bound = False
        self._on_gpus = False
        self._has_own_steps = _has_own_steps(type(self))
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
            per_replica_value: A PerReplica of arrays, numbers or IndexedSlices, or one such as the value of a
                single replica.
            destinations: Variable, distributed value, array or device string.
            options: Packing, deadline and algorithm.

        Returns:
            Mirrored with a copy per destination, or the bare value for a single destination.

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
        local_values.destination_devices(destinations)
        return self.broadcast_implementation(tensor, destinations)

    # Extension points ---------------------------------------------------------------------------------------

    def reduce_implementation(
        self, reduce_op: ReduceOp, per_replica_value: PerReplica, destinations: object, options: CallOptions
    ) -> Any:
        """Combine the values of this rank's replicas and put the result on ``destinations``.

        Under a strategy ``reduce_op`` is SUM where MEAN was asked for: the mean is taken once, over all replicas.
        """
        arrays = self._gathered(per_replica_value, destinations)
        total = local_values.accumulate(arrays, reduce_op)
        if reduce_op is ReduceOp.MEAN:
            total = local_values.divided(total, len(arrays))
        return self.broadcast_implementation(total, destinations)

    def batch_reduce_implementation(
        self, reduce_op: ReduceOp, value_destination_pairs: Sequence[tuple[PerReplica, object]], options: CallOptions
    ) -> list[Any]:
        """Combine many values of this rank's replicas."""
        return [self.reduce_implementation(reduce_op, v, d, options) for v, d in value_destination_pairs]

    def broadcast_implementation(self, tensor: object, destinations: object) -> Any:
        """Return a copy of ``tensor`` for each destination of this rank."""
        return local_values.place(tensor, local_values.destination_devices(destinations))

    def _gathered(self, value: ReplicaValues, destinations: object) -> list[Array]:
        """Return the arrays of this rank's replicas, brought to the first destination."""
        where = place_at(local_values.destination_devices(destinations)[0])
        return [where.brings(to_array(array)) for array in value.values]

    def between_ranks_implementation(
        self, reduce_op: ReduceOp, arrays: list[Array], divisor: int, options: CallOptions, structure: str = ""
    ) -> list[Array]:
        """Combine this rank's results with those of the other ranks (collective). Extension.

        Args:
            reduce_op: The operation; MEAN here, where it was asked for.
            arrays: This rank's results, one array for each value.
            divisor: The number of replicas, by which a mean divides the sum over the ranks.
            options: Packing, deadline and algorithm.
            structure: The text of the nest of the arrays, on which all ranks must agree; hand it on.

        Returns:
            The totals, arrays of the same shapes and dtypes, the same on every rank.
        """
        op = reduce_op
        if self.device_algorithm == self.algorithm:
            return self._by_engine(op, arrays, divisor, self.with_algorithm(options), structure)
        results = list(arrays)
        for on_device in (False, True):
            indices = [i for i, array in enumerate(arrays) if is_device_array(array) is on_device]
            if indices:
                own = self.with_algorithm(options, on_device)
                totals = self._by_engine(op, [arrays[i] for i in indices], divisor, own, structure)
                for i, total in zip(indices, totals, strict=True):
                    results[i] = total
        return results

    def _by_engine(
        self, op: ReduceOp, arrays: list[Array], divisor: int, options: CallOptions, structure: str
    ) -> list[Array]:
        assert self._comm is not None
        return self._comm.reduce_arrays(op, arrays, divisor, options=options, note=structure)

    # For the strategies -------------------------------------------------------------------------------------

    @property
    def leaves_all_to_engine(self) -> bool:
        """Whether nothing but the engine's all-reduce happens, if every rank has one replica."""
        return not self._has_own_steps and self._is_plain()

    def _is_plain(self) -> bool:
        """Return whether the steps of this class amount to the engine's all-reduce."""
        return True

    @property
    def ranks(self) -> Communicator | None:
        """The communicator where other ranks take part, otherwise None."""
        return self._comm if self._comm is not None and self._comm.size > 1 else None

    def reduce_pairs(
        self, op: ReduceOp, pairs: Pairs, divisor: int, options: CallOptions, structure: str = ""
    ) -> list[object]:
        """Reduce checked pairs; a mean divides by ``divisor``. Dense and sparse values travel apart.

        ``structure`` describes the nest that the values come from, which all ranks must agree on.
        """
        results: list[object] = [None] * len(pairs)
        sparse = [i for i, (v, _) in enumerate(pairs) if isinstance(v.values[0], IndexedSlices)]
        dense = [i for i in range(len(pairs)) if i not in set(sparse)]
        if dense:
            batch = self._dense(op, [pairs[i] for i in dense], divisor, options, structure)
            for i, result in zip(dense, batch, strict=True):
                results[i] = result
        for i in sparse:
            value, destinations = pairs[i]
            total = self._sparse(op, value, divisor, options)
            results[i] = local_values.place(total, local_values.destination_devices(destinations))
        return results

    def reduce_pairs_async(
        self, op: ReduceOp, pairs: Pairs, divisor: int, options: CallOptions, structure: str = ""
    ) -> Work | FinishedWork:
        """Start :meth:`reduce_pairs`. Steps beside the engine's are done at once."""
        comm, has_sparse = self.ranks, any(isinstance(value.values[0], IndexedSlices) for value, _ in pairs)
        if comm is None or not self.leaves_all_to_engine or has_sparse:
            return FinishedWork(self.reduce_pairs(op, pairs, divisor, options, structure))
        replicas, dtypes = self._of_replicas(op, pairs)
        reduced, *more = replicas if _are_on_host(replicas) else [self._combined(op, replicas, pairs, options)]
        work = comm.reduce_arrays_async(
            op, reduced, divisor, options=self.with_algorithm(options), note=structure, more=more
        )
        return work.then(lambda totals: self._delivered(pairs, totals, dtypes))

    def _dense(self, op: ReduceOp, pairs: Pairs, divisor: int, options: CallOptions, structure: str) -> list[object]:
        comm = self.ranks
        if comm is None and not self._has_own_steps:
            found = self._among_devices(op, pairs, divisor, options)
            if found is not None:
                return found
        replicas, dtypes = self._of_replicas(op, pairs)
        if comm is not None and self.leaves_all_to_engine and _are_on_host(replicas):
            arrays, *more = replicas
            totals = comm.reduce_arrays(
                op, arrays, divisor, options=self.with_algorithm(options), note=structure, more=more
            )
            return self._delivered(pairs, totals, dtypes)
        totals = self._combined(op, replicas, pairs, options)
        if comm is not None:
            totals = self.between_ranks_implementation(op, totals, divisor, options, structure)
        elif op is ReduceOp.MEAN:
            totals = [local_values.divided(total, divisor) for total in totals]
        return self._delivered(pairs, totals, dtypes)

    def _among_devices(self, op: ReduceOp, pairs: Pairs, divisor: int, options: CallOptions) -> list[object] | None:
        """Return the results on all devices of this process, or None.

        A class overrides it that has a way from all devices to all.
        """
        return None

    def _of_replicas(self, op: ReduceOp, pairs: Pairs) -> tuple[list[list[Array]], list[DType]]:
        """Return the arrays of each replica of this rank, and the dtypes of the results.

        Arrays have the dtype in which ``op`` is formed.
        """
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
        """Return the arrays of this rank's replicas combined."""
        if len(replicas) == 1 and not self._has_own_steps:
            return replicas[0]
        with self._shared_errors("the values of its replicas"):
            values = [PerReplica(arrays, pairs[0][0].replica_ids) for arrays in zip(*replicas, strict=True)]
            to_first = [(value, local_values.device_of(value.values[0])) for value in values]
            # The mean is taken once, at the end, over all replicas.
            local_op = ReduceOp.SUM if op is ReduceOp.MEAN else op
            reduced = self.batch_reduce_implementation(local_op, to_first, options)
            return [to_array(r.values[0] if isinstance(r, ReplicaValues) else r) for r in reduced]

    def _delivered(self, pairs: Pairs, totals: Sequence[Array], dtypes: Sequence[DType]) -> list[object]:
        """Return the totals in their final dtype and kind, on their destinations."""
        results = []
        for (value, destinations), total, dtype in zip(pairs, totals, dtypes, strict=True):
            # The caller gets an array of its own, never one of the inputs.
            is_input = any(_share_memory(total, to_array(component)) for component in value.values)
            here = place_of(total)
            own = here.copies(total) if is_input and total.dtype == dtype else here.casts(total, dtype)
            restore = restorer(value.values[0])
            results.append(
                local_values.place(
                    own if restore is None else restore(own), local_values.destination_devices(destinations)
                )
            )
        return results

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
            mean = place_of(slices.values).casts(local_values.divided(slices.values, divisor), result)
            slices = IndexedSlices(mean, slices.indices, slices.dense_shape)
        return slices

    def _total_replicas(self, local: int) -> int:
        if self.ranks is None:
            return local
        if self._num_replicas is None:
            self._num_replicas = int(self.ranks.all_reduce(ReduceOp.SUM, local))
        return self._num_replicas

    def with_algorithm(self, options: CallOptions, on_device: bool = False) -> CallOptions:
        """Return ``options`` with this class's algorithm, unless the caller forces one."""
        algorithm = self.device_algorithm if on_device else self.algorithm
        if algorithm is None or (options is not None and options.algorithm is not None):
            return options
        key = (algorithm, options)
        if key not in _FORCED_OPTIONS:
            _FORCED_OPTIONS[key] = CommunicationOptions(algorithm=algorithm).merge(options)
        return _FORCED_OPTIONS[key]

    def close(self) -> None:
        """Free the resources of devices.

        A strategy closes the object that it was given.
        """

    def _shared_errors(self, doing: str) -> AbstractContextManager[None]:
        return nullcontext() if self.ranks is None else self.ranks.shared_errors(doing)


def _are_on_host(replicas: Sequence[Sequence[Array]]) -> bool:
    return not any(is_device_array(array) for arrays in replicas for array in arrays)


def _check_pairs(pairs: object) -> list[tuple[ReplicaValues, object]]:
    if not isinstance(pairs, (list, tuple)) or any(not isinstance(p, (list, tuple)) or len(p) != 2 for p in pairs):
        raise ValueError(f"value_destination_pairs is {pairs!r}; expected a list of (value, destinations) tuples")
    checked = []
    for value, destinations in pairs:
        local_values.destination_devices(destinations)
        checked.append((value if isinstance(value, ReplicaValues) else PerReplica((value,)), destinations))
    counts = {len(value.values) for value, _ in checked}
    if len(counts) > 1:
        raise ValueError(
            f"the values of one batch come from {sorted(counts)} replicas; expected all on the same devices"
        )
    return checked


def _share_memory(one: Array, other: Array) -> bool:
    return place_of(one) == place_of(other) and np.may_share_memory(one, other)


def _has_own_steps(kind: type) -> bool:
    """Return whether a class replaces steps of a base that defines ``_is_plain`` for its own."""
    return _place_of_first(kind, *_ON_A_RANK, _BETWEEN_RANKS) < _place_of_first(kind, "_is_plain")


def _check_steps(kind: type, comm: Communicator | None) -> None:
    """Raise TypeError where a class of several ranks replaces only the step on one.

    It would work on one rank, and be passed by without a word where each rank has one replica.
    """
    ours = _place_of_first(kind, *_ON_A_RANK)
    if comm is None or comm.size == 1 or ours >= _place_of_first(kind, _BETWEEN_RANKS):
        return
    name = next(name for name in _ON_A_RANK if name in kind.__mro__[ours].__dict__)
    raise TypeError(
        f"{kind.__name__} overrides {name}, which combines the replicas of one rank, and not {_BETWEEN_RANKS}, which "
        f"combines the results of the ranks, of which there are {comm.size}. Expected both: def {_BETWEEN_RANKS}(self, "
        f"{_ARGUMENTS}=''), which returns super().{_BETWEEN_RANKS}({_ARGUMENTS}) where a plain sum is right"
    )


def _place_of_first(kind: type, *names: str) -> int:
    """Return the index in the MRO of the first class that defines one of ``names``."""
    return next(i for i, base in enumerate(kind.__mro__) if not base.__dict__.keys().isdisjoint(names))
