"""Collectives on lists of NumPy arrays: what strategies call, and what Communicator puts its public face on."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from mpidist.arrays.convert import Array
from mpidist.arrays.dtypes import check_transportable
from mpidist.collectives import algorithms, gathering, table
from mpidist.collectives.channel import Channel
from mpidist.collectives.handshake import plan_id
from mpidist.collectives.memory import Pool
from mpidist.collectives.node import Node
from mpidist.collectives.packing import copies_of_overlapping
from mpidist.collectives.plan import ReductionPlan, signature_of, signature_text
from mpidist.collectives.waiting import Steps
from mpidist.collectives.work import Work
from mpidist.core.callsite import user_call_site
from mpidist.core.enums import ReduceOp
from mpidist.core.options import CommunicationOptions, check_communication_options
from mpidist.topology import import_mpi, world_topology

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")

_DEFAULT_OPTIONS = CommunicationOptions()
# A program whose shapes change all the time must not grow; plans are cheap to make again.
_MOST_PLANS = 1024


class ArrayCollectives:
    """All-reduce, all-gather and broadcast of NumPy arrays on a channel of its own (collective).

    Args:
        comm: An mpi4py intracommunicator; all ranks of the job by default.
        options: Defaults for every call.
    """

    def __init__(self, comm: MPI.Intracomm | None = None, *, options: CommunicationOptions | None = None) -> None:
        check_communication_options(options)
        self._options = _DEFAULT_OPTIONS.merge(options)
        check_is_offered(self._options)
        if comm is not None and not isinstance(comm, import_mpi().Intracomm):
            raise TypeError(f"comm is {comm!r}; expected an mpi4py intracommunicator, or None for all ranks")
        base = world_topology().world if comm is None else comm
        self._channel = Channel(base, self._options.timeout_seconds)
        self.rank: int = self._channel.rank
        self.size: int = self._channel.size
        self._plans: dict[Any, ReductionPlan] = {}
        self._algorithms: dict[str, algorithms.Algorithm] = {}
        self._node: Node | None = None
        self._pool = Pool()
        self.last_algorithm = "none"
        """What the last all-reduce took: ``"handshake"``, where it fitted in there, or an algorithm's name."""

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
        steps = self._reduce_steps(plan, arrays, None, call_site)
        return self._channel.submit(steps, plan.text, call_site, _timeout_of(options))

    def gather_arrays(
        self, arrays: Sequence[Array], axis: int, *, options: CommunicationOptions | None = None, note: str = ""
    ) -> list[Array]:
        """Concatenate NumPy arrays of all ranks along ``axis`` (collective)."""
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

        def steps() -> Steps[list[Array]]:
            yield from self._channel.handshake.open(plan_id(text), text, None)
            lengths = yield from gathering.gather_lengths(self._channel.comm, [len(array) for array in moved])
            results = []
            for index, array in enumerate(moved):
                row = int(np.prod(array.shape[1:]))
                rows: list[int] = lengths[:, index].tolist()
                counts = [n * row for n in rows]
                flat = yield from gathering.all_gather_flat(self._channel.comm, array.reshape(-1), counts)
                whole = flat.reshape(sum(rows), *array.shape[1:])
                results.append(np.moveaxis(whole, 0, axis if axis >= 0 else axis + array.ndim))
            return results

        return self._run(steps(), text, options)

    def broadcast_arrays(
        self, arrays: Sequence[Array], root: int, *, options: CommunicationOptions | None = None, note: str = ""
    ) -> list[Array]:
        """Return the NumPy arrays of rank ``root``, as new arrays (collective)."""
        root = self._check_root(root)
        with self.shared_errors("broadcast"):
            for array in arrays:
                check_transportable(array.dtype, "broadcast")
        of_what = f" for {note}" if note else ""
        text = f"broadcast from rank {root} of {signature_text(signature_of(arrays))}{of_what}"

        def steps() -> Steps[list[Array]]:
            yield from self._channel.handshake.open(plan_id(text), text, None)
            results = [np.array(array, order="C", subok=False) for array in arrays]
            for result in results:
                yield from gathering.broadcast_flat(self._channel.comm, result.reshape(-1), root)
            return results

        return self._run(steps(), text, options)

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
        self._channel.close(self._close_algorithms)

    def _close_algorithms(self) -> None:
        for algorithm in self._algorithms.values():
            algorithm.close()
        if self._node is not None:
            self._node.close()

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
                check_is_offered(merged)
                if len(self._plans) == _MOST_PLANS:
                    self._plans.clear()
                plan = self._plans[key] = ReductionPlan(kind, op, signature, merged, divisor, note)
        return plan

    def _reduce_steps(
        self, plan: ReductionPlan, arrays: Sequence[Array], out: Sequence[Array] | None, call_site: str | None
    ) -> Steps[list[Array]]:
        handshake = self._channel.handshake
        if plan.inline:
            self.last_algorithm = "handshake"
            plan.fill_inline(arrays, handshake.payload)
            yield from handshake.open(plan.id, plan.text, call_site)
            return plan.from_inline(handshake.totals, out)
        handshake.payload[0] = self._are_own(arrays)
        yield from handshake.open(plan.id, plan.text, call_site)
        all_own = handshake.totals[0] == self.size
        results: list[Any] = [None] * len(arrays)
        if out is not None:
            # One pack may write what another has still to read.
            arrays = copies_of_overlapping(arrays, out)
        for pack in plan.packs:
            algorithm = self._algorithm(plan.algorithm or self._choice(pack.nbytes, all_own))
            parts = pack.parts(arrays, algorithm.most_parts, self._pool)
            receive = partial(pack.result_buffer, out, self._pool)
            flat = yield from algorithm.all_reduce(parts, receive, plan.op, plan.divisor, out is None)
            plan.deliver(pack, flat, results, out)
        return results

    def _are_own(self, arrays: Sequence[Array]) -> bool:
        """Whether all of ``arrays`` lie in the node's shared memory."""
        node = self._node
        return node is not None and node.shared.has_arrays and all(node.shared.locate(a) is not None for a in arrays)

    def _choice(self, nbytes: int, all_own: bool) -> str:
        """Return the algorithm for a message (collective: the node may have to be explored).

        Args:
            nbytes: Of the message.
            all_own: Whether the input of every rank lies in shared memory.
        """
        if nbytes < table.SMALLEST_CHOICE or self.size == 1:
            return "mpi"
        node = self._explored()
        if node.topology.num_nodes > 1:
            row = table.SHIPPED.several_nodes
        else:
            row = table.SHIPPED.one_node_readable if node.reads_neighbours else table.SHIPPED.one_node
        return table.look_up(row, None if all_own else nbytes)

    def _explored(self) -> Node:
        if self._node is None:
            self._node = Node(self._channel.comm)
        return self._node

    def _algorithm(self, name: str) -> algorithms.Algorithm:
        self.last_algorithm = name
        if name not in self._algorithms:
            node = self._explored() if algorithms.needs_node(name) else None
            self._algorithms[name] = algorithms.make(name, self._channel.comm, node)
        return self._algorithms[name]

    def _run(self, steps: Steps[T], text: str, options: CommunicationOptions | None) -> T:
        return self._channel.run(steps, text, _timeout_of(options))

    def _check_root(self, root: int) -> int:
        if not isinstance(root, (int, np.integer)) or not 0 <= root < self.size:
            raise ValueError(f"root is {root!r}; expected a rank from 0 to {self.size - 1}")
        return int(root)


def _timeout_of(options: CommunicationOptions | None) -> float | None:
    if options is None:
        return None
    check_communication_options(options)
    return options.timeout_seconds


def check_is_offered(options: CommunicationOptions) -> None:
    """Raise for options that name something unknown, or that this version does not offer."""
    algorithms.check_name(options.algorithm)
    for name in ("wire_dtype", "error_feedback", "deterministic"):
        if getattr(options, name):
            raise NotImplementedError(f"{name}={getattr(options, name)!r} is not offered yet; leave it out")


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
