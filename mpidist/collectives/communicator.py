"""Communicator: collectives between ranks without a strategy, for arrays of any kind."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial, wraps
from inspect import signature
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar
from weakref import proxy

import numpy as np

from mpidist.arrays.convert import to_array
from mpidist.arrays.device_ops import is_device_array, ops_of
from mpidist.arrays.dtypes import Array, as_dtype, check_transportable
from mpidist.collectives.channel.channel import Channel, SharedErrors
from mpidist.collectives.channel.mismatch import FOR_COMMUNICATORS, Advice
from mpidist.collectives.channel.observers import Observer
from mpidist.collectives.channel.operation import Operation, Work, describe, signature_of, signature_text
from mpidist.collectives.engine import Engine
from mpidist.collectives.move.point_to_point import PointToPoint
from mpidist.collectives.mpi import exchange
from mpidist.collectives.mpi.waiting import Comm, Steps
from mpidist.collectives.node import packing
from mpidist.collectives.node.core import NO_FAST_CALLS
from mpidist.collectives.observe.attach import observe_channel
from mpidist.collectives.planner import Planner
from mpidist.collectives.reading import Given, deliver, read, read_one, read_out
from mpidist.collectives.reduce.registry import Table, check_options, check_table
from mpidist.collectives.reduce.tuning_file import agreed_table
from mpidist.collectives.world_channel import world_channel
from mpidist.core.message_tags import TAGS_OF_PROGRAMS
from mpidist.core.options import CommunicationOptions, ReduceOp, check_communication_options
from mpidist.core.text import user_call_site
from mpidist.topology import import_mpi, world_topology
from mpidist.topology.start import create_group

T = TypeVar("T")
P = ParamSpec("P")

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

    from mpidist.collectives.step_agreement import StepAgreement

_log = logging.getLogger("mpidist")
_LARGEST_C_INT = 2**31 - 1
_BARRIER = describe("barrier", operation="barrier")
_DEFAULT_OPTIONS = CommunicationOptions()
# Public methods that programs do not call.
_FOR_STRATEGIES = {
    "announce",
    "broadcast_arrays",
    "changing",
    "common_memory",
    "done",
    "fast",
    "gather_arrays",
    "settle",
}
_FOR_STRATEGIES |= {"gather_objects", "meet", "prepare_device", "reduce_arrays", "reduce_arrays_async", "shared_errors"}


def _started(call: Callable[Concatenate[Communicator, P], T]) -> Callable[Concatenate[Communicator, P], Work[T]]:
    """Return the method that starts a collective or message, and returns its handle."""

    @wraps(call)
    def start(self: Communicator, /, *args: P.args, **kwargs: P.kwargs) -> Work[T]:
        work: Work[T] = call(self._starting, *args, **kwargs)  # type: ignore[assignment]
        return work

    name, found = call.__name__, signature(call)
    start.__name__, start.__qualname__ = f"{name}_async", f"Communicator.{name}_async"
    start.__doc__ = f"Start :meth:`{name}` and return its handle. Do not change its arrays before it is done."
    start.__dict__["__signature__"] = found.replace(return_annotation=f"Work[{found.return_annotation}]")
    return start


class Communicator:
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
        table: Table of algorithms by size. All ranks use the table of rank 0. By default, it is read from
            ``MPIDIST_TUNING_FILE``. If that has no table for these ranks, the shipped table is used.
        owner: Name of the owner in messages, equal on every rank.
        advice: Advice for errors.

    Raises:
        LaunchError: The MPI library is missing, or the ranks do not form one world.
        ValueError: The tuning file cannot be read or is wrong; on all ranks.
        MismatchError: Other ranks make something else.

    >>> comm = Communicator()
    >>> comm.all_reduce("SUM", np.ones(3)) / comm.size
    array([1., 1., 1.])
    >>> comm.close()
    """

    _has_warned = False

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
        self._channel = channel = Channel(base, self._options.timeout_seconds, owner, advice=advice)
        observe_channel(channel)
        self.rank: int = channel.rank
        self.size: int = channel.size
        try:
            agreeing = agreed_table(channel.comm, channel.node, table)
            agreed = channel.run(Operation(agreeing, describe("agreeing on the tuning table")))
        except ValueError:
            self._close(lambda: None)
            raise
        self._engine = Engine(channel, agreed)
        self._planner = Planner(channel, self._engine, self._options)
        self._messages = PointToPoint(channel)
        self.fast = self._engine.open_fast_calls(partial(Communicator._resume, proxy(self)))
        """The collectives of the fast path. They return None for calls of the general path."""
        # Functions that run an operation, and finish a message.
        self._launch: Callable[[Operation[Any]], Any] = channel.run
        self._finish: Callable[[Work[Any]], Any] = Work.wait
        # The same communicator for the ``_async`` methods, which start operations and return their handles.
        self._starting = starting = Communicator.__new__(Communicator)
        starts = {"fast": NO_FAST_CALLS, "_launch": channel.start, "_finish": self._messages.later}
        starting.__dict__.update(self.__dict__ | starts)

    # Running ----------------------------------------------------------------------------------------------------

    def _run(self, make: Callable[[], Operation[T]]) -> T:
        """Make and run an operation, and return its result."""
        operation = self._made(make)
        try:
            result: T = self._launch(operation)
        except BaseException:
            if operation.release is not None:
                operation.release()
            raise
        return result

    def _made(self, make: Callable[[], T]) -> T:
        try:
            return make()
        except Exception as error:  # a generator in the arguments may raise anything
            self.announce(error, "its arguments")
            raise

    def _resume(self, number: int, state: int, value: Array, result: Array, out: Array | None) -> Array:
        """Finish a fast-path call after peers were late, or made another call."""
        description = self._channel.executor.fast.descriptions[number]
        rest = Operation(self._engine.resume(description, state, value, result), description)
        rest.is_resumed = True
        final = self._channel.run(rest)
        # If ranks give unequal parts, the result is not the array that the fast path has prepared.
        return final if out is None else deliver([out], [final])[0]

    @property
    def last_algorithm(self) -> str:
        """Name of the algorithm of the last all-reduce."""
        took_fast_path = self._channel.executor.fast.last() is not None
        return self._engine.core_algorithm if took_fast_path else self._engine.last_algorithm

    # Reductions -------------------------------------------------------------------------------------------------

    def all_reduce(
        self, op: ReduceOp | str, value: T, options: CommunicationOptions | None = None, *, out: T | None = None
    ) -> T:
        """Reduce element by element over all ranks; every rank gets the same bits (collective; MPI_Allreduce).

        Args:
            op: SUM, MEAN, MIN, MAX or PROD; BAND, BOR or BXOR for integers and bool. A ReduceOp or its name.
            value: Array, number, or nest of them, with equal structure, shapes and dtypes on all ranks.
            out: Arrays for the result, with the same structure, shapes and dtypes; new arrays by default.
            options: Options of this call, merged into those of the communicator.

        Returns:
            The kind of ``value``. The mean of integers is float64. New arrays, or ``out``. Large results of one call in
            host memory may share one block of memory. Copy a result if you keep only that one.

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
        return self._run(lambda: self._planner.all_reduce(op, read(value, out), self.size, options))

    all_reduce_async = _started(all_reduce)

    def reduce(
        self, op: ReduceOp | str, value: T, root: int = 0, options: CommunicationOptions | None = None
    ) -> T | None:
        """Reduce over all ranks to rank ``root``. The others return None (collective, MPI_Reduce).

        >>> with Communicator() as comm:
        ...     total = comm.reduce("SUM", 1)
        ...     assert total == comm.size if comm.rank == 0 else total is None
        """
        return self._run(lambda: self._planner.reduce(op, read(value), root, options))

    reduce_async = _started(reduce)

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
            kept: T | None = self.fast.reduce_scatter(op, value, out)
            if kept is not None:
                return kept
        return self._run(lambda: self._planner.reduce_scatter(op, read_one(value, out), counts, options))

    reduce_scatter_async = _started(reduce_scatter)

    # Movement ---------------------------------------------------------------------------------------------------

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
        return self._run(lambda: self._planner.move("all_gather", read(value, out), options, axis=axis))

    all_gather_async = _started(all_gather)

    def gather(
        self, value: T, root: int = 0, options: CommunicationOptions | None = None, *, out: T | None = None
    ) -> T | None:
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
        return self._run(lambda: self._planner.move("gather", read(value, out), options, root=root))

    gather_async = _started(gather)

    def scatter(
        self,
        value: T,
        root: int = 0,
        options: CommunicationOptions | None = None,
        *,
        counts: Sequence[int] | None = None,
        out: T | None = None,
    ) -> T:
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
        return self._run(lambda: self._planner.move("scatter", read(value, out), options, root=root, counts=counts))

    scatter_async = _started(scatter)

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
        return self._run(
            lambda: self._planner.move("all_to_all", read(value, out), options, counts=counts, expected=expected)
        )

    all_to_all_async = _started(all_to_all)

    def broadcast(
        self, value: T, root: int = 0, options: CommunicationOptions | None = None, *, out: T | None = None
    ) -> T:
        """Return the value of rank ``root`` on every rank (collective; MPI_Bcast).

        Args:
            value: Array, number, or nest of them. On ranks other than ``root`` it gives structure, shape and dtype.
            root: The rank whose value is sent.
            options: Options of this call, merged into those of the communicator.
            out: Arrays for the result, for example ``value`` itself; new arrays by default.

        >>> with Communicator() as comm:
        ...     comm.broadcast([np.full(2, comm.rank), comm.rank + 1.0])
        [array([0, 0]), np.float64(1.0)]
        """
        if options is None:
            copy: T | None = self.fast.broadcast(value, root, out)
            if copy is not None:
                return copy
        return self._run(lambda: self._planner.move("broadcast", read(value, out), options, root=root))

    broadcast_async = _started(broadcast)

    def barrier(self, options: CommunicationOptions | None = None) -> None:
        """Wait until every rank has called it (collective; MPI_Barrier)."""
        return self._run(lambda: self._planner.meeting(_BARRIER, options))

    barrier_async = _started(barrier)

    def all_gather_object(self, value: T) -> list[T]:
        """Return the picklable objects of all ranks, in rank order (collective); for metadata, not data.

        >>> with Communicator() as comm:
        ...     assert comm.all_gather_object({"rank": comm.rank})[0] == {"rank": 0}
        ...     assert comm.broadcast_object(("step", comm.rank)) == ("step", 0)
        """
        return self.gather_objects(value)

    def broadcast_object(self, value: object, root: int = 0) -> Any:
        """Return the picklable object of rank ``root`` on every rank (collective); for metadata, not data."""

        def make() -> Operation[object]:
            title = f"broadcast_object from rank {self._planner.check_root(root)}"
            pickled = pickle.dumps(value) if self.rank == root else b""
            steps = exchange.broadcast_pickle(self._channel.comm, pickled, root)
            return self._planner.after_meeting(describe(title, operation="broadcast_object"), steps)

        return self._run(make)

    # Messages ---------------------------------------------------------------------------------------------------

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
        with self.shared_errors("send"):
            array = to_array(value)
            if is_device_array(array):
                array = ops_of(array).to_host(array)
            check_transportable(array.dtype, "send")
            self._check_message(dest, tag)
        sent: None = self._finish(self._messages.send(array, dest, tag, self._planner.timeout_of(options)))
        return sent

    send_async = _started(send)

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
        with self.shared_errors("recv"):
            (target,) = read_out(out, "")
            check_transportable(target.dtype, "recv")
            self._check_message(self.rank if source is None else source, tag)
        into = np.empty(target.shape, target.dtype) if is_device_array(target) else target
        message = self._messages.receive(into, source, tag, self._planner.timeout_of(options))
        if into is not target:
            message.add(partial(_to_device, into, target))
        sender: int = self._finish(message)
        return sender

    recv_async = _started(recv)

    def _check_message(self, rank: int, tag: int) -> None:
        if not _is_c_int(rank, 0) or rank >= self.size:
            raise ValueError(f"the other side is {rank!r}; expected a rank from 0 to {self.size - 1}")
        if not _is_c_int(tag, 0) or tag >= TAGS_OF_PROGRAMS:
            raise ValueError(f"tag is {tag!r}; expected a whole number from 0 to {TAGS_OF_PROGRAMS - 1}")

    # The end ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Finish all works and free the communicator (collective). Closing again does nothing.

        Raises:
            RuntimeError: Messages of this rank are in flight.
        """
        with self.shared_errors("closing a Communicator"):
            self._messages.check_none_in_flight()
        try:
            self._close(self._engine.close, self._engine.before_close())
        finally:
            self._messages.close()

    def _close(self, free_first: Callable[[], None], before: Steps[None] | None = None) -> None:
        if self._channel.close(free_first, before) and self._uses_world_channel:
            world_channel.release()

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

    # Memory and groups ------------------------------------------------------------------------------------------

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
        memory = self._run(lambda: self._planner.after_meeting(description, self._allocate(like.nbytes)))
        return like if memory is None else memory.view(like.dtype).reshape(like.shape)

    def _allocate(self, nbytes: int) -> Steps[Array | None]:
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

        >>> with Communicator() as comm, comm.split(color=comm.rank % 2) as half:
        ...     assert half.size <= comm.size
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

    # Observers and steps ----------------------------------------------------------------------------------------

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
        from mpidist.collectives.step_agreement import StepAgreement

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

    # For strategies ---------------------------------------------------------------------------------------------

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
        kind = self._planner.kind_of(note) if options is None and not more and divisor == self.size else None
        if kind is not None:
            is_one = len(arrays) == 1 and not kind and (out is None or len(out) == 1)
            given, outs = ([*arrays], out and [*out]) if not is_one else (arrays[0], out and out[0])
            result = self.fast.all_reduce(op, given, outs, kind)
            if result is not None:
                return [result] if is_one else list(result)
        return self._run(lambda: self._planner.all_reduce(op, Given(arrays, note, outs=out), divisor, options, more))

    reduce_arrays_async = _started(reduce_arrays)

    def gather_arrays(
        self, arrays: Sequence[Array], axis: int, *, options: CommunicationOptions | None = None, note: str = ""
    ) -> list[Array]:
        """Concatenate arrays of all ranks along ``axis`` (collective)."""
        return self._run(lambda: self._planner.move("all_gather", Given(arrays, note), options, axis=axis))

    def broadcast_arrays(
        self, arrays: Sequence[Array], root: int, *, options: CommunicationOptions | None = None, note: str = ""
    ) -> list[Array]:
        """Return the arrays of rank ``root``, as new arrays (collective)."""
        return self._run(lambda: self._planner.move("broadcast", Given(arrays, note), options, root=root))

    def gather_objects(self, value: T, note: str = "") -> list[T]:
        """Return the picklable objects of all ranks, in rank order (collective)."""
        return self._run(lambda: self._planner.gather_objects(value, note))

    def prepare_device(self, kind: str, device: int) -> None:
        """Make the algorithms for arrays on a device, while memory is free (collective)."""
        self._made(lambda: self._planner.prepare_device(kind, device))

    def meet(self, text: str) -> None:
        """Wait until every rank has called it with the same ``text`` (collective)."""
        self._run(lambda: self._planner.meeting(describe(text)))

    @property
    def shares_memory(self) -> bool:
        """Whether all ranks are on one node that has room for shared memory."""
        return self._channel.node.is_alone

    def common_memory(self, nbytes: int, text: str) -> Array | None:
        """Return a block of bytes for all ranks, None without room for it (collective).

        The block lives while any rank holds an array over it. ``text`` must contain the size.
        """
        steps = self._channel.node.shared.common(max(nbytes, 1), in_place=False)
        whole = self._run(lambda: self._planner.after_meeting(describe(text), steps))
        return None if whole is None else whole[:nbytes]

    @contextmanager
    def changing(self, label: str, what: str, content: Callable[[], bytes]) -> Iterator[None]:
        """Compare the change of this block with the other ranks' at the next collective.

        That collective raises MismatchError if the ranks have not made the same change. ``label`` names the variable,
        and ``what`` the change. ``content`` returns the bytes of the variable to compare.
        """
        local_changes = self._channel.executor.local_changes
        known = local_changes().before(label)
        before = content() if known is None else known
        try:
            yield
        finally:
            # A collective in the block may have compared the earlier changes, so this makes new ones.
            local_changes().change(label, before, content, f"{what} at {user_call_site()}")

    def settle(self, label: str) -> None:
        """Compare earlier changes of a variable by its present content.

        Its copies may differ from here on.
        """
        self._channel.executor.local_changes().settle(label)

    def done(self, label: str, what: str, checksum: int) -> None:
        """Compare an act with the other ranks at the next collective, as :meth:`changing` does."""
        self._channel.executor.local_changes().add(label, checksum, f"{what} at {user_call_site()}")

    def shared_errors(self, doing: str) -> AbstractContextManager[None]:
        """Return a block for work of this rank alone. Its errors reach every rank (see ``Channel``)."""
        return SharedErrors(self._channel, doing)

    def announce(self, error: Exception, doing: str) -> None:
        """Send an error of this rank to the other ranks, as :meth:`shared_errors` does."""
        self._channel.announce(error, doing)

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
        return sorted(set(super().__dir__()) - _FOR_STRATEGIES)

    def __deepcopy__(self, memo: object = None) -> Communicator:
        raise ValueError("a Communicator cannot be copied, because it owns an MPI communicator. Make a new one")

    __copy__ = __deepcopy__


def _is_c_int(value: object, smallest: int) -> bool:
    return isinstance(value, (int, np.integer)) and bool(smallest <= value <= _LARGEST_C_INT)


def _to_device(into: Array, target: Array, rank: int) -> int:
    """Copy a received array to the device of ``target``, and return the sender."""
    target[...] = ops_of(target).from_host(into, ops_of(target).device_of(target))
    return rank
