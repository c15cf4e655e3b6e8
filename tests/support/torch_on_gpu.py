"""PyTorch's CUDA on the stand-in for CuPy: tensors in host memory that behave as if they lay on its GPUs.

``install(monkeypatch)`` puts it in the place of ``torch.cuda`` and what goes with it, where ``fake_cupy`` is installed;
``on_gpu(tensor)`` gives a copy of a tensor there. As with the stand-in for CuPy, an operation sees what the *current*
stream of torch has done and no other, and what it writes is written by a job of that stream, later; memory that is let
go is spoiled in the order of the stream on which it was made, as PyTorch's allocator would give it to somebody else.
Operations that C++ does by itself, those of DDP's reducer for instance, know nothing of it.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from tests.support.fake_cupy import streams
from tests.support.fake_cupy.devices import current_device, machine, on_device
from tests.support.fake_cupy.memory import FREED, MemoryPointer, UnownedMemory, bytes_at
from tests.support.fake_cupy.ndarray import ndarray
from tests.support.fake_cupy.running import Capsule

_local = threading.local()
# Memory that was let go.
_spoiled: list[Any] = []
_Base: Any = torch.Tensor
_BaseFuture: Any = torch.futures.Future
# Its methods, as PyTorch's own look up the name in whose place the class below is.
_InC: Any = torch._C.Future
# They look at no element: what they return is a part of the memory, or says something of it.
_WITHOUT_WORK = {
    *("detach", "view", "view_as", "reshape", "__get__", "__set__", "requires_grad_", "data_ptr", "numel", "size"),
    *("is_contiguous", "is_conj", "is_neg", "is_complex", "is_floating_point", "dim", "stride", "element_size", "t"),
    *("storage_offset", "untyped_storage", "__len__", "is_inference", "unbind", "__hash__", "transpose", "unflatten"),
    *("is_coalesced", "nelement", "is_pinned"),
}


# Streams --------------------------------------------------------------------------------------------------------------


class Stream:
    """``torch.cuda.Stream``."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device = _device(device)
        with on_device(self.device.index):
            self._set(streams.Stream(non_blocking=True, priority=priority))

    def _set(self, raw: Any) -> None:
        self.raw, self.cuda_stream = raw, raw.ptr

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and (self.cuda_stream, self.device) == (other.cuda_stream, other.device)

    def __hash__(self) -> int:
        return hash((self.cuda_stream, self.device))

    @property
    def worker(self) -> Any:
        return machine().worker(self.cuda_stream, self.device.index)

    def record_event(self) -> Any:
        with on_device(self.device.index):
            event = streams.Event(disable_timing=True)
            event.record(self.raw)
        return event

    def wait_event(self, event: Any) -> None:
        self.worker.enqueue(event.capture())

    def synchronize(self) -> None:
        self.worker.drain()


class ExternalStream(Stream):
    """``torch.cuda.ExternalStream``."""

    def __init__(self, stream_ptr: int, device: Any = None) -> None:
        self.device = _device(device)
        self._set(streams.BaseStream(stream_ptr, -1))


def _device(given: Any) -> Any:
    if given is None:
        return torch.device("cuda", current_device())
    return torch.device("cuda", given) if isinstance(given, int) else torch.device(given)


def current_stream(device: Any = None) -> Stream:
    """``torch.cuda.current_stream``."""
    device = _device(device)
    found: Stream = _current().get(device.index) or ExternalStream(0, device)
    return found


def _current() -> dict[int, Stream]:
    # Of this thread, on these GPUs.
    if getattr(_local, "machine", None) is not machine():
        _local.machine, _local.current = machine(), {}
    current: dict[int, Stream] = _local.current
    return current


@contextlib.contextmanager
def stream(chosen: Stream) -> Iterator[None]:
    """``torch.cuda.stream``; the device is current, too."""
    index = chosen.device.index
    before = _current().get(index)
    with on_device(index) if current_device() != index else contextlib.nullcontext():
        _current()[index] = chosen
        try:
            yield
        finally:
            _current().pop(index)
            if before is not None:
                _current()[index] = before


# Tensors --------------------------------------------------------------------------------------------------------------


