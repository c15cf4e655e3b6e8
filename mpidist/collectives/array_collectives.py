"""Collectives on lists of arrays, which strategies call and Communicator has a public face for."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, TypeVar
from weakref import WeakMethod

import numpy as np

from mpidist.arrays.convert import graph_error
from mpidist.arrays.device_ops import is_device_array, ops_of
from mpidist.arrays.dtypes import Array
from mpidist.collectives.channel.channel import Channel
from mpidist.collectives.channel.mismatch import FOR_COMMUNICATORS, Advice
from mpidist.collectives.channel.operation import (
    Description,
    Operation,
    Signature,
    describe,
    signature_of,
    signature_text,
    which_on_device,
)
from mpidist.collectives.channel.tally import Tally
from mpidist.collectives.channel.work import Work
from mpidist.collectives.engine import Engine
from mpidist.collectives.gpu.device_call import ReductionCall
from mpidist.collectives.gpu.device_movement import DeviceMovement, MovementCall
from mpidist.collectives.gpu.device_streams import DeviceCall
from mpidist.collectives.gpu.staging import on_host
from mpidist.collectives.move.movement_plan import BroadcastPlan, DealPlan, GatherPlan
from mpidist.collectives.mpi.waiting import Comm, Steps
from mpidist.collectives.node.core import GoOn
from mpidist.collectives.reading import check_writable, delivering
from mpidist.collectives.reduce.plan import ReductionPlan
from mpidist.collectives.reduce.registry import check_options, gpu_names
from mpidist.collectives.reduce.table import Table, check_table
from mpidist.collectives.reduce.tuning_file import agreed_table
from mpidist.collectives.watch.attach import watch_channel
from mpidist.collectives.world_channel import world_channel
from mpidist.core.nest import flat_kind
from mpidist.core.options import CommunicationOptions, ReduceOp, check_communication_options
from mpidist.core.text import user_call_site
from mpidist.topology import import_mpi, world_topology

T = TypeVar("T")
P = TypeVar("P", ReductionPlan, GatherPlan, BroadcastPlan)

_DEFAULT_OPTIONS = CommunicationOptions()
# A program whose shapes change all the time must not grow; plans are cheap to make again.
_MOST_PLANS = 1024


class ArrayCollectives:
    """All-reduce, all-gather and broadcast of NumPy arrays on a channel of its own (collective).

    Args:
        comm: An mpi4py intracommunicator; all ranks of the job by default.
        options: Defaults for every call.
        table: Which algorithm is taken at which size; that of rank 0 counts. By default the one that
            ``MPIDIST_TUNING_FILE`` has for these ranks, else the shipped one.
        owner: What it is made for, for messages; the same on every rank.
        advice: Advice for errors, that fits the programs of the owner.

    Raises:
        ValueError: The tuning file cannot be read or is wrong; on all ranks.
        MismatchError: Other ranks are about to make something else, or do something else.
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
        watch_channel(self._channel)
        self.rank: int = self._channel.rank
        self.size: int = self._channel.size
        self._plans: dict[Any, Any] = {}
        self._engine = Engine(self._channel, self._agreed_table(table))
        self.short = self._engine.open_short(_weakly(self._go_on))
        """The collectives of one array whose like there has been before."""

    @property
    def last_algorithm(self) -> str:
        """The name of the algorithm that the last all-reduce took."""
        was_short = self._channel.executor.short.last() is not None
        return self._engine.short_name if was_short else self._engine.last_algorithm

    def _agreed_table(self, given: Table | None) -> Table:
        channel = self._channel
        steps = agreed_table(channel.comm, channel.node, given)
        agreeing: Operation[Table] = Operation(steps, describe("agreeing on the tuning table"))
        try:
            return channel.run(agreeing)
        except ValueError:
            self._close(lambda: None)
            raise

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
        """All-reduce NumPy arrays; a mean is the sum divided by ``divisor`` (collective).

        ``more`` are those of this rank's further replicas, in host memory. On one node sums are formed in the order of
        ranks, and of replicas in each.
        """
        kind = flat_kind(note) if options is None and not more and divisor == self.size else None
        if kind is not None:
            is_one = len(arrays) == 1 and not kind and (out is None or len(out) == 1)
            given, outs = ([*arrays], out and [*out]) if not is_one else (arrays[0], out and out[0])
            result = self.short.all_reduce(op, given, outs, kind)
            if result is not None:
                return [result] if is_one else list(result)
        return self._now(self._reduction(op, arrays, divisor, options, out, note, more))

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
    ) -> Work:
        """Start :meth:`reduce_arrays` and return its handle (collective)."""
        return self._later(self._reduction(op, arrays, divisor, options, out, note, more))

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
                call = ReductionCall(plan, arrays, out, choice.streams, choice.multiple, seconds)
        steps = self._engine.all_reduce(plan, arrays, out, call, more)
        operation = self._operation(steps, plan.description, options, call)
        if options is None and plan.may_be_short and divisor == self.size and not more:
            kind = flat_kind(note) or 0
            given = list(arrays) if kind or len(arrays) > 1 else arrays[0]
            operation.then(self._learns("all_reduce", given, operation, op, plan.divisor, kind))
        return operation

    def _learns(
        self,
        name: str,
        array: Array | list[Array],
        operation: Operation[Any],
        op: ReduceOp | None = None,
        divisor: int | None = None,
        root: int = 0,
    ) -> Callable[[T], T]:
        """Return a function of a result that opens the short way to calls like it."""
        before = signature_of(array if isinstance(array, list) else [array])

        def learn(result: T) -> T:
            core, description = self._engine.core_of_short(name), operation.description
            if signature_of(array if isinstance(array, list) else [array]) != before:
                return result  # the program has changed the shape meanwhile
            took = [self._engine.short_name] if name == "all_reduce" else []
            if core is not None and operation.algorithms == took:
                number = core.learn(name, array, description.id, op, divisor, root, description.text)
                if number is not None:
                    self._channel.executor.short.learn(number, description)
            return result

        return learn

    def _go_on(self, number: int, state: int, value: Array, result: Array, out: Array | None) -> Array:
        """Carry on with a short call whose ranks have not come soon, or differ."""
        description = self._channel.executor.short.description(number)
        rest = Operation(self._engine.rest_of_short(description, state, value, result), description)
        rest.is_rest = True
        # Where ranks give unequal parts the result is another array than the one at hand.
        (final,) = self._channel.run(rest.then(lambda found: [found]).then(delivering(None if out is None else [out])))
        return final

    def _check_out(self, plan: ReductionPlan, out: Sequence[Array]) -> None:
        given, on_device = signature_of(out), which_on_device(out)
        try:
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
        except ValueError as error:
            self.announce(error, "checking out")
            raise

    def prepare_device(self, kind: str, device: int) -> None:
        """Make the algorithms for arrays on a device, while there is memory (collective)."""
        if not _keeps_nccl_out(self._options):
            self._prepare_device(kind, device, describe("preparing to reduce arrays on GPUs"))

    def _prepare_device(self, kind: str, device: int, description: Description) -> None:
        with self.shared_errors(description.text):
            choice = self._engine.choice_on(kind, device)
        self._channel.run(Operation(self._engine.prepare_device(choice, description), description))

    def _moved_on_device(
        self, name: str, arrays: Sequence[Array], options: CommunicationOptions | None
    ) -> DeviceMovement | None:
        """Return what moves these arrays between GPUs; None where they go through host memory."""
        if not which_on_device(arrays):
            return None
        engine = self._engine
        self._check_options(options)
        with self.shared_errors(name):
            for array in arrays:
                if is_device_array(array) and ops_of(array).current_stream(ops_of(array).device_of(array)).is_capturing:
                    raise graph_error(name)
            if _keeps_nccl_out(self._options.merge(options)) or not engine.may_move_on_device(arrays):
                return None
        if not engine.is_device_prepared:
            # Whether NCCL works, and has a network, all ranks have to know before any of them decides.
            ops = ops_of(arrays[0])
            why = describe(name, "arrays on GPUs, which NCCL moves where all ranks have them there (cupy.asarray)")
            self._prepare_device(ops.kind, ops.device_of(arrays[0]), why)
        return engine.on_device

    def gather_arrays(
        self, arrays: Sequence[Array], axis: int, *, options: CommunicationOptions | None = None, note: str = ""
    ) -> list[Array]:
        """Concatenate NumPy arrays of all ranks along ``axis`` (collective)."""
        return self._now(self._gathering(arrays, axis, options, note))

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
        if on_device is None:
            copies, bring_back = on_host(arrays)
            steps = engine.on_host.all_gather(plan, copies, _in_host_memory(outs))
            operation = self._operation(steps, plan.description, options)
            if options is None and axis == 0 and len(arrays) == 1 and not note:
                operation.then(self._learns("all_gather", arrays[0], operation))
            return operation.then(bring_back)
        call = self._movement_call("all_gather", arrays, plan.moved(arrays), (), options)
        return self._operation(on_device.all_gather(plan, call), plan.description, options, call)

    def gather_objects(self, value: T, note: str = "") -> list[T]:
        """Return the picklable objects of all ranks, in rank order (collective)."""
        description = describe("all_gather_object", note, operation="all_gather_object")
        with self.shared_errors(description.text):
            pickled = pickle.dumps(value)
        steps: Steps[list[bytes]] = self._engine.on_host.all_gather_bytes(description, pickled)
        return self._now(Operation(steps, description).then(lambda parts: [*map(pickle.loads, parts)]))

    def broadcast_arrays(
        self, arrays: Sequence[Array], root: int, *, options: CommunicationOptions | None = None, note: str = ""
    ) -> list[Array]:
        """Return the NumPy arrays of rank ``root``, as new arrays (collective)."""
        return self._now(self._broadcasting(arrays, root, options, note))

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
        if on_device is None:
            copies, bring_back = on_host(arrays)
            steps = engine.on_host.broadcast(plan, copies, _in_host_memory(outs))
            operation = self._operation(steps, plan.description, options)
            if options is None and len(arrays) == 1 and not note:
                operation.then(self._learns("broadcast", arrays[0], operation, root=root))
            return operation.then(bring_back)
        call = self._movement_call("broadcast", arrays, arrays, signature, options)
        return self._operation(on_device.broadcast(plan, call), plan.description, options, call)

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
        """Return the operation that gives each rank the rows between two borders.

        Args:
            name: Of the collective.
            arrays: Of this rank.
            cut: Returns the borders in so many rows; None for a rank that gives none.
            options: Of the call.
            note: The structure that the arrays came from.
            outs: For the results, if they are given.
            root: The rank that gives, or takes, if only one does.
            expected: How many rows this rank expects from each.
        """
        signature = signature_of(arrays)
        compares = expected is not None
        key = (name, root, tuple([(shape[1:], dtype) for shape, dtype in signature]), note, compares)
        with self.shared_errors(name):
            self._check_options(options)
            plan: DealPlan | None = self._plans.get(key)
            if plan is None:
                plan = self._plans[key] = DealPlan(name, root, signature, note, compares)
            borders = [[0] * (self.size + 1) if cut is None else cut(len(array)) for array in arrays]
        copies, bring_back = on_host(arrays if cut is not None else [array[:0] for array in arrays])
        steps = self._engine.on_host.deal(plan, copies, borders, _in_host_memory(outs), expected)
        return self._operation(steps, plan.description, options).then(bring_back)

    def _movement_call(
        self,
        kind: str,
        arrays: Sequence[Array],
        travelling: Sequence[Array],
        results: Signature,
        options: CommunicationOptions | None,
    ) -> MovementCall:
        """Return a call with memory for the results that are known before the ranks meet."""
        with self.shared_errors(kind):
            streams = self._engine.choice_for(kind, arrays).streams
            return MovementCall(travelling, results, streams, self._timeout_of(options) or self._channel.timeout)

    def _operation(
        self,
        steps: Steps[Any],
        description: Description,
        options: CommunicationOptions | None,
        call: DeviceCall | None = None,
    ) -> Operation[Any]:
        """Return an operation with the deadline of its options, and its part on a device."""
        timeout = None if options is None else self._timeout_of(options)
        operation: Operation[Any] = Operation(steps, description, timeout)
        if call is not None:
            operation.then(call.join)
            operation.let_go, operation.before_return = call.leave, call.wait_here
        return operation

    def _now(self, operation: Operation[T]) -> T:
        """Carry an operation out and return its result."""
        try:
            return self._channel.run(operation)
        finally:
            if operation.let_go is not None:
                operation.let_go()

    def _later(self, operation: Operation[Any]) -> Work:
        """Start an operation and return its handle."""
        try:
            return self._channel.submit(operation)
        except BaseException:
            if operation.let_go is not None:
                operation.let_go()
            raise

    def meet(self, text: str, options: CommunicationOptions | None = None) -> None:
        """Return once every rank has come, to do what ``text`` says (collective)."""
        self._now(self._meeting(describe(text), options))

    def _meeting(self, description: Description, options: CommunicationOptions | None) -> Operation[Any]:
        return self._operation(self._channel.open(description), description, options)

    @contextmanager
    def changing(self, label: str, what: str, checksum: Callable[[], int]) -> Iterator[None]:
        """Have the ranks compare, at the next collective, their changes in this block.

        That collective is a MismatchError where they have not changed it alike.

        Args:
            label: What is changed, the same on all ranks.
            what: How, as in "assign of variable 'w'".
            checksum: Of what is changed, as it is.
        """
        known = None if self._channel.executor.tally is None else self._channel.executor.tally.now(label)
        before = checksum() if known is None else known
        try:
            yield
        finally:
            # Asked for anew: a collective in the block has taken the one before along.
            self._tally().change(label, before, checksum(), f"{what} at {user_call_site()}")

    def done(self, label: str, what: str, checksum: int) -> None:
        """Have the ranks compare an act, as :meth:`changing` has them compare a state."""
        self._tally().add(label, checksum, f"{what} at {user_call_site()}")

    def _tally(self) -> Tally:
        if self._channel.executor.tally is None:
            self._channel.executor.tally = Tally()
        return self._channel.executor.tally

    @property
    def shares_memory(self) -> bool:
        """Whether all ranks are on one node that has room for shared memory."""
        return self._channel.node.is_alone

    def common_memory(self, nbytes: int, text: str) -> Array | None:
        """Return one new block of bytes for all ranks, or None (collective).

        It is None on all ranks where there is no room. It stays while any rank holds an array over it.

        Args:
            nbytes: Its size.
            text: What it is for, which says its size, too.
        """
        description = describe(text)

        def steps() -> Steps[Array | None]:
            yield from self._channel.open(description)
            whole = yield from self._channel.node.shared.unlisted(max(nbytes, 1))
            return None if whole is None else whole[:nbytes]

        return self._now(Operation(steps(), description))

    def shared_errors(self, doing: str) -> AbstractContextManager[None]:
        """Return a block for work of this rank alone, whose errors reach every rank.

        The rank that fails raises its own error; the others raise PeerError at their next call.

        Args:
            doing: What the block does, for the report.
        """
        return self._channel.shared_errors(doing)

    def announce(self, error: Exception, doing: str) -> None:
        """Tell the other ranks of an error, as :meth:`shared_errors` does."""
        self._channel.announce(error, doing)

    def close(self) -> None:
        """Finish what is on its way and free the communicator (collective). Closing again does nothing."""
        self._close(self._engine.close, self._engine.before_close())

    def _close(self, free_first: Callable[[], None], before: Steps[None] | None = None) -> None:
        if self._channel.close(free_first, before) and self._uses_world_channel:
            world_channel.release()

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
        """Return the plan of a reduction; copies of arrays on a GPU take any algorithm."""
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
        """Return the plan that ``make`` makes of the arguments after ``kind``, the operation."""
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


def _weakly(method: GoOn) -> GoOn:
    """Return a function that calls a method, and does not keep its object.

    The garbage collector cannot see into C.
    """
    reference: WeakMethod[Any] = WeakMethod(method)

    def call(number: int, state: int, value: Array, result: Array, out: Array | None) -> Array:
        found = reference()
        assert found is not None, "a call of a communicator that is gone"
        carried_on: Array = found(number, state, value, result, out)
        return carried_on

    return call


def _keeps_nccl_out(options: CommunicationOptions) -> bool:
    """Whether options keep NCCL out, by name or for the order of sums."""
    return options.algorithm not in (None, "nccl", "hierarchical") or options.deterministic


def _in_host_memory(outs: Sequence[Array] | None) -> Sequence[Array] | None:
    """Return the arrays for results if they lie in host memory.

    Those on a GPU get a copy later.
    """
    return outs if outs and not which_on_device(outs) else None
