"""Communicator: the public face of the engine, collectives between ranks without a strategy."""

from __future__ import annotations

import atexit
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from mpidist.arrays.convert import Array, restorer, to_array
from mpidist.arrays.dtypes import check_transportable
from mpidist.collectives import algorithms, gathering, objects
from mpidist.collectives.algorithms.reduce_broadcast import reduce_to
from mpidist.collectives.handshake import FAILED, LEFT, Handshake, plan_id
from mpidist.collectives.plan import ReductionPlan, Signature, signature_text
from mpidist.collectives.waiting import Deadline, Steps, drive
from mpidist.collectives.work import Work
from mpidist.core import settings
from mpidist.core.callsite import user_call_site
from mpidist.core.enums import ReduceOp
from mpidist.core.errors import CollectiveTimeoutError, MismatchError, PeerError
from mpidist.core.options import CommunicationOptions, check_communication_options
from mpidist.topology import import_mpi, world_topology

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")

_DEFAULT_OPTIONS = CommunicationOptions()
# A rank that failed on its own tells the others, but does not keep its error back for longer than this.
_FAILURE_SECONDS = 30.0
# How long a rank that leaves after a timeout waits for the others to catch up, so that MPI can end in order.
_EXIT_SECONDS = 5.0
_open: list[Communicator] = []


def open_communicators() -> list[Communicator]:
    """Return the communicators of this process that have not been closed."""
    return list(_open)


