"""Wrap NCCL communicators of several ranks, or of the GPUs of one process.

CuPy's binding checks no arguments, so every call is checked here. A wrong call hangs or corrupts memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from types import ModuleType
from typing import NamedTuple, NoReturn

import numpy as np

from mpidist.arrays.device_ops import DeviceOps, ops_for
from mpidist.arrays.dtypes import Array, DType
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
from mpidist.core.errors import DeviceError, NcclFailure
from mpidist.core.options import ReduceOp

# Dtypes and operations ------------------------------------------------------------------------------------------------


# ncclDataType_t and ncclRedOp_t, part of NCCL's binary interface. By name, because extension dtypes share type letters.
_INTEGERS = {"int8": 0, "uint8": 1, "int32": 2, "uint32": 3, "int64": 4, "uint64": 5}
_FLOATS = {"float16": 6, "float32": 7, "float64": 8, "bfloat16": 9}
_COMPLEX = {"complex64": 7, "complex128": 8}
_WIDER = {"int16": "int32", "uint16": "uint32"}
_OPS = {ReduceOp.SUM: 0, ReduceOp.PROD: 1, ReduceOp.MAX: 2, ReduceOp.MIN: 3}
BYTES = 1
"""ncclUint8, to send any dtype as bytes."""


class NcclCode(NamedTuple):
    """A reduction in the codes of NCCL."""

    datatype: int
    """The ncclDataType_t."""
    op: int
    """The ncclRedOp_t."""
    numbers: int
    """Numbers of that type per element: two for complex elements."""


@lru_cache(maxsize=256)
def nccl_reduction(dtype: DType, op: ReduceOp) -> NcclCode:
    """Return NCCL's codes of a reduction, or raise TypeError if NCCL does not support it.

    A mean is a SUM that is divided afterwards. NCCL adds and multiplies float16 and bfloat16 in their own precision,
    and its MIN and MAX of floating point ignore NaN.

    >>> nccl_reduction(np.dtype("complex64"), ReduceOp.SUM)
    NcclCode(datatype=7, op=0, numbers=2)
    """
    name = dtype.name
    if not dtype.isnative:
        raise TypeError(f"NCCL does not support dtype {dtype!r}. Convert it to native byte order")
    if op is ReduceOp.MEAN:
        raise TypeError("NCCL has no MEAN. Use SUM, and divide the result")
    if op.is_bitwise:
        raise TypeError(f"NCCL has no {op.name}")
    if name in _COMPLEX and op is ReduceOp.SUM:
        return NcclCode(_COMPLEX[name], _OPS[op], 2)
    if name in _FLOATS:
        return NcclCode(_FLOATS[name], _OPS[op], 1)
    if name in _INTEGERS:
        return NcclCode(_INTEGERS[name], _OPS[op], 1)
    raise TypeError(f"NCCL has no {op.name} of {name}. {_instead(name)}")


def _instead(name: str) -> str:
    if name in _COMPLEX:
        return "It supports SUM of complex numbers only"
    if name in _WIDER:
        return f"Cast to {_WIDER[name]} first"
    if name == "bool":
        return "Cast to uint8 first, for which MAX is 'any' and MIN is 'all'"
    return f"Use one of {', '.join([*_INTEGERS, *_FLOATS, *_COMPLEX])}"


@lru_cache(maxsize=256)
def nccl_dtype(dtype: DType, op: ReduceOp) -> DType | None:
    """Return the dtype in which NCCL reduces ``dtype`` by ``op``, or None.

    The values must be cast to it, and back. None for MIN and MAX of floating point, because NCCL ignores NaN and NumPy
    does not. A mean counts as SUM.

    >>> nccl_dtype(np.dtype("int16"), ReduceOp.SUM)
    dtype('int32')
    >>> nccl_dtype(np.dtype("float32"), ReduceOp.MAX) is None
    True
    """
    summed = ReduceOp.SUM if op is ReduceOp.MEAN else op
    if dtype.name in _FLOATS and op in (ReduceOp.MIN, ReduceOp.MAX):
        return None
    target = np.dtype(_WIDER[dtype.name]) if dtype.name in _WIDER and dtype.isnative else dtype
    try:
        nccl_reduction(target, summed)
    except TypeError:
        return None
    return target


# Communicators --------------------------------------------------------------------------------------------------------


class NcclComm:
    """Wrap one rank's end of an NCCL communicator, with one GPU.

    Methods that move data enqueue it on a stream and return early. Keep the arrays alive and unchanged until the stream
    is past the call. All ranks must call the same methods with the same counts in the same order, also across
    communicators that share a GPU. Calls with empty arrays are skipped.

    Create one with ``made``. Close or abort it before dropping it, because otherwise CuPy destroys it when Python
    collects it, perhaps after MPI has ended.

    Args:
        binding: Module ``cupy.cuda.nccl``.
        raw: NcclCommunicator, or a share of one.
        device: GPU number.
        rank: Rank of this end.
        size: Number of ranks.
        ops: Operations on arrays of the device.
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
        # NCCL restores the current device, which must be a device that this process uses.
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
        """Create a communicator, or return on every rank the same reason for failure (collective).

        NCCL's memory is shared with other users of the same ranks and GPUs. See ``started`` for the arguments.
        """
        raw = yield from started(comm, device, start_seconds, has_given_up)
        if isinstance(raw, str):
            return raw
        assert device is not None
        return cls(nccl_binding(), raw, device, comm.Get_rank(), comm.Get_size(), ops_for("gpu"))

    # Data -------------------------------------------------------------------------------------------------------

    def all_reduce(self, source: Array, target: Array, op: ReduceOp, stream: Stream) -> None:
        """Reduce ``source`` of all ranks into ``target`` of every rank.

        Both may be one array. A mean is a SUM that the caller divides.

        Raises:
            ValueError: An array is not contiguous or on another GPU, or the sizes differ.
            TypeError: The dtypes differ or have no such reduction, or an array is not on a GPU.
            NcclFailure: NCCL reported an error.
            RuntimeError: The communicator was closed or aborted.
        """
        from_, to = self._addresses("all_reduce", source, target)
        datatype, code, numbers = nccl_reduction(source.dtype, op)
        count = source.size
        self._check_size("all_reduce", "target", target.size, count)
        if count:
            self._call("all_reduce", self._raw.allReduce, from_, to, count * numbers, datatype, code, stream.handle)

    def reduce_scatter(self, source: Array, target: Array, op: ReduceOp, stream: Stream) -> None:
        """Reduce ``source`` of all ranks, and write this rank's slice of n elements into ``target``.

        ``target`` may be elements rank * n to (rank + 1) * n of ``source``.
        """
        from_, to = self._addresses("reduce_scatter", source, target)
        datatype, code, numbers = nccl_reduction(source.dtype, op)
        count = target.size
        self._check_size("reduce_scatter", "source", source.size, count, "target")
        if count:
            call = self._raw.reduceScatter
            self._call("reduce_scatter", call, from_, to, count * numbers, datatype, code, stream.handle)

    def all_gather(self, source: Array, target: Array, stream: Stream) -> None:
        """Concatenate ``source`` of all ranks in ``target``, in rank order and for any dtype.

        ``source`` may be this rank's slice of ``target``.
        """
        from_, to = self._addresses("all_gather", source, target)
        count = source.size
        self._check_size("all_gather", "target", target.size, count, "source")
        if count:
            self._call("all_gather", self._raw.allGather, from_, to, source.nbytes, BYTES, stream.handle)

    def reduce(self, source: Array, target: Array | None, op: ReduceOp, root: int, stream: Stream) -> None:
        """Reduce ``source`` of all ranks into ``target`` of rank ``root``. Other ranks may pass None."""
        self._check_rank("reduce", "root", root)
        if target is None and self.rank == root:
            raise ValueError(f"reduce: target is None on the root, rank {root}. Pass an array like the source")
        from_, to = self._addresses("reduce", source, source if target is None else target)
        datatype, code, numbers = nccl_reduction(source.dtype, op)
        count = source.size
        if target is not None:
            self._check_size("reduce", "target", target.size, count)
        if count:
            to = 0 if target is None else to
            self._call("reduce", self._raw.reduce, from_, to, count * numbers, datatype, code, root, stream.handle)

    def broadcast(self, source: Array | None, target: Array, root: int, stream: Stream) -> None:
        """Copy ``source`` of rank ``root`` into ``target`` of every rank, for any dtype.

        Only the root's ``source`` is used. None means ``target``.
        """
        self._check_rank("broadcast", "root", root)
        source = target if source is None or self.rank != root else source
        from_, to = self._addresses("broadcast", source, target)
        count = target.size
        self._check_size("broadcast", "target", count, source.size)
        if count:
            self._call("broadcast", self._raw.broadcast, from_, to, target.nbytes, BYTES, root, stream.handle)

    def group(self) -> NcclGroup:
        """Return a context that starts calls of any communicators together.

        The calls start even if the block raises, so other ranks must make the same calls. NCCL may report an error of a
        call at the end of the block.
        """
        return self._group

    # Errors and the end -----------------------------------------------------------------------------------------

    @property
    def is_closed(self) -> bool:
        """Return True after close() or abort()."""
        return isinstance(self._raw, _Closed)

    def check_async_error(self) -> None:
        """Raise NcclFailure if NCCL found an error, such as a lost rank or network."""
        try:
            self._call("an earlier call", self._raw.check_async_error)
        except NcclFailure as error:
            if error.status != IN_PROGRESS:
                raise

    def check_in_step(self) -> None:
        """Raise RuntimeError if another user of the shared communicator failed."""
        raw = self._raw
        if isinstance(raw, (NcclShare, _Closed)):
            raw.check_in_step()

    def abort(self) -> None:
        """Abort NCCL for all users and lose unfinished results (idempotent).

        NCCL does not notify other ranks, so each must abort its own end. May block until all of them have.
        """
        raw = self._raw
        if not self.is_closed:
            self._raw = _Closed("it was aborted")
            with self._on_device():
                raw.abort()

    def close(self) -> None:
        """Release it when all enqueued work is done on every rank (idempotent)."""
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
            raise TypeError(f"{name}: source is {source.dtype} and target is {target.dtype}. Use one dtype")
        return from_, to

    def address(self, name: str, role: str, array: Array) -> int:
        """Check ``array``, an argument of call ``name``, and return its address."""
        try:
            if self._device_of(array) == self.device and self._is_contiguous(array):
                return self._pointer(array)
            device = self._device_of(array)
        except AttributeError:
            raise TypeError(f"{name}: {role} is {_kind(array)}. Pass a CuPy array on gpu:{self.device}") from None
        if device != self.device:
            raise ValueError(f"{name}: {role} is on gpu:{device}. Pass an array on gpu:{self.device}")
        raise ValueError(
            f"{name}: {role} of shape {array.shape} and strides {array.strides} is not contiguous. Use "
            "cupy.ascontiguousarray(...)"
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
    """Start several NCCL calls together (see ``NcclComm.group``)."""

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
    """Replace an NcclCommunicator after its end."""

    def __init__(self, why: str) -> None:
        self._why = why

    def __getattr__(self, name: str) -> NoReturn:
        raise RuntimeError(f"this NCCL communicator can no longer be used: {self._why}")


def _kind(value: object) -> str:
    kind = type(value)
    return f"of type {kind.__module__}.{kind.__qualname__}"


class LocalNccl:
    """Join the GPUs of one process with NCCL, without other processes. Close it before dropping it.

    Args:
        devices: Distinct GPU numbers.

    Attributes:
        comms: The end of the communicator on each GPU. Call several of them inside one ``group()``.

    Raises:
        DeviceError: NCCL cannot be used in this process.
        NcclFailure: NCCL reported an error.
    """

    def __init__(self, devices: Sequence[int]) -> None:
        self.devices = [int(device) for device in devices]
        if not self.devices or len(set(self.devices)) < len(self.devices):
            raise ValueError(f"devices are {self.devices}. Pass at least one GPU, each once")
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

    @contextmanager
    def group(self) -> Iterator[None]:
        """Start the calls of all GPUs together (see ``NcclComm.group``)."""
        with self._on_first(), self.comms[0].group():
            yield

    def close(self) -> None:
        """Release it when all enqueued work is done (idempotent)."""
        with self.group():
            for comm in self.comms:
                comm.close()