class OnGpu(_Base):  # type: ignore[misc]
    """A tensor that pretends to lie on the GPU of this process."""

    is_cuda, is_cpu = True, False
    device = torch.device("cuda", 0)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            return _do(func, args, kwargs or {})

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, self.device.index)

    def __dlpack__(self, *, stream: int | None = -1, **kwargs: Any) -> Any:
        if self.requires_grad or self.is_conj() or current_device() != self.device.index:
            raise BufferError("Can't export this tensor")
        here = current_stream(self.device)
        if stream != -1 and (stream or 1) != (here.cuda_stream or 1):
            handle = 0 if stream in (None, 1) else stream
            machine().worker(handle, self.device.index).enqueue(here.record_event().capture())
        with torch._C.DisableTorchFunctionSubclass():
            seen = _plain(self).numpy()  # which has no bfloat16, as CuPy's DLPack
            extent = sum((n - 1) * step for n, step in zip(seen.shape, seen.strides, strict=True)) + seen.itemsize
            # Work that is under way keeps no memory, as on a GPU: the array alone does.
            buffer = bytes_at(self.data_ptr(), extent if seen.size else 0)
            memory = UnownedMemory(buffer, self.device.index, self)
            return Capsule(ndarray(seen.shape, seen.dtype, MemoryPointer(memory, 0), seen.strides))

    def record_stream(self, stream: Stream) -> None:
        raise NotImplementedError("memory is spoiled when it is let go, whoever reads it")


def _plain(value: Any) -> Any:
    if isinstance(value, OnGpu):
        return value.as_subclass(_Base)
    return type(value)(map(_plain, value)) if type(value) in (list, tuple) else value


