"""Communicator: collectives between ranks without a strategy, for arrays of any kind."""

from __future__ import annotations

import logging
import math
import pickle
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
from numpy.typing import DTypeLike

from mpidist.arrays.convert import to_array
from mpidist.arrays.device_ops import ops_of
from mpidist.arrays.dtypes import Array, as_dtype, check_transportable
from mpidist.collectives.array_collectives import ArrayCollectives
from mpidist.collectives.channel.observers import Observer
from mpidist.collectives.channel.operation import (
    Description,
    Operation,
    describe,
    signature_of,
    signature_text,
    which_on_device,
)
from mpidist.collectives.channel.work import Work
from mpidist.collectives.gpu.staging import on_host
from mpidist.collectives.move.movement_plan import check_has_axis
from mpidist.collectives.move.point_to_point import PointToPoint
from mpidist.collectives.mpi import objects
from mpidist.collectives.mpi.waiting import Steps
from mpidist.collectives.node import packing
from mpidist.collectives.node.chunks import borders
from mpidist.collectives.reading import delivering, read, read_out, restore
from mpidist.collectives.watch.step_agreement import StepAgreement
from mpidist.core.message_tags import TAGS_OF_PROGRAMS
from mpidist.core.options import CommunicationOptions, ReduceOp
from mpidist.topology import import_mpi
from mpidist.topology.start import create_group

T = TypeVar("T")

_log = logging.getLogger("mpidist")
_LARGEST_C_INT = 2**31 - 1
_BARRIER = describe("barrier", operation="barrier")
# Of the names of its base.
_OF_PROGRAMS = {"close", "last_algorithm", "shares_memory"}


