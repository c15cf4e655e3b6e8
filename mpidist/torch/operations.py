"""The collectives of torch.distributed on a Communicator, for ProcessGroup and Backend alike."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.distributed.distributed_c10d

from mpidist.arrays.dtypes import Array
from mpidist.collectives import Communicator
from mpidist.core.errors import CollectiveTimeoutError, MismatchError, PeerError
from mpidist.core.options import CommunicationOptions
from mpidist.topology import cores_are_short
from mpidist.torch.arguments import listed, nested, options_of
from mpidist.torch.compiling import keep_compiler_out
from mpidist.torch.foreign import Foreign
from mpidist.torch.profiling import begin_event, is_profiling
from mpidist.torch.reductions import SUM, Reduction
from mpidist.torch.results import Finish, bringing, filling_flat, gathered_parts, nothing
from mpidist.torch.sparse import gathered_elements
from mpidist.torch.tensors import array_of, fill, memory_of, target_of, targets_of
from mpidist.torch.works import LARGE_BYTES, DoneWork, ManyWorks, OpenWorks, StartedWork, advise

if TYPE_CHECKING:
    from torch import Tensor

c10d: Foreign = torch.distributed.distributed_c10d
_log = logging.getLogger("mpidist")
_AllreduceOptions = c10d.AllreduceOptions
# Written by torch where a call has no timeout of its own.
_UNSET = timedelta(0)
_MESSAGES = ("send_async", "recv_async")


class Operations:
    """torch.distributed's collectives, under the names that its C++ looks up.

    Each is carried out at once where torch waits for it at once, and otherwise started.

    Args:
        comm: The ranks of the group.
        name: Of the backend, for profilers.
        options: Laid over those of the communicator.

    Attributes:
        calls: The collectives so far.
    """

    def __init__(self, comm: Communicator, name: str, options: CommunicationOptions | None = None) -> None:
        self.comm, self.backend_name, self._options = comm, name, options
        self._program = threading.RLock()
        self._works = OpenWorks()
        self.calls = 0
        # Where the progress thread has no core of its own, backward hides nothing.
        self._is_short_of_cores = cores_are_short(2)

    # One array in, one out --------------------------------------------------------------------------------------

    def allreduce(
        self,
        tensors: Tensor | Sequence[Tensor],
        opts: Foreign = None,
        timeout: timedelta | None = None,
        *,
        op: Foreign = None,
    ) -> Foreign:
        """Reduce tensors in place, on all ranks."""
        if isinstance(opts, _AllreduceOptions) and isinstance(tensors, list):
            done = self._sum_in_place(tensors, opts)
            if done is not None:
                return done
        return self._reduce_in_place(listed(tensors), options_of(_AllreduceOptions, opts, timeout, reduceOp=op))

    def _sum_in_place(self, tensors: list[Tensor], opts: Foreign) -> Foreign:
        """Sum up one tensor where it lies, and wait, as most calls do.

        None where there is more to ask.
        """
        if opts.asyncOp or len(tensors) > 1 or hash(opts.reduceOp) != SUM or opts.timeout > _UNSET:
            return None
        if self._options is not None or is_profiling():
            return None
        array = memory_of(tensors[0])
        # A sum of bools is another operation.
        if array is None or array.dtype.kind == "b":
            return None
        try:
            with self._program:
                self.calls += 1
                self.comm.all_reduce("SUM", array, out=array)
        except CollectiveTimeoutError as error:
            advise(error)
            raise
        return DoneWork([*tensors])

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Foreign = None) -> Foreign:
        """Reduce tensors in place, on all ranks, in one go."""
        return self._reduce_in_place(tensors, options_of(c10d.AllreduceCoalescedOptions, opts))

    def _reduce_in_place(self, tensors: Sequence[Tensor], opts: Foreign) -> Foreign:
        reduction = Reduction(opts.reduceOp, self.comm.size)
        if tensors[0].is_sparse:
            elements, add_up = gathered_elements(tensors[0], reduction.op)
            return self._do("all_gather", "all_reduce", tensors, tensors, opts, add_up, elements)
        arrays, bring = targets_of(tensors)
        one: Any = reduction.opened(arrays[0])
        if len(arrays) > 1:
            one = [one, *[reduction.opened(array) for array in arrays[1:]]]
        finish = reduction.finisher(arrays, bring)
        return self._do("all_reduce", "all_reduce", tensors, tensors, opts, finish, reduction.op, one, out=one)

    def broadcast(
        self,
        tensors: Tensor | Sequence[Tensor],
        opts: Foreign = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> Foreign:
        """Give all ranks the tensors of one."""
        tensors, opts = listed(tensors), options_of(c10d.BroadcastOptions, opts, timeout, rootRank=root)
        arrays, bring = targets_of(tensors)
        one = arrays[0] if len(arrays) == 1 else arrays
        return self._do("broadcast", "broadcast", tensors, tensors, opts, bringing(bring), one, opts.rootRank, out=one)

    def reduce(
        self,
        tensors: Tensor | Sequence[Tensor],
        opts: Foreign = None,
        op: Foreign = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> Foreign:
        """Reduce a tensor in place, on one rank."""
        tensors, opts = listed(tensors), options_of(c10d.ReduceOptions, opts, timeout, rootRank=root, reduceOp=op)
        reduction = Reduction(opts.reduceOp, self.comm.size)
        (tensor,) = tensors
        array, bring = target_of(tensor)
        opened = reduction.opened(array)
        close = reduction.finisher([array], bring)

        def finish(result: Array | None) -> None:
            if result is not None:
                opened[...] = result
                close(result)

        return self._do("reduce", "reduce", tensors, tensors, opts, finish, reduction.op, opened, opts.rootRank)

    def barrier(self, opts: Foreign = None, timeout: timedelta | None = None) -> Foreign:
        """Return once all ranks have come."""
        return self._do("barrier", "barrier", [], [], options_of(c10d.BarrierOptions, opts, timeout), nothing)

    def monitored_barrier(self, timeout: Foreign = None, wait_all_ranks: bool = False) -> None:
        """Return once all ranks have come; the error after the timeout names the others.

        C++ gives the timeout within options.
        """
        del wait_all_ranks  # the report is of all ranks anyway
        opts = options_of(c10d.BarrierOptions, None, getattr(timeout, "timeout", timeout))
        opts.asyncOp = False
        self.barrier(opts)

    # Gathering --------------------------------------------------------------------------------------------------

    def allgather(
        self,
        outputs: Sequence[Foreign],
        inputs: Tensor | Sequence[Tensor],
        opts: Foreign = None,
        timeout: timedelta | None = None,
    ) -> Foreign:
        """Give all ranks the tensors of all."""
        (parts,), (tensor,), opts = nested(outputs), listed(inputs), options_of(c10d.AllgatherOptions, opts, timeout)
        row, finish = gathered_parts(tensor, parts)
        return self._do("all_gather", "all_gather", [tensor], list(parts), opts, finish, row)

    def allgather_coalesced(
        self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Foreign = None
    ) -> Foreign:
        """Give all ranks the tensors of all, several from each in one go."""
        opts = options_of(c10d.AllgatherOptions, opts)
        rows = [array_of(tensor)[None] for tensor in inputs]

        def finish(gathered: list[Array]) -> None:
            for rank, parts in enumerate(outputs):
                for part, rows_of_one in zip(parts, gathered, strict=True):
                    fill(part, rows_of_one[rank])

        return self._do("all_gather", "all_gather", inputs, list(chain(*outputs)), opts, finish, rows)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Foreign = None) -> Foreign:
        """Give all ranks the tensors of all, as one."""
        return self._gather_into([output], [tensor], opts, "_all_gather_base")

    _allgather_base = all_gather_single

    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Foreign = None
    ) -> Foreign:
        """Give all ranks several tensors of all in one go, each as one."""
        return self._gather_into(outputs, inputs, opts, "all_gather_into_tensor_coalesced")

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    def _gather_into(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Foreign, event: str) -> Foreign:
        opts = options_of(c10d.AllgatherOptions, opts)
        rows = [array_of(tensor)[None] for tensor in inputs]
        arrays, bring = targets_of(outputs)
        outs = [self._dealt(array, row.shape[1:]) for array, row in zip(arrays, rows, strict=True)]
        one, out = (rows[0], outs[0]) if len(rows) == 1 else (rows, outs)
        return self._do("all_gather", event, inputs, list(outputs), opts, bringing(bring), one, out=out)

    def gather(
        self,
        outputs: Sequence[Foreign],
        inputs: Tensor | Sequence[Tensor],
        opts: Foreign = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> Foreign:
        """Give one rank the tensors of all."""
        (tensor,), opts = listed(inputs), options_of(c10d.GatherOptions, opts, timeout, rootRank=root)
        if self.comm.rank != opts.rootRank:
            return self._do("gather", "gather", [tensor], [], opts, nothing, array_of(tensor)[None], opts.rootRank)
        (parts,) = nested(outputs)
        row, finish = gathered_parts(tensor, parts)
        return self._do("gather", "gather", [tensor], list(parts), opts, finish, row, opts.rootRank)

    # Dealing ----------------------------------------------------------------------------------------------------

    def scatter(
        self,
        outputs: Tensor | Sequence[Tensor],
        inputs: Sequence[Foreign],
        opts: Foreign = None,
        timeout: timedelta | None = None,
        *,
        root: int | None = None,
    ) -> Foreign:
        """Give each rank one of the tensors of one rank."""
        (output,), opts = listed(outputs), options_of(c10d.ScatterOptions, opts, timeout, rootRank=root)
        array, bring = target_of(output)
        if self.comm.rank == opts.rootRank:
            (parts,) = nested(inputs)
            value = np.stack([array_of(part).reshape(array.shape) for part in parts])
        else:
            parts, value = [], np.empty((0, *array.shape), array.dtype)
        finish, root = bringing(bring), opts.rootRank
        return self._do("scatter", "scatter", parts, [output], opts, finish, value, root, out=array[None])

    def reduce_scatter(
        self,
        outputs: Tensor | Sequence[Tensor],
        inputs: Sequence[Foreign],
        opts: Foreign = None,
        timeout: timedelta | None = None,
        *,
        op: Foreign = None,
    ) -> Foreign:
        """Reduce tensors over all ranks; each rank keeps one of them."""
        (output,), (parts,) = listed(outputs), nested(inputs)
        opts = options_of(c10d.ReduceScatterOptions, opts, timeout, reduceOp=op)
        reduction = Reduction(opts.reduceOp, self.comm.size)
        array, bring = target_of(output)
        out = reduction.opened(array)
        finish = reduction.finisher([array], bring)
        if len({part.shape for part in parts}) == 1:
            given, counts, out = np.stack([array_of(part) for part in parts]), None, out[None]
        else:
            given = np.concatenate([array_of(part).reshape(-1) for part in parts])
            counts, out = [part.numel() for part in parts], out.reshape(-1)
        value, op = reduction.opened(given), reduction.op
        return self._do(
            "reduce_scatter", "reduce_scatter", parts, [output], opts, finish, op, value, counts=counts, out=out
        )

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Foreign = None) -> Foreign:
        """Reduce a tensor over all ranks; each rank keeps a part of it."""
        opts = options_of(c10d.ReduceScatterOptions, opts)
        reduction = Reduction(opts.reduceOp, self.comm.size)
        array, bring = target_of(output)
        value, out = reduction.opened(self._dealt(array_of(tensor), array.shape)), reduction.opened(array[None])
        finish, op = reduction.finisher([array], bring), reduction.op
        return self._do("reduce_scatter", "_reduce_scatter_base", [tensor], [output], opts, finish, op, value, out=out)

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Foreign = None
    ) -> Foreign:
        """Reduce several tensors over all ranks; each rank keeps a part of each."""
        works = [self.reduce_scatter_single(output, given, opts) for output, given in zip(outputs, inputs, strict=True)]
        return works[0] if len(works) == 1 else ManyWorks(works, list(outputs))

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def alltoall(
        self,
        outputs: Sequence[Tensor],
        inputs: Sequence[Tensor],
        opts: Foreign = None,
        timeout: timedelta | None = None,
    ) -> Foreign:
        """Give each rank one tensor, and take one from each."""
        opts = options_of(c10d.AllToAllOptions, opts, timeout)
        given = [array_of(tensor) for tensor in inputs]
        # Flat, also where they are alike: other ranks may have others.
        flat = np.concatenate([array.reshape(-1) for array in given])
        out = np.empty(sum(output.numel() for output in outputs), flat.dtype)
        counts = [array.size for array in given]
        finish = filling_flat(outputs)
        return self._do("all_to_all", "all_to_all", inputs, list(outputs), opts, finish, flat, counts=counts, out=out)

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_counts: Sequence[int],
        input_counts: Sequence[int],
        opts: Foreign = None,
        timeout: timedelta | None = None,
    ) -> Foreign:
        """Deal the rows of a tensor, and take those for this rank."""
        opts = options_of(c10d.AllToAllOptions, opts, timeout)
        del output_counts  # the other ranks' input_counts, which out is compared with
        array, bring = target_of(output)
        given, size = array_of(tensor), self.comm.size
        if not input_counts and len(given) % size:
            raise ValueError(f"the tensor has {len(given)} rows; expected a multiple of {size}, or split sizes")
        counts = list(input_counts) or [len(given) // size] * size
        return self._do(
            "all_to_all", "all_to_all", [tensor], [output], opts, bringing(bring), given, counts=counts, out=array
        )

    alltoall_base = all_to_all_single

    def _dealt(self, array: Array, shape: tuple[int, ...]) -> Array:
        """Return an array as one row for each rank."""
        rows = self.comm.size
        if array.size != rows * int(np.prod(shape)):
            raise ValueError(f"a tensor has {array.size} elements; expected those of {shape} times {rows}, the ranks")
        return array.reshape(rows, *shape)

    # Point to point ---------------------------------------------------------------------------------------------

    def send(self, tensors: Sequence[Tensor], dest: int, tag: int) -> Foreign:
        """Send a tensor to a rank."""
        (tensor,) = tensors
        return self._do("send", "send", tensors, tensors, None, nothing, array_of(tensor), dest, tag)

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> Foreign:
        """Receive a tensor from a rank."""
        return self._receive("recv", tensors, source, tag)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int) -> Foreign:
        """Receive a tensor from whichever rank sends one."""
        return self._receive("recvAnySource", tensors, None, tag)

    def _receive(self, event: str, tensors: Sequence[Tensor], source: int | None, tag: int) -> Foreign:
        (tensor,) = tensors
        array, bring = target_of(tensor)

        def finish(source: int) -> int:
            if bring is not None:
                bring()
            return source

        return self._do("recv", event, tensors, tensors, None, finish, array, source, tag)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of the calls that have none of their own."""
        self._options = self.options_within(timeout)

    def options_within(self, timeout: timedelta) -> CommunicationOptions:
        """Return the options of the group with a timeout."""
        options = CommunicationOptions() if self._options is None else self._options
        return options.merge(CommunicationOptions(timeout_seconds=timeout.total_seconds()))

    @property
    def timeout(self) -> timedelta:
        """The timeout of the calls that have none of their own."""
        seconds = None if self._options is None else self._options.timeout_seconds
        return c10d.default_pg_timeout if seconds is None else timedelta(seconds=seconds)

    # The end ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Finish the works on their way, and free the communicator (collective).

        After an error, ranks of torch.distributed leave one by one: one that the others do not join says so.
        """
        with self._program:
            self._works.close()
            try:
                self.comm.close()
            except (CollectiveTimeoutError, MismatchError, PeerError) as error:
                _log.warning("mpidist: a process group was left without the others: %s", error)

    def abort(self) -> None:
        """Leave the group without the other ranks; works end with an error (local)."""
        self.comm.abort()
        self._works.move()

    # Inside -----------------------------------------------------------------------------------------------------

    def _do(
        self,
        name: str,
        event: str,
        given: Sequence[Tensor],
        tensors: Sequence[Tensor],
        opts: Foreign,
        finish: Finish,
        *args: Any,
        **kwargs: Any,
    ) -> Foreign:
        """Carry out or start the method ``name`` of the Communicator.

        Args:
            name: Of the method.
            event: Its name for profilers.
            given: The tensors that go in, for profilers.
            tensors: For the result.
            opts: Of the call, from torch; None for messages, which are always started.
            finish: Brings the result into the tensors.
            args: Of the method.
            kwargs: Of the method.
        """
        self.calls += opts is not None
        if opts is not None and opts.timeout > _UNSET:
            kwargs["options"] = self.options_within(opts.timeout)
        elif self._options is not None:
            kwargs["options"] = self._options
        ended = begin_event(f"{self.backend_name}:{event}", given)
        if opts is None or opts.asyncOp:
            return self._start(name + "_async", list(tensors), finish, ended, args, kwargs)
        try:
            with self._program:
                finish(getattr(self.comm, name)(*args, **kwargs))
        except CollectiveTimeoutError as error:
            advise(error)
            raise
        finally:
            if ended is not None:
                ended()
        return DoneWork(list(tensors))

    def _start(
        self,
        name: str,
        tensors: list[Tensor],
        finish: Finish,
        ended: Callable[[], None] | None,
        args: Sequence[Any],
        kwargs: dict[str, Any],
    ) -> StartedWork:
        # Collectives are carried out by one thread of the program at a time, messages by any.
        program = threading.RLock() if name in _MESSAGES else self._program
        with program:
            try:
                started = getattr(self.comm, name)(*args, **kwargs)
            except BaseException:
                if ended is not None:
                    ended()
                raise
            work = StartedWork(started, finish, tensors, program, ended)
            if name not in _MESSAGES and self._is_short_of_cores and any(map(_is_large, tensors)):
                work.carry_on()
        if not work.advance():
            self._works.add(work)
        return work


def _is_large(tensor: Tensor) -> bool:
    # Also of a sparse one.
    nbytes: int = tensor.numel() * tensor.element_size()
    return nbytes >= LARGE_BYTES


keep_compiler_out(Operations)