def _do(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    assert not (getattr(func, "__module__", None) or "").startswith("torch.distributed"), f"{func} is no operation"
    name = func.__name__
    plain = _plain(args)
    storages = [part.untyped_storage().data_ptr() for part in _tensors(plain)]
    if name in _WITHOUT_WORK:
        result = func(*plain, **kwargs)
        if all(part.untyped_storage().data_ptr() in storages for part in _tensors(result)):
            return _back(result)
    worker = current_stream(OnGpu.device).worker
    worker.drain()
    if name == "__setitem__" or name.startswith("__i") or (name.endswith("_") and not name.endswith("__")):
        value = plain[0].detach().clone()
        func(value, *plain[1:], **kwargs)
        worker.enqueue(_writing(plain[0], value))
        return args[0]
    result = func(*plain, **kwargs)
    return result.clone() if name == "cpu" else _back(result, worker, storages)


def _writing(target: Any, value: Any) -> Callable[[], None]:
    """Return a job that keeps the target's memory no longer than a kernel would."""
    address, nbytes = target.data_ptr(), value.numel() * value.element_size()
    if not target.is_contiguous() or target.is_conj() or target.is_neg():
        seen = target.detach()
        return lambda: _quietly(seen, value)
    source = value.contiguous().reshape(-1).view(torch.uint8).numpy()
    into = bytes_at(address, nbytes)
    return lambda: np.copyto(into, source)


def _quietly(target: Any, value: Any) -> None:
    with torch.no_grad():
        target.copy_(value)


def _tensors(value: Any) -> list[Any]:
    if isinstance(value, _Base):
        return [value]
    return [found for part in value for found in _tensors(part)] if type(value) in (list, tuple) else []


def _back(result: Any, worker: Any = None, storages: Any = ()) -> Any:
    """Return a result as one on the GPU; one in new memory gets there by a job of the stream."""
    if type(result) in (list, tuple):
        return type(result)(_back(part, worker, storages) for part in result)
    if type(result) is not _Base:
        return result
    if worker is None or result.untyped_storage().data_ptr() in storages:
        return result.as_subclass(OnGpu)
    made = _room(result, worker)
    worker.enqueue(_writing(made, result))
    return made.as_subclass(OnGpu)


def _room(like: Any, worker: Any) -> Any:
    """Return a tensor in memory that is spoiled when it is let go, by a job of the stream that it was made on."""
    memory = np.full(max(like.numel() * like.element_size(), 1), FREED, np.uint8)
    machine().blocks.append(memory)  # work that comes too late meets it still
    machine().regions.add(memory, worker.device)
    owner = memory[:]
    weakref.finalize(owner, _spoil, memory, worker).atexit = False
    flat = torch.from_numpy(owner)[: like.numel() * like.element_size()]
    return flat.view(like.dtype).reshape(like.shape)


def _spoil(memory: Any, worker: Any) -> None:
    if not worker.stopping:
        worker.enqueue(lambda: memory.fill(FREED))
        _spoiled.append(memory)


def check() -> None:
    """Raise where something was written to memory that had been let go."""
    # Other threads let go of memory meanwhile; the jobs that spoil these pieces are in the streams' queues.
    spoiled = list(_spoiled)
    for worker in list(machine().workers.values()):
        worker.drain()
    for memory in spoiled:
        assert (memory == FREED).all(), "was written to after it had been let go"


def on_gpu(tensor: Any) -> Any:
    """Return a copy of a tensor on the GPU, there once the current stream has come to it."""
    return _back(tensor.detach().clone(), current_stream(OnGpu.device).worker)


def from_dlpack(array: Any) -> Any:
    """``torch.from_dlpack`` of an array of the stand-in for CuPy."""
    capsule = array.__dlpack__(stream=current_stream(OnGpu.device).cuda_stream or 1)
    assert isinstance(capsule, Capsule)
    if array.dtype.name == "bfloat16":
        raise BufferError("dtype is not supported for dlpack export")
    tensor = torch.from_numpy(np.asarray(_Kept(array)))
    return tensor.as_subclass(OnGpu)


class _Kept:
    """The memory of an array, for NumPy, which keeps the array."""

    def __init__(self, array: Any) -> None:
        self.array = array
        self.__array_interface__ = array.host_view().__array_interface__


# Futures --------------------------------------------------------------------------------------------------------------


class Future(_BaseFuture):  # type: ignore[misc]
    """``torch.futures.Future`` with devices, as ``ivalue::Future`` has it.

    It records an event for each device of the tensors that it is given, on the stream that is current there; ``wait``
    has the current stream wait for these, and functions for ``then`` run on a stream of their own that has waited.
    """

    def __class_getitem__(cls, kind: Any) -> type:
        return cls

    def __init__(self, *, devices: Any = None) -> None:
        super().__init__()
        self._devices, self._events = [_device(device) for device in devices or []], []

    def set_result(self, result: Any) -> None:
        found = {part.device for part in _tensors(result) if isinstance(part, OnGpu)}
        if self._devices and not found <= {*self._devices}:
            raise ValueError(f"tensors on {found}; expected them on {self._devices}")
        if self._devices:
            self._events = [(device, current_stream(device).record_event()) for device in found]
        super().set_result(result)

    def wait(self) -> Any:
        value = super().wait()
        for device, event in self._events:
            current_stream(device).wait_event(event)
        return value

    def then(self, callback: Callable[[Any], Any]) -> Any:
        if not self._devices:
            return _InC.then(self, callback)
        child = Future(devices=self._devices)

        def run(_: Any) -> None:
            with contextlib.ExitStack() as pool:
                for device in self._devices:
                    pool.enter_context(stream(Stream(device)))
                for device, event in self._events:
                    current_stream(device).wait_event(event)
                try:
                    child.set_result(callback(self))
                except Exception as error:
                    child.set_exception(error)

        _InC.then(self, run)
        return child


def install(monkeypatch: Any, device: int = 0) -> None:
    """Put it in the place of PyTorch's own, until the end of the test; tensors lie on one device."""
    _spoiled.clear()
    monkeypatch.setattr(OnGpu, "device", torch.device("cuda", device))
    for made in (Stream, ExternalStream, stream, current_stream):
        monkeypatch.setattr(torch.cuda, made.__name__, made)
    # Its collectives are to take the tensors as they take others, and not as operations on them.
    monkeypatch.setattr(sys.modules["torch.distributed.distributed_c10d"], "has_torch_function", lambda args: False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: current_stream().raw.is_capturing())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.futures, "Future", Future)
    monkeypatch.setattr(torch, "from_dlpack", from_dlpack)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