class Communicator(ArrayCollectives):
    """Collectives between the ranks of an MPI communicator, which is duplicated (collective).

    Every method is collective: call it on every rank, in the same order. Ranks that make different calls at the
    same point all get a MismatchError that shows the call of each and its line. Nothing waits for ever: after the
    deadline of the call (30 minutes, ``MPIDIST_TIMEOUT``) CollectiveTimeoutError is raised.

    ``value`` is an array, a number, or a nest of them that travels together: lists, tuples, named tuples and dicts,
    in one another, of the same structure on all ranks. Results have that structure; mappings that are no dicts come out
    as dicts, generators and the values of a dict as lists. Entries of dicts are told apart by their keys.

    Arrays of PyTorch, JAX and CuPy give results of the same kind. Other objects with the buffer protocol, such as
    ``array.array``, give NumPy arrays. Arrays on a GPU stay there. A rank uses one device. The result is ordered after
    the call on the current stream. It may not be computed yet.

    Args:
        comm: An mpi4py intracommunicator; all ranks of the job by default.
        options: Defaults for every call.

    Raises:
        LaunchError: There is no MPI library, or the ranks do not form one world.

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
        """Return an agreement of the ranks on a step, without a message in each (collective).

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
        """Have an observer see the collectives of this communicator from now on (local).

        While one looks at beginnings, ends or chunks a call takes a few microseconds longer.

        Args:
            observer: A subclass of ``mpidist.collectives.Observer``, which names the events.

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
        """Have an observer see nothing more (local)."""
        self._channel.observers.remove(observer)

    # Reductions -------------------------------------------------------------------------------------------

    def all_reduce(
        self, op: ReduceOp | str, value: T, *, out: T | None = None, options: CommunicationOptions | None = None
    ) -> T:
        """Reduce element by element over all ranks; every rank gets the same bits (collective; MPI_Allreduce).

        Args:
            op: SUM, MEAN, MIN, MAX or PROD, of whole numbers and bool BAND, BOR or BXOR; a ReduceOp or its name.
            value: Array, number, or nest of them; equal structure, shapes and dtypes on all ranks.
            out: Where to put the result, of the same structure, shapes and dtypes; a new array by default.
            options: Laid over those of the communicator.

        Returns:
            The kind of ``value``; the mean of integers is float64. New arrays, or ``out``. Large results of one call,
            on a GPU also small ones, may share one block of memory: to keep one of many for long, keep a copy.

        Raises:
            TypeError: A dtype that cannot be reduced: bool, object, big-endian.
            MismatchError: Ranks differ in operation, structure, shapes, dtypes or options.
            ValueError: ``out`` does not fit the value.
            CollectiveTimeoutError: The other ranks did not come in time.

        Integer sums and products that are too large for their dtype wrap around as in NumPy, without a warning: 100 +
        100 is -56 in int8. Means of integers are formed in float64.

        >>> comm = Communicator()
        >>> comm.all_reduce("MEAN", [2.0, np.array([1, 2])])
        [np.float64(2.0), array([1., 2.])]
        >>> comm.all_reduce("MEAN", {"w": np.ones(2), "b": (3.0,)})
        {'w': array([1., 1.]), 'b': (np.float64(3.0),)}
        >>> comm.close()
        """
        if options is None:
            result: T | None = self.short.all_reduce(op, value, out, 0)
            if result is not None:
                return result
        return self._now(self._all_reducing(op, value, options, out))

    def all_reduce_async(
        self, op: ReduceOp | str, value: T, options: CommunicationOptions | None = None, *, out: T | None = None
    ) -> Work[T]:
        """Start an :meth:`all_reduce` and return its handle (collective).

        ``value`` and ``out`` must not be changed before the handle is done, and ``out`` says nothing before.

        >>> comm = Communicator()
        >>> work = comm.all_reduce_async("MAX", 3.0)
        >>> work.wait()
        np.float64(3.0)
        >>> comm.close()
        """
        return self._later(self._all_reducing(op, value, options, out))

    def _all_reducing(
        self, op: ReduceOp | str, value: T, options: CommunicationOptions | None, out: T | None
    ) -> Operation[T]:
        op, arrays, outs, structure, rebuild = self._read(op, value, out)
        return self._reduction(op, arrays, self.size, options, outs, structure).then(rebuild)

    def reduce(
        self, op: ReduceOp | str, value: T, root: int = 0, options: CommunicationOptions | None = None
    ) -> T | None:
        """Reduce over all ranks to rank ``root``; the others get None (collective; MPI_Reduce)."""
        return self._now(self._reducing_to(op, value, root, options))

    def reduce_async(
        self, op: ReduceOp | str, value: T, root: int = 0, options: CommunicationOptions | None = None
    ) -> Work[T | None]:
        """Start a :meth:`reduce` and return its handle (collective)."""
        return self._later(self._reducing_to(op, value, root, options))

    def _reducing_to(
        self, op: ReduceOp | str, value: T, root: int, options: CommunicationOptions | None
    ) -> Operation[T | None]:
        op, arrays, _, structure, rebuild = self._read(op, value)
        root = self._check_root(root)
        copies, bring_back = on_host(arrays)
        are_copies = bool(which_on_device(arrays))
        plan = self._plan("reduce", op, copies, self.size, options, structure, root=root, are_copies=are_copies)
        operation = self._operation(self._engine.reduce_to(plan, copies, root), plan.description, options)
        if self.rank != root:
            return operation.then(_nothing)
        return operation.then(bring_back).then(rebuild)

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

        The rows (axis 0) are dealt in rank order.

        Args:
            op: See :meth:`all_reduce`.
            value: Array of at least one dimension, equal in shape and dtype on all ranks.
            options: Laid over those of the communicator.
            counts: How many rows each rank keeps, the same on all ranks; by default equally many, and where they do
                not divide one more for the first ranks.
            out: Where to put this rank's rows; a new array by default.

        Raises:
            ValueError: A 0-d value, counts that do not make up its rows, or ``out`` does not fit.

        >>> comm = Communicator()
        >>> comm.reduce_scatter("SUM", np.ones((4 * comm.size, 2))).shape
        (4, 2)
        >>> comm.close()
        """
        if options is None and counts is None:
            rows: T | None = self.short.reduce_scatter(op, value, out)
            if rows is not None:
                return rows
        return self._now(self._reduce_scattering(op, value, options, counts, out))

    def reduce_scatter_async(
        self,
        op: ReduceOp | str,
        value: T,
        options: CommunicationOptions | None = None,
        *,
        counts: Sequence[int] | None = None,
        out: T | None = None,
    ) -> Work[T]:
        """Start a :meth:`reduce_scatter` and return its handle (collective)."""
        return self._later(self._reduce_scattering(op, value, options, counts, out))

    def _reduce_scattering(
        self,
        op: ReduceOp | str,
        value: T,
        options: CommunicationOptions | None,
        counts: Sequence[int] | None,
        out: T | None,
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
            operation.then(self._learns("reduce_scatter", given, operation, op, plan.divisor))
        return operation.then(bring_back).then(delivering(outs)).then(lambda parts: restore(value, parts[0]))

    # Movement ---------------------------------------------------------------------------------------------

    def all_gather(
        self, value: T, axis: int = 0, options: CommunicationOptions | None = None, *, out: T | None = None
    ) -> T:
        """Concatenate the arrays of all ranks along ``axis``, in rank order (collective; MPI_Allgatherv).

        Args:
            value: Array, or nest of arrays, of at least one dimension. Sizes along ``axis`` may differ
                between ranks and may be 0; dtypes and other dimensions must be equal.
            axis: Where to concatenate; may be negative.
            options: Laid over those of the communicator.
            out: Where to put the result; a new array by default. A value that is this rank's part of it, where all
                give as much, is not copied.

        Raises:
            ValueError: A 0-d array, an axis out of range, or ``out`` does not fit the result.
            MismatchError: Ranks differ in dtype or another dimension.

        >>> comm = Communicator()
        >>> comm.all_gather(np.zeros((1, 2)), axis=1).shape == (1, 2 * comm.size)
        True
        >>> comm.close()
        """
        if options is None and axis == 0:
            gathered: T | None = self.short.all_gather(value, out)
            if gathered is not None:
                return gathered
        return self._now(self._all_gathering(value, axis, options, out))

    def all_gather_async(
        self, value: T, axis: int = 0, options: CommunicationOptions | None = None, *, out: T | None = None
    ) -> Work[T]:
        """Start an :meth:`all_gather` and return its handle (collective)."""
        return self._later(self._all_gathering(value, axis, options, out))

    def _all_gathering(self, value: T, axis: int, options: CommunicationOptions | None, out: T | None) -> Operation[T]:
        _, arrays, outs, structure, rebuild = self._read(ReduceOp.SUM, value, out)
        return self._gathering(arrays, axis, options, structure, outs).then(delivering(outs)).then(rebuild)

    def gather(
        self, value: T, root: int = 0, options: CommunicationOptions | None = None, *, out: T | None = None
    ) -> T | None:
        """Concatenate the arrays of all ranks along axis 0 on one rank (collective; MPI_Gatherv).

        Args:
            value: As for :meth:`all_gather`.
            root: The rank that gets the result; the others get None.
            options: Laid over those of the communicator.
            out: Where to put the result on ``root``; a new array by default. Left out on the others.

        >>> comm = Communicator()
        >>> rows = comm.gather(np.full((2, 3), comm.rank))
        >>> rows.shape == (2 * comm.size, 3) if comm.rank == 0 else rows is None
        True
        >>> comm.close()
        """
        return self._now(self._gathering_to(value, root, options, out))

    def gather_async(
        self, value: T, root: int = 0, options: CommunicationOptions | None = None, *, out: T | None = None
    ) -> Work[T | None]:
        """Start a :meth:`gather` and return its handle (collective)."""
        return self._later(self._gathering_to(value, root, options, out))

    def _gathering_to(
        self, value: T, root: int, options: CommunicationOptions | None, out: T | None
    ) -> Operation[T | None]:
        root = self._check_root(root)
        _, arrays, outs, structure, rebuild = self._read(ReduceOp.SUM, value, out)

        def cut(rows: int) -> Sequence[int]:
            return [0] * (root + 1) + [rows] * (self.size - root)

        gathering = self._dealing("gather", arrays, cut, options, structure, outs, root)
        if self.rank != root:
            return gathering.then(_nothing)
        return gathering.then(delivering(outs)).then(rebuild)

    def scatter(
        self,
        value: T,
        root: int = 0,
        options: CommunicationOptions | None = None,
        *,
        counts: Sequence[int] | None = None,
        out: T | None = None,
    ) -> T:
        """Deal the rows of an array of one rank, in rank order (collective; MPI_Scatterv).

        Args:
            value: Array, or nest of arrays, of at least one dimension. On ranks other than ``root`` it tells structure,
                dtype and the shape of a row, and may have no rows.
            root: Whose rows are dealt.
            options: Laid over those of the communicator.
            counts: How many rows each rank gets; that of ``root`` counts. By default equally many, and where they do
                not divide one more for the first ranks.
            out: Where to put this rank's rows; a new array by default.

        >>> comm = Communicator()
        >>> comm.scatter(np.arange(3.0 * comm.size)) - 3 * comm.rank
        array([0., 1., 2.])
        >>> comm.close()
        """
        return self._now(self._scattering(value, root, options, counts, out))

    def scatter_async(
        self,
        value: T,
        root: int = 0,
        options: CommunicationOptions | None = None,
        *,
        counts: Sequence[int] | None = None,
        out: T | None = None,
    ) -> Work[T]:
        """Start a :meth:`scatter` and return its handle (collective)."""
        return self._later(self._scattering(value, root, options, counts, out))

    def _scattering(
        self, value: T, root: int, options: CommunicationOptions | None, counts: Sequence[int] | None, out: T | None
    ) -> Operation[T]:
        root = self._check_root(root)
        _, arrays, outs, structure, rebuild = self._read(ReduceOp.SUM, value, out)
        cut = partial(self._cut, counts=counts) if self.rank == root else None
        dealing = self._dealing("scatter", arrays, cut, options, structure, outs, root)
        return dealing.then(delivering(outs)).then(rebuild)

    def all_to_all(
        self,
        value: T,
        options: CommunicationOptions | None = None,
        *,
        counts: Sequence[int] | None = None,
        expected: Sequence[int] | None = None,
        out: T | None = None,
    ) -> T:
        """Deal the rows of every rank's array, in rank order (collective; MPI_Alltoallv).

        Args:
            value: Array, or nest of arrays, of at least one dimension; ranks may have other numbers of rows, but the
                same dtypes and other dimensions.
            options: Laid over those of the communicator.
            counts: How many of this rank's rows each rank gets; by default equally many, and where they do not divide
                one more for the first ranks.
            expected: How many rows this rank expects from each rank, which the ranks compare: all of them say it, or
                none.
            out: Where to put the rows from all ranks, those of rank 0 first; a new array by default.

        Raises:
            ValueError: A 0-d array, counts that do not make up its rows, or ``out`` does not fit the result.
            MismatchError: A rank gives another one more or fewer rows than that one expects.

        >>> comm = Communicator()
        >>> comm.all_to_all(np.arange(2 * comm.size)).size == 2 * comm.size
        True
        >>> comm.close()
        """
        if options is None and counts is None and expected is None:
            dealt: T | None = self.short.all_to_all(value, out)
            if dealt is not None:
                return dealt
        return self._now(self._exchanging(value, options, counts, expected, out))

    def all_to_all_async(
        self,
        value: T,
        options: CommunicationOptions | None = None,
        *,
        counts: Sequence[int] | None = None,
        expected: Sequence[int] | None = None,
        out: T | None = None,
    ) -> Work[T]:
        """Start an :meth:`all_to_all` and return its handle (collective)."""
        return self._later(self._exchanging(value, options, counts, expected, out))

    def _exchanging(
        self,
        value: T,
        options: CommunicationOptions | None,
        counts: Sequence[int] | None,
        expected: Sequence[int] | None,
        out: T | None,
    ) -> Operation[T]:
        _, arrays, outs, structure, rebuild = self._read(ReduceOp.SUM, value, out)
        if expected is not None:
            with self.shared_errors("checking what it expects"):
                expected = [*map(int, expected)]
                self._check_expected(expected, outs or ())
        cut = partial(self._cut, counts=counts)
        exchange = self._dealing("all_to_all", arrays, cut, options, structure, outs, expected=expected)
        if options is None and counts is None and expected is None and len(arrays) == 1 and not structure:
            exchange.then(self._learns("all_to_all", arrays[0], exchange))
        return exchange.then(delivering(outs)).then(rebuild)

    def broadcast(
        self, value: T, root: int = 0, options: CommunicationOptions | None = None, *, out: T | None = None
    ) -> T:
        """Return the value of rank ``root`` on every rank (collective; MPI_Bcast).

        Args:
            value: Array, number, or nest of them; on ranks other than ``root`` it tells structure, shape and dtype.
            root: Whose value it is.
            options: Laid over those of the communicator.
            out: Where to put it, ``value`` itself for instance; new arrays by default.
        """
        if options is None:
            copy: T | None = self.short.broadcast(value, root, out)
            if copy is not None:
                return copy
        return self._now(self._broadcasting_value(value, root, options, out))

    def broadcast_async(
        self, value: T, root: int = 0, options: CommunicationOptions | None = None, *, out: T | None = None
    ) -> Work[T]:
        """Start a :meth:`broadcast` and return its handle (collective)."""
        return self._later(self._broadcasting_value(value, root, options, out))

    def _broadcasting_value(
        self, value: T, root: int, options: CommunicationOptions | None, out: T | None
    ) -> Operation[T]:
        _, arrays, outs, structure, rebuild = self._read(ReduceOp.SUM, value, out)
        return self._broadcasting(arrays, root, options, structure, outs).then(delivering(outs)).then(rebuild)

    def barrier(self, options: CommunicationOptions | None = None) -> None:
        """Return once every rank has called it (collective; MPI_Barrier)."""
        self._now(self._meeting(_BARRIER, options))

    def barrier_async(self, options: CommunicationOptions | None = None) -> Work[None]:
        """Start a :meth:`barrier` and return its handle, done once every rank has come (collective)."""
        return self._later(self._meeting(_BARRIER, options))

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
            return (yield from objects.broadcast_pickle(self._channel.comm, pickled, root))

        return self._now(Operation(steps(), description))

    # Messages ---------------------------------------------------------------------------------------------

    def send(self, value: object, dest: int, tag: int = 0, options: CommunicationOptions | None = None) -> None:
        """Send an array to one rank, which calls :meth:`recv` (MPI_Send).

        Not collective, and independent of the collectives. Messages between two ranks with the same tag come in the
        order in which they were sent. May return before the other rank has the array.

        Args:
            value: Array or number.
            dest: The rank.
            tag: From 0 to 8189; tells messages apart.
            options: ``timeout_seconds`` of them counts.

        Raises:
            MessageTimeoutError: It was not taken in time.

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
        """Start a :meth:`send` and return its handle.

        ``value`` must not be changed before it is done.
        """
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
            out: An array of the shape and dtype that is sent, into which it goes.
            source: Who sends it; None takes it from whoever sends first.
            tag: That of the message.
            options: ``timeout_seconds`` of them counts.

        Raises:
            MismatchError: The message has another shape or dtype; with the lines of both calls.
            MessageTimeoutError: None came in time.
        """
        return self._receiving(out, source, tag, options).wait()

    def recv_async(
        self, out: object, source: int | None = None, tag: int = 0, options: CommunicationOptions | None = None
    ) -> Work[int]:
        """Start a :meth:`recv` and return its handle; ``out`` says nothing before it is done."""
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

    def close(self) -> None:
        """Finish what is on its way and free the communicator (collective). Closing again does nothing.

        Raises:
            RuntimeError: Messages of this rank are under way, which others may not have taken.
        """
        with self.shared_errors("closing a Communicator"):
            self._messages.check_none_under_way()
        try:
            super().close()
        finally:
            self._messages.close()

    def abort(self) -> None:
        """Leave without the other ranks, for good (local; any thread may call it).

        Started collectives and messages end with a PeerError, and so does a call in which another thread waits; MPI
        may still write to their results. Ranks that wait for this one in a collective do so until their deadline, or
        until its program ends.

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

        Where several ranks share a node it lies in shared memory, and the all-reduce of such arrays copies nothing:
        each rank reduces its share straight out of its neighbours' memory. From 2 MiB on the result is a read-only
        array that the ranks of the node share; ``out=`` gives one of the caller's own. The memory belongs to the
        communicator: it is not used for other arrays before ``close()``. Small arrays, and all where there is no room
        (which is said), are ordinary memory.

        Args:
            shape: The same on every rank.
            dtype: The same on every rank.

        >>> comm = Communicator()
        >>> gradient = comm.empty((3, 2), "float64")
        >>> gradient[:] = 1.0
        >>> comm.all_reduce("MEAN", gradient).tolist()
        [[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]
        >>> comm.close()
        """
        like = np.empty(shape, as_dtype(dtype))
        description = describe("empty", signature_text(signature_of([like])))
        memory = self._now(Operation(self._allocate_steps(like.nbytes, description), description))
        return like if memory is None else memory.view(like.dtype).reshape(like.shape)

    def _allocate_steps(self, nbytes: int, description: Description) -> Steps[Array | None]:
        yield from self._channel.open(description)
        node = self._channel.node
        if node.size == 1 or nbytes < packing.SMALL_ARRAY_BYTES:
            return None
        memory = yield from node.shared.allocate(nbytes)
        if memory is None and node.rank == 0 and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "mpidist: empty() gives ordinary memory from now on: /dev/shm has no room for %d bytes more of each "
                "rank, or the files that a process may have open (ulimit -n) are used up",
                nbytes,
            )
        return memory

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Return a communicator of the ranks that passed the same ``color`` (collective; MPI_Comm_split).

        Args:
            color: Which group; None joins no group and returns None.
            key: Order of the ranks in the group; ties keep their order.
        """
        with self.shared_errors("split"):
            if color is not None and not _is_c_int(color, 0):
                raise ValueError(f"color is {color!r}; expected a whole number from 0, or None to join no group")
            if not _is_c_int(key, -_LARGEST_C_INT):
                raise ValueError(f"key is {key!r}; expected a whole number that fits into a C int")
        self.meet("split")
        part: Any = self._channel.comm.Split(import_mpi().UNDEFINED if color is None else color, key)
        if color is None:
            return None
        group = Communicator(part, options=self._options, advice=self._channel.handshake.advice)
        part.Free()
        return group

    def group(self, ranks: Sequence[int]) -> Communicator:
        """Return a communicator of some ranks, made by them alone (collective over them; MPI_Comm_create_group).

        Args:
            ranks: Of this communicator, this rank among them; the same on all of them. In this order.

        Raises:
            ValueError: Ranks that there are not, or one twice, or without this one.

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
        part = create_group(self._channel.comm, members, f"the group {members}")
        group = Communicator(part, options=self._options, advice=self._channel.handshake.advice)
        part.Free()
        return group

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
        except Exception as error:  # a generator may raise whatever it likes
            self.announce(error, "reading its arguments")
            raise

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        elif isinstance(error, Exception):
            # Closing takes all ranks, and this one is on its way out alone.
            self.announce(error, "the block of a Communicator")

    def __repr__(self) -> str:
        unusable = self._channel.executor.unusable
        state = f" ({unusable})" if unusable else ""
        return f"<Communicator rank {self.rank} of {self.size}{state}>"

    def __dir__(self) -> list[str]:
        """Return the names for programs, without those for strategies alone."""
        for_strategies = {"short", *(name for name in vars(ArrayCollectives) if name[0] != "_")} - _OF_PROGRAMS
        return sorted(set(super().__dir__()) - for_strategies)

    def __copy__(self) -> Communicator:
        return self.__deepcopy__({})

    def __deepcopy__(self, memo: object) -> Communicator:
        raise ValueError("a Communicator cannot be copied: it owns an MPI communicator; make a new one")


def _is_c_int(value: object, smallest: int) -> bool:
    return isinstance(value, (int, np.integer)) and bool(smallest <= value <= _LARGEST_C_INT)


def _nothing(_: object) -> None:
    return None
