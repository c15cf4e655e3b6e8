"""Tensors of PyTorch as arrays of a Communicator, in the order of CUDA streams.

A collective uses its tensors as they are on the stream that is current in the calling thread. A wait for its work
makes the then current stream wait, not the host. Works may finish in another thread while the program computes, so
their results are copied on a stream of their own. No stream of the program waits for it before it asks for the result.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mpidist.arrays.convert import fill_torch, to_array
from mpidist.arrays.cupy_ops import CupyOps
from mpidist.arrays.device_ops import gpu_ops
from mpidist.arrays.dtypes import Array, as_dtype
from mpidist.arrays.streams import Event, Stream, find_cupy
from mpidist.core.errors import DeviceError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.futures import Future

Finish = Callable[[Any], int | None]
"""Copies a result into tensors. Returns the source rank of a message."""

# NumPy has no such dtypes. Moving these tensors means moving their bytes.
_OPAQUE = tuple(dtype for name, dtype in vars(torch).items() if name.startswith("float8"))
# The dtypes of both libraries, and NumPy's codes for them.
_OF_NUMPY = {torch.from_numpy(np.empty(0, code)).dtype: np.dtype(code).str for code in "?bhilBefdFD"}


# Arrays of tensors --------------------------------------------------------------------------------------------------


def array_of(tensor: Tensor) -> Array:
    """Return the elements as a contiguous array, on the tensor's memory if that is contiguous."""
    _check_dense(tensor)
    if not _is_plain(tensor):
        tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return _plain_array(tensor)


def memory_of(tensor: Tensor) -> Array | None:
    """Return the array on a tensor's memory, or None if NumPy has no such array."""
    if tensor.dtype in _OF_NUMPY and tensor.is_cpu and _is_plain(tensor):
        return np.asarray(_Memory(tensor))
    return None


def joined(tensors: Sequence[Tensor]) -> Array:
    """Return the elements of all tensors as a new flat array."""
    for tensor in tensors:
        _check_dense(tensor)
    return array_of(torch.cat([_opened(tensor.detach()).reshape(-1) for tensor in tensors]))


def outputs_of(tensors: Sequence[Tensor]) -> tuple[list[Array], Finish]:
    """Return arrays for the results, and the function that copies these into tensors with gaps."""
    arrays = [array_of(tensor) for tensor in tensors]
    copied = [pair for pair in zip(tensors, arrays, strict=True) if not _is_plain(pair[0])]
    return arrays, _copying(copied) if copied else nothing


def _copying(pairs: Sequence[tuple[Tensor, Array]]) -> Finish:
    def finish(_: object) -> None:
        for tensor, array in pairs:
            fill(tensor, array)

    return finish


def nothing(_: object) -> None:
    """Do nothing: the result is in the tensors."""


def filling(tensors: Sequence[Tensor]) -> Finish:
    """Return the function that distributes the elements of a result to tensors."""

    def finish(result: Array) -> None:
        flat = result.reshape(-1)
        borders = list(accumulate([tensor.numel() for tensor in tensors], initial=0))
        if len(flat) != borders[-1]:
            raise ValueError(f"The result has {len(flat)} elements, but the tensors for it have {borders[-1]}.")
        for tensor, (start, end) in zip(tensors, pairwise(borders), strict=True):
            fill(tensor, flat[start:end])

    return finish


def fill(tensor: Tensor, array: Array) -> None:
    """Copy an array into a tensor of the same dtype and size."""
    array, tensor = array.reshape(tensor.shape), _opened(tensor)
    if _is_plain(tensor):
        target = _plain_array(tensor)
        if target.dtype != array.dtype:
            raise TypeError(f"The tensor for the result has dtype {target.dtype}. Pass one of dtype {array.dtype}.")
        target[...] = array
    else:
        fill_torch(tensor, array)


def sparse_parts(tensor: Tensor, op: str) -> tuple[list[Array], Finish]:
    """Return the arrays of a sparse tensor, and the function that adds up gathered ones."""
    if tensor.is_cuda:
        raise TypeError(
            f"a sparse tensor is on {tensor.device}; expected one in host memory, or a dense one: tensor.cpu() or "
            "tensor.to_dense()"
        )
    if op != "SUM" or tensor.layout is not torch.sparse_coo:
        raise TypeError(f"{op} of {tensor.layout} is not supported. Use SUM of torch.sparse_coo, or a dense tensor.")
    own = tensor.detach().coalesce()

    def finish(gathered: list[Array]) -> None:
        positions, values = (torch.from_numpy(array) for array in gathered)
        total = torch.sparse_coo_tensor(positions.t(), values, tensor.shape)
        # Not into tensor.detach(), which has a number of elements of its own.
        with torch.no_grad():
            tensor.copy_(total.coalesce())

    return [array_of(own.indices().t()), array_of(own.values())], finish


