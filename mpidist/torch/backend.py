"""The collectives of torch.distributed on a Communicator.

Groups are a Backend with torch 2.14 and newer, and a ProcessGroup before.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend
from torch.optim.optimizer import register_optimizer_step_post_hook

from mpidist.arrays.dtypes import Array
from mpidist.collectives import Communicator
from mpidist.core.options import CommunicationOptions
from mpidist.core.phases import counts
from mpidist.core.text import skip_frames_of
from mpidist.torch.compiling import keep_compiler_out
from mpidist.torch.tensors import Finish, array_of, fill, filling, joined, nothing, outputs_of, sparse_parts
from mpidist.torch.works import Calls

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ReduceOp, Store, Work

    Tensors = Sequence[Tensor]
    Nested = Sequence[Tensor | Tensors]

c10d = torch.distributed.distributed_c10d
HAS_BACKENDS = hasattr(Backend, "supports_reconfigure")
"""Whether this torch accepts a Backend that is written in Python."""
# With TORCH_DISTRIBUTED_DEBUG=DETAIL, torch keeps the C++ half of a backend alive, but not the Python object.
_open: list[MpidistBackend] = []
_Kind = dist.ReduceOp.RedOpType
# By their hashes, which are those of a ReduceOp.
_NAMES = {
    hash(_Kind.SUM): "SUM",
    hash(_Kind.AVG): "MEAN",
    hash(_Kind.PRODUCT): "PROD",
    hash(_Kind.MIN): "MIN",
    hash(_Kind.MAX): "MAX",
    hash(_Kind.BAND): "BAND",
    hash(_Kind.BOR): "BOR",
    hash(_Kind.BXOR): "BXOR",
}
# Of bools, as bytes 0 and 1: a sum is whether any is true, a product whether all are.
_OF_BOOLS = {"SUM": "MAX", "MAX": "MAX", "BOR": "MAX", "PROD": "MIN", "MIN": "MIN", "BAND": "MIN", "BXOR": "BXOR"}
skip_frames_of(torch.__file__)
register_optimizer_step_post_hook(counts.add_optimizer_step)


def _listed(tensors: Tensor | Tensors) -> Tensors:
    """Return a list: programs that call methods of a group may pass a bare tensor."""
    return [tensors] if isinstance(tensors, torch.Tensor) else tensors


def _nested(lists: Nested) -> Sequence[Tensors]:
    return [lists] if lists and isinstance(lists[0], torch.Tensor) else lists


def _one(arrays: list[Array]) -> Array | list[Array]:
    return arrays[0] if len(arrays) == 1 else arrays


class Operations:
    """torch's collectives, under the names that its C++ looks up. Each returns a Work of torch.

    Args:
        comm: Communicator of the group.
        name: Name of the backend, as the program gave it.
        options: Options that are merged into the communicator's.
    """

    def __init__(self, comm: Communicator, name: str, options: CommunicationOptions | None = None) -> None:
        self.comm, self.backend_name = comm, name
        self._calls = Calls(comm, name, options)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} rank {self.comm.rank} of {self.comm.size}>"

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        """Return the name of the backend."""
        return self.backend_name

    # One array in, one out --------------------------------------------------------------------------------------

    def allreduce(self, tensors: Tensor | list[Tensor], opts: dist.AllreduceOptions | None = None) -> Work:
        """Reduce tensors in place, on all ranks."""
        if opts is not None and isinstance(tensors, list):
            done = self._calls.sum_in_place(tensors, opts)
            if done is not None:
                return done
        return self._reduce_in_place(_listed(tensors), opts or c10d.AllreduceOptions())

    def allreduce_coalesced(self, tensors: Tensors, opts: dist.AllreduceCoalescedOptions | None = None) -> Work:
        """Reduce several tensors in place, on all ranks."""
        return self._reduce_in_place(tensors, opts or c10d.AllreduceCoalescedOptions())

    def _reduce_in_place(self, tensors: Tensors, opts: dist.AllreduceOptions) -> Work:
        if tensors[0].is_sparse:
            parts, add_up = sparse_parts(tensors[0], _name_of(opts.reduceOp))
            return self._calls.do("all_gather", tensors, tensors, opts, add_up, parts, event="all_reduce")
        arrays, finish = outputs_of(tensors)
        op, views, finish = self._reduction(opts.reduceOp, arrays, finish)
        value = _one(views)
        return self._calls.do("all_reduce", tensors, tensors, opts, finish, op, value, out=value)

    def _reduction(self, reduce_op: ReduceOp, arrays: list[Array], finish: Finish) -> tuple[str, list[Array], Finish]:
        """Return the Communicator's operation, views of ``arrays`` for it, and the function for its result."""
        name = _name_of(reduce_op)
        ops = {_op_of(name, array.dtype.kind) for array in arrays}
        if len(ops) > 1:
            raise TypeError(f"{name} of tensors of these dtypes is not supported in one call. Call it for each dtype.")
        (op,) = ops
        views = [array.view(np.uint8) if array.dtype == np.bool_ else array for array in arrays]
        if op == name or name != "MEAN":
            return op, views, finish

        def divide(result: Array | list[Array]) -> None:
            # torch reduces in place: the mean of integers is an integer, rounded down.
            for array in result if isinstance(result, list) else [result]:
                array //= self.comm.size
            finish(result)

        return op, views, divide

    def broadcast(self, tensors: Tensor | Tensors, opts: dist.BroadcastOptions | None = None) -> Work:
        """Copy the tensors of one rank to all ranks."""
        tensors, opts = _listed(tensors), opts or c10d.BroadcastOptions()
        arrays, finish = outputs_of(tensors)
        value = _one(arrays)
        return self._calls.do("broadcast", tensors, tensors, opts, finish, value, opts.rootRank, out=value)

    def reduce(self, tensors: Tensor | Tensors, opts: dist.ReduceOptions | None = None) -> Work:
        """Reduce a tensor in place, on one rank."""
        tensors, opts = _listed(tensors), opts or c10d.ReduceOptions()
        arrays, copy = outputs_of(tensors)

        def store(result: Array) -> None:
            arrays[0][...] = result
            copy(result)

        op, (view,), finish = self._reduction(opts.reduceOp, arrays, store)
        if self.comm.rank != opts.rootRank:
            finish = nothing
        return self._calls.do("reduce", tensors, tensors, opts, finish, op, view, opts.rootRank)

    def barrier(self, opts: dist.BarrierOptions | None = None) -> Work:
        """Return when all ranks have arrived."""
        return self._calls.do("barrier", [], [], opts or c10d.BarrierOptions(), nothing)

    def monitored_barrier(
        self, timeout: timedelta | dist.BarrierOptions | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Return when all ranks have arrived. The error after the timeout names the missing ranks, always all."""
        opts = c10d.BarrierOptions()
        opts.asyncOp = False
        # C++ passes options.
        seconds = getattr(timeout, "timeout", timeout)
        if seconds is not None:
            opts.timeout = seconds
        self.barrier(opts)

    # Gathering --------------------------------------------------------------------------------------------------

    def allgather(self, outputs: Nested, inputs: Tensor | Tensors, opts: dist.AllgatherOptions | None = None) -> Work:
        """Gather the tensors of all ranks on all ranks."""
        (parts,), (tensor,) = _nested(outputs), _listed(inputs)
        row = _row_of(tensor, parts)
        return self._calls.do("all_gather", [tensor], parts, opts or c10d.AllgatherOptions(), filling(parts), row)

    def allgather_coalesced(
        self, outputs: Sequence[Tensors], inputs: Tensors, opts: dist.AllgatherOptions | None = None
    ) -> Work:
        """Gather several tensors of all ranks on all ranks, into one list for each rank."""
        wanted = [tensor.shape for tensor in inputs]
        with self.comm.shared_errors("reading the lists of all_gather_coalesced"):
            found = [[part.shape for part in parts] for parts in outputs]
            if found != [wanted] * self.comm.size:
                raise ValueError(
                    f"output_tensor_lists has {len(outputs)} lists of {[len(parts) for parts in outputs]} tensors. "
                    f"Pass one list for each of the {self.comm.size} ranks, each with the {len(inputs)} tensors of "
                    f"that rank, of the shapes {[tuple(shape) for shape in wanted]}: output_tensor_lists[rank][i]."
                )
        rows = [array_of(tensor)[None] for tensor in inputs]

        def finish(gathered: list[Array]) -> None:
            for rank, parts in enumerate(outputs):
                for part, rows_of_one in zip(parts, gathered, strict=True):
                    fill(part, rows_of_one[rank])

        return self._calls.do("all_gather", inputs, [*chain(*outputs)], opts or c10d.AllgatherOptions(), finish, rows)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: dist.AllgatherOptions | None = None) -> Work:
        """Gather the tensors of all ranks on all ranks, in one tensor."""
        return self._gather_into([output], [tensor], opts, "_all_gather_base")

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: dist.AllgatherOptions | None = None
    ) -> Work:
        """Gather several tensors of all ranks on all ranks, each in one tensor."""
        return self._gather_into(outputs, inputs, opts, "all_gather_into_tensor_coalesced")

    def _gather_into(self, outputs: Tensors, inputs: Tensors, opts: dist.AllgatherOptions | None, event: str) -> Work:
        rows = [array_of(tensor)[None] for tensor in inputs]
        arrays, finish = outputs_of(outputs)
        outs = [self._row_each(array, row.shape[1:]) for array, row in zip(arrays, rows, strict=True)]
        opts = opts or c10d.AllgatherOptions()
        return self._calls.do("all_gather", inputs, outputs, opts, finish, _one(rows), out=_one(outs), event=event)

    def gather(self, outputs: Nested, inputs: Tensor | Tensors, opts: dist.GatherOptions | None = None) -> Work:
        """Gather the tensors of all ranks on one rank."""
        (tensor,), opts = _listed(inputs), opts or c10d.GatherOptions()
        if self.comm.rank != opts.rootRank:
            return self._calls.do("gather", [tensor], [], opts, nothing, array_of(tensor)[None], opts.rootRank)
        (parts,) = _nested(outputs)
        return self._calls.do("gather", [tensor], parts, opts, filling(parts), _row_of(tensor, parts), opts.rootRank)

    # Distributing -----------------------------------------------------------------------------------------------

    def scatter(self, outputs: Tensor | Tensors, inputs: Nested, opts: dist.ScatterOptions | None = None) -> Work:
        """Distribute the tensors of one rank."""
        (output,), opts = _listed(outputs), opts or c10d.ScatterOptions()
        (array,), finish = outputs_of([output])
        parts: Tensors = []
        value = array[None][:0]
        if self.comm.rank == opts.rootRank:
            (parts,) = _nested(inputs)
            value = joined([part.reshape(output.shape) for part in parts]).reshape(len(parts), *array.shape)
        return self._calls.do("scatter", parts, [output], opts, finish, value, opts.rootRank, out=array[None])

    def reduce_scatter(
        self, outputs: Tensor | Tensors, inputs: Nested, opts: dist.ReduceScatterOptions | None = None
    ) -> Work:
        """Reduce one tensor for each rank over all ranks."""
        (output,), (parts,) = _listed(outputs), _nested(inputs)
        opts = opts or c10d.ReduceScatterOptions()
        (array,), finish = outputs_of([output])
        op, (value, out), finish = self._reduction(opts.reduceOp, [joined(parts), array], finish)
        counts = None
        if len({part.shape for part in parts}) == 1:
            value, out = value.reshape(len(parts), *parts[0].shape), out[None]
        else:
            counts, out = [part.numel() for part in parts], out.reshape(-1)
        return self._calls.do("reduce_scatter", parts, [output], opts, finish, op, value, counts=counts, out=out)

    def reduce_scatter_single(
        self, output: Tensor, tensor: Tensor, opts: dist.ReduceScatterOptions | None = None
    ) -> Work:
        """Reduce a tensor over all ranks, and keep this rank's part."""
        opts = opts or c10d.ReduceScatterOptions()
        (array,), finish = outputs_of([output])
        rows = self._row_each(array_of(tensor), array.shape)
        op, (value, out), finish = self._reduction(opts.reduceOp, [rows, array[None]], finish)
        return self._calls.do(
            "reduce_scatter", [tensor], [output], opts, finish, op, value, out=out, event="_reduce_scatter_base"
        )

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: dist.ReduceScatterOptions | None = None
    ) -> Work:
        """Reduce several tensors over all ranks, and keep this rank's part of each."""
        opts, size = opts or c10d.ReduceScatterOptions(), self.comm.size
        if len({tensor.dtype for tensor in (*inputs, *outputs)}) > 1:
            raise TypeError("reduce_scatter of tensors of several dtypes in one call. Call it for each dtype.")
        for output, tensor in zip(outputs, inputs, strict=True):
            if output.numel() * size != tensor.numel():
                raise ValueError(_no_row_each(tensor.numel(), tuple(output.shape), size))
        flat = torch.cat([tensor.detach().reshape(size, -1) for tensor in inputs], dim=1)
        op, (value,), finish = self._reduction(opts.reduceOp, [array_of(flat)], filling(outputs))
        return self._calls.do("reduce_scatter", inputs, outputs, opts, finish, op, value, event="_reduce_scatter_base")

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: dist.AllToAllOptions | None = None) -> Work:
        """Send a tensor to each rank, and receive one from each."""
        # Flat, also if all have the same shape: other ranks' tensors may have others.
        flat, counts = joined(inputs), [tensor.numel() for tensor in inputs]
        expected = [output.numel() for output in outputs]
        out = array_of(inputs[0].new_empty(sum(expected)))
        opts, finish = opts or c10d.AllToAllOptions(), filling(outputs)
        return self._calls.do(
            "all_to_all", inputs, outputs, opts, finish, flat, counts=counts, expected=expected, out=out
        )

    def all_to_all_single(
        self,
        output: Tensor,
        tensor: Tensor,
        output_counts: Sequence[int],
        input_counts: Sequence[int],
        opts: dist.AllToAllOptions | None = None,
    ) -> Work:
        """Send rows of a tensor to each rank, and receive rows from each."""
        (array,), finish = outputs_of([output])
        given = array_of(tensor)
        with self.comm.shared_errors("reading split sizes"):
            counts, expected = self._splits(given, input_counts), self._splits(array, output_counts)
        opts = opts or c10d.AllToAllOptions()
        return self._calls.do(
            "all_to_all", [tensor], [output], opts, finish, given, counts=counts, expected=expected, out=array
        )

    def _splits(self, array: Array, counts: Sequence[int]) -> list[int]:
        size = self.comm.size
        if not counts and len(array) % size:
            raise ValueError(f"The tensor has {len(array)} rows. Pass a multiple of {size}, or split sizes.")
        return list(counts) or [len(array) // size] * size

    def _row_each(self, array: Array, shape: tuple[int, ...]) -> Array:
        """Return an array as one row for each rank."""
        if array.size != self.comm.size * int(np.prod(shape)):
            raise ValueError(_no_row_each(array.size, shape, self.comm.size))
        return array.reshape(self.comm.size, *shape)

    # The names that other versions of torch look up.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    # Point to point ---------------------------------------------------------------------------------------------

    def send(self, tensors: Tensors, dest: int, tag: int) -> Work:
        """Send a tensor to a rank."""
        (tensor,) = tensors
        return self._calls.do("send", tensors, tensors, None, nothing, array_of(tensor), dest, tag)

    def recv(self, tensors: Tensors, source: int, tag: int) -> Work:
        """Receive a tensor from a rank."""
        return self._receive("recv", tensors, source, tag)

    def recv_anysource(self, tensors: Tensors, tag: int) -> Work:
        """Receive a tensor from any rank."""
        return self._receive("recvAnySource", tensors, None, tag)

    def _receive(self, event: str, tensors: Tensors, source: int | None, tag: int) -> Work:
        (array,), copy = outputs_of(tensors)

        def finish(source: int) -> int:
            copy(source)
            return source

        return self._calls.do("recv", tensors, tensors, None, finish, array, source, tag, event=event)

    # Life -------------------------------------------------------------------------------------------------------

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of calls without one of their own."""
        self._calls.options = self._calls.options_within(timeout)

    @property
    def timeout(self) -> timedelta:
        """The timeout of calls without one of their own."""
        return self._calls.timeout

    def shutdown(self) -> None:
        """Finish the works in flight, and free the communicator (collective)."""
        self._calls.close()

    def abort(self) -> None:
        """Leave the group without the other ranks. Works end with an error (local)."""
        self._calls.abort()


def _name_of(op: ReduceOp) -> str:
    name = _NAMES.get(hash(op))
    if name is None:
        raise ValueError(f"mpidist has no reduction {op.op}. Use SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR or BXOR.")
    return name


def _op_of(name: str, kind: str) -> str:
    """Return the Communicator's operation for a kind of dtype."""
    if kind == "b":
        if name == "MEAN":
            raise TypeError("The mean of bools is not defined. Cast the tensor first: tensor.float()")
        return _OF_BOOLS[name]
    return "SUM" if name == "MEAN" and kind in "iu" else name


def _row_of(tensor: Tensor, parts: Tensors) -> Array:
    """Return the array to gather: a row if all results have its shape, otherwise flat."""
    # The ranks compare the shapes of rows.
    array = array_of(tensor)
    return array[None] if {part.shape for part in parts} == {tensor.shape} else array.reshape(-1)


def _no_row_each(elements: int, shape: tuple[int, ...], size: int) -> str:
    return f"A tensor has {elements} elements. Pass one with the elements of {shape} times {size}, the number of ranks."


keep_compiler_out(Operations)


class MpidistBackend(Operations, Backend):
    """A backend of torch 2.14 and newer, which mixes with backends of other devices.

    Programs get its works through torch's PyWorkHolder, which passes on ``wait`` and ``get_future`` only. So
    ``is_completed`` is never True, and ``source_rank`` is an error. ``get_future().done()`` is right.
    """

    def __init__(self, comm: Communicator, name: str, options: CommunicationOptions | None = None) -> None:
        Backend.__init__(self, comm.rank, comm.size)
        Operations.__init__(self, comm, name, options)
        _open.append(self)

    def _get_sequence_number_for_group(self) -> int:
        # Compared with TORCH_DISTRIBUTED_DEBUG=DETAIL.
        return self._calls.count

    # Properties: torch's implementations of these call themselves without end.
    supports_splitting = supports_shrinking = property(lambda _: True)
    supports_coalescing = supports_window = property(lambda _: False)
    # A Backend in Python keeps the rank and size that it was created with.
    supports_reconfigure = property(lambda _: False)
    # torch 2.15 uses the name with an underscore.
    supports_time_estimate = _supports_time_estimate = property(lambda _: False)

    @property
    def options(self) -> object:
        """The options from which torch creates groups of this one."""
        return Backend.Options(self.backend_name, self.timeout)

    def split(self, store: Store, ranks: Sequence[int], opts: Backend.Options | None) -> MpidistBackend:
        """Return a backend of some ranks, which include this one (collective over them)."""
        return MpidistBackend(self.comm.group(ranks), self.backend_name, self._options_of_another(opts))

    def shrink(
        self, ranks_to_exclude: Sequence[int], shrink_flags: int = 0, opts_override: Backend.Options | None = None
    ) -> MpidistBackend:
        """Return a backend of the other ranks, and leave this one (collective over them).

        Works in flight end with an error, whatever the flags are: the excluded ranks do not take part.
        """
        left = [rank for rank in range(self.comm.size) if rank not in ranks_to_exclude]
        self.abort()
        return MpidistBackend(self.comm.group(left), self.backend_name, self._options_of_another(opts_override))

    def _options_of_another(self, given: Backend.Options | None) -> CommunicationOptions | None:
        # torch passes its default timeout if the program passed none.
        timeout = c10d.default_pg_timeout if given is None else given._timeout
        return self._calls.options if timeout == c10d.default_pg_timeout else self._calls.options_within(timeout)

    def abort(self) -> None:
        """Leave the group without the other ranks. Works end with an error (local)."""
        super().abort()
        self._forget()

    def shutdown(self) -> None:
        """Finish the works in flight, and free the communicator (collective)."""
        self._forget()
        super().shutdown()

    def _forget(self) -> None:
        if self in _open:
            _open.remove(self)


class MpidistProcessGroup(Operations, dist.ProcessGroup):
    """A process group of torch 2.13. ``store`` is the group's."""

    def __init__(
        self, comm: Communicator, name: str, store: Store, options: CommunicationOptions | None = None
    ) -> None:
        dist.ProcessGroup.__init__(self, comm.rank, comm.size)
        Operations.__init__(self, comm, name, options)
        self._store = store
        self._group_name = self._group_desc = ""

    _get_backend_name = name = Operations.getBackendName

    def getGroupName(self) -> str:  # noqa: N802 - torch's name
        """Return the name by which torch finds the group."""
        return self._group_name

    def setGroupName(self, name: str) -> None:  # noqa: N802 - torch's name
        """Set the name by which torch finds the group."""
        self._group_name = name

    def getGroupDesc(self) -> str:  # noqa: N802 - torch's name
        """Return the program's description of the group."""
        return self._group_desc

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802 - torch's name
        """Set the program's description of the group."""
        self._group_desc = desc

    def get_group_store(self) -> Store:
        """Return the store of the group."""
        return self._store

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: object = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: object = None,
    ) -> MpidistProcessGroup:
        """Return a group of some ranks, which include this one (collective over them)."""
        name = group_name or f"{self._group_name}:split:{ranks}"
        options = self._calls.options if timeout is None else self._calls.options_within(timeout)
        store = dist.PrefixStore(f"{name}/", self._store)
        group = MpidistProcessGroup(self.comm.group(ranks), self.backend_name, store, options)
        group.setGroupName(name)
        group.setGroupDesc(group_desc or "")
        return group
