"""Planner: makes the operations of one communicator from lists of arrays, with cached plans."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from io import BytesIO
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from mpidist.arrays.convert import graph_error
from mpidist.arrays.device_ops import gpu_ops, is_device_array, ops_of
from mpidist.arrays.dtypes import Array
from mpidist.collectives.channel.channel import Channel
from mpidist.collectives.channel.operation import (
    Description,
    FastCall,
    Operation,
    Signature,
    describe,
    signature_of,
    signature_text,
    which_on_device,
)
from mpidist.collectives.engine import Engine
from mpidist.collectives.move.move import MovePlan, Outs, check_expected, check_has_axis, cut_rows
from mpidist.collectives.mpi.waiting import Steps
from mpidist.collectives.reading import Given, check_writable, deliver
from mpidist.collectives.reduce.finite import checked
from mpidist.collectives.reduce.plan import ReductionPlan
from mpidist.collectives.reduce.registry import check_options, gpu_names
from mpidist.core import settings
from mpidist.core.nest import flat_kind
from mpidist.core.options import CommunicationOptions, ReduceOp, check_communication_options

# Programs without arrays on GPUs do not import the modules for them.
if TYPE_CHECKING:
    from mpidist.collectives.gpu.device_move import BringBack, DeviceMovement
    from mpidist.collectives.gpu.device_streams import DeviceCall

T = TypeVar("T")
P = TypeVar("P", ReductionPlan, MovePlan)
Options = CommunicationOptions | None

# The cache is cleared at this size, so that a program with ever new shapes does not grow. Plans are cheap to remake.
_MOST_PLANS = 1024
# Values of ``flat_kind``.
_FLAT_KINDS = 3
_BYTES = np.dtype(np.uint8)


class Planner:
    """Checks the arguments of calls, chooses host or device, and makes operations.

    ``options`` are the defaults of each call.
    """

    def __init__(self, channel: Channel, engine: Engine, options: CommunicationOptions) -> None:
        self.options = options
        self._channel, self._engine = channel, engine
        self._plans: dict[tuple[object, ...], Any] = {}
        self._checks_nan = settings.CHECK_NAN.read()
        self._kinds: dict[str, int] = {}

    # Reductions -------------------------------------------------------------------------------------------------

    def all_reduce(
        self,
        op: ReduceOp | str,
        given: Given[T],
        divisor: int,
        options: Options,
        more: Sequence[Sequence[Array]] = (),
    ) -> Operation[T]:
        """Return an all-reduce. ``more`` are the arrays of further replicas of this rank."""
        plan = self._reduction_plan("all_reduce", op, given, divisor, options)
        arrays, outs = given.arrays, given.outs
        if outs is not None:
            _check_out(plan, outs)
        call = None
        if plan.on_device:
            from mpidist.collectives.gpu.device_streams import DeviceCall

            choice = self._engine.choice_for("all_reduce", arrays if outs is None else [*arrays, *outs])
            inputs = {index: arrays[index] for index, is_on_device in enumerate(plan.on_device) if is_on_device}
            packs, seconds = choice.packs_of(plan), self._seconds(options)
            call = DeviceCall(choice.streams, seconds, inputs, plan.result_signature, outs, packs)
        steps = self._checked(
            plan, given, [arrays, *more], self._engine.all_reduce(plan, arrays, outs, call, more), call
        )
        operation = self._operation(steps, plan.description, options, call)
        may_be_fast = options is None and plan.may_be_short and not self._checks_nan
        if may_be_fast and divisor == self._channel.size and not more:
            kind = self.kind_of(given.structure)
            cached = list(arrays) if kind or len(arrays) > 1 else arrays[0]
            if kind is not None:
                operation.fast_call = FastCall("all_reduce", cached, given.signature, plan.op, plan.divisor, kind)
        return operation.then(given.rebuild)

    def kind_of(self, structure: str) -> int | None:
        """Return the fast path's number of a structure, or None after too many structures."""
        kind = self._kinds.get(structure)
        if kind is None and len(self._kinds) < _MOST_PLANS:
            flat = flat_kind(structure)
            kind = self._kinds[structure] = len(self._kinds) + _FLAT_KINDS if flat is None else flat
        return kind

    def reduce(self, op: ReduceOp | str, given: Given[T], root: int, options: Options) -> Operation[T]:
        """Return a reduction to ``root``. Results of other ranks are None."""
        root, is_root = self.check_root(root), root == self._channel.rank
        here, bring_back = _on_host(given)
        plan = self._reduction_plan(
            "reduce", op, here, self._channel.size, options, root=root, is_copy=here is not given
        )
        steps = self._checked(plan, given, [here.arrays], self._engine.reduce_to(plan, here.arrays, root))
        operation = self._operation(steps, plan.description, options)
        return _finishing(operation, bring_back, given) if is_root else operation.then(_nothing)

    def reduce_scatter(
        self, op: ReduceOp | str, given: Given[T], counts: Sequence[int] | None, options: Options
    ) -> Operation[T]:
        """Return a reduction of an array. Each rank keeps its own rows of the result."""
        name, rank, size = "reduce_scatter", self._channel.rank, self._channel.size
        (array,), ((shape, _),) = given.arrays, given.signature
        check_has_axis(array.ndim, 0, name)
        rows = cut_rows(len(array), size, counts)
        on_device = self._moved_on_device(name, given, options)
        if on_device is not None and counts is None:
            plan = self._reduction_plan(name, op, given, size, options)
            if self._engine.scatters_on_device(plan):
                shape = (rows[rank + 1] - rows[rank], *shape[1:])
                result = (math.prod(shape),), plan.result_dtypes[0]
                call = self._movement_call(name, given.arrays, given.arrays, (result,), options, plan)
                steps = self._checked(plan, given, [given.arrays], on_device.reduce_scatter(plan, call), call)
                operation = self._operation(steps, plan.description, options, call)
                return _finishing(operation, lambda flats: [flats[0].reshape(shape)], given)
        here, bring_back = _on_host(given)
        note = "" if counts is None else f"parts of {list(counts)} rows"
        plan = self._reduction_plan(name, op, here, size, options, note, is_copy=here is not given)
        outs = _in_host_memory(given)
        steps = self._engine.reduce_scatter(plan, here.arrays[0], rows, outs[0] if outs else None)
        steps = self._checked(plan, given, [here.arrays], steps)
        operation = self._operation(steps, plan.description, options)
        if options is None and counts is None and plan.may_be_short and not self._checks_nan:
            operation.fast_call = FastCall(name, array, given.signature, plan.op, plan.divisor)
        return _finishing(operation, bring_back, given)

    # Movement ---------------------------------------------------------------------------------------------------

    def move(
        self,
        name: str,
        given: Given[T],
        options: Options,
        *,
        axis: int = 0,
        root: int | None = None,
        counts: Sequence[int] | None = None,
        expected: Sequence[int] | None = None,
    ) -> Operation[T]:
        """Return an all_gather, broadcast, gather, scatter or all_to_all.

        ``root`` is the only rank that sends, or receives. ``counts`` are the rows for each rank, equal by default.
        ``expected`` are the rows that this rank expects from each rank.
        """
        if root is not None:
            root = self.check_root(root)
        if given.outs is not None and len(given.outs) != len(given.arrays):
            raise ValueError(f"out has {len(given.outs)} arrays; expected {len(given.arrays)}, as the value has")
        is_broadcast = name == "broadcast"
        on_device = self._moved_on_device(name, given, options) if is_broadcast or name == "all_gather" else None
        more = " on GPUs" if on_device is not None else "" if expected is None else " with expected rows"
        facts = given.signature, given.structure, axis, root, more
        plan = self._cached(lambda: MovePlan(self._channel, name, *facts), name, *facts)
        arrays, bring_back = given.arrays, None
        if on_device is not None:
            known = given.signature if is_broadcast else ()
            call = self._movement_call(name, arrays, plan.moved(arrays), known, options)
            steps = on_device.broadcast(plan, call) if is_broadcast else on_device.all_gather(plan, call)
            return _finishing(self._operation(steps, plan.description, options, call), None, given)
        awaited = None if expected is None else check_expected(expected, self._channel.size, given.outs or ())
        cuts = plan.equal_cuts if counts is None else plan.cut(counts)
        if given.on_device:
            from mpidist.collectives.gpu.device_move import on_host

            needed = [array[:0] for array in arrays] if cuts is not None and not plan.sends else arrays
            arrays, bring_back = on_host(needed)
        steps = self._engine.on_host.move(plan, arrays, _in_host_memory(given), cuts, awaited)
        operation = self._operation(steps, plan.description, options)
        if not plan.receives:
            return operation.then(_nothing)
        has_defaults = options is None and axis == 0 and counts is None and expected is None and not given.on_device
        if has_defaults and name not in ("gather", "scatter") and len(arrays) == 1 and not given.structure:
            operation.fast_call = FastCall(name, given.arrays[0], given.signature, root=root or 0)
        return _finishing(operation, bring_back, given)

    def gather_objects(self, value: T, note: str) -> Operation[list[T]]:
        """Return a gather of the picklable objects of all ranks."""

        def make() -> MovePlan:
            plan = MovePlan(self._channel, "all_gather_object", (((0,), _BYTES),))
            plan.description = describe("all_gather_object", note, operation="all_gather_object")
            return plan

        def unpickled(results: list[Array]) -> list[T]:
            stream = BytesIO(results[0].data)
            return [pickle.load(stream) for _ in range(self._channel.size)]

        pickled = np.frombuffer(pickle.dumps(value), np.uint8)
        plan = self._cached(make, "all_gather_object", note)
        return self._operation(self._engine.on_host.move(plan, [pickled]), plan.description, None).then(unpickled)

    def meeting(self, description: Description, options: Options = None) -> Operation[None]:
        """Return an operation that waits for all ranks."""
        return self._operation(self._channel.open(description), description, options)

    def after_meeting(self, description: Description, steps: Steps[T]) -> Operation[T]:
        """Return an operation that waits for all ranks, and then runs ``steps``."""
        return self._operation(_in_turn(self._channel.open(description), steps), description, None)

    # GPUs -------------------------------------------------------------------------------------------------------

    def prepare_device(self, kind: str, device: int) -> None:
        """Make the algorithms for arrays on a device, while memory is free (collective)."""
        if not _excludes_nccl(self.options):
            self._prepare_device(kind, device, describe("preparing to reduce arrays on GPUs"))

    def _prepare_device(self, kind: str, device: int, description: Description) -> None:
        choice = self._engine.choice_on(kind, device)
        self._channel.run(Operation(self._engine.prepare_device(choice, description), description))

    def _moved_on_device(self, name: str, given: Given[T], options: Options) -> DeviceMovement | None:
        """Return the movement of these arrays by NCCL, or None for host memory."""
        if not given.on_device:
            return None
        engine, arrays = self._engine, given.arrays
        check_communication_options(options)
        for array in arrays:
            if is_device_array(array) and gpu_ops().current_stream(gpu_ops().device_of(array)).is_capturing:
                raise graph_error(name)
        if _excludes_nccl(self.options.merge(options)) or not engine.may_move_on_device(arrays):
            return None
        if not engine.is_device_prepared:
            # All ranks must know whether NCCL works, and has a network, before any of them decides.
            ops = ops_of(arrays[0])
            why = describe(name, "arrays on GPUs, which NCCL moves where all ranks have them there (cupy.asarray)")
            self._prepare_device(ops.kind, ops.device_of(arrays[0]), why)
        return engine.on_device

    def _movement_call(
        self,
        name: str,
        arrays: Sequence[Array],
        sent: Sequence[Array],
        results: Signature,
        options: Options,
        plan: ReductionPlan | None = None,
    ) -> DeviceCall:
        """Return a call on a device, with memory for results of known shape."""
        from mpidist.collectives.gpu.device_streams import DeviceCall

        choice = self._engine.choice_for(name, arrays)
        packs = () if plan is None else choice.packs_of(plan)
        return DeviceCall(choice.streams, self._seconds(options), dict(enumerate(sent)), results, packs=packs)

    # Operations, plans and checks -------------------------------------------------------------------------------

    def _operation(
        self, steps: Steps[T], description: Description, options: Options, call: DeviceCall | None = None
    ) -> Operation[T]:
        operation = Operation(steps, description, None if options is None else self.timeout_of(options))
        if call is not None:
            operation.add(call.join)
            operation.release, operation.before_return = call.leave, call.wait_here
        return operation

    def _checked(
        self,
        plan: ReductionPlan,
        given: Given[Any],
        contributed: Sequence[Sequence[Array]],
        steps: Steps[T],
        call: DeviceCall | None = None,
    ) -> Steps[T]:
        """Return the steps of a reduction, with the check that ``MPIDIST_CHECK_NAN=1`` asks for."""
        if not self._checks_nan:
            return steps
        on = () if call is None else (call.streams.on(), call.streams.stream)
        return checked(self._channel.comm, plan.description.text, given.structure, contributed, steps, on)

    def _reduction_plan(
        self,
        name: str,
        op: ReduceOp | str,
        given: Given[T],
        divisor: int,
        options: Options,
        note: str = "",
        *,
        root: int | None = None,
        is_copy: bool = False,
    ) -> ReductionPlan:
        """Return the plan of a reduction. Copies of arrays on a GPU may use any algorithm."""
        check_communication_options(options)
        op, signature, on_device, note = ReduceOp.of(op), given.signature, given.on_device, note or given.structure

        def make() -> ReductionPlan:
            merged = self.options.merge(options)
            check_options(merged)
            if is_copy and merged.algorithm in gpu_names():
                merged = replace(merged, algorithm=None)
            by_core = self._engine.core is not None
            return ReductionPlan(name, op, signature, merged, divisor, on_device, note, root, by_core)

        return self._cached(make, name, op, divisor, signature, on_device, options, note, root, is_copy)

    def _cached(self, make: Callable[[], P], *key: object) -> P:
        """Return the cached plan for a key, or the new one of ``make``."""
        plan: P | None = self._plans.get(key)
        if plan is None:
            plan = make()
            if len(self._plans) == _MOST_PLANS:
                self._plans.clear()
            self._plans[key] = plan
        return plan

    def check_root(self, root: int) -> int:
        """Return ``root`` as an int. Raises ValueError unless it is a rank."""
        if not isinstance(root, (int, np.integer)) or not 0 <= root < self._channel.size:
            raise ValueError(f"root is {root!r}; expected a rank from 0 to {self._channel.size - 1}")
        return int(root)

    def timeout_of(self, options: Options) -> float | None:
        """Return the timeout of a call, or None for the timeout of the communicator."""
        check_communication_options(options)
        return None if options is None else options.timeout_seconds

    def _seconds(self, options: Options) -> float:
        return self.timeout_of(options) or self._channel.timeout


