"""NCCL communicators of several ranks, or of the GPUs of one process.

CuPy's binding with checks before each call, since a wrong one hangs or corrupts memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import NoReturn

from mpidist.arrays.device_ops import DeviceOps, ops_for
from mpidist.arrays.dtypes import Array
from mpidist.arrays.streams import Stream
from mpidist.collectives.gpu.nccl_start import (
    IN_PROGRESS,
    START_SECONDS,
    NcclCommunicator,
    NcclShare,
    failure,
    nccl_binding,
    nccl_problem,
    started,
)
from mpidist.collectives.mpi.waiting import Comm, Steps
from mpidist.collectives.reduce.device_packs import BYTES, nccl_reduction
from mpidist.core.errors import DeviceError, NcclFailure
from mpidist.core.options import ReduceOp


class NcclComm:
    """One rank's end of an NCCL communicator, with one GPU.

    Every method that moves data enqueues it on a stream and returns before it is done: the arrays must live, and stay
    as they are, until the stream is past it. All ranks must call the same methods with the same counts in the same
    order, also across communicators that share a GPU. Empty arrays are no call at all.

    Made by ``made``. It has to be closed, or aborted, before it is dropped: CuPy would destroy it whenever Python
    happens to collect it, which may be after MPI has ended.

    Args:
        binding: The module ``cupy.cuda.nccl``.
        raw: The NcclCommunicator, or an ``NcclShare`` of one.
        device: Number of the GPU.
        rank: Of this end.
        size: How many ranks there are.
        ops: The operations on arrays of its kind.
    """

    def __init__(
        self,
        binding: ModuleType,
        raw: NcclCommunicator | NcclShare,
        device: int,
        rank: int,
        size: int,
        ops: DeviceOps,
    ) -> None:
        self.device = device
        self.rank = rank
        self.size = size
        self._binding = binding
        self._raw: NcclCommunicator | NcclShare | _Closed = raw
        self._errors = (binding.NcclError, KeyError)
        self._is_contiguous, self._device_of, self._pointer = ops.is_contiguous, ops.device_of, ops.pointer
        self._group = NcclGroup(binding)
        # NCCL goes back to what was current before, which has to be a device that this process uses.
        self._on_device = partial(ops.on, device)

    def __repr__(self) -> str:
        state = ", closed" if self.is_closed else ""
        return f"<NcclComm, rank {self.rank} of {self.size} on gpu:{self.device}{state}>"

    @classmethod
    def made(
        cls,
        comm: Comm,
        device: int | None,
        start_seconds: float = START_SECONDS,
        has_given_up: Callable[[], bool] = lambda: False,
    ) -> Steps[NcclComm | str]:
        """Return one, or on every rank the same reason why there is none (collective).

        The memory of NCCL is shared with others of the same ranks on the same GPUs.

        Args:
            comm: The ranks, which keep their numbers.
            device: Number of this rank's GPU; None where it has none.
            start_seconds: How long NCCL may take to start.
            has_given_up: Whether its user makes no more calls, also of those that other ranks make.
        """
        raw = yield from started(comm, device, start_seconds, has_given_up)
        if isinstance(raw, str):
            return raw
        assert device is not None
        return cls(nccl_binding(), raw, device, comm.Get_rank(), comm.Get_size(), ops_for("gpu"))

    # Data -------------------------------------------------------------------------------------------------------

    def all_reduce(self, source: Array, target: Array, op: ReduceOp, stream: Stream) -> None:
        """Put the reduction of all ranks' ``source`` into ``target`` of every rank.

        They may be one array. A mean is a SUM that is divided afterwards.

        Raises:
            ValueError: An array is not contiguous or on another GPU, or the two do not fit together.
            TypeError: They differ in dtype, or NCCL has no such reduction, or one is no array of a GPU.
            NcclFailure: NCCL refused.
            RuntimeError: This communicator has been closed or aborted.
        """
        from_, to = self._addresses("all_reduce", source, target)
        datatype, code, numbers = nccl_reduction(source.dtype, op)
        count = source.size
        self._check_size("all_reduce", "target", target.size, count)
        if count:
            self._call("all_reduce", self._raw.allReduce, from_, to, count * numbers, datatype, code, stream.handle)

    def reduce_scatter(self, source: Array, target: Array, op: ReduceOp, stream: Stream) -> None:
        """Put this rank's piece of the reduction of all ranks' ``source`` into ``target``.

        ``target`` may be that piece of ``source``: elements rank * n to (rank + 1) * n. Raises the errors of
        ``all_reduce``.
        """
        from_, to = self._addresses("reduce_scatter", source, target)
        datatype, code, numbers = nccl_reduction(source.dtype, op)
        count = target.size
        self._check_size("reduce_scatter", "source", source.size, count, "target")
        if count:
            call = self._raw.reduceScatter
            self._call("reduce_scatter", call, from_, to, count * numbers, datatype, code, stream.handle)

    def all_gather(self, source: Array, target: Array, stream: Stream) -> None:
        """Put the elements of all ranks' ``source`` into ``target``, in rank order; any dtype.

        ``source`` may be this rank's piece of ``target``. Raises the errors of ``all_reduce``.
        """
        from_, to = self._addresses("all_gather", source, target)
        count = source.size
        self._check_size("all_gather", "target", target.size, count, "source")
        if count:
            self._call("all_gather", self._raw.allGather, from_, to, source.nbytes, BYTES, stream.handle)

    def reduce(self, source: Array, target: Array | None, op: ReduceOp, root: int, stream: Stream) -> None:
        """Put the reduction of all ranks' ``source`` into ``target`` of rank ``root``.

        The others may pass None. Raises the errors of ``all_reduce``.
        """
        self._check_rank("reduce", "root", root)
        if target is None and self.rank == root:
            raise ValueError(f"reduce: target is None on rank {root}, the root; expected an array like the source")
        from_, to = self._addresses("reduce", source, source if target is None else target)
        datatype, code, numbers = nccl_reduction(source.dtype, op)
        count = source.size
        if target is not None:
            self._check_size("reduce", "target", target.size, count)
        if count:
            to = 0 if target is None else to
            self._call("reduce", self._raw.reduce, from_, to, count * numbers, datatype, code, root, stream.handle)

    def broadcast(self, source: Array | None, target: Array, root: int, stream: Stream) -> None:
        """Put ``source`` of rank ``root`` into ``target`` of every rank; any dtype.

        Args:
            source: Looked at on ``root`` only; there None stands for ``target``.
            target: Where it goes.
            root: Whose source it is.
            stream: Where it is enqueued.

        Raises the errors of ``all_reduce``.
        """
        self._check_rank("broadcast", "root", root)
        source = target if source is None or self.rank != root else source
        from_, to = self._addresses("broadcast", source, target)
        count = target.size
        self._check_size("broadcast", "target", count, source.size)
        if count:
            self._call("broadcast", self._raw.broadcast, from_, to, target.nbytes, BYTES, root, stream.handle)

    def group(self) -> NcclGroup:
        """Return a context in which calls, also of other communicators, are started together.

        It starts them however its block ends: calls before an error run, and need the same calls of the other ranks
        as ever. An error of NCCL in one of them may come up at the end of the block.
        """
        return self._group

    # Errors and the end -----------------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        """Return whether it has been closed or aborted."""
        return isinstance(self._raw, _Closed)

    def check_async_error(self) -> None:
        """Raise NcclFailure if NCCL has found an error: a rank or a network was lost."""
        try:
            self._call("an earlier call", self._raw.check_async_error)
        except NcclFailure as error:
            if error.status != IN_PROGRESS:
                raise

    def check_in_step(self) -> None:
        """Raise RuntimeError where another user of the shared communicator has given up.

        For one that ``made`` has returned.
        """
        raw = self._raw
        if isinstance(raw, (NcclShare, _Closed)):
            raw.check_in_step()

    def abort(self) -> None:
        """Abort NCCL for all who share it; unfinished results are lost.

        Any number of times. The other ranks do not learn of it from NCCL; each has to be told to abort its own end. May
        block until all of them have.
        """
        raw = self._raw
        if not self.is_closed:
            self._raw = _Closed("it was aborted")
            with self._on_device():
                raw.abort()

    def close(self) -> None:
        """Free it, if nobody shares it; any number of times.

        All that was enqueued must be done, on every rank.
        """
        raw = self._raw
        if not self.is_closed:
            self._raw = _Closed("it has been closed")
            with self._on_device():
                raw.destroy()

    # Checks -----------------------------------------------------------------------------------------------------

    def _call(self, name: str, call: Callable[..., None], *arguments: int) -> None:
        try:
            call(*arguments)
        except self._errors as error:
            doing = f"NCCL failed in {name} on rank {self.rank} of {self.size} (gpu:{self.device})"
            raise failure(self._binding, doing, error) from error

    def _addresses(self, name: str, source: Array, target: Array) -> tuple[int, int]:
        from_, to = self.address(name, "source", source), self.address(name, "target", target)
        if source.dtype != target.dtype:
            raise TypeError(f"{name}: source is {source.dtype} and target is {target.dtype}; expected one dtype")
        return from_, to

    def address(self, name: str, role: str, array: Array) -> int:
        """Check ``array``, the ``role`` in call ``name``, and return its address.

        Raises the errors of ``all_reduce``.
        """
        try:
            if self._device_of(array) == self.device and self._is_contiguous(array):
                return self._pointer(array)
            device = self._device_of(array)
        except AttributeError:
            raise TypeError(f"{name}: {role} is {_kind(array)}; expected a CuPy array on gpu:{self.device}") from None
        if device != self.device:
            raise ValueError(f"{name}: {role} is on gpu:{device}; expected gpu:{self.device}, that of the communicator")
        raise ValueError(
            f"{name}: {role}, of shape {array.shape} and strides {array.strides}, is not contiguous; expected C "
            "order: cupy.ascontiguousarray(...)"
        )

    def _check_rank(self, name: str, role: str, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise ValueError(f"{name}: {role} is {rank}; expected a rank of 0 to {self.size - 1}")

    def _check_size(self, name: str, role: str, size: int, count: int, per_rank_of: str | None = None) -> None:
        expected = count if per_rank_of is None else count * self.size
        if size != expected:
            why = (
                "as many as the source" if per_rank_of is None else f"{self.size} ranks x {count} of the {per_rank_of}"
            )
            raise ValueError(f"{name}: {role} has {size} elements; expected {expected}, {why}")


class NcclGroup:
    """Calls that NCCL collects and starts together; see ``NcclComm.group``.

    Args:
        binding: The module ``cupy.cuda.nccl``.
    """

    def __init__(self, binding: ModuleType) -> None:
        self._binding = binding

    def __enter__(self) -> None:
        self._binding.groupStart()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self._binding.groupEnd()
        except (self._binding.NcclError, KeyError) as end_error:
            raise failure(self._binding, "NCCL failed to start a group of calls", end_error) from (error or end_error)


class _Closed:
    """The substitute for an NcclCommunicator that is gone."""

    def __init__(self, why: str) -> None:
        self._why = why

    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError(f"this NCCL communicator can no longer be used: {self._why}")


def _kind(value: object) -> str:
    kind = type(value)
    return f"of type {kind.__module__}.{kind.__qualname__}"


class LocalNccl:
    """The GPUs of one process, joined by NCCL. Waits for no other process; has to be closed before it is dropped.

    Methods take one array and one stream per GPU, in the order of ``devices``, enqueue, and return before anything is
    done: the arrays must live, and stay as they are, until the streams are past it.

    Args:
        devices: Numbers of the GPUs, each once.

    Attributes:
        devices: The same.
        comms: The end of the communicator on each GPU; calls of several go into one ``group()`` of any of them.

    Raises:
        DeviceError: NCCL cannot be used in this process; the text says how to install it.
        NcclFailure: NCCL refused.
    """

    def __init__(self, devices: Sequence[int]) -> None:
        self.devices = [int(device) for device in devices]
        if not self.devices or len(set(self.devices)) < len(self.devices):
            raise ValueError(f"devices are {self.devices}; expected at least one GPU, and each once")
        problem = nccl_problem()
        if problem is not None:
            raise DeviceError(problem)
        binding, ops, size = nccl_binding(), ops_for("gpu"), len(self.devices)
        try:
            with ops.on(self.devices[0]):
                raw = binding.NcclCommunicator.initAll(self.devices)
        except (binding.NcclError, KeyError) as error:
            raise failure(binding, f"NCCL could not join the GPUs {self.devices} of one process", error) from error
        self._on_first = partial(ops.on, self.devices[0])
        self.comms = [NcclComm(binding, raw[i], device, i, size, ops) for i, device in enumerate(self.devices)]

    def __repr__(self) -> str:
        state = ", closed" if self.comms[0].is_closed else ""
        return f"<LocalNccl of GPUs {self.devices}{state}>"

    def all_reduce(
        self,
        arrays: Sequence[Array],
        op: ReduceOp,
        streams: Sequence[Stream],
        targets: Sequence[Array] | None = None,
    ) -> None:
        """Put the reduction of ``arrays`` into each of ``targets``, or in place.

        Raises the errors of ``NcclComm``.
        """
        targets = arrays if targets is None else targets
        self._check("all_reduce", streams, arrays, targets)
        nccl_reduction(arrays[0].dtype, op)
        with self._on_first(), self.comms[0].group():
            for comm, array, target, stream in zip(self.comms, arrays, targets, streams, strict=True):
                comm.all_reduce(array, target, op, stream)

    def close(self) -> None:
        """Free it; any number of times. All that was enqueued must be done."""
        with self._on_first(), self.comms[0].group():
            for comm in self.comms:
                comm.close()

    def _check(self, name: str, streams: Sequence[Stream], *lists: Sequence[Array]) -> None:
        # Within a group it would be too late: what was called already runs, and waits for the rest.
        for given in (streams, *lists):
            if len(given) != len(self.comms):
                raise ValueError(
                    f"{name}: {len(given)} arrays or streams were given for {len(self.comms)} GPUs; expected one of "
                    "each for each GPU"
                )
        first = lists[0][0]
        for arrays in lists:
            for comm, array in zip(self.comms, arrays, strict=True):
                comm.address(name, f"the array of place {comm.rank}", array)
                if (array.size, array.dtype) != (first.size, first.dtype):
                    raise ValueError(
                        f"{name}: the array of place {comm.rank} has {array.size} elements of {array.dtype}, that of "
                        f"place 0 {first.size} of {first.dtype}; expected equal numbers of one dtype"
                    )