class Communicator:
    """Collectives between the ranks of an MPI communicator, which is duplicated (collective).

    Every method is collective: call it on every rank, in the same order. Ranks that make different calls at the
    same point all get a MismatchError that shows what each wanted and where. Nothing waits for ever: after the
    deadline of the call (30 minutes, ``MPIDIST_TIMEOUT``) CollectiveTimeoutError is raised.

    ``value`` is an array, a number, or a flat list or tuple of them that travels together. Arrays of other
    libraries (PyTorch, JAX, anything with DLPack or the buffer protocol) come out as the kind that went in.

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

    def __init__(self, comm: MPI.Intracomm | None = None, *, options: CommunicationOptions | None = None) -> None:
        check_communication_options(options)
        self._options = _DEFAULT_OPTIONS.merge(options)
        _check_is_offered(self._options)
        self._timeout = self._options.timeout_seconds or settings.TIMEOUT.read()
        self._warn_after = settings.WARN_AFTER.read()
        base = world_topology().world if comm is None else comm
        self._comm = base.Dup()
        self.rank: int = self._comm.Get_rank()
        self.size: int = self._comm.Get_size()
        self._handshake = Handshake(self._comm)
        self._plans: dict[Any, ReductionPlan] = {}
        self._algorithms: dict[str, algorithms.Algorithm] = {}
        self._queue: deque[Work] = deque()
        self._lock = threading.Lock()
        self._calls = 0
        self._unusable: str | None = None
        self._given_up: Steps[Any] | None = None
        _open.append(self)

    # Reductions -------------------------------------------------------------------------------------------

    def all_reduce(
        self, op: ReduceOp | str, value: Any, *, out: Any = None, options: CommunicationOptions | None = None
    ) -> Any:
        """Reduce element by element over all ranks; every rank gets the same bits (collective; MPI_Allreduce).

        Args:
            op: SUM, MEAN, MIN, MAX or PROD, as a ReduceOp or its name.
            value: Array, number, or list or tuple of them; equal shapes and dtypes on all ranks.
            out: Where to put the result, of the same structure, shapes and dtypes; a new array by default.
            options: Laid over those of the communicator.

        Returns:
            The kind of ``value``; the mean of integers is float64. A new array, or ``out``.

        Raises:
            TypeError: A dtype that cannot be reduced: bool, object, big-endian.
            MismatchError: Ranks differ in operation, shapes, dtypes or options.
            CollectiveTimeoutError: The other ranks did not come in time.

        >>> comm = Communicator()
        >>> comm.all_reduce("MEAN", [2.0, np.array([1, 2])])
        [np.float64(2.0), array([1., 2.])]
        >>> comm.close()
        """
        op = ReduceOp.of(op)
        arrays, rebuild = _unwrap(value)
        outs = None if out is None else _unwrap(out)[0]
        return rebuild(self.reduce_arrays(op, arrays, self.size, options=options, out=outs))

    def all_reduce_async(self, op: ReduceOp | str, value: Any, options: CommunicationOptions | None = None) -> Work:
        """Start an :meth:`all_reduce` and return its handle (collective).

        ``value`` must not be changed before the handle is done.

        >>> comm = Communicator()
        >>> work = comm.all_reduce_async("MAX", 3.0)
        >>> work.wait()
        np.float64(3.0)
        >>> comm.close()
        """
        op = ReduceOp.of(op)
        arrays, rebuild = _unwrap(value)
        return self.reduce_arrays_async(op, arrays, self.size, options=options).then(rebuild)

    def reduce(self, op: ReduceOp | str, value: Any, root: int = 0, options: CommunicationOptions | None = None) -> Any:
        """Reduce over all ranks to rank ``root``; the others get None (collective; MPI_Reduce)."""
        op = ReduceOp.of(op)
        root = self._check_root(root)
        arrays, rebuild = _unwrap(value)
        plan = self._plan(f"reduce to rank {root}", op, arrays, self.size, options, "")

        def steps() -> Steps[list[Array] | None]:
            yield from self._handshake.open(plan.id, plan.text, None)
            results: list[Array] = [arrays[0]] * len(arrays)
            for pack in plan.packs:
                flat = pack.empty_result(None) if self.rank == root else None
                yield from reduce_to(self._comm, pack.fill(arrays), flat, op, root)
                if flat is not None:
                    plan.finish(pack, flat, results, None)
            return results if self.rank == root else None

        results = self._run(steps(), plan.text, options)
        return None if results is None else rebuild(results)

    def reduce_scatter(self, op: ReduceOp | str, value: Any, options: CommunicationOptions | None = None) -> Any:
        """Reduce an array over all ranks and keep this rank's rows of it (collective; MPI_Reduce_scatter).

        The rows (axis 0) are dealt in rank order; where they do not divide, the first ranks get one more.

        Raises:
            ValueError: A 0-d value.

        >>> comm = Communicator()
        >>> comm.reduce_scatter("SUM", np.ones((4 * comm.size, 2))).shape
        (4, 2)
        >>> comm.close()
        """
        op = ReduceOp.of(op)
        array = to_array(value)
        _check_has_axis(array, 0, "reduce_scatter")
        plan = self._plan("reduce_scatter", op, [array], self.size, options, "")
        rows = [len(part) for part in np.array_split(np.arange(len(array)), self.size)]
        row_size = int(np.prod(array.shape[1:]))
        pack = plan.packs[0]

        def steps() -> Steps[Array]:
            yield from self._handshake.open(plan.id, plan.text, None)
            flat = yield from gathering.reduce_scatter_rows(
                self._comm, pack.fill([array]), rows, row_size, op, pack.dtype
            )
            if op is ReduceOp.MEAN:
                np.true_divide(flat, self.size, out=flat)
            return flat.astype(plan.result_dtypes[0], copy=False).reshape(rows[self.rank], *array.shape[1:])

        return _restore(value, self._run(steps(), plan.text, options))

    # Movement ---------------------------------------------------------------------------------------------

    def all_gather(self, value: Any, axis: int = 0, options: CommunicationOptions | None = None) -> Any:
        """Concatenate the arrays of all ranks along ``axis``, in rank order (collective; MPI_Allgatherv).

        Args:
            value: Array, or list or tuple of arrays, of at least one dimension. Sizes along ``axis`` may differ
                between ranks and may be 0; dtypes and other dimensions must be equal.
            axis: Where to concatenate; may be negative.
            options: Laid over those of the communicator.

        Raises:
            ValueError: A 0-d array, or an axis out of range.
            MismatchError: Ranks differ in dtype or another dimension.

        >>> comm = Communicator()
        >>> comm.all_gather(np.zeros((1, 2)), axis=1).shape == (1, 2 * comm.size)
        True
        >>> comm.close()
        """
        arrays, rebuild = _unwrap(value)
        return rebuild(self.gather_arrays(arrays, axis, options=options))

    def broadcast(self, value: Any, root: int = 0, options: CommunicationOptions | None = None) -> Any:
        """Return the value of rank ``root`` on every rank, as new arrays (collective; MPI_Bcast).

        Args:
            value: Array, number, or list or tuple of them; on ranks other than ``root`` it tells shape and dtype.
            root: Whose value it is.
            options: Laid over those of the communicator.
        """
        arrays, rebuild = _unwrap(value)
        return rebuild(self.broadcast_arrays(arrays, root, options=options))

    def barrier(self, options: CommunicationOptions | None = None) -> None:
        """Return once every rank has called it (collective; MPI_Barrier)."""
        self._run(self._handshake.open(plan_id("barrier"), "barrier", None), "barrier", options)

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the picklable objects of all ranks, in rank order (collective); for metadata, not data."""
        text = "all_gather_object"

        def steps() -> Steps[list[Any]]:
            yield from self._handshake.open(plan_id(text), text, None)
            return (yield from objects.gather_objects(self._comm, value))

        return self._run(steps(), text, None)

    def broadcast_object(self, value: Any, root: int = 0) -> Any:
        """Return the picklable object of rank ``root`` on every rank (collective); for metadata, not data."""
        text = f"broadcast_object from rank {self._check_root(root)}"

        def steps() -> Steps[Any]:
            yield from self._handshake.open(plan_id(text), text, None)
            return (yield from objects.broadcast_object(self._comm, value, root))

        return self._run(steps(), text, None)

    # Memory and groups ------------------------------------------------------------------------------------

    def empty(self, shape: int | Sequence[int], dtype: Any = "float32") -> Array:
        """Return a new array, uninitialized, in memory that collectives handle best (collective)."""
        array = np.empty(shape, dtype)
        text = f"empty of {signature_text(_signature([array]))}"
        self._run(self._handshake.open(plan_id(text), text, None), text, None)
        return array

    def split(self, color: int | None, key: int = 0) -> Communicator | None:
        """Return a communicator of the ranks that passed the same ``color`` (collective; MPI_Comm_split).

        Args:
            color: Which group; None joins no group and returns None.
            key: Order of the ranks in the group; ties keep their order.
        """
        self._run(self._handshake.open(plan_id("split"), "split", None), "split", None)
        part: Any = self._comm.Split(import_mpi().UNDEFINED if color is None else color, key)
        if color is None:
            return None
        group = Communicator(part, options=self._options)
        part.Free()
        return group

    def close(self) -> None:
        """Finish what is on its way and free the communicator (collective). Closing again does nothing."""
        if self not in _open:
            return
        _open.remove(self)
        if self._unusable is None:
            while self._queue:
                self.complete(self._queue[0], None)
            for algorithm in self._algorithms.values():
                algorithm.close()
            self._comm.Free()
            self._unusable = "it has been closed"

    def __enter__(self) -> Communicator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = f" ({self._unusable})" if self._unusable else ""
        return f"<Communicator rank {self.rank} of {self.size}{state}>"

    def __deepcopy__(self, memo: Any) -> Communicator:
        raise ValueError("a Communicator cannot be copied: it owns an MPI communicator; make a new one")

    # For the rooms above ----------------------------------------------------------------------------------

    def reduce_arrays(
        self,
        op: ReduceOp,
        arrays: Sequence[Array],
        divisor: int,
        *,
        options: CommunicationOptions | None = None,
        out: Sequence[Array] | None = None,
        note: str = "",
    ) -> list[Array]:
        """All-reduce NumPy arrays; a mean is the sum divided by ``divisor`` (collective)."""
        plan = self._plan("all_reduce", op, arrays, divisor, options, note)
        _check_out(plan, out)
        return self._run(self._reduce_steps(plan, arrays, out, None), plan.text, options)

    def reduce_arrays_async(
        self,
        op: ReduceOp,
        arrays: Sequence[Array],
        divisor: int,
        *,
        options: CommunicationOptions | None = None,
        note: str = "",
    ) -> Work:
        """Start :meth:`reduce_arrays` and return its handle (collective)."""
        plan = self._plan("all_reduce", op, arrays, divisor, options, note)
        call_site = user_call_site()
        steps = self._reduce_steps(plan, arrays, None, call_site)
        return self._submit(steps, plan.text, call_site, options)

    def gather_arrays(
        self, arrays: Sequence[Array], axis: int, *, options: CommunicationOptions | None = None, note: str = ""
    ) -> list[Array]:
        """Concatenate NumPy arrays of all ranks along ``axis`` (collective)."""
        moved = []
        parts = []
        for array in arrays:
            check_transportable(array.dtype, "all_gather")
            position = _check_has_axis(array, axis, "all_gather")
            moved.append(np.ascontiguousarray(np.moveaxis(array, position, 0)))
            shape = ", ".join("*" if i == position else str(n) for i, n in enumerate(array.shape))
            parts.append(f"{array.dtype.name}({shape})")
        text = f"all_gather along axis {axis} of {', '.join(parts)}{f' as {note}' if note else ''}"

        def steps() -> Steps[list[Array]]:
            yield from self._handshake.open(plan_id(text), text, None)
            lengths = yield from gathering.gather_lengths(self._comm, [len(array) for array in moved])
            results = []
            for index, array in enumerate(moved):
                row = int(np.prod(array.shape[1:]))
                rows: list[int] = lengths[:, index].tolist()
                counts = [n * row for n in rows]
                flat = yield from gathering.all_gather_flat(self._comm, array.reshape(-1), counts)
                whole = flat.reshape(sum(rows), *array.shape[1:])
                results.append(np.moveaxis(whole, 0, axis if axis >= 0 else axis + array.ndim))
            return results

        return self._run(steps(), text, options)

    def broadcast_arrays(
        self, arrays: Sequence[Array], root: int, *, options: CommunicationOptions | None = None, note: str = ""
    ) -> list[Array]:
        """Return the NumPy arrays of rank ``root``, as new arrays (collective)."""
        root = self._check_root(root)
        for array in arrays:
            check_transportable(array.dtype, "broadcast")
        of_what = f" for {note}" if note else ""
        text = f"broadcast from rank {root} of {signature_text(_signature(arrays))}{of_what}"

        def steps() -> Steps[list[Array]]:
            yield from self._handshake.open(plan_id(text), text, None)
            results = [np.array(array, order="C", subok=False) for array in arrays]
            for result in results:
                yield from gathering.broadcast_flat(self._comm, result.reshape(-1), root)
            return results

        return self._run(steps(), text, options)

    @contextmanager
    def shared_errors(self, doing: str) -> Iterator[None]:
        """Run a block of rank-local work before a collective, so that an error in it reaches every rank.

        The rank that fails raises its own error; the others raise PeerError at their next call.

        Args:
            doing: What the block does, for the report.
        """
        try:
            yield
        except Exception as error:
            if self.size > 1 and self._unusable is None:
                limit = min(self._timeout, _FAILURE_SECONDS)
                steps = self._handshake.signal(FAILED, f"raised {type(error).__name__}: {error}", user_call_site())
                text = f"telling the other ranks of {type(error).__name__} in {doing}"
                try:
                    self._drive(steps, text, limit, None)
                except CollectiveTimeoutError as others_did_not_come:
                    raise error from others_did_not_come
            raise

    def advance(self) -> None:
        """Move the oldest unfinished work one step forward."""
        self._check_usable()
        if self._queue and self._queue[0].step():
            self._queue.popleft()

    def complete(self, work: Work, timeout: float | None) -> None:
        """Carry out works in order until ``work`` is done."""
        if timeout is None:
            while self._queue and not work._is_done:
                self._finish_oldest()
            return
        if not work._is_done:
            drive(
                self._polling(work),
                lambda: Deadline(timeout, timeout, lambda _: "", lambda _: _raise_still_running(work, timeout)),
            )

    # Inside -----------------------------------------------------------------------------------------------

    def _plan(
        self,
        kind: str,
        op: ReduceOp,
        arrays: Sequence[Array],
        divisor: int,
        options: CommunicationOptions | None,
        note: str,
    ) -> ReductionPlan:
        signature = _signature(arrays)
        key = (kind, op, divisor, signature, options, note)
        plan = self._plans.get(key)
        if plan is None:
            check_communication_options(options)
            merged = self._options.merge(options)
            _check_is_offered(merged)
            plan = self._plans[key] = ReductionPlan(kind, op, signature, merged, divisor, note)
        return plan

    def _reduce_steps(
        self, plan: ReductionPlan, arrays: Sequence[Array], out: Sequence[Array] | None, call_site: str | None
    ) -> Steps[list[Array]]:
        handshake = self._handshake
        if plan.inline:
            plan.fill_inline(arrays, handshake.payload)
            yield from handshake.open(plan.id, plan.text, call_site)
            return plan.from_inline(handshake.totals, out)
        yield from handshake.open(plan.id, plan.text, call_site)
        algorithm = self._algorithm(plan.algorithm)
        results: list[Array] = [arrays[0]] * len(arrays)
        for pack in plan.packs:
            flat = pack.empty_result(out)
            send = pack.fill(arrays)
            if out is not None and np.may_share_memory(send, flat):
                send = send.copy()
            yield from algorithm.all_reduce(send, flat, plan.op)
            plan.finish(pack, flat, results, out)
        return results

    def _algorithm(self, name: str | None) -> algorithms.Algorithm:
        name = algorithms.check_name(name)
        if name not in self._algorithms:
            self._algorithms[name] = algorithms.make(name, self._comm)
        return self._algorithms[name]

    def _run(self, steps: Steps[T], text: str, options: CommunicationOptions | None) -> T:
        self._check_usable()
        while self._queue:
            self._finish_oldest()
        timeout = self._timeout
        if options is not None:
            check_communication_options(options)
            timeout = options.timeout_seconds or timeout
        return self._drive(steps, text, timeout, None)

    def _submit(self, steps: Steps[Any], text: str, call_site: str, options: CommunicationOptions | None) -> Work:
        self._check_usable()
        timeout = (options.timeout_seconds if options else None) or self._timeout
        work = Work(self, steps, text, call_site, timeout)
        self._queue.append(work)
        self.advance()
        return work

    def _finish_oldest(self) -> None:
        self._check_usable()
        work = self._queue[0]
        self._drive(self._stepping(work), work.text, work.timeout, work.call_site)
        self._queue.popleft()

    def _stepping(self, work: Work) -> Steps[None]:
        while not work.step():
            yield

    def _polling(self, work: Work) -> Steps[None]:
        while not work._is_done:
            self.advance()
            yield

    def _drive(self, steps: Steps[T], text: str, timeout: float, call_site: str | None) -> T:
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                "two threads used one Communicator at the same time; collectives of one communicator are issued "
                "by one thread, in the same order on every rank"
            )
        try:
            self._calls += 1
            return drive(
                steps,
                lambda: Deadline(
                    timeout,
                    self._warn_after,
                    lambda waited: self._report(text, waited, call_site),
                    lambda waited: self._expire(steps, text, waited),
                ),
            )
        finally:
            self._lock.release()

    def _report(self, text: str, waited: float, call_site: str | None) -> str:
        return (
            f"mpidist: rank {self.rank} of {self.size} has waited {waited:.0f} s for the other ranks in {text}, "
            f"its collective number {self._calls}, at {call_site or user_call_site()}"
        )

    def _expire(self, steps: Steps[Any], text: str, waited: float) -> None:
        # Requests are still open, and MPI may write to their buffers: the communicator is never used again,
        # and the buffers are kept.
        self._given_up = steps
        self._unusable = f"an earlier collective, {text}, did not finish within its deadline"
        error = CollectiveTimeoutError(text, self._calls, waited, self.rank)
        for work in self._queue:
            work.settle(error)
        self._queue.clear()
        raise error

    def _check_usable(self) -> None:
        if self._unusable is not None:
            raise RuntimeError(f"this Communicator can no longer be used: {self._unusable}")
        if self._handshake.left:
            raise PeerError(f"this Communicator can no longer be used: ranks {self._handshake.left} left the program")

    def _leave(self) -> Steps[None]:
        """Finish what is on its way and tell the others that this rank's program has ended."""
        if self._given_up is not None:
            yield from _at_most(self._given_up, _EXIT_SECONDS, self._abort_job)
        while self._queue:
            if self._queue[0].step():
                self._queue.popleft()
            yield
        if not self._handshake.left:
            yield from self._handshake.signal(LEFT, "has left the program", "its end")

    def _abort_job(self) -> None:
        # MPI_Finalize would wait for ever for the collective that was given up.
        print(f"mpidist: rank {self.rank} ends the job: {self._unusable}", file=sys.stderr, flush=True)
        import_mpi().COMM_WORLD.Abort(1)

    def _check_root(self, root: int) -> int:
        if not 0 <= root < self.size:
            raise ValueError(f"root is {root}; expected a rank from 0 to {self.size - 1}")
        return root


