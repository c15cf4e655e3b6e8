"""The collectives of torch.distributed on a Communicator, for ProcessGroup and Backend alike."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch.distributed.distributed_c10d

from mpidist.arrays.dtypes import Array
from mpidist.collectives import Communicator
from mpidist.core.options import CommunicationOptions
from mpidist.torch.arguments import listed, nested, options_of
from mpidist.torch.calls import Calls
from mpidist.torch.compiling import keep_compiler_out
from mpidist.torch.foreign import Foreign
from mpidist.torch.ordering import order_of
from mpidist.torch.reductions import Reduction
from mpidist.torch.results import bringing, filling_flat, gathered_parts, nothing
from mpidist.torch.sparse import gathered_elements
from mpidist.torch.tensors import array_of, fill, joined, target_of, targets_of
from mpidist.torch.works import ManyWorks

if TYPE_CHECKING:
    from torch import Tensor

c10d: Foreign = torch.distributed.distributed_c10d
_AllreduceOptions = c10d.AllreduceOptions


class Operations:
    """torch.distributed's collectives, under the names that its C++ looks up.

    Args:
        comm: The ranks of the group.
        name: Of the backend, for profilers.
        options: Laid over those of the communicator.
    """

    def __init__(self, comm: Communicator, name: str, options: CommunicationOptions | None = None) -> None:
        self.comm, self.backend_name = comm, name
        self._calls = Calls(comm, name, options)

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
            done = self._calls.sum_in_place(tensors, opts)
            if done is not None:
                return done
        return self._reduce_in_place(listed(tensors), options_of(_AllreduceOptions, opts, timeout, reduceOp=op))

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Foreign = None) -> Foreign:
        """Reduce tensors in place, on all ranks, in one go."""
        return self._reduce_in_place(tensors, options_of(c10d.AllreduceCoalescedOptions, opts))

    def _reduce_in_place(self, tensors: Sequence[Tensor], opts: Foreign) -> Foreign:
        reduction = Reduction(opts.reduceOp, self.comm.size)
        if tensors[0].is_sparse:
            elements, add_up = gathered_elements(tensors[0], reduction.op)
            return self._calls.do("all_gather", "all_reduce", tensors, tensors, opts, add_up, elements)
        arrays, bring = targets_of(tensors)
        one: Any = reduction.opened(arrays[0])
        if len(arrays) > 1:
            one = [one, *[reduction.opened(array) for array in arrays[1:]]]
        finish = reduction.finisher(arrays, bring)
        return self._calls.do("all_reduce", "all_reduce", tensors, tensors, opts, finish, reduction.op, one, out=one)

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
        return self._calls.do(
            "broadcast", "broadcast", tensors, tensors, opts, bringing(bring), one, opts.rootRank, out=one
        )

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

        return self._calls.do("reduce", "reduce", tensors, tensors, opts, finish, reduction.op, opened, opts.rootRank)

    def barrier(self, opts: Foreign = None, timeout: timedelta | None = None) -> Foreign:
        """Return once all ranks have come."""
        return self._calls.do("barrier", "barrier", [], [], options_of(c10d.BarrierOptions, opts, timeout), nothing)

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
        return self._calls.do("all_gather", "all_gather", [tensor], list(parts), opts, finish, row)

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

        return self._calls.do("all_gather", "all_gather", inputs, list(chain(*outputs)), opts, finish, rows)

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
        return self._calls.do("all_gather", event, inputs, list(outputs), opts, bringing(bring), one, out=out)

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
            return self._calls.do(
                "gather", "gather", [tensor], [], opts, nothing, array_of(tensor)[None], opts.rootRank
            )
        (parts,) = nested(outputs)
        row, finish = gathered_parts(tensor, parts)
        return self._calls.do("gather", "gather", [tensor], list(parts), opts, finish, row, opts.rootRank)

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
            value = joined([part.reshape(output.shape) for part in parts]).reshape(len(parts), *array.shape)
        else:
            parts, value = [], array[None][:0]
        finish, root = bringing(bring), opts.rootRank
        return self._calls.do("scatter", "scatter", parts, [output], opts, finish, value, root, out=array[None])

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
        given = joined(parts)
        if len({part.shape for part in parts}) == 1:
            given, counts, out = given.reshape(len(parts), *parts[0].shape), None, out[None]
        else:
            counts, out = [part.numel() for part in parts], out.reshape(-1)
        value, op = reduction.opened(given), reduction.op
        return self._calls.do(
            "reduce_scatter", "reduce_scatter", parts, [output], opts, finish, op, value, counts=counts, out=out
        )

    def reduce_scatter_single(self, output: Tensor, tensor: Tensor, opts: Foreign = None) -> Foreign:
        """Reduce a tensor over all ranks; each rank keeps a part of it."""
        opts = options_of(c10d.ReduceScatterOptions, opts)
        reduction = Reduction(opts.reduceOp, self.comm.size)
        array, bring = target_of(output)
        value, out = reduction.opened(self._dealt(array_of(tensor), array.shape)), reduction.opened(array[None])
        finish, op = reduction.finisher([array], bring), reduction.op
        return self._calls.do(
            "reduce_scatter", "_reduce_scatter_base", [tensor], [output], opts, finish, op, value, out=out
        )

    _reduce_scatter_base = reduce_scatter_single

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Foreign = None
    ) -> Foreign:
        """Reduce several tensors over all ranks; each rank keeps a part of each."""
        works = [self.reduce_scatter_single(output, given, opts) for output, given in zip(outputs, inputs, strict=True)]
        return works[0] if len(works) == 1 else ManyWorks(works, list(outputs), order_of(outputs))

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
        # Flat, also where they are alike: other ranks may have others.
        flat, counts = joined(inputs), [tensor.numel() for tensor in inputs]
        expected = [output.numel() for output in outputs]
        out = array_of(inputs[0].new_empty(sum(expected)))
        finish = filling_flat(outputs)
        kwargs = {"counts": counts, "expected": expected, "out": out}
        return self._calls.do("all_to_all", "all_to_all", inputs, list(outputs), opts, finish, flat, **kwargs)

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
        array, bring = target_of(output)
        given = array_of(tensor)
        counts, expected = self._splits(given, input_counts), self._splits(array, output_counts)
        kwargs = {"counts": counts, "expected": expected, "out": array}
        return self._calls.do("all_to_all", "all_to_all", [tensor], [output], opts, bringing(bring), given, **kwargs)

    alltoall_base = all_to_all_single

    def _splits(self, array: Array, counts: Sequence[int]) -> list[int]:
        """Return how many rows go to each rank, or come from each."""
        size = self.comm.size
        with self.comm.shared_errors("reading split sizes"):
            if not counts and len(array) % size:
                raise ValueError(f"the tensor has {len(array)} rows; expected a multiple of {size}, or split sizes")
        return list(counts) or [len(array) // size] * size

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
        return self._calls.do("send", "send", tensors, tensors, None, nothing, array_of(tensor), dest, tag)

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

        return self._calls.do("recv", event, tensors, tensors, None, finish, array, source, tag)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of the calls that have none of their own."""
        self._calls.options = self._calls.options_within(timeout)

    @property
    def timeout(self) -> timedelta:
        """The timeout of the calls that have none of their own."""
        return self._calls.timeout

    # The end ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Finish the works on their way, and free the communicator (collective).

        After an error, ranks of torch.distributed leave one by one: one that the others do not join says so.
        """
        self._calls.close()

    def abort(self) -> None:
        """Leave the group without the other ranks; works end with an error (local)."""
        self._calls.abort()


keep_compiler_out(Operations)
