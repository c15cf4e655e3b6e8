"""Collectives on lists of NumPy arrays: what strategies call, and what Communicator puts its public face on."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from mpidist.arrays.convert import Array
from mpidist.arrays.dtypes import check_transportable
from mpidist.collectives.channel import Channel
from mpidist.collectives.choice import check_options
from mpidist.collectives.engine import Engine
from mpidist.collectives.plan import ReductionPlan, signature_of, signature_text
from mpidist.collectives.table import Table, check_table
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
        self._engine = Engine(self._channel, self._agreed_table(table))

    @property
    def last_algorithm(self) -> str:
        """What the last all-reduce took: ``"handshake"``, where it fitted in there, or an algorithm's name."""
        return self._engine.last_algorithm

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
        return self._run(self._engine.all_reduce(plan, arrays, out, None), plan.text, options)

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
        return self._submit(self._engine.all_reduce(plan, arrays, None, call_site), plan.text, call_site, options)

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
        return self._engine.all_gather(moved, axis, text, call_site), text

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
        return self._engine.broadcast(arrays, root, text, call_site), text

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
        self._channel.close(self._engine.choice.close)

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
                most_inline = self._channel.handshake.most_numbers
                plan = self._plans[key] = ReductionPlan(kind, op, signature, merged, divisor, most_inline, note)
                if self._channel.trace is not None:
                    self._channel.trace.planned(plan.text, sum(array.nbytes for array in arrays))
        return plan

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
