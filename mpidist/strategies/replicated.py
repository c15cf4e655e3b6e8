"""ReplicatedExtended: replicas on one or several ranks, with a copy of each variable.

MirroredStrategy and MultiWorkerMirroredStrategy differ only in which ranks take part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np

from mpidist.arrays.convert import to_array
from mpidist.arrays.dtypes import Array
from mpidist.cluster_resolver import ClusterResolver
from mpidist.collectives import Communicator, FinishedWork, PartOfWork, Work
from mpidist.collectives.reading import restore
from mpidist.core import nest
from mpidist.core.context import Args, Kwargs, current_frame, may_cross_replicas
from mpidist.core.errors import DeviceError
from mpidist.core.options import CallOptions, CommunicationOptions, ReduceOp, check_communication_options
from mpidist.cross_device_ops import CrossDeviceOps, Pairs, select_cross_device_ops
from mpidist.input import InputWorkers
from mpidist.strategies.base import ReplicaContext, Strategy, Value
from mpidist.strategies.replica_devices import agreed_devices
from mpidist.strategies.replica_threads import ReplicaThreads
from mpidist.strategies.strategy_extended import Result, StrategyExtended
from mpidist.strategies.value_checks import outputs_for
from mpidist.values import IndexedSlices, Variable, select_replica
from mpidist.values.placement import place_at
from mpidist.values.synchronization import make_variable

# Values that the fast path may reduce, whose results are arrays or NumPy numbers.
_FAST_KINDS = (np.ndarray, float, int, np.float32, np.float64, np.int64)


class ReplicatedExtended(StrategyExtended):
    """Replicas in sync.

    Args:
        strategy: The strategy it belongs to.
        devices: Devices of this rank's replicas; None for its share of the GPUs, or the CPU.
        comm: The ranks that take part; None for this process alone. Closed with the strategy.
        cross_device_ops: How values are reduced; chosen by :func:`select_cross_device_ops` by default.
        cluster_resolver: The value of ``strategy.cluster_resolver``.
        allows_per_replica_input: Whether input may be made per replica.
    """

    local_replica_ids: tuple[int, ...] = ()
    worker_devices: tuple[str, ...] = ()
    # The all-reduce of the fast path, if each rank has one replica and nothing else forms the sums.
    _fast: Callable[..., Array | None] | None = None

    def __init__(
        self,
        strategy: Strategy,
        devices: tuple[str, ...] | None,
        comm: Communicator | None,
        cross_device_ops: CrossDeviceOps | None = None,
        cluster_resolver: ClusterResolver | None = None,
        allows_per_replica_input: bool = False,
    ) -> None:
        super().__init__(strategy, comm)
        try:
            devices, counts, all_have_gpus = agreed_devices(devices, comm)
        except DeviceError:  # raised on all ranks together
            if comm is not None:
                comm.close()
            raise
        self.worker_devices = devices
        self._workers = InputWorkers(len(counts), comm.rank if comm else 0, counts, comm, sum(counts) > 1, devices)
        self.local_replica_ids = self._workers.local_replica_ids
        self._places = [place_at(device) for device in devices]
        self.first_gpu = next((place for place in self._places if not place.is_host), None)
        if self.first_gpu is not None:
            self.first_gpu.settle()
        self.cluster_resolver = cluster_resolver
        self.allows_per_replica_input = allows_per_replica_input
        self._ops = cross_device_ops or select_cross_device_ops(devices, self.num_replicas_in_sync, comm)
        try:
            self._ops.bind(comm, self.num_replicas_in_sync, devices)
        except (TypeError, ValueError):
            if comm is not None:
                comm.close()
            raise
        if comm is not None and all_have_gpus:
            # Before the model takes the memory of the GPUs.
            comm.prepare_device("gpu", self._places[0].number)
        self._contexts = [ReplicaContext(strategy, global_id, i) for i, global_id in enumerate(self.local_replica_ids)]
        if comm is not None and max(counts) == 1 and self._ops.leaves_all_to_engine:
            self._contexts = [LoneReplicaContext(strategy, comm, self._ops)]
            if self._ops.with_algorithm(None) is None:
                self._fast = comm.fast.all_reduce
        self.threads = ReplicaThreads([context.frame for context in self._contexts], self._places)

    def input_workers(self) -> InputWorkers:
        """See ``StrategyExtended``."""
        return self._workers

    def create_variable(self, array: Array, **properties: Any) -> Variable:
        """See ``StrategyExtended``."""
        kind = f"{properties['synchronization'].name}/{properties['aggregation'].name}"
        (array,) = self.broadcast([array], 0, f"variable {properties['name']!r} {kind}")
        return make_variable(self.strategy, self.worker_devices, array, **properties)

    def run_replicas(self, fn: Callable[..., Result], args: Args, kwargs: Kwargs) -> list[Result]:
        """See ``StrategyExtended``."""
        if len(self._contexts) > 1:
            arguments = [(select_replica(i, args), select_replica(i, kwargs)) for i in range(len(self._contexts))]
            return self.threads.run(self, fn, arguments)
        if self.first_gpu is None:
            return [self._contexts[0].call(fn, args, kwargs)]
        with self.first_gpu.current():
            return [self._contexts[0].call(fn, args, kwargs)]

    def reduce(self, op: ReduceOp, pairs: Pairs, divisor: int, options: CallOptions, note: str) -> list[object]:
        """See ``StrategyExtended``."""
        return self._ops.reduce_pairs(op, pairs, divisor, options, note)

    def reduce_fast(self, reduce_op: ReduceOp | str, value: Value) -> Value | None:
        """See ``StrategyExtended``."""
        if self._fast is None or type(value) not in _FAST_KINDS or not may_cross_replicas(self.strategy):
            return None
        result = self._fast(reduce_op, np.asarray(value), None, 0)
        return cast(Value, result[()]) if result is not None and result.ndim == 0 else cast("Value | None", result)

    def reduce_async(
        self, op: ReduceOp, pairs: Pairs, divisor: int, options: CallOptions, note: str
    ) -> Work | FinishedWork:
        """See ``StrategyExtended``."""
        return self._ops.reduce_pairs_async(op, pairs, divisor, options, note)

    def copy_to(self, value: object, destinations: object) -> Any:
        """See ``StrategyExtended``."""
        return self._ops.broadcast(value, destinations)

    def gather(self, arrays: list[Array], axis: int, options: CallOptions, note: str) -> list[Array]:
        """See ``StrategyExtended``."""
        comm = self.communicator
        return arrays if comm is None else comm.gather_arrays(arrays, axis, options=options, note=note)

    def broadcast(self, arrays: list[Array], root: int, note: str) -> list[Array]:
        """See ``StrategyExtended``."""
        return arrays if self.communicator is None else self.communicator.broadcast_arrays(arrays, root, note=note)

    def copy_for(self, strategy: Strategy) -> StrategyExtended:
        """See ``StrategyExtended``."""
        if self.communicator is not None or self.cluster_resolver is not None:
            raise ValueError(
                f"{type(self.strategy).__name__} cannot be copied, since it owns a communicator; build a new one on "
                "every rank"
            )
        allows = self.allows_per_replica_input
        return type(self)(strategy, self.worker_devices, None, self._ops, allows_per_replica_input=allows)

    def close(self) -> None:
        """See ``StrategyExtended``."""
        self.threads.close()
        self._ops.close()
        self._fast = None
        super().close()


class LoneReplicaContext(ReplicaContext):
    """The only replica of its rank, as on all other ranks.

    The collectives form its sums without further steps.

    Args:
        strategy: The strategy that runs the replica.
        comm: The ranks.
        ops: Says which options go with a reduction.
    """

    def __init__(self, strategy: Strategy, comm: Communicator, ops: CrossDeviceOps) -> None:
        super().__init__(strategy, comm.rank)
        self._comm, self._ops, self._options = comm, ops, ops.with_algorithm(None)

    def all_reduce(
        self,
        reduce_op: ReduceOp | str,
        value: Value,
        options: CommunicationOptions | None = None,
        *,
        out: object = None,
    ) -> Value:
        """See ``ReplicaContext``."""
        if options is None and self._options is None and current_frame() is self.frame:
            result: Value | None = self._comm.fast.all_reduce(reduce_op, value, out, None)
            if result is not None:
                return result if out is None else cast(Value, out)
        return super().all_reduce(reduce_op, value, options, out=out)

    def sums_of(self, like: dict[str, object]) -> Callable[[list[Array]], list[Array]] | None:
        """See ``ReplicaContext``."""
        note, size, options = nest.describe(like), self._comm.size, self._options
        return lambda arrays: self._comm.reduce_arrays(ReduceOp.SUM, arrays, size, options=options, note=note)

    def all_reduce_async(
        self,
        reduce_op: ReduceOp | str,
        value: object,
        options: CommunicationOptions | None = None,
        *,
        out: object = None,
    ) -> Work | PartOfWork | FinishedWork:
        """See ``ReplicaContext``; an array is reduced in place where it is ``out`` as well."""
        if type(out) is not np.ndarray or value is not out or current_frame() is not self.frame:
            return super().all_reduce_async(reduce_op, value, options, out=out)
        check_communication_options(options)
        options = self._options if options is None else self._ops.with_algorithm(options)
        return self._comm.all_reduce_async(reduce_op, value, options, out=out)

    def _all_reduce(
        self, op: ReduceOp, value: object, leaves: Sequence[object], options: CallOptions, out: object
    ) -> Any:
        if any([isinstance(leaf, IndexedSlices) for leaf in leaves]):
            return super()._all_reduce(op, value, leaves, options, out)
        try:
            arrays = [to_array(leaf) for leaf in leaves]
            outs = None if out is None else outputs_for(value, out)
        except (TypeError, ValueError) as error:
            self._comm.announce(error, f"{op.name} of its values")
            raise
        is_leaf = len(leaves) == 1 and leaves[0] is value
        results = self._comm.reduce_arrays(
            op,
            arrays,
            self._comm.size,
            options=self._options if options is None else self._ops.with_algorithm(options),
            out=outs,
            note="" if is_leaf else nest.describe(value),
        )
        if out is not None:
            return out
        if any(array is not leaf for array, leaf in zip(arrays, leaves, strict=True)):
            results = list(map(restore, leaves, results))
        return results[0] if is_leaf else nest.pack_like(value, results)
