"""Communicator: collectives between ranks without a strategy, for arrays of any kind."""

from __future__ import annotations

import logging
import math
import pickle
from collections.abc import Callable, Sequence
from functools import cached_property, partial, wraps
from inspect import signature
from itertools import accumulate
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
from numpy.typing import DTypeLike

from mpidist.arrays.convert import to_array
from mpidist.arrays.device_ops import ops_of
from mpidist.arrays.dtypes import Array, as_dtype, check_transportable
from mpidist.collectives.array_collectives import ArrayCollectives
from mpidist.collectives.channel.observers import Observer
from mpidist.collectives.channel.operation import (
    Description,
    FastCall,
    Operation,
    Work,
    describe,
    signature_of,
    signature_text,
    which_on_device,
)
from mpidist.collectives.gpu.device_move import on_host
from mpidist.collectives.move.move import check_has_axis
from mpidist.collectives.move.point_to_point import PointToPoint
from mpidist.collectives.mpi import exchange
from mpidist.collectives.mpi.waiting import Comm, Steps
from mpidist.collectives.node import packing
from mpidist.collectives.node.memory import borders
from mpidist.collectives.reading import delivering, read, read_out, restore
from mpidist.collectives.step_agreement import StepAgreement
from mpidist.core.message_tags import TAGS_OF_PROGRAMS
from mpidist.core.options import CommunicationOptions, ReduceOp
from mpidist.topology import import_mpi
from mpidist.topology.start import create_group

T = TypeVar("T")
P = ParamSpec("P")

_log = logging.getLogger("mpidist")
_LARGEST_C_INT = 2**31 - 1
_BARRIER = describe("barrier", operation="barrier")
# Public names of its base class.
_OF_PROGRAMS = {"close", "last_algorithm", "shares_memory"}


def _runs(make: Callable[Concatenate[Communicator, P], Operation[T]]) -> Callable[Concatenate[Communicator, P], T]:
    """Return the method that runs the operation of ``make``. Its arguments and docstring are those of ``make``."""

    @wraps(make)
    def run(self: Communicator, /, *args: P.args, **kwargs: P.kwargs) -> T:
        result: T = self._run(make(self, *args, **kwargs))
        return result

    _describe(run, make, make.__name__.lstrip("_"), "Operation[", "]")
    return run


def _starts(
    make: Callable[Concatenate[Communicator, P], Operation[T]],
) -> Callable[Concatenate[Communicator, P], Work[T]]:
    """Return the method that starts the operation of ``make`` and returns its handle."""

    @wraps(make)
    def start(self: Communicator, /, *args: P.args, **kwargs: P.kwargs) -> Work[T]:
        work: Work[T] = self._start(make(self, *args, **kwargs))
        return work

    name = make.__name__.lstrip("_")
    start.__doc__ = f"Start :meth:`{name}` and return its handle (collective)."
    _describe(start, make, f"{name}_async", "Operation", "")
    return start


def _describe(method: Callable[..., object], make: Callable[..., object], name: str, before: str, after: str) -> None:
    """Give a method its name and the signature of ``make``, with another result."""
    found = signature(make)
    returns = str(found.return_annotation).removeprefix(before).removesuffix(after)
    returns = returns if after else f"Work{returns}"
    method.__name__, method.__qualname__ = name, f"Communicator.{name}"
    method.__dict__["__signature__"] = found.replace(return_annotation=returns)