def _check_is_offered(options: CommunicationOptions) -> None:
    algorithms.check_name(options.algorithm)
    for name in ("wire_dtype", "error_feedback", "deterministic"):
        if getattr(options, name):
            raise NotImplementedError(f"{name}={getattr(options, name)!r} is not offered yet; leave it out")


def _signature(arrays: Sequence[Array]) -> Signature:
    return tuple((array.shape, array.dtype) for array in arrays)


def _restore(value: Any, result: Array) -> Any:
    restore = restorer(value)
    return result if restore is None else restore(result)


def _unwrap(value: Any) -> tuple[list[Array], Any]:
    """Return the arrays of a value, and the function that makes the result look like the value."""
    if isinstance(value, (list, tuple)):
        kind = type(value)
        return [to_array(v) for v in value], lambda results: kind(
            _restore(v, r) for v, r in zip(value, results, strict=True)
        )
    return [to_array(value)], lambda results: _restore(value, results[0])


def _check_has_axis(array: Array, axis: int, method: str) -> int:
    if array.ndim == 0:
        raise ValueError(f"{method} was given a scalar; expected an array with at least one axis: value[None]")
    if not -array.ndim <= axis < array.ndim:
        raise ValueError(
            f"{method} along axis {axis} of an array of rank {array.ndim}; "
            f"expected an axis from {-array.ndim} to {array.ndim - 1}"
        )
    return axis % array.ndim


