"""Tensors on GPUs: the order of a call among torch's streams, and CuPy arrays.

A program of torch computes on the stream that is current in its thread. A call takes its tensors as they are there;
whoever waits for its work has the stream that is current then wait for the results, and not the host. A work may end in
another thread while the program computes: its results go into the tensors on a stream apart, for which no stream of the
program waits before it asks for them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import TYPE_CHECKING

import torch

from mpidist.arrays.convert import to_array
from mpidist.arrays.cupy_ops import CupyOps
from mpidist.arrays.device_ops import gpu_ops
from mpidist.arrays.dtypes import Array
from mpidist.arrays.streams import Event, Stream, find_cupy
from mpidist.core.errors import DeviceError
from mpidist.torch.foreign import Foreign

if TYPE_CHECKING:
    from torch import Tensor

_cuda: Foreign = torch.cuda


class Order:
    """The order of a call of tensors in host memory: that of the program."""

    has_streams = False

    def calling(self) -> AbstractContextManager[object]:
        """Return a block for the call itself, in the thread that makes it."""
        return nullcontext()

    def ending(self, *needed: object) -> AbstractContextManager[object]:
        """Return a block, for any thread, in which results go into the tensors.

        ``needed`` is kept until that has happened.
        """
        return nullcontext()

    def future(self) -> Foreign:
        """Return a future for tensors of the call."""
        return torch.futures.Future()


class StreamOrder(Order):
    """The order of a call of tensors on a GPU.

    Args:
        device: torch's, whose current stream the call follows.
    """

    has_streams = True

    def __init__(self, device: Foreign) -> None:
        ops = _ops(device)
        self._device = device
        self._caller = _current_stream(ops, device)
        self._apart = _apart(ops, device.index)
        # Results go into tensors that work before the call may still read.
        self._ready = self._caller.record()

    def calling(self) -> AbstractContextManager[object]:
        """See ``Order``. CuPy's current stream is that of torch."""
        return self._caller

    @contextmanager
    def ending(self, *needed: object) -> Iterator[None]:
        """See ``Order``. The current stream of CuPy and of torch is one apart."""
        with self._apart.current():
            self._apart.stream.wait(self._ready)
            try:
                yield
            finally:
                self._apart.keep(needed)

    def future(self) -> Foreign:
        """See ``Order``. It takes the tensors as they are on the stream that is current when it is told of them."""
        return torch.futures.Future(devices=[self._device])


HOST_ORDER = Order()


def order_of(tensors: Iterable[Tensor]) -> Order:
    """Return the order of a call that begins now in this thread."""
    for tensor in tensors:
        if tensor.is_cuda:
            return StreamOrder(tensor.device)
    return HOST_ORDER


def array_on_gpu(tensor: Tensor) -> Array:
    """Return the elements of a tensor as a CuPy array over its memory.

    It is for the stream that is current in torch.

    Raises:
        DeviceError: CuPy cannot be used.
        RuntimeError: That stream records a CUDA graph.
    """
    with _current_stream(_ops(tensor.device), tensor.device):
        return to_array(tensor, "tensor")


class _StreamApart:
    """A stream of a GPU apart from the program's.

    The memory that it uses belongs to other streams, which may have it as soon as it is let go.
    """

    def __init__(self, ops: CupyOps, device: int) -> None:
        self.stream: Stream = ops.stream(device, is_urgent=True)
        self._in_torch = _cuda.ExternalStream(self.stream.handle, device=torch.device("cuda", device))
        self._kept: deque[tuple[Event, object]] = deque()
        self._lock = threading.Lock()

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make it current in this thread, in CuPy and in torch."""
        # CuPy's first: it goes back to no device where this process has nothing.
        with self.stream, _cuda.stream(self._in_torch):
            yield

    def keep(self, needed: object) -> None:
        """Keep objects until the work so far, which needs them, has happened."""
        let_go = []
        with self._lock:
            self._kept.append((self.stream.record(), needed))
            while self._kept and self._kept[0][0].is_done:
                let_go.append(self._kept.popleft())
        # Not under the lock: it may be the last that holds a work.
        let_go.clear()


@cache
def _apart(ops: CupyOps, device: int) -> _StreamApart:
    return _StreamApart(ops, device)


def _current_stream(ops: CupyOps, device: Foreign) -> Stream:
    return ops.stream_of_others(device.index, _cuda.current_stream(device).cuda_stream)


def _ops(device: Foreign) -> CupyOps:
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