class _Memory:
    """NumPy's view of a tensor's memory. It keeps the tensor alive as long as the array."""

    __slots__ = ("__array_interface__", "_tensor")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), False),
            "shape": tensor.shape,
            "typestr": _OF_NUMPY[tensor.dtype],
        }


def _plain_array(tensor: Tensor) -> Array:
    tensor = _opened(tensor.detach())
    if tensor.is_cuda:
        # Converted for torch's current stream.
        with _current_stream(_ops(tensor.device), tensor.device):
            return to_array(tensor, "tensor")
    if tensor.is_cpu:
        # Tensor.numpy() would keep torch from resizing the memory, as FSDP and PowerSGD do.
        if tensor.dtype in _OF_NUMPY:
            return np.asarray(_Memory(tensor))
        if tensor.dtype == torch.bfloat16:
            return np.asarray(_Memory(tensor.view(torch.int16))).view(as_dtype("bfloat16"))
    return to_array(tensor, "tensor")


def _opened(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.dtype in _OPAQUE else tensor


def _check_dense(tensor: Tensor) -> None:
    if tensor.layout is not torch.strided:
        raise TypeError(f"The tensor is {tensor.layout}. Pass a dense one: tensor.to_dense()")


def _is_plain(tensor: Tensor) -> bool:
    """Return whether the memory has the elements in order, without gaps and pending operations."""
    return bool(
        tensor.layout is torch.strided and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
    )


# The order of a call ------------------------------------------------------------------------------------------------


class Order:
    """The order of a call. On a GPU it follows the device's current stream."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device
        if device is not None:
            ops = _ops(device)
            self._caller = _current_stream(ops, device)
            self._apart = _apart(ops, device.index)
            # Work before the call may still read the tensors for the results.
            self._ready = self._caller.record()

    def calling(self) -> AbstractContextManager[object]:
        """Return a context for the call itself, in the calling thread. torch's current stream is CuPy's, too."""
        return nullcontext() if self.device is None else self._caller

    def ending(self, *needed: object) -> AbstractContextManager[object]:
        """Return a context, in any thread, to copy results into tensors. It keeps ``needed`` alive until then."""
        return nullcontext() if self.device is None else self._on_stream_apart(needed)

    @contextmanager
    def _on_stream_apart(self, needed: object) -> Iterator[None]:
        with self._apart.current():
            self._apart.stream.wait(self._ready)
            try:
                yield
            finally:
                self._apart.keep(needed)

    def future(self) -> Future[list[Tensor]]:
        """Return a future for tensors that are ready on the current stream of ``set_result``."""
        return torch.futures.Future(devices=[] if self.device is None else [self.device])


HOST_ORDER = Order()


def order_of(tensors: Iterable[Tensor]) -> Order:
    """Return the order of a call that this thread makes now."""
    for tensor in tensors:
        if tensor.is_cuda:
            return Order(tensor.device)
    return HOST_ORDER


class _StreamApart:
    """A stream that the program does not use. Other streams own the memory that its work reads."""

    def __init__(self, ops: CupyOps, device: int) -> None:
        self.stream: Stream = ops.stream(device, is_urgent=True)
        self._in_torch = torch.cuda.ExternalStream(self.stream.handle, device=torch.device("cuda", device))
        self._kept: deque[tuple[Event, object]] = deque()
        self._lock = threading.Lock()

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make it the current stream of this thread, in CuPy and in torch."""
        # CuPy first: it does not restore a device on which this process has no context.
        with self.stream, torch.cuda.stream(self._in_torch):
            yield

    def keep(self, needed: object) -> None:
        """Keep objects alive until the work on the stream so far is done."""
        released = []
        with self._lock:
            self._kept.append((self.stream.record(), needed))
            while self._kept and self._kept[0][0].is_done:
                released.append(self._kept.popleft())
        # Not under the lock: this may be the last reference to a work.
        released.clear()


@cache
def _apart(ops: CupyOps, device: int) -> _StreamApart:
    return _StreamApart(ops, device)


def _current_stream(ops: CupyOps, device: torch.device) -> Stream:
    return ops.stream_of_others(device.index, torch.cuda.current_stream(device).cuda_stream)


def _ops(device: torch.device) -> CupyOps:
    cuda: str | None = torch.version.cuda
    if cuda is None:
        raise DeviceError(
            f"a tensor is on {device}, and this PyTorch is not for CUDA; expected one that is, or a tensor in host "
            "memory: tensor.cpu()"
        )
    if not find_cupy().is_installed:
        raise DeviceError(
            f"a tensor is on {device}, and mpidist takes tensors on GPUs by CuPy, which is not installed; type: "
            f"pip install cupy-cuda{cuda.partition('.')[0]}x   (this PyTorch has CUDA {cuda}), or take the tensor to "
            "host memory: tensor.cpu()"
        )
    return gpu_ops()
