"""ReplicatedExtended: several replicas, on this rank, on several ranks or both; a copy of each variable per replica.

MirroredStrategy and MultiWorkerMirroredStrategy differ only in which ranks take part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from mpidist.arrays.convert import Array, to_array
from mpidist.cluster_resolver import ClusterResolver
from mpidist.collectives import Communicator, FinishedWork, PartOfWork, Work
from mpidist.collectives.watch.step_agreement import StepAgreement
from mpidist.core import nest
from mpidist.core.context import pop, push
from mpidist.core.enums import ReduceOp
from mpidist.core.errors import DeviceError
from mpidist.core.options import CommunicationOptions
from mpidist.cross_device_ops import CrossDeviceOps, select_cross_device_ops
from mpidist.cross_device_ops.destinations import destination_devices
from mpidist.cross_device_ops.destinations import place as place_values
from mpidist.input import InputWorkers, distribute_dataset, distribute_from_function, distribute_values
from mpidist.strategies.devices import agreed_devices
from mpidist.strategies.extended import StrategyExtended, is_on_read
from mpidist.strategies.leaves import (
    check_can_gather,
    check_can_reduce,
    check_out,
    concatenated,
    copied,
    copy_into,
    outputs_for,
    restored,
)
from mpidist.strategies.replica_context import ReplicaContext
from mpidist.strategies.replica_threads import ReplicaThreads
from mpidist.strategies.replica_work import finished_work, replica_works
from mpidist.strategies.shared_inputs import check_gradients_apart, check_results_apart
from mpidist.strategies.single_replica import empty_on, plain_call
from mpidist.strategies.strategy import Strategy
from mpidist.values import IndexedSlices, Mirrored, PerReplica, ReplicaValues, Variable, select_replica
from mpidist.values.placement import place_at, place_of
from mpidist.values.variable import initial_array, make_variable


class ReplicatedExtended(StrategyExtended):
    """Replicas in sync.

    Args:
        strategy: The strategy it belongs to.
        devices: Devices of this rank's replicas; None for its share of the GPUs, or the CPU.
        comm: The ranks that take part; None for this process alone. Closed with the strategy.
        cross_device_ops: How values are reduced; chosen by :func:`select_cross_device_ops` by default.
        options: Defaults of the communication.
        cluster_resolver: What ``strategy.cluster_resolver`` returns.
        allows_per_replica_input: Whether input may be made per replica.
    """

    def __init__(
        self,
        strategy: Strategy,
        devices: tuple[str, ...] | None,
        comm: Communicator | None,
        cross_device_ops: CrossDeviceOps | None = None,
        options: CommunicationOptions | None = None,
        cluster_resolver: ClusterResolver | None = None,
        allows_per_replica_input: bool = False,
    ) -> None:
        super().__init__(strategy)
        try:
            devices, self._replica_counts, all_have_gpus = agreed_devices(devices, comm)
        except DeviceError:  # raised on all ranks together
            if comm is not None:
                comm.close()
            raise
        self._devices = devices
        self._places = [place_at(device) for device in devices]
        self._first_gpu = next((place for place in self._places if not place.is_host), None)
        if self._first_gpu is not None:
            self._first_gpu.settle()
        self._comm = comm
        self._cluster_resolver = cluster_resolver
        self._allows_per_replica_input = allows_per_replica_input
        rank = comm.rank if comm else 0
        first = sum(self._replica_counts[:rank])
        self._ids = tuple(range(first, first + len(devices)))
        self._total = sum(self._replica_counts)
        self._wraps_lone_replica = len(set(self._replica_counts)) > 1
        self._contexts = [ReplicaContext(strategy, global_id, i) for i, global_id in enumerate(self._ids)]
        self._threads = ReplicaThreads(self._contexts, self._places)
        self._ops = cross_device_ops or select_cross_device_ops(devices, self._total, comm, options)
        try:
            self._ops.bind(comm, self._total, devices)
        except (TypeError, ValueError):
            if comm is not None:
                comm.close()
            raise
        if comm is not None and all_have_gpus:
            # Before the model takes the memory of the GPUs.
            comm.prepare_device("gpu", self._places[0].number)
        # Whether an all-reduce of dense values is the engine's call and nothing else.
        self._takes_short_way = (
            comm is not None and len(devices) == 1 and not self._wraps_lone_replica and self._ops.leaves_all_to_engine
        )

    # Facts ----------------------------------------------------------------------------------------------------

    @property
    def _num_replicas_in_sync(self) -> int:
        return self._total

    @property
    def local_replica_ids(self) -> tuple[int, ...]:
        """See ``StrategyExtended``."""
        return self._ids

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """See ``StrategyExtended``."""
        return self._devices

    @property
    def should_checkpoint(self) -> bool:
        """Whether this is the first of the strategy's ranks."""
        return self._comm is None or self._comm.rank == 0

    def _in_multi_worker_mode(self) -> bool:
        return self._comm is not None

    # Running --------------------------------------------------------------------------------------------------

    def _call_for_each_replica(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any] | None) -> Any:
        try:
            if len(self._contexts) > 1:
                return self._run_threads(fn, tuple(args), kwargs or {})
            frame = self._contexts[0]._frame
            push(frame)
            try:
                if self._first_gpu is None:
                    result = plain_call(fn, args, kwargs)
                else:
                    with self._places[0].current():
                        result = plain_call(fn, args, kwargs)
            finally:
                pop(frame)
        except Exception as error:
            # If the caller goes on, the other ranks must not pair this rank's next step with their present one.
            self._announce(error, "the function given to run()")
            raise
        return self._per_replica([result]) if self._wraps_lone_replica else result

    def _run_threads(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        arguments = [(select_replica(i, args), select_replica(i, kwargs)) for i in range(len(self._contexts))]
        return self._per_replica(self._threads.run(self._strategy, fn, arguments))

    # Variables ------------------------------------------------------------------------------------------------

    def _create_variable(self, **kwargs: Any) -> Variable:
        name, dtype, shape = kwargs["name"], kwargs.pop("dtype"), kwargs.pop("shape")
        with self._shared_errors(f"creating variable {name!r}"):
            array = initial_array(kwargs["initial_value"], dtype, shape, kwargs["aggregation"])
        if self._comm is not None:
            kind = f"{kwargs['synchronization'].name}/{kwargs['aggregation'].name}"
            array = self._comm.broadcast_arrays([array], 0, note=f"variable {name!r} {kind}")[0]
        return make_variable(self._strategy, self._devices, array, **kwargs)

    # Reductions -----------------------------------------------------------------------------------------------

    def _batch_reduce_to(
        self,
        op: ReduceOp,
        pairs: Sequence[tuple[Any, Any]],
        options: CommunicationOptions | None,
        structure: str = "",
    ) -> list[Any]:
        results: list[Any] = [None] * len(pairs)
        by_divisor: dict[int, list[int]] = {}
        values: list[Any] = []
        for i, (value, destinations) in enumerate(pairs):
            with self._shared_errors(f"{op.name} of its values"):
                value = self._as_contribution(op, value)
            values.append(value)
            if isinstance(value, PerReplica) and self._total > 1:
                # A plain value counts once per rank, a PerReplica once per replica.
                is_plain = not isinstance(pairs[i][0], (ReplicaValues, Variable))
                divisor = len(self._replica_counts) if is_plain else self._total
                by_divisor.setdefault(divisor, []).append(i)
            else:
                own = value.values[0] if isinstance(value, ReplicaValues) else value
                with self._shared_errors(f"{op.name} of its values"):
                    check_can_reduce([own], op)
                results[i] = self._ops.broadcast(own, destinations)
        with self._shared_errors(f"{op.name} of its values"):
            check_gradients_apart([value for value in values if isinstance(value, PerReplica)])
        for divisor, indices in by_divisor.items():
            batch = [(values[i], pairs[i][1]) for i in indices]
            reduced = self._ops.reduce_pairs(op, batch, divisor, options, structure)
            for i, result in zip(indices, reduced, strict=True):
                results[i] = result
        return results

    def _as_contribution(self, op: ReduceOp, value: Any) -> Any:
        """Return the PerReplica that takes part in a reduction, or the value that is its own result."""
        value = self._distributed(value)
        if isinstance(value, Mirrored):
            if op in (ReduceOp.SUM, ReduceOp.PROD) and self._total > 1:
                raise ValueError(
                    f"{op.name} of a Mirrored value, which is equal on all {self._total} replicas, is ambiguous; "
                    "use MEAN for the value itself, or multiply it by strategy.num_replicas_in_sync"
                )
            return value
        if isinstance(value, ReplicaValues):
            if len(value.values) != len(self._ids):
                raise ValueError(
                    f"a value of {len(value.values)} replicas was given to {type(self._strategy).__name__}, which has "
                    f"{len(self._ids)} on this rank; expected what strategy.run() of this strategy returned"
                )
            return value if isinstance(value, PerReplica) else PerReplica(value.values, value.replica_ids)
        if self._comm is not None:
            return PerReplica((value,), self._ids[:1])
        return self._reduce_plain(op, value)

    def _distributed(self, value: Any) -> Any:
        """Return the components of a variable as a distributed value; other values unchanged."""
        if not isinstance(value, Variable):
            return value
        copies = [component.value() for component in value.values]
        return PerReplica(copies, self._ids) if is_on_read(value) else Mirrored(copies, self._ids)

    def _reduce_plain(self, op: ReduceOp, value: Any) -> Any:
        if op in (ReduceOp.SUM, ReduceOp.PROD) and self._total > 1:
            array = None if isinstance(value, IndexedSlices) else to_array(value)
            is_zero = array is not None and op is ReduceOp.SUM and not array.any()
            if not is_zero:
                raise ValueError(
                    f"{op.name} of a value that is not distributed, {value!r}, over {self._total} replicas is "
                    "ambiguous; pass what strategy.run() returned, use MEAN for the value itself, or multiply it"
                )
        return value

    def _gather_to_implementation(
        self, leaves: Sequence[Any], axis: int, structure: str, options: CommunicationOptions | None = None
    ) -> list[Any]:
        local: list[Array] = []
        samples = []
        with self._shared_errors("gathering the values of its replicas"):
            for leaf in map(self._distributed, leaves):
                parts = leaf.values if isinstance(leaf, ReplicaValues) else (leaf,)
                check_can_gather(parts[0], axis, "gather()")
                first = place_of(to_array(parts[0]))
                with first.current():
                    local.append(concatenated([first.brings(to_array(part)) for part in parts], axis))
                samples.append(parts[0])
        if self._comm is not None:
            local = self._comm.gather_arrays(local, axis, options=options, note=structure)
        return [restored(sample, array) for sample, array in zip(samples, local, strict=True)]

    def _gather_bytes(self, data: Array, doing: str) -> Array:
        return data if self._comm is None else self._comm.gather_arrays([data], 0, note=doing)[0]

    def _broadcast_to(self, tensor: Any, destinations: Any, root: int) -> Any:
        sent = self._broadcast_from(tensor, root)
        return nest.map_structure(lambda leaf: self._ops.broadcast(leaf, destinations), sent)

    def _broadcast_from_first(self, value: Any, doing: str = "") -> Any:
        return self._broadcast_from(value, 0, doing)

    def _broadcast_from(self, value: Any, root: int, doing: str = "") -> Any:
        if not 0 <= root < len(self._replica_counts):
            with self._shared_errors("broadcast_to()"):
                raise ValueError(f"root is {root}; expected a rank from 0 to {len(self._replica_counts) - 1}")
        if self._comm is None:
            return value
        leaves = nest.flatten(value)
        with self._shared_errors("broadcasting its values"):
            arrays = [to_array(leaf) for leaf in leaves]
        arrays = self._comm.broadcast_arrays(arrays, root, note=doing or nest.describe(value))
        return nest.pack_like(value, [restored(leaf, array) for leaf, array in zip(leaves, arrays, strict=True)])

    # In replica context ---------------------------------------------------------------------------------------

    def _replica_ctx_all_reduce(
        self, ctx: ReplicaContext, op: ReduceOp, value: Any, options: CommunicationOptions | None, out: Any
    ) -> Any:
        leaves = nest.flatten(value)
        if self._takes_short_way and not any([isinstance(leaf, IndexedSlices) for leaf in leaves]):
            return self._all_reduce_lone(op, value, leaves, options, out)
        self._check_values(leaves, op, value, out)
        if self._total == 1:
            return nest.map_structure(copied, value) if out is None else copy_into(out, value)

        def merged(_: Strategy, values: Any, outs: Any) -> Any:
            with self._shared_errors(f"{op.name} of its values"):
                check_results_apart(outs)
            return self._start_all_reduce(op, values, options).wait()

        reduced = ctx._meet(("all_reduce", op, options), merged, (value, out), {})
        return reduced if out is None else copy_into(out, reduced)

    def _check_values(self, leaves: list[Any], op: ReduceOp, value: Any, out: Any) -> None:
        with self._shared_errors(f"{op.name} of its values"):
            check_can_reduce(leaves, op)
            if out is not None:
                check_out(value, out, op, self._total)

    def _all_reduce_lone(
        self, op: ReduceOp, value: Any, leaves: list[Any], options: CommunicationOptions | None, out: Any
    ) -> Any:
        """All-reduce dense values where every rank has one replica: nothing but the engine's call."""
        assert self._comm is not None
        try:
            arrays = [to_array(leaf) for leaf in leaves]
            outs = None if out is None else outputs_for(value, out)
        except (TypeError, ValueError) as error:
            self._announce(error, f"{op.name} of its values")
            raise
        structure = "" if leaves and leaves[0] is value else nest.describe(value)
        results = self._comm.reduce_arrays(
            op, arrays, self._total, options=self._ops.with_algorithm(options), out=outs, note=structure
        )
        if out is not None:
            return out
        if structure == "":
            return restored(value, results[0])
        return nest.pack_like(value, [restored(a, b) for a, b in zip(leaves, results, strict=True)])

    def _replica_ctx_all_reduce_async(
        self, ctx: ReplicaContext, op: ReduceOp, value: Any, options: CommunicationOptions | None, out: Any
    ) -> Any:
        self._check_values(nest.flatten(value), op, value, out)
        if self._total == 1:
            return finished_work(nest.map_structure(copied, value), self._first_gpu)

        def merged(_: Strategy, values: Any, outs: Any) -> PerReplica:
            with self._shared_errors(f"{op.name} of its values"):
                check_results_apart(outs)
            return PerReplica(replica_works(self._start_all_reduce(op, values, options), self._places), self._ids)

        return ctx._meet(("all_reduce_async", op, options), merged, (value, out), {})

    def _start_all_reduce(
        self, op: ReduceOp, value: Any, options: CommunicationOptions | None
    ) -> Work | FinishedWork | PartOfWork:
        """Start reducing a nest of values; the work gives a nest of results for the local devices."""
        leaves = [
            leaf if isinstance(leaf, PerReplica) else PerReplica((leaf,), self._ids) for leaf in nest.flatten(value)
        ]
        with self._shared_errors(f"{op.name} of its values"):
            check_gradients_apart(leaves)
        structure = "" if isinstance(value, PerReplica) else nest.describe(value)
        # Results go where the values are: an array of the host stays there, also under a strategy of devices.
        pairs = [(leaf, leaf) for leaf in leaves]
        work = self._ops.reduce_pairs_async(op, pairs, self._total, options, structure)
        return PartOfWork(work, lambda results: nest.pack_like(value, results))

    def _replica_ctx_all_gather(
        self, ctx: ReplicaContext, value: Any, axis: int, options: CommunicationOptions | None
    ) -> Any:
        with self._shared_errors("gathering its values"):
            for leaf in nest.flatten(value):
                check_can_gather(leaf, axis, "all_gather()")

        def merged(_: Strategy, values: Any) -> Any:
            gathered = self._gather_to_implementation(nest.flatten(values), axis, nest.describe(values), options)
            copies = [
                place_values(array, destination_devices(leaf))
                for array, leaf in zip(gathered, nest.flatten(values), strict=True)
            ]
            return nest.pack_like(values, copies)

        return ctx._meet(("all_gather along axis", axis, options), merged, (value,), {})

    # Input ----------------------------------------------------------------------------------------------------

    def _input_workers(self) -> InputWorkers:
        return InputWorkers(
            num_workers=len(self._replica_counts),
            worker_id=self._comm.rank if self._comm else 0,
            replica_counts=self._replica_counts,
            communicator=self._comm,
            wrap=self._total > 1,
            devices=self._devices,
        )

    def _experimental_distribute_dataset(self, dataset: Any, options: Any) -> Any:
        return distribute_dataset(dataset, self._input_workers(), self._strategy, options)

    def _distribute_datasets_from_function(self, dataset_fn: Callable[..., Any], options: Any) -> Any:
        return distribute_from_function(
            dataset_fn,
            self._input_workers(),
            self._strategy,
            options,
            per_replica_allowed=self._allows_per_replica_input,
        )

    def _experimental_distribute_values_from_function(self, value_fn: Callable[..., Any]) -> Any:
        return distribute_values(value_fn, self._input_workers())

    # Housekeeping ---------------------------------------------------------------------------------------------

    def _empty(self, shape: int | Sequence[int], dtype: Any, device: str) -> Any:
        if self._comm is None or not place_at(device).is_host:
            return empty_on(device, shape, dtype)
        return self._comm.empty(shape, dtype)

    def _step_agreement(self) -> StepAgreement:
        return StepAgreement(None) if self._comm is None else self._comm.step_agreement()

    def _changing(self, label: str, what: str, checksum: Callable[[], int]) -> AbstractContextManager[None]:
        return nullcontext() if self._comm is None else self._comm.changing(label, what, checksum)

    def _done(self, label: str, what: str, checksum: Callable[[], int]) -> None:
        if self._comm is not None:
            self._comm.done(label, what, checksum())

    def _agree_on(self, text: Callable[[], str]) -> None:
        if self._comm is not None:
            self._comm.meet(text())

    def _shared_errors(self, doing: str) -> AbstractContextManager[None]:
        return nullcontext() if self._comm is None else self._comm.shared_errors(doing)

    def _announce(self, error: Exception, doing: str) -> None:
        if self._comm is not None:
            self._comm.announce(error, doing)

    def _copy_for(self, strategy: Strategy) -> StrategyExtended:
        if self._comm is not None or self._cluster_resolver is not None:
            raise ValueError(
                f"{type(self._strategy).__name__} cannot be copied, since it owns a communicator; build a new one on "
                "every rank"
            )
        return ReplicatedExtended(
            strategy, self._devices, None, self._ops, allows_per_replica_input=self._allows_per_replica_input
        )

    def _close(self) -> None:
        self._threads.close()
        self._ops.close()
        if self._comm is not None:
            self._comm.close()