def _check_out(plan: ReductionPlan, out: Sequence[Array] | None) -> None:
    if out is None:
        return
    given = [(array.shape, array.dtype) for array in out]
    expected = list(zip(plan.shapes, plan.result_dtypes, strict=True))
    if given != expected:
        raise ValueError(
            f"out has {signature_text(tuple(given))}; expected {signature_text(tuple(expected))}, as the result has"
        )
    if not all(array.flags.writeable for array in out):
        raise ValueError("out is read-only; expected arrays that can be written")


def _raise_still_running(work: Work, timeout: float) -> None:
    raise TimeoutError(f"{work.text} is not done after {timeout} s; it goes on, and may be waited for again")


def _at_most(steps: Steps[Any], seconds: float, otherwise: Callable[[], None]) -> Steps[None]:
    give_up = time.monotonic() + seconds
    try:
        for _ in steps:
            if time.monotonic() > give_up:
                otherwise()
            yield
    except (MismatchError, PeerError):
        # The caller had its CollectiveTimeoutError; all ranks have now taken part, which is what matters here.
        return


def _together(all_steps: Sequence[Steps[None]]) -> Steps[None]:
    going = list(all_steps)
    while going:
        going = [steps for steps in going if next(steps, going) is not going]
        yield


@atexit.register
def _leave_all() -> None:
    """Tell the other ranks that this program has ended, before MPI_Finalize waits for theirs in silence.

    A rank that leaves early, by sys.exit() for example, so gives the others a PeerError in their next collective.
    How long the other programs still run is their own affair, so this wait has no deadline, only a report.
    """
    several = [c for c in _open if c.size > 1]
    if several and not import_mpi().Is_finalized():
        rank = several[0].rank
        drive(
            _together([c._leave() for c in several]),
            lambda: Deadline(
                math.inf,
                several[0]._warn_after,
                lambda _: f"mpidist: rank {rank} has ended its program, and waits for the other ranks to end theirs",
                lambda _: None,
            ),
        )
    _open.clear()