class Communicator(ArrayCollectives):
    """Collectives between the ranks of an MPI communicator, which is duplicated (collective).

    Every method is collective: call it on every rank, in the same order. If ranks make different calls at the same
    point, all of them raise a MismatchError that shows the call of each rank and its line. No call waits forever: after
    its deadline (30 minutes, ``MPIDIST_TIMEOUT``) it raises CollectiveTimeoutError.

    ``value`` is an array, a number, or a nest of them that travels together: nested lists, tuples, named tuples and
    dicts with the same structure on all ranks. Results have that structure. Other mappings become dicts. Generators and
    dict views become lists. Entries of dicts are matched by their keys.

    Arrays of PyTorch, JAX and CuPy give results of the same kind. Other objects with the buffer protocol, such as
    ``array.array``, give NumPy arrays. Arrays on a GPU stay there. A rank uses one device. The result is ordered after
    the call on the current stream. It may not be computed yet.

    Args:
        comm: An mpi4py intracommunicator; all ranks of the job by default.
        options: Defaults for every call.

    Raises:
        LaunchError: The MPI library is missing, or the ranks do not form one world.

    >>> comm = Communicator()
    >>> comm.all_reduce("SUM", np.ones(3)) / comm.size
    array([1., 1., 1.])
    >>> comm.close()
    """

    _has_warned = False

    @cached_property
    def _messages(self) -> PointToPoint:
        return PointToPoint(self._channel)

    def step_agreement(self) -> StepAgreement:
        """Return an object that lets the ranks agree on a step (collective).

        No message is sent in each step.

        >>> comm = Communicator()
        >>> agreement = comm.step_agreement()
        >>> agreement.ask_for("a save")
        >>> agreement.step_done()
        ['a save']
        >>> agreement.close()
        >>> comm.close()
        """
        self.meet("preparing to agree on steps")
        return StepAgreement(self._channel.comm)

    def add_observer(self, observer: Observer) -> None:
        """Let an observer see the collectives of this communicator from now on (local).

        A call takes a few microseconds longer while an observer sees beginnings, ends or chunks.

        Args:
            observer: A subclass of ``mpidist.collectives.Observer``, which lists the events.

        Raises:
            TypeError: It is no Observer.

        >>> from mpidist.collectives import Observer
        >>> class Texts(Observer):
        ...     def ended(self, operation):
        ...         print(operation.text, "by", *operation.algorithms)
        >>> comm = Communicator()
        >>> comm.add_observer(Texts())
        >>> _ = comm.all_reduce("SUM", np.ones(3))
        all_reduce SUM of float64(3,) by alone
        >>> comm.close()
        close by
        """
        if not isinstance(observer, Observer):
            raise TypeError(f"observer is {observer!r}; expected an instance of a subclass of Observer")
        self._channel.observers.add(observer)

    def remove_observer(self, observer: Observer) -> None:
        """Remove an observer (local)."""
        self._channel.observers.remove(observer)

    # Reductions -------------------------------------------------------------------------------------------

    def all_reduce(
        self, op: ReduceOp | str, value: T, *, out: T | None = None, options: CommunicationOptions | None = None
    ) -> T:
        """Reduce element by element over all ranks; every rank gets the same bits (collective; MPI_Allreduce).

        Args:
            op: SUM, MEAN, MIN, MAX or PROD; BAND, BOR or BXOR for integers and bool. A ReduceOp or its name.
            value: Array, number, or nest of them, with equal structure, shapes and dtypes on all ranks.
            out: Arrays for the result, with the same structure, shapes and dtypes; new arrays by default.
            options: Options of this call, merged into those of the communicator.

        Returns:
            The kind of ``value``; the mean of integers is float64. New arrays, or ``out``. Large results of one call,
            and on a GPU also small ones, may share one block of memory: copy a result if you keep only that one.

        Raises:
            TypeError: A dtype that cannot be reduced: bool, object, big-endian.
            MismatchError: Ranks differ in operation, structure, shapes, dtypes or options.
            ValueError: ``out`` does not fit the value.
            CollectiveTimeoutError: The other ranks did not arrive in time.

        Integer sums and products that exceed their dtype wrap around as in NumPy, without a warning: 100 + 100 is -56
        in int8. Means of integers are computed in float64.

        >>> comm = Communicator()
        >>> comm.all_reduce("MEAN", [2.0, np.array([1, 2])])
        [np.float64(2.0), array([1., 2.])]
        >>> comm.all_reduce("MEAN", {"w": np.ones(2), "b": (3.0,)})
        {'w': array([1., 1.]), 'b': (np.float64(3.0),)}
        >>> comm.close()
        """
        if options is None:
            result: T | None = self.fast.all_reduce(op, value, out, 0)
            if result is not None:
                return result
        return self._run(self._all_reduce(op, value, options, out=out))

    def _all_reduce(
        self, op: ReduceOp | str, value: T, options: CommunicationOptions | None = None, *, out: T | None = None
    ) -> Operation[T]:
        op, arrays, outs, structure, rebuild = self._read(op, value, out)
        return self._reduction(op, arrays, self.size, options, outs, structure).then(rebuild)

    all_reduce_async = _starts(_all_reduce)

    def _reduce(
        self, op: ReduceOp | str, value: T, root: int = 0, options: CommunicationOptions | None = None
    ) -> Operation[T | None]:
        """Reduce over all ranks to rank ``root``; the others return None (collective; MPI_Reduce)."""
        op, arrays, _, structure, rebuild = self._read(op, value)
        root = self._check_root(root)
        copies, bring_back = on_host(arrays)
        are_copies = bool(which_on_device(arrays))
        plan = self._plan("reduce", op, copies, self.size, options, structure, root=root, are_copies=are_copies)
        operation = self._operation(self._engine.reduce_to(plan, copies, root), plan.description, options)
        if self.rank != root:
            return operation.then(_nothing)
        return operation.then(bring_back).then(rebuild)

    reduce = _runs(_reduce)
    reduce_async = _starts(_reduce)

    def reduce_scatter(
        self,
        op: ReduceOp | str,
        value: T,
        options: CommunicationOptions | None = None,
        *,
        counts: Sequence[int] | None = None,
        out: T | None = None,
    ) -> T:
        """Reduce an array over all ranks and keep this rank's rows of it (collective; MPI_Reduce_scatter).

        The rows (axis 0) are distributed in rank order.

        Args:
            op: See :meth:`all_reduce`.
            value: Array of at least one dimension, equal in shape and dtype on all ranks.
            options: Options of this call, merged into those of the communicator.
            counts: Number of rows of each rank, the same on all ranks. By default equal, with one row more for the
                first ranks if the rows do not divide.
            out: Array for this rank's rows; a new array by default.

        Raises:
            ValueError: A 0-d value, counts whose sum is not the number of rows, or ``out`` does not fit.

        >>> comm = Communicator()
        >>> comm.reduce_scatter("SUM", np.ones((4 * comm.size, 2))).shape
        (4, 2)
        >>> comm.close()
        """
        if options is None and counts is None:
            rows: T | None = self.fast.reduce_scatter(op, value, out)
            if rows is not None:
                return rows
        return self._run(self._reduce_scatter(op, value, options, counts=counts, out=out))

    def _reduce_scatter(
        self,
        op: ReduceOp | str,
        value: T,
        options: CommunicationOptions | None = None,
        *,
        counts: Sequence[int] | None = None,
        out: T | None = None,
    ) -> Operation[T]:
        with self.shared_errors("reduce_scatter"):
            op = ReduceOp.of(op)
            given = to_array(value)
            check_has_axis(given.ndim, 0, "reduce_scatter")
            rows = self._cut(len(given), counts)
            outs = None if out is None else read_out(out, "")
        engine, note = self._engine, "" if counts is None else f"parts of {list(counts)} rows"
        on_device = self._moved_on_device("reduce_scatter", [given], options)
        if on_device is not None and counts is None:
            plan = self._plan("reduce_scatter", op, [given], self.size, options, "")
            if engine.scatters_on_device(plan):
                shape = (rows[self.rank + 1] - rows[self.rank], *given.shape[1:])
                result = (math.prod(shape),), plan.result_dtypes[0]
                call = self._movement_call("reduce_scatter", [given], [given], (result,), options)
                operation = self._operation(on_device.reduce_scatter(plan, call), plan.description, options, call)
                kept = operation.then(lambda flats: [flats[0].reshape(shape)])
                return kept.then(delivering(outs)).then(lambda parts: restore(value, parts[0]))
        copies, bring_back = on_host([given])
        are_copies = bool(which_on_device([given]))
        plan = self._plan("reduce_scatter", op, copies, self.size, options, note, are_copies=are_copies)
        on_host_out = outs[0] if outs and not which_on_device(outs) else None
        steps = engine.reduce_scatter(plan, copies[0], rows, on_host_out)
        operation = self._operation(steps, plan.description, options)
        if options is None and counts is None and plan.may_be_short:
            operation.fast_call = FastCall("reduce_scatter", given, signature_of([given]), op, plan.divisor)
        return operation.then(bring_back).then(delivering(outs)).then(lambda parts: restore(value, parts[0]))

    reduce_scatter_async = _starts(_reduce_scatter)

    # Movement ---------------------------------------------------------------------------------------------

    def all_gather(
        self, value: T, axis: int = 0, options: CommunicationOptions | None = None, *, out: T | None = None
    ) -> T:
        """Concatenate the arrays of all ranks along ``axis``, in rank order (collective; MPI_Allgatherv).

        Args:
            value: Array, or nest of arrays, of at least one dimension. Sizes along ``axis`` may differ
                between ranks and may be 0. Dtypes and other dimensions must be equal.
            axis: Axis to concatenate along; may be negative.
            options: Options of this call, merged into those of the communicator.
            out: Array for the result; a new array by default. If all parts have equal sizes, a value that is this
                rank's part of ``out`` is not copied.

        Raises:
            ValueError: A 0-d array, an axis out of range, or ``out`` does not fit the result.
            MismatchError: Ranks differ in dtype or another dimension.

        >>> comm = Communicator()
        >>> comm.all_gather(np.zeros((1, 2)), axis=1).shape == (1, 2 * comm.size)
        True
        >>> comm.close()
        """
        if options is None and axis == 0:
            gathered: T | None = self.fast.all_gather(value, out)
            if gathered is not None:
                return gathered
        return self._run(self._all_gather(value, axis, options, out=out))

    def _all_gather(
        self, value: T, axis: int = 0, options: CommunicationOptions | None = None, *, out: T | None = None
    ) -> Operation[T]:
        _, arrays, outs, structure, rebuild = self._read(ReduceOp.SUM, value, out)
        return self._gathering(arrays, axis, options, structure, outs).then(delivering(outs)).then(rebuild)

    all_gather_async = _starts(_all_gather)

    def _gather(
        self, value: T, root: int = 0, options: CommunicationOptions | None = None, *, out: T | None = None
    ) -> Operation[T | None]:
        """Concatenate the arrays of all ranks along axis 0 on one rank (collective; MPI_Gatherv).

        Args:
            value: As for :meth:`all_gather`.
            root: The rank that gets the result; the others return None.
            options: Options of this call, merged into those of the communicator.
            out: Array for the result on ``root``; a new array by default. Pass None on other ranks.

        >>> comm = Communicator()
        >>> rows = comm.gather(np.full((2, 3), comm.rank))
        >>> rows.shape == (2 * comm.size, 3) if comm.rank == 0 else rows is None
        True
        >>> comm.close()
        """
        root = self._check_root(root)
        _, arrays, outs, structure, rebuild = self._read(ReduceOp.SUM, value, out)

        def cut(rows: int) -> Sequence[int]:
            return [0] * (root + 1) + [rows] * (self.size - root)

        gathering = self._dealing("gather", arrays, cut, options, structure, outs, root)
        if self.rank != root:
            return gathering.then(_nothing)
        return gathering.then(delivering(outs)).then(rebuild)

    gather = _runs(_gather)
    gather_async = _starts(_gather)

    def _scatter(
        self,
        value: T,
        root: int = 0,
        options: CommunicationOptions | None = None,
        *,
        counts: Sequence[int] | None = None,
        out: T | None = None,
    ) -> Operation[T]:
        """Distribute the rows of one rank's array, in rank order (collective; MPI_Scatterv).

        Args:
            value: Array, or nest of arrays, of at least one dimension. On ranks other than ``root`` it gives
                structure, dtype and the shape of a row, and may have no rows.
            root: The rank whose rows are distributed.
            options: Options of this call, merged into those of the communicator.
            counts: Number of rows for each rank; that of ``root`` counts. By default equal, with one row more for the
                first ranks if the rows do not divide.
            out: Array for this rank's rows; a new array by default.

        >>> comm = Communicator()
        >>> comm.scatter(np.arange(3.0 * comm.size)) - 3 * comm.rank
        array([0., 1., 2.])
        >>> comm.close()
        """
        root = self._check_root(root)
        _, arrays, outs, structure, rebuild = self._read(ReduceOp.SUM, value, out)
        cut = partial(self._cut, counts=counts) if self.rank == root else None
        dealing = self._dealing("scatter", arrays, cut, options, structure, outs, root)
        return dealing.then(delivering(outs)).then(rebuild)

    scatter = _runs(_scatter)
    scatter_async = _starts(_scatter)

    def all_to_all(
        self,
        value: T,
        options: CommunicationOptions | None = None,
        *,
        counts: Sequence[int] | None = None,
        expected: Sequence[int] | None = None,
        out: T | None = None,
    ) -> T:
        """Distribute the rows of every rank's array, in rank order (collective; MPI_Alltoallv).

        Args:
            value: Array, or nest of arrays, of at least one dimension. Ranks may have different numbers of rows, but
                need the same dtypes and other dimensions.
            options: Options of this call, merged into those of the communicator.
            counts: Number of this rank's rows for each rank. By default equal, with one row more for the first ranks
                if the rows do not divide.
            expected: Number of rows that this rank expects from each rank. The ranks compare them, so all ranks must
                pass it, or none.
            out: Array for the rows from all ranks, those of rank 0 first; a new array by default.

        Raises:
            ValueError: A 0-d array, counts whose sum is not the number of rows, or ``out`` does not fit the result.
            MismatchError: A rank sends another rank more or fewer rows than that rank expects.

        >>> comm = Communicator()
        >>> comm.all_to_all(np.arange(2 * comm.size)).size == 2 * comm.size
        True
        >>> comm.close()
        """
        if options is None and counts is None and expected is None:
            rows: T | None = self.fast.all_to_all(value, out)
            if rows is not None:
                return rows
        return self._run(self._all_to_all(value, options, counts=counts, expected=expected, out=out))

    def _all_to_all(
        self,
        value: T,
        options: CommunicationOptions | None = None,
        *,
        counts: Sequence[int] | None = None,
        expected: Sequence[int] | None = None,
        out: T | None = None,
    ) -> Operation[T]:
        _, arrays, outs, structure, rebuild = self._read(ReduceOp.SUM, value, out)
        if expected is not None:
            with self.shared_errors("checking what it expects"):
                expected = [*map(int, expected)]
                self._check_expected(expected, outs or ())
        cut = partial(self._cut, counts=counts)
        exchange = self._dealing("all_to_all", arrays, cut, options, structure, outs, expected=expected)
        if options is None and counts is None and expected is None and len(arrays) == 1 and not structure:
            exchange.fast_call = FastCall("all_to_all", arrays[0], signature_of(arrays))
        return exchange.then(delivering(outs)).then(rebuild)

    all_to_all_async = _starts(_all_to_all)

    def broadcast(
        self, value: T, root: int = 0, options: CommunicationOptions | None = None, *, out: T | None = None
    ) -> T:
        """Return the value of rank ``root`` on every rank (collective; MPI_Bcast).

        Args:
            value: Array, number, or nest of them. On ranks other than ``root`` it gives structure, shape and dtype.
            root: The rank whose value is sent.
            options: Options of this call, merged into those of the communicator.
            out: Arrays for the result, for example ``value`` itself; new arrays by default.
        """
        if options is None:
            copy: T | None = self.fast.broadcast(value, root, out)
            if copy is not None:
                return copy
        return self._run(self._broadcast(value, root, options, out=out))

    def _broadcast(
        self, value: T, root: int = 0, options: CommunicationOptions | None = None, *, out: T | None = None
    ) -> Operation[T]:
        _, arrays, outs, structure, rebuild = self._read(ReduceOp.SUM, value, out)
        return self._broadcasting(arrays, root, options, structure, outs).then(delivering(outs)).then(rebuild)

    broadcast_async = _starts(_broadcast)

    def _barrier(self, options: CommunicationOptions | None = None) -> Operation[None]:
        """Wait until every rank has called it (collective; MPI_Barrier)."""
        return self._meeting(_BARRIER, options)

    barrier = _runs(_barrier)
    barrier_async = _starts(_barrier)

    def all_gather_object(self, value: T) -> list[T]:
        """Return the picklable objects of all ranks, in rank order (collective); for metadata, not data."""
        return self.gather_objects(value)

    def broadcast_object(self, value: object, root: int = 0) -> Any:
        """Return the picklable object of rank ``root`` on every rank (collective); for metadata, not data."""
        description = describe(f"broadcast_object from rank {self._check_root(root)}", operation="broadcast_object")
        with self.shared_errors(description.text):
            pickled = pickle.dumps(value) if self.rank == root else b""

        def steps() -> Steps[Any]:
            yield from self._channel.open(description)
            return (yield from exchange.broadcast_pickle(self._channel.comm, pickled, root))

        return self._run(Operation(steps(), description))

    # Messages ---------------------------------------------------------------------------------------------

    def send(self, value: object, dest: int, tag: int = 0, options: CommunicationOptions | None = None) -> None:
        """Send an array to one rank, which calls :meth:`recv` (MPI_Send).

        Not collective, and independent of the collectives. Messages between two ranks with the same tag arrive in the
        order in which they were sent. May return before the other rank has the array.

        Args:
            value: Array or number.
            dest: Rank that receives it.
            tag: Number from 0 to 8189 that tells messages apart.
            options: Only ``timeout_seconds`` counts.

        Raises:
            MessageTimeoutError: It was not received in time.

        >>> comm = Communicator()
        >>> work, got = comm.send_async(np.arange(3), comm.rank), np.empty(3, int)
        >>> comm.recv(got, comm.rank), got
        (0, array([0, 1, 2]))
        >>> work.wait()
        >>> comm.close()
        """
        self._sending(value, dest, tag, options).wait()

    def send_async(
        self, value: object, dest: int, tag: int = 0, options: CommunicationOptions | None = None
    ) -> Work[None]:
        """Start a :meth:`send` and return its handle. Do not change ``value`` before it is done."""
        return self._messages.later(self._sending(value, dest, tag, options))

    def _sending(self, value: object, dest: int, tag: int, options: CommunicationOptions | None) -> Work[None]:
        with self.shared_errors("send"):
            (array,), _ = on_host([to_array(value)])
            check_transportable(array.dtype, "send")
            self._check_message(dest, tag, options)
        return self._messages.send(array, dest, tag, self._timeout_of(options))

    def recv(
        self, out: object, source: int | None = None, tag: int = 0, options: CommunicationOptions | None = None
    ) -> int:
        """Receive an array that another rank sends; return that rank (MPI_Recv).

        Args:
            out: Array for the message, of its shape and dtype.
            source: Rank that sends it; None receives from any rank.
            tag: Tag of the message.
            options: Only ``timeout_seconds`` counts.

        Raises:
            MismatchError: The message has another shape or dtype; with the lines of both calls.
            MessageTimeoutError: No message arrived in time.
        """
        return self._receiving(out, source, tag, options).wait()

    def recv_async(
        self, out: object, source: int | None = None, tag: int = 0, options: CommunicationOptions | None = None
    ) -> Work[int]:
        """Start a :meth:`recv` and return its handle. ``out`` is undefined before it is done."""
        return self._messages.later(self._receiving(out, source, tag, options))

    def _receiving(self, out: object, source: int | None, tag: int, options: CommunicationOptions | None) -> Work[int]:
        with self.shared_errors("recv"):
            (target,) = read_out(out, "")
            check_transportable(target.dtype, "recv")
            self._check_message(self.rank if source is None else source, tag, options)
        into = np.empty(target.shape, target.dtype) if which_on_device([target]) else target

        def deliver(rank: int) -> int:
            if into is not target:
                target[...] = ops_of(target).from_host(into, ops_of(target).device_of(target))
            return rank

        return self._messages.receive(into, source, tag, self._timeout_of(options)).then(deliver)

    def _check_message(self, rank: int, tag: int, options: CommunicationOptions | None) -> None:
        self._check_options(options)
        if not _is_c_int(rank, 0) or rank >= self.size:
            raise ValueError(f"the other side is {rank!r}; expected a rank from 0 to {self.size - 1}")
        if not _is_c_int(tag, 0) or tag >= TAGS_OF_PROGRAMS:
            raise ValueError(f"tag is {tag!r}; expected a whole number from 0 to {TAGS_OF_PROGRAMS - 1}")

    # The end ----------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Finish all works and free the communicator (collective). Closing again does nothing.

        Raises:
            RuntimeError: Messages of this rank are in flight.
        """
        with self.shared_errors("closing a Communicator"):
            self._messages.check_none_in_flight()
        try:
            super().close()
        finally:
            self._messages.close()

    def abort(self) -> None:
        """Leave without the other ranks, for good (local; any thread may call it).

        Started collectives and messages end with a PeerError, and so does a call in which another thread waits. MPI may
        still write to their results. Ranks that wait for this one in a collective do so until their deadline, or until
        its program ends.

        >>> comm = Communicator()
        >>> comm.abort()
        >>> comm.barrier()
        Traceback (most recent call last):
        RuntimeError: this Communicator can no longer be used: this rank has aborted it
        """
        self._messages.abort()
        self._channel.executor.abort()

    # Memory and groups ------------------------------------------------------------------------------------

    def empty(self, shape: int | Sequence[int], dtype: DTypeLike = "float32") -> Array:
        """Return a new uninitialized array in memory that collectives handle best (collective).

        If several ranks share a node, the array is in shared memory, and its all-reduce copies nothing: each rank
        reduces its share straight from its neighbours' memory. From 2 MiB on, the result is a read-only array that the
        ranks of the node share; pass ``out=`` to get an array of your own. The memory belongs to the communicator and
        is not reused before ``close()``. Small arrays use ordinary memory. So do all arrays if there is no room, which
        is logged.

        Args:
            shape: Shape, the same on every rank.
            dtype: Dtype, the same on every rank.

        >>> comm = Communicator()
        >>> gradient = comm.empty((3, 2), "float64")
        >>> gradient[:] = 1.0
        >>> comm.all_reduce("MEAN", gradient).tolist()
        [[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]
        >>> comm.close()
        """
        like = np.empty(shape, as_dtype(dtype))
        description = describe("empty", signature_text(signature_of([like])))
        memory = self._run(Operation(self._allocate(like.nbytes, description), description))
        return like if memory is None else memory.view(like.dtype).reshape(like.shape)

    def _allocate(self, nbytes: int, description: Description) -> Steps[Array | None]:
        yield from self._channel.open(description)
        node = self._channel.node
        if node.size == 1 or nbytes < packing.SMALL_ARRAY_BYTES:
            return None
        memory = yield from node.shared.allocate(nbytes)
        if memory is None and node.rank == 0 and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "mpidist: empty() returns ordinary memory from now on: /dev/shm has no room for %d bytes more of each "
                "rank, or the process has no file descriptors left (ulimit -n)",
                nbytes,
            )
        return memory

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Return a communicator of the ranks that passed the same ``color`` (collective; MPI_Comm_split).

        Args:
            color: Number of the group; None joins no group and returns None.
            key: Order of the ranks in the group; equal keys keep their order.
        """
        with self.shared_errors("split"):
            if color is not None and not _is_c_int(color, 0):
                raise ValueError(f"color is {color!r}; expected a whole number from 0, or None to join no group")
            if not _is_c_int(key, -_LARGEST_C_INT):
                raise ValueError(f"key is {key!r}; expected a whole number that fits into a C int")
        self.meet("split")
        part: Any = self._channel.comm.Split(import_mpi().UNDEFINED if color is None else color, key)
        return None if color is None else self._like(part)

    def group(self, ranks: Sequence[int]) -> Communicator:
        """Return a communicator of some ranks (collective over these ranks; MPI_Comm_create_group).

        Args:
            ranks: Ranks of this communicator in their new order, equal on all of them, with this rank among them.

        Raises:
            ValueError: Unknown ranks, or one twice, or without this one.

        >>> comm = Communicator()
        >>> alone = comm.group([comm.rank])
        >>> alone.size
        1
        >>> alone.close(); comm.close()
        """
        members = list(ranks)
        known = all(_is_c_int(rank, 0) and rank < self.size for rank in members)
        if not known or len(set(members)) != len(members) or self.rank not in members:
            raise ValueError(
                f"ranks are {members!r}; expected different ranks from 0 to {self.size - 1}, {self.rank} among them"
            )
        return self._like(create_group(self._channel.comm, members, f"the group {members}"))

    def _like(self, part: Comm) -> Communicator:
        """Return a communicator over ``part`` with the options of this one, and free ``part``."""
        group = Communicator(part, options=self._options, advice=self._channel.handshake.advice)
        part.Free()
        return group

    # Reading arguments ------------------------------------------------------------------------------------

    def _cut(self, rows: int, counts: Sequence[int] | None) -> Sequence[int]:
        """Return the borders of the rows for each rank."""
        if counts is None:
            return borders(rows, self.size)
        cuts = list(accumulate(map(int, counts), initial=0))
        if len(cuts) != self.size + 1 or cuts[-1] != rows or min(counts) < 0:
            raise ValueError(
                f"counts is {counts!r}; expected how many of {rows} rows each of {self.size} ranks gets, in their order"
            )
        return cuts

    def _check_expected(self, expected: Sequence[int], outs: Sequence[Array]) -> None:
        if len(expected) != self.size or min(expected) < 0:
            raise ValueError(
                f"expected is {expected!r}; expected how many rows each of {self.size} ranks gives this one, in order"
            )
        for out in outs:
            if out.shape[:1] != (sum(expected),):
                given = signature_text(signature_of([out]))
                raise ValueError(f"out has {given}; expected {sum(expected)} rows, as in {expected!r}")

    def _read(
        self, op: ReduceOp | str, value: T, out: T | None = None
    ) -> tuple[ReduceOp, list[Array], list[Array] | None, str, Callable[[list[Array]], T]]:
        """Return operation, arrays of the value and of ``out``, structure, and function for the result."""
        try:
            op = ReduceOp.of(op)
            arrays, structure, rebuild = read(value)
            return op, arrays, None if out is None else read_out(out, structure), structure, rebuild
        except Exception as error:  # a generator may raise anything
            self.announce(error, "reading its arguments")
            raise

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        elif isinstance(error, Exception):
            # Closing is collective, and only this rank has left the block.
            self.announce(error, "the block of a Communicator")

    def __repr__(self) -> str:
        reason = self._channel.executor.reason
        return f"<Communicator rank {self.rank} of {self.size}{f' ({reason})' if reason else ''}>"

    def __dir__(self) -> list[str]:
        """Return the names for programs, without those for strategies alone."""
        for_strategies = {"fast", *(name for name in vars(ArrayCollectives) if name[0] != "_")} - _OF_PROGRAMS
        return sorted(set(super().__dir__()) - for_strategies)

    def __copy__(self) -> Communicator:
        return self.__deepcopy__({})

    def __deepcopy__(self, memo: object) -> Communicator:
        raise ValueError("a Communicator cannot be copied, because it owns an MPI communicator. Make a new one")


def _is_c_int(value: object, smallest: int) -> bool:
    return isinstance(value, (int, np.integer)) and bool(smallest <= value <= _LARGEST_C_INT)


def _nothing(_: object) -> None:
    return None