def _excludes_nccl(options: CommunicationOptions) -> bool:
    return options.algorithm not in (None, "nccl", "hierarchical") or options.deterministic


def _check_out(plan: ReductionPlan, out: Sequence[Array]) -> None:
    given, on_device = signature_of(out), which_on_device(out)
    if (given, on_device) != (plan.result_signature, plan.on_device):
        expected = signature_text(plan.result_signature, plan.on_device)
        raise ValueError(f"out has {signature_text(given, on_device)}; expected {expected}, as the result has")
    check_writable(out)


def _in_host_memory(given: Given[T]) -> Outs:
    """Return the arrays for results, or None if they are on a GPU."""
    return given.outs if given.outs and not which_on_device(given.outs) else None


def _on_host(given: Given[T]) -> tuple[Given[T], BringBack | None]:
    """Return the arrays in host memory, and a function that brings results back."""
    if not given.on_device:
        return given, None
    from mpidist.collectives.gpu.device_move import on_host

    copies, bring_back = on_host(given.arrays)
    return Given(copies, given.structure, given.rebuild), bring_back


def _finishing(operation: Operation[list[Array]], convert: BringBack | None, given: Given[T]) -> Operation[T]:
    """Convert the results of an operation, deliver them, and make them like the value."""
    if convert is not None:
        operation.add(convert)
    if given.outs is not None:
        operation.add(partial(deliver, given.outs))
    return operation.then(given.rebuild)


def _nothing(_: object) -> Any:
    return None


def _in_turn(first: Steps[None], then: Steps[T]) -> Steps[T]:
    yield from first
    return (yield from then)
