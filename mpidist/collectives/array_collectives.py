"""Collectives on lists of arrays: the base of Communicator, which strategies call."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeVar
from weakref import WeakMethod

import numpy as np

from mpidist.arrays.convert import graph_error
from mpidist.arrays.device_ops import gpu_ops, is_device_array, ops_of
from mpidist.arrays.dtypes import Array
from mpidist.collectives.channel.changes import LocalChanges
from mpidist.collectives.channel.channel import Channel
from mpidist.collectives.channel.mismatch import FOR_COMMUNICATORS, Advice
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
from mpidist.collectives.gpu.device_move import DeviceMovement, MovementCall, on_host
from mpidist.collectives.gpu.device_streams import DeviceCall, ReductionCall
from mpidist.collectives.move.move import BroadcastPlan, DealPlan, GatherPlan
from mpidist.collectives.mpi.waiting import Comm, Steps
from mpidist.collectives.node.core import Resume
from mpidist.collectives.observe.attach import observe_channel
from mpidist.collectives.reading import check_writable, delivering
from mpidist.collectives.reduce.plan import ReductionPlan
from mpidist.collectives.reduce.registry import Table, check_options, check_table, gpu_names
from mpidist.collectives.reduce.tuning_file import agreed_table
from mpidist.collectives.world_channel import world_channel
from mpidist.core.nest import flat_kind
from mpidist.core.options import CommunicationOptions, ReduceOp, check_communication_options
from mpidist.core.text import user_call_site
from mpidist.topology import import_mpi, world_topology

T = TypeVar("T")
P = TypeVar("P", ReductionPlan, GatherPlan, BroadcastPlan, DealPlan)

_DEFAULT_OPTIONS = CommunicationOptions()
# Plans are cheap to make again, and a program whose shapes change all the time must not grow.
_MOST_PLANS = 1024


class ArrayCollectives:
    """All-reduce, all-gather and broadcast of lists of arrays on a channel of its own (collective).

    Args:
        comm: An mpi4py intracommunicator; all ranks of the job by default.
        options: Defaults for every call.
        table: Algorithms by size; that of rank 0 counts. By default the one in ``MPIDIST_TUNING_FILE`` for these
            ranks, else the shipped one.
        owner: Name of the owner, for messages; equal on every rank.
        advice: Advice for errors.

    Raises:
        ValueError: The tuning file cannot be read or is wrong; on all ranks.
        MismatchError: Other ranks make something else.
    """

    def __init__(
        self,
        comm: Comm | None = None,
        *,
        options: CommunicationOptions | None = None,
        table: Table | None = None,
        owner: str = "Communicator",
        advice: Advice = FOR_COMMUNICATORS,
    ) -> None:
        check_communication_options(options)
        check_table(table)
        self._options = _DEFAULT_OPTIONS.merge(options)
        check_options(self._options)
        if comm is not None and not isinstance(comm, import_mpi().Intracomm):
            raise TypeError(f"comm is {comm!r}; expected an mpi4py intracommunicator, or None for all ranks")
        self._uses_world_channel = world_channel.agree_to_make(owner, comm)
        base = world_topology().world if comm is None else comm
        self._channel = Channel(base, self._options.timeout_seconds, owner, advice=advice)
        observe_channel(self._channel)
        self.rank: int = self._channel.rank
        self.size: int = self._channel.size
        self._plans: dict[Any, Any] = {}
        self._engine = Engine(self._channel, self._agreed_table(table))
        self.fast = self._engine.open_fast_calls(_weakly(self._resume))
        """The collectives of the fast path. They return None for calls of the general path."""

    @property
    def last_algorithm(self) -> str:
        """Name of the algorithm of the last all-reduce."""
        took_fast_path = self._channel.executor.fast.last() is not None
        return self._engine.core_algorithm if took_fast_path else self._engine.last_algorithm

    def _agreed_table(self, given: Table | None) -> Table:
        channel = self._channel
        steps = agreed_table(channel.comm, channel.node, given)
        agreeing: Operation[Table] = Operation(steps, describe("agreeing on the tuning table"))
        try:
            return channel.run(agreeing)
        except ValueError:
            self._close(lambda: None)
            raise

    # Running ----------------------------------------------------------------------------------------------------

    def _operation(
        self,
        steps: Steps[T],
        description: Description,
        options: CommunicationOptions | None,
        call: DeviceCall | None = None,
    ) -> Operation[T]:
        operation = Operation(steps, description, self._timeout_of(options))
        if call is not None:
            operation.add(call.join)
            operation.release, operation.before_return = call.leave, call.wait_here
        return operation

    def _run(self, operation: Operation[T]) -> T:
        """Run an operation and return its result."""
        try:
            return self._channel.run(operation)
        finally:
            if operation.release is not None:
                operation.release()

    def _start(self, operation: Operation[T]) -> Operation[T]:
        """Start an operation and return it as the handle."""
        try:
            return self._channel.start(operation)
        except BaseException:
            if operation.release is not None:
                operation.release()
            raise

    def _resume(self, number: int, state: int, value: Array, result: Array, out: Array | None) -> Array:
        """Finish a fast-path call whose peers are late or made another call."""
        description = self._channel.executor.fast.description(number)
        rest = Operation(self._engine.resume(description, state, value, result), description)
        rest.is_resumed = True
        # If ranks give unequal parts, the result is not the array that the fast path has prepared.
        (final,) = self._channel.run(rest.then(lambda found: [found]).then(delivering(None if out is None else [out])))
        return final

    # Reductions -------------------------------------------------------------------------------------------------

    def reduce_arrays(
        self,
        op: ReduceOp,
        arrays: Sequence[Array],
        divisor: int,
        *,
        options: CommunicationOptions | None = None,
        out: Sequence[Array] | None = None,
        note: str = "",
        more: Sequence[Sequence[Array]] = (),
    ) -> list[Array]:
        """All-reduce arrays; a mean is the sum divided by ``divisor`` (collective).

        ``more`` are the arrays of further replicas of this rank, in host memory. On one node, sums are formed in the
        order of ranks, and of replicas in each rank.
        """
        kind = flat_kind(note) if options is None and not more and divisor == self.size else None
        if kind is not None:
            is_one = len(arrays) == 1 and not kind and (out is None or len(out) == 1)
            given, outs = ([*arrays], out and [*out]) if not is_one else (arrays[0], out and out[0])
            result = self.fast.all_reduce(op, given, outs, kind)
            if result is not None:
                return [result] if is_one else list(result)
        return self._run(self._reduction(op, arrays, divisor, options, out, note, more))

    def reduce_arrays_async(
        self,
        op: ReduceOp,
        arrays: Sequence[Array],
        divisor: int,
        *,
        options: CommunicationOptions | None = None,
        out: Sequence[Array] | None = None,
        note: str = "",
        more: Sequence[Sequence[Array]] = (),
    ) -> Operation[list[Array]]:
        """Start :meth:`reduce_arrays` and return its handle (collective)."""
        return self._start(self._reduction(op, arrays, divisor, options, out, note, more))

    def _reduction(
        self,
        op: ReduceOp,
        arrays: Sequence[Array],
        divisor: int,
        options: CommunicationOptions | None,
        out: Sequence[Array] | None,
        note: str,
        more: Sequence[Sequence[Array]] = (),
    ) -> Operation[list[Array]]:
        plan = self._plan("all_reduce", op, arrays, divisor, options, note)
        if out is not None:
            self._check_out(plan, out)
        call = None
        if plan.on_device:
            with self.shared_errors("all_reduce"):
                choice = self._engine.choice_for("all_reduce", arrays if out is None else [*arrays, *out])
                seconds = self._timeout_of(options) or self._channel.timeout
                call = ReductionCall(plan, arrays, out, choice.packs_of(plan), choice.streams, seconds)
        steps = self._engine.all_reduce(plan, arrays, out, call, more)
        operation = self._operation(steps, plan.description, options, call)
        if options is None and plan.may_be_short and divisor == self.size and not more:
            kind = flat_kind(note) or 0
            given = list(arrays) if kind or len(arrays) > 1 else arrays[0]
            operation.fast_call = FastCall("all_reduce", given, signature_of(arrays), op, plan.divisor, kind)
        return operation

    def _check_out(self, plan: ReductionPlan, out: Sequence[Array]) -> None:
        given, on_device = signature_of(out), which_on_device(out)
        with self.shared_errors("checking out"):
            if given != plan.result_signature:
                raise ValueError(
                    f"out has {signature_text(given)}; expected {signature_text(plan.result_signature)}, as the result "
                    "has"
                )
            if on_device != plan.on_device:
                raise ValueError(
                    f"out has {signature_text(given, on_device)}; expected "
                    f"{signature_text(plan.result_signature, plan.on_device)}, where the values lie"
                )
            check_writable(out)

    # Movement ---------------------------------------------------------------------------------------------------

    def gather_arrays(
        self, arrays: Sequence[Array], axis: int, *, options: CommunicationOptions | None = None, note: str = ""
    ) -> list[Array]:
        """Concatenate arrays of all ranks along ``axis`` (collective)."""
        return self._run(self._gathering(arrays, axis, options, note))

    def _gathering(
        self,
        arrays: Sequence[Array],
        axis: int,
        options: CommunicationOptions | None,
        note: str,
        outs: Sequence[Array] | None = None,
    ) -> Operation[list[Array]]:
        signature, engine = signature_of(arrays), self._engine
        on_device = self._moved_on_device("all_gather", arrays, options)
        plan = self._kept(GatherPlan, "all_gather", axis, signature, note, on_device is not None)
        if on_device is not None:
            call = self._movement_call("all_gather", arrays, plan.moved(arrays), (), options)
            return self._operation(on_device.all_gather(plan, call), plan.description, options, call)
        copies, bring_back = on_host(arrays)
        steps = engine.on_host.all_gather(plan, copies, _in_host_memory(outs))
        operation = self._operation(steps, plan.description, options)
        if options is None and axis == 0 and len(arrays) == 1 and not note:
            operation.fast_call = FastCall("all_gather", arrays[0], signature)
        return operation.then(bring_back)

    def gather_objects(self, value: T, note: str = "") -> list[T]:
        """Return the picklable objects of all ranks, in rank order (collective)."""
        description = _describe_objects(note)
        with self.shared_errors(description.text):
            pickled = pickle.dumps(value)
        steps: Steps[list[bytes]] = self._engine.on_host.all_gather_bytes(description, pickled)
        return self._run(Operation(steps, description).then(lambda parts: [*map(pickle.loads, parts)]))

    def broadcast_arrays(
        self, arrays: Sequence[Array], root: int, *, options: CommunicationOptions | None = None, note: str = ""
    ) -> list[Array]:
        """Return the arrays of rank ``root``, as new arrays (collective)."""
        return self._run(self._broadcasting(arrays, root, options, note))

    def _broadcasting(
        self,
        arrays: Sequence[Array],
        root: int,
        options: CommunicationOptions | None,
        note: str,
        outs: Sequence[Array] | None = None,
    ) -> Operation[list[Array]]:
        root, signature, engine = self._check_root(root), signature_of(arrays), self._engine
        on_device = self._moved_on_device("broadcast", arrays, options)
        plan = self._kept(BroadcastPlan, "broadcast", root, signature, note, on_device is not None)
        if on_device is not None:
            call = self._movement_call("broadcast", arrays, arrays, signature, options)
            return self._operation(on_device.broadcast(plan, call), plan.description, options, call)
        copies, bring_back = on_host(arrays)
        steps = engine.on_host.broadcast(plan, copies, _in_host_memory(outs))
        operation = self._operation(steps, plan.description, options)
        if options is None and len(arrays) == 1 and not note:
            operation.fast_call = FastCall("broadcast", arrays[0], signature, root=root)
        return operation.then(bring_back)

    def _dealing(
        self,
        name: str,
        arrays: Sequence[Array],
        cut: Callable[[int], Sequence[int]] | None,
        options: CommunicationOptions | None,
        note: str,
        outs: Sequence[Array] | None,
        root: int | None = None,
        expected: list[int] | None = None,
    ) -> Operation[list[Array]]:
        """Return the operation that sends each rank the rows between two borders.

        Args:
            name: Method of Communicator.
            arrays: Arrays of this rank.
            cut: Returns the borders, given the number of rows; None for a rank that sends nothing.
            options: Options of the call.
            note: Structure of the value.
            outs: Arrays for the results.
            root: The only rank that sends, or receives, if there is one.
            expected: Number of rows that this rank expects from each rank.
        """
        signature = signature_of(arrays)
        row_types = tuple([(shape[1:], dtype) for shape, dtype in signature])

        def make(*_: object) -> DealPlan:
            return DealPlan(name, root, signature, note, expected is not None)

        self._check_options(options)
        plan = self._kept(make, name, root, row_types, note, expected is not None)
        with self.shared_errors(name):
            borders = [[0] * (self.size + 1) if cut is None else cut(len(array)) for array in arrays]
        copies, bring_back = on_host(arrays if cut is not None else [array[:0] for array in arrays])
        steps = self._engine.on_host.deal(plan, copies, borders, _in_host_memory(outs), expected)
        return self._operation(steps, plan.description, options).then(bring_back)

    # GPUs -------------------------------------------------------------------------------------------------------

    def prepare_device(self, kind: str, device: int) -> None:
        """Make the algorithms for arrays on a device, while memory is free (collective)."""
        if not _excludes_nccl(self._options):
            self._prepare_device(kind, device, describe("preparing to reduce arrays on GPUs"))

    def _prepare_device(self, kind: str, device: int, description: Description) -> None:
        with self.shared_errors(description.text):
            choice = self._engine.choice_on(kind, device)
        self._channel.run(Operation(self._engine.prepare_device(choice, description), description))

    def _moved_on_device(
        self, name: str, arrays: Sequence[Array], options: CommunicationOptions | None
    ) -> DeviceMovement | None:
        """Return what moves these arrays between GPUs; None if they travel through host memory."""
        if not which_on_device(arrays):
            return None
        engine = self._engine
        self._check_options(options)
        with self.shared_errors(name):
            for array in arrays:
                if is_device_array(array) and gpu_ops().current_stream(gpu_ops().device_of(array)).is_capturing:
                    raise graph_error(name)
            if _excludes_nccl(self._options.merge(options)) or not engine.may_move_on_device(arrays):
                return None
        if not engine.is_device_prepared:
            # All ranks must know whether NCCL works, and has a network, before any of them decides.
            ops = ops_of(arrays[0])
            why = describe(name, "arrays on GPUs, which NCCL moves where all ranks have them there (cupy.asarray)")
            self._prepare_device(ops.kind, ops.device_of(arrays[0]), why)
        return engine.on_device

    def _movement_call(
        self,
        kind: str,
        arrays: Sequence[Array],
        travelling: Sequence[Array],
        results: Signature,
        options: CommunicationOptions | None,
    ) -> MovementCall:
        """Return a call on a device, with memory for results of known shape."""
        with self.shared_errors(kind):
            streams = self._engine.choice_for(kind, arrays).streams
            return MovementCall(travelling, results, streams, self._timeout_of(options) or self._channel.timeout)

    # Agreement --------------------------------------------------------------------------------------------------

    def meet(self, text: str, options: CommunicationOptions | None = None) -> None:
        """Wait until every rank has called it with the same ``text`` (collective)."""
        self._run(self._meeting(describe(text), options))

    def _meeting(self, description: Description, options: CommunicationOptions | None) -> Operation[None]:
        return self._operation(self._channel.open(description), description, options)

    @contextmanager
    def changing(self, label: str, what: str, checksum: Callable[[], int]) -> Iterator[None]:
        """Compare the change of this block with the other ranks' at the next collective.

        That collective raises MismatchError if the ranks have not made the same change.

        Args:
            label: The changed variable; equal on all ranks.
            what: The change, as in "assign of variable 'w'".
            checksum: Returns the present checksum of the variable.
        """
        known = None if self._channel.executor.changes is None else self._channel.executor.changes.now(label)
        before = checksum() if known is None else known
        try:
            yield
        finally:
            # A collective in the block may have compared the earlier changes, so this makes new ones.
            self._changes().change(label, before, checksum(), f"{what} at {user_call_site()}")

    def done(self, label: str, what: str, checksum: int) -> None:
        """Compare an act with the other ranks at the next collective, as :meth:`changing` does."""
        self._changes().add(label, checksum, f"{what} at {user_call_site()}")

    def _changes(self) -> LocalChanges:
        if self._channel.executor.changes is None:
            self._channel.executor.changes = LocalChanges()
        return self._channel.executor.changes

    def shared_errors(self, doing: str) -> AbstractContextManager[None]:
        """Return a block for work of this rank alone. Its errors reach every rank (see ``Channel``)."""
        return self._channel.shared_errors(doing)

    def announce(self, error: Exception, doing: str) -> None:
        """Tell the other ranks of an error, as :meth:`shared_errors` does."""
        self._channel.announce(error, doing)

    # Memory and the end -----------------------------------------------------------------------------------------

    @property
    def shares_memory(self) -> bool:
        """Whether all ranks are on one node that has room for shared memory."""
        return self._channel.node.is_alone

    def common_memory(self, nbytes: int, text: str) -> Array | None:
        """Return a block of bytes for all ranks, None without room for it (collective).

        The block lives while any rank holds an array over it. ``text`` must contain the size.
        """
        description = describe(text)

        def steps() -> Steps[Array | None]:
            yield from self._channel.open(description)
            whole = yield from self._channel.node.shared.common(max(nbytes, 1), in_place=False)
            return None if whole is None else whole[:nbytes]

        return self._run(Operation(steps(), description))

    def close(self) -> None:
        """Finish all works and free the communicator (collective). Closing again does nothing."""
        self._close(self._engine.close, self._engine.before_close())

    def _close(self, free_first: Callable[[], None], before: Steps[None] | None = None) -> None:
        if self._channel.close(free_first, before) and self._uses_world_channel:
            world_channel.release()

    # Plans and checks -------------------------------------------------------------------------------------------

    def _plan(
        self,
        operation: str,
        op: ReduceOp,
        arrays: Sequence[Array],
        divisor: int,
        options: CommunicationOptions | None,
        note: str,
        *,
        root: int | None = None,
        are_copies: bool = False,
    ) -> ReductionPlan:
        """Return the plan of a reduction. Copies of arrays on a GPU may use any algorithm."""
        if options is not None:
            self._check_options(options)
        signature, on_device = signature_of(arrays), which_on_device(arrays)

        def make(*_: object) -> ReductionPlan:
            merged = self._options.merge(options)
            check_options(merged)
            if are_copies and merged.algorithm in gpu_names():
                merged = replace(merged, algorithm=None)
            by_core = self._engine.core is not None
            return ReductionPlan(operation, op, signature, merged, divisor, on_device, note, root, by_core)

        return self._kept(make, operation, op, divisor, signature, on_device, options, note, root, are_copies)

    def _kept(self, make: Callable[..., P], kind: str, *arguments: Any) -> P:
        """Return the cached plan for these arguments, or the new one of ``make``."""
        key = kind, *arguments
        try:
            plan: P | None = self._plans.get(key)
            if plan is None:
                plan = make(*arguments)
                if len(self._plans) == _MOST_PLANS:
                    self._plans.clear()
                self._plans[key] = plan
        except Exception as error:
            self.announce(error, kind)
            raise
        return plan

    def _check_root(self, root: int) -> int:
        if not isinstance(root, (int, np.integer)) or not 0 <= root < self.size:
            with self.shared_errors("checking its root"):
                raise ValueError(f"root is {root!r}; expected a rank from 0 to {self.size - 1}")
        return int(root)

    def _check_options(self, options: object) -> None:
        if not (options is None or isinstance(options, CommunicationOptions)):
            with self.shared_errors("checking its options"):
                check_communication_options(options)

    def _timeout_of(self, options: CommunicationOptions | None) -> float | None:
        if options is None:
            return None
        self._check_options(options)
        return options.timeout_seconds


@lru_cache(maxsize=64)
def _describe_objects(note: str) -> Description:
    return describe("all_gather_object", note, operation="all_gather_object")


def _weakly(method: Resume) -> Resume:
    """Return a function that calls a method without keeping its object alive."""
    reference: WeakMethod[Any] = WeakMethod(method)

    def call(number: int, state: int, value: Array, result: Array, out: Array | None) -> Array:
        found = reference()
        assert found is not None, "a fast-path call of a communicator that is freed"
        final: Array = found(number, state, value, result, out)
        return final

    return call


def _excludes_nccl(options: CommunicationOptions) -> bool:
    return options.algorithm not in (None, "nccl", "hierarchical") or options.deterministic


def _in_host_memory(outs: Sequence[Array] | None) -> Sequence[Array] | None:
    """Return the arrays for results, or None if they are on a GPU."""
    return outs if outs and not which_on_device(outs) else None
