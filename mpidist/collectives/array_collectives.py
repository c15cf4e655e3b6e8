"""Collectives on lists of NumPy arrays: what strategies call, and what Communicator puts its public face on."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from mpidist.arrays.convert import Array
from mpidist.arrays.dtypes import check_transportable
from mpidist.collectives import algorithms, gathering
from mpidist.collectives.algorithms.reduce_broadcast import reduce_to
from mpidist.collectives.channel import Channel
from mpidist.collectives.choice import Choice, check_options
from mpidist.collectives.chunks import slices
from mpidist.collectives.handshake import plan_id
from mpidist.collectives.memory import Pool
from mpidist.collectives.movement import Movement
from mpidist.collectives.packing import copies_of_overlapping, divided
from mpidist.collectives.plan import ReductionPlan, signature_of, signature_text
from mpidist.collectives.table import Table, check_table
from mpidist.collectives.trace import OTHERS, PACK, REDUCE, UNPACK
from mpidist.collectives.tuning_file import agreed_table
from mpidist.collectives.waiting import Steps
from mpidist.collectives.work import Work
from mpidist.core.callsite import user_call_site
from mpidist.core.enums import ReduceOp
from mpidist.core.options import CommunicationOptions, check_communication_options
from mpidist.topology import import_mpi, world_topology

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")
# What a collective does, and what it is.
Call = tuple[Steps[T], str]

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

    Raises:
        ValueError: The tuning file cannot be read or is wrong; on all ranks.
    """

    def __init__(
        self,
        comm: MPI.Intracomm | None = None,
        *,
        options: CommunicationOptions | None = None,
        table: Table | None = None,
    ) -> None:
        check_communication_options(options)
        check_table(table)
        self._options = _DEFAULT_OPTIONS.merge(options)
        check_options(self._options)
        if comm is not None and not isinstance(comm, import_mpi().Intracomm):
            raise TypeError(f"comm is {comm!r}; expected an mpi4py intracommunicator, or None for all ranks")
        base = world_topology().world if comm is None else comm
        self._channel = Channel(base, self._options.timeout_seconds)
        self.rank: int = self._channel.rank
        self.size: int = self._channel.size
        self._plans: dict[Any, ReductionPlan] = {}
        self._choice = Choice(self._channel.comm, self._channel.node, self._agreed_table(table))
        self._movement = Movement(self._channel.node)
        self._pool = Pool()
        self.last_algorithm = "none"
        """What the last all-reduce took: ``"handshake"``, where it fitted in there, or an algorithm's name."""

    def _agreed_table(self, given: Table | None) -> Table:
        channel = self._channel
        table = channel.run(agreed_table(channel.comm, channel.node, given), "agreeing on the tuning table")
        if isinstance(table, ValueError):
            channel.close(lambda: None)
            raise table
        return table

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
        if out is not None:
            try:
                _check_out(plan, out)
            except ValueError as error:
                self.announce(error, "checking out")
                raise
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
        return self._submit(self._reduce_steps(plan, arrays, None, call_site), plan.text, call_site, options)

    def gather_arrays(
        self, arrays: Sequence[Array], axis: int, *, options: CommunicationOptions | None = None, note: str = ""
    ) -> list[Array]:
        """Concatenate NumPy arrays of all ranks along ``axis`` (collective)."""
        return self._run(*self._gather_call(arrays, axis, note), options)

    def _gather_call(
        self, arrays: Sequence[Array], axis: int, note: str = "", call_site: str | None = None
    ) -> Call[list[Array]]:
        moved = []
        parts = []
        with self.shared_errors("all_gather"):
            for array in arrays:
                check_transportable(array.dtype, "all_gather")
                position = check_has_axis(array, axis, "all_gather")
                moved.append(np.ascontiguousarray(np.moveaxis(array, position, 0)))
                shape = ", ".join("*" if i == position else str(n) for i, n in enumerate(array.shape))
                parts.append(f"{array.dtype.name}({shape})")
        text = f"all_gather along axis {axis} of {', '.join(parts)}{f' as {note}' if note else ''}"
        return self._gather_steps(moved, axis, text, call_site), text

    def _gather_steps(self, moved: list[Array], axis: int, text: str, call_site: str | None) -> Steps[list[Array]]:
        """Gather arrays along their first axis, which comes to be ``axis``."""
        channel, movement, k = self._channel, self._movement, len(moved)
        told = movement.can_tell(2 * k)
        mine = [len(array) for array in moved]
        if told:
            channel.node.board.tell([*mine, *map(movement.place_of, moved)])
        yield from channel.handshake.open(plan_id(text), text, call_site)
        if channel.trace is not None:
            channel.trace.moves(sum(array.nbytes for array in moved))
        if told:
            words = np.array(channel.node.board.told(2 * k)).reshape(self.size, 2 * k)
            lengths, places = words[:, :k], words[:, k:]
        else:
            lengths = yield from gathering.gather_lengths(channel.comm, mine)
        in_node = told and (yield from movement.works())
        results = []
        for index, array in enumerate(moved):
            row = int(np.prod(array.shape[1:]))
            counts = [n * row for n in lengths[:, index].tolist()]
            flat = self._pool.take(sum(counts), array.dtype)
            if in_node:
                wanted = list(enumerate(np.split(flat, np.cumsum(counts[:-1]))))
                longest = max(counts) * array.itemsize
                yield from movement.copy(array, places[:, index].tolist(), wanted, longest)
            else:
                yield from gathering.all_gather_flat(channel.comm, array.reshape(-1), flat, counts)
            whole = flat.reshape(int(lengths[:, index].sum()), *array.shape[1:])
            results.append(np.moveaxis(whole, 0, axis if axis >= 0 else axis + array.ndim))
        if in_node:
            # The others may still be reading.
            yield from channel.node.board.meet()
        return results

    def broadcast_arrays(
        self, arrays: Sequence[Array], root: int, *, options: CommunicationOptions | None = None, note: str = ""
    ) -> list[Array]:
        """Return the NumPy arrays of rank ``root``, as new arrays (collective)."""
        return self._run(*self._broadcast_call(arrays, root, note), options)

    def _broadcast_call(
        self, arrays: Sequence[Array], root: int, note: str = "", call_site: str | None = None
    ) -> Call[list[Array]]:
        root = self._check_root(root)
        with self.shared_errors("broadcast"):
            for array in arrays:
                check_transportable(array.dtype, "broadcast")
        of_what = f" for {note}" if note else ""
        text = f"broadcast from rank {root} of {signature_text(signature_of(arrays))}{of_what}"
        return self._broadcast_steps(arrays, root, text, call_site), text

    def _broadcast_steps(
        self, arrays: Sequence[Array], root: int, text: str, call_site: str | None
    ) -> Steps[list[Array]]:
        channel, movement = self._channel, self._movement
        told = movement.can_tell(len(arrays))
        is_root = self.rank == root
        sources = [np.ascontiguousarray(array).reshape(-1) for array in arrays] if is_root else []
        if told:
            channel.node.board.tell([movement.place_of(source) for source in sources])
        yield from channel.handshake.open(plan_id(text), text, call_site)
        if channel.trace is not None:
            channel.trace.moves(sum(array.nbytes for array in arrays))
        places = channel.node.board.told(len(arrays))[root] if told else []
        in_node = told and (yield from movement.works())
        results = []
        for index, array in enumerate(arrays):
            flat = self._pool.take(array.size, array.dtype)
            if is_root:
                flat[:] = sources[index]
            if in_node:
                source = sources[index] if is_root else None
                wanted = [] if is_root else [(root, flat)]
                yield from movement.copy(source, [places[index]] * self.size, wanted, flat.nbytes)
            else:
                yield from gathering.broadcast_flat(channel.comm, flat, root)
            results.append(flat.reshape(array.shape))
        if in_node:
            # The others may still be reading.
            yield from channel.node.board.meet()
        return results

    def shared_errors(self, doing: str) -> AbstractContextManager[None]:
        """Return a block for rank-local work before a collective, so that an error in it reaches every rank.

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
        self._channel.close(self._choice.close)

    def _plan(
        self,
        kind: str,
        op: ReduceOp,
        arrays: Sequence[Array],
        divisor: int,
        options: CommunicationOptions | None,
        note: str,
    ) -> ReductionPlan:
        check_communication_options(options)
        signature = signature_of(arrays)
        key = (kind, op, divisor, signature, options, note)
        plan = self._plans.get(key)
        if plan is None:
            with self.shared_errors(kind):
                merged = self._options.merge(options)
                check_options(merged)
                if len(self._plans) == _MOST_PLANS:
                    self._plans.clear()
                plan = self._plans[key] = ReductionPlan(kind, op, signature, merged, divisor, note)
                if self._channel.trace is not None:
                    self._channel.trace.planned(plan.text, sum(array.nbytes for array in arrays))
        return plan

    def _reduce_steps(
        self, plan: ReductionPlan, arrays: Sequence[Array], out: Sequence[Array] | None, call_site: str | None
    ) -> Steps[list[Array]]:
        handshake = self._channel.handshake
        if plan.inline:
            self.last_algorithm = "handshake"
            plan.fill_inline(arrays, handshake.payload(plan.count))
            if not handshake.begin(plan.id):
                yield from handshake.finish(plan.id, plan.text, call_site)
            return plan.from_inline(handshake.totals(plan.count), out)
        results = plan.blank_results(out)
        if not plan.packs:
            yield from handshake.open(plan.id, plan.text, call_site)
        if out is not None:
            # One pack may write what another has still to read.
            arrays = copies_of_overlapping(arrays, out)
        trace = self._channel.trace
        for number, pack in enumerate(plan.packs):
            algorithm = self._choice.made(pack.nbytes, plan.options)
            if algorithm is None:
                algorithm = yield from self._make_algorithm(pack.nbytes, plan, call_site)
            if trace is not None:
                trace.phase(PACK)
            job = plan.reduction(pack, arrays, out, self._pool)
            job.trace = trace
            algorithm.prepare(job, out is None)
            if number == 0:
                if not handshake.begin(plan.id):
                    yield from handshake.finish(plan.id, plan.text, call_site)
            else:
                if trace is not None:
                    trace.phase(OTHERS)
                yield from self._channel.node.board.meet()
            if trace is not None:
                trace.phase(REDUCE)
            pieces = yield from algorithm.all_reduce(job)
            if trace is not None:
                trace.took(algorithm.name)
                trace.phase(UNPACK)
            pack.deliver(pieces, results, out)
            self.last_algorithm = algorithm.name
        return results

    def _reduce_to_steps(
        self, plan: ReductionPlan, arrays: Sequence[Array], root: int, call_site: str | None
    ) -> Steps[list[Array]]:
        """Reduce to rank ``root``; what the others return is of no account."""
        channel, is_root = self._channel, self.rank == root
        results = plan.blank_results(None)
        if not plan.packs:
            yield from channel.handshake.open(plan.id, plan.text, call_site)
        trace = channel.trace
        for number, pack in enumerate(plan.packs):
            if trace is not None:
                trace.phase(PACK)
            job = plan.reduction(pack, arrays, None, self._pool)
            job.is_wanted, job.trace = is_root, trace
            algorithm = None
            if channel.node.is_alone and self.size > 1:
                algorithm = self._choice.made(pack.nbytes, plan.options)
                if algorithm is None:
                    algorithm = yield from self._make_algorithm(pack.nbytes, plan, call_site)
                algorithm.prepare(job, False)
            if number == 0:
                yield from channel.handshake.open(plan.id, plan.text, call_site)
            else:
                if trace is not None:
                    trace.phase(OTHERS)
                yield from channel.node.board.meet()
            if trace is not None:
                trace.phase(REDUCE)
                trace.took("mpi" if algorithm is None else algorithm.name)
            if algorithm is not None:
                pieces = yield from algorithm.all_reduce(job)
            else:
                flat = job.flat_result() if is_root else None
                yield from reduce_to(channel.comm, job.flat_input(), flat, plan.op, root)
                pieces = [] if flat is None else job.finish(flat)
            if is_root:
                if trace is not None:
                    trace.phase(UNPACK)
                pack.deliver(pieces, results, None)
        return results

    def _reduce_scatter_steps(self, plan: ReductionPlan, array: Array, call_site: str | None) -> Steps[Array]:
        """Return the flat elements of this rank's rows of the reduction."""
        channel, movement = self._channel, self._movement
        row_size = int(np.prod(array.shape[1:]))
        rows = [b - a for a, b in slices(len(array), self.size)]
        start = sum(rows[: self.rank]) * row_size
        wire, result_dtype = plan.formed[0]
        send = np.ascontiguousarray(array, wire).reshape(-1)
        told = channel.node.is_alone
        if told:
            channel.node.board.tell([movement.place_of(send)])
        yield from channel.handshake.open(plan.id, plan.text, call_site)
        if channel.trace is not None:
            channel.trace.phase(REDUCE)
        places = [place for (place,) in channel.node.board.told(1)] if told else []
        if told and (channel.node.reads_neighbours or all(place < 0 for place in places)):
            flat = self._pool.take(rows[self.rank] * row_size, wire)
            movement.reduce_rows(send, places, start, flat, plan.op)
            yield from channel.node.board.meet()
        else:
            flat = yield from gathering.reduce_scatter_rows(channel.comm, send, rows, row_size, plan.op, wire)
        return divided(flat, plan.divisor).astype(result_dtype, copy=False)

    def _make_algorithm(self, nbytes: int, plan: ReductionPlan, call_site: str | None) -> Steps[algorithms.Algorithm]:
        """Return a new algorithm for a message, once all ranks have come."""
        yield from self._channel.handshake.open(plan.id, plan.text, call_site)
        return (yield from self._choice.make(nbytes, plan.options))

    def _run(self, steps: Steps[T], text: str, options: CommunicationOptions | None) -> T:
        return self._channel.run(steps, text, _timeout_of(options))

    def _submit(self, steps: Steps[Any], text: str, call_site: str, options: CommunicationOptions | None) -> Work:
        return self._channel.submit(steps, text, call_site, _timeout_of(options))

    def _check_root(self, root: int) -> int:
        if not isinstance(root, (int, np.integer)) or not 0 <= root < self.size:
            raise ValueError(f"root is {root!r}; expected a rank from 0 to {self.size - 1}")
        return int(root)


def _timeout_of(options: CommunicationOptions | None) -> float | None:
    if options is None:
        return None
    check_communication_options(options)
    return options.timeout_seconds


def check_has_axis(array: Array, axis: int, method: str) -> int:
    """Return ``axis`` counted from 0, after checking that ``array`` has it."""
    if array.ndim == 0:
        raise ValueError(f"{method} was given a scalar; expected an array with at least one axis: value[None]")
    if not isinstance(axis, (int, np.integer)) or not -array.ndim <= axis < array.ndim:
        raise ValueError(
            f"{method} along axis {axis!r} of an array of rank {array.ndim}; "
            f"expected an axis from {-array.ndim} to {array.ndim - 1}"
        )
    return axis % array.ndim


def _check_out(plan: ReductionPlan, out: Sequence[Array]) -> None:
    given = signature_of(out)
    if given != plan.result_signature:
        raise ValueError(
            f"out has {signature_text(given)}; expected {signature_text(plan.result_signature)}, as the result has"
        )
    if not all([array.flags.writeable for array in out]):
        raise ValueError("out is read-only; expected arrays that can be written")
