"""The modules ``cupy``, ``cupy.cuda``, ``cupy.cuda.runtime`` and ``cupyx``, put together."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np

from tests.support.fake_cupy import captures, creation, devices, memory, running, streams
from tests.support.fake_cupy.ndarray import ndarray
from tests.support.fake_cupy.raw_kernel import RawKernel

VERSION = "14.2.0"

# Functions that CuPy has under NumPy's name and with NumPy's meaning.
_FUNCTIONS = (
    "all allclose amax amin any append argmax argmin argsort around array_equal atleast_1d average "
    "bincount broadcast_arrays broadcast_to clip concatenate copy count_nonzero cumprod cumsum diag diff dot einsum "
    "expand_dims flatnonzero flip hstack imag inner isclose matmul max mean median min moveaxis "
    "nan_to_num nonzero outer pad percentile prod ravel real repeat reshape result_type roll round searchsorted sort "
    "split squeeze stack std sum swapaxes take_along_axis tensordot tile trace transpose tril triu unique var vdot "
    "vstack where"
)
_PLAIN = (
    "bool_ broadcast_shapes complex128 complex64 dtype e finfo float16 float32 float64 floating generic iinfo inexact "
    "inf int16 int32 int64 int8 integer intp isscalar issubdtype nan ndindex newaxis number pi promote_types "
    "uint16 uint32 uint64 uint8 can_cast shape ndim size"
)
_MADE = (
    creation.empty, creation.zeros, creation.ones, creation.full, creation.empty_like, creation.zeros_like,
    creation.ones_like, creation.full_like, creation.array, creation.asarray, creation.ascontiguousarray,
    creation.arange, creation.asnumpy, creation.get_array_module, creation.copyto, creation.from_dlpack,
    creation.may_share_memory,
)  # fmt: skip


class _Pool:
    """``cupy.get_default_memory_pool()``."""

    def used_bytes(self) -> int:
        return devices.machine().used[devices.current_device()]

    def total_bytes(self) -> int:
        return sum(block.nbytes for block in devices.machine().blocks)

    def free_all_blocks(self) -> None:
        devices.machine().release(devices.current_device())


class _UFunc:
    """A ufunc of ``cupy``."""

    def __init__(self, ufunc: np.ufunc) -> None:
        self._ufunc = ufunc
        self.__name__ = ufunc.__name__

    def __call__(self, *args: Any, out: Any = None, **kwargs: Any) -> Any:
        inputs, rest = args[: self._ufunc.nin], args[self._ufunc.nin :]
        return running.run(self._ufunc, inputs, kwargs, rest[0] if rest else out)

    def reduce(self, array: Any, axis: Any = 0, dtype: Any = None, out: Any = None, keepdims: bool = False) -> Any:
        return running.run(self._ufunc.reduce, (array,), {"axis": axis, "dtype": dtype, "keepdims": keepdims}, out)

    def accumulate(self, array: Any, axis: int = 0, dtype: Any = None, out: Any = None) -> Any:
        return running.run(self._ufunc.accumulate, (array,), {"axis": axis, "dtype": dtype}, out)

    def outer(self, a: Any, b: Any, **kwargs: Any) -> Any:
        return running.run(self._ufunc.outer, (a, b), kwargs)

    def at(self, a: Any, indices: Any, b: Any = None) -> None:
        given = (indices,) if b is None else (indices, b)
        running.run_into(a, lambda view, *rest: self._ufunc.at(view, *rest), given)


def build() -> dict[str, ModuleType]:
    """Return the modules by their names; ``cupy.cuda.nccl`` is added by the one who installs them."""
    cupy = ModuleType("cupy", "A stand-in for CuPy on a machine without a GPU.")
    cupy.__path__ = []  # a package: ``import cupy.cuda`` asks for it
    cupy.__dict__.update({name: getattr(np, name) for name in _PLAIN.split()})
    cupy.__dict__.update({function.__name__: function for function in _MADE})
    cupy.__dict__.update({name: _forwarded(getattr(np, name)) for name in _FUNCTIONS.split()})
    for name in dir(np):
        ufunc = getattr(np, name)
        if isinstance(ufunc, np.ufunc) and name not in ("isnat", "spacing", "matvec", "vecmat", "vecdot"):
            cupy.__dict__[name] = _UFunc(ufunc)
    # Indices may lie on the host; operands may not.
    cupy.take = lambda a, indices, axis=None, out=None: a.take(indices, axis, out)  # type: ignore[attr-defined]
    cupy.linalg = ModuleType("cupy.linalg")  # type: ignore[attr-defined]
    cupy.linalg.norm = _forwarded(np.linalg.norm)
    cuda = _cuda()
    pool = _Pool()
    cupy.__dict__.update(
        __version__=VERSION,
        ndarray=ndarray,
        RawKernel=RawKernel,
        cuda=cuda,
        is_available=cuda.is_available,
        get_default_memory_pool=lambda: pool,
        get_default_pinned_memory_pool=lambda: devices.machine().pinned,
    )
    cupyx = ModuleType("cupyx")
    cupyx.empty_pinned = memory.empty_pinned  # type: ignore[attr-defined]
    cupyx.zeros_pinned = memory.zeros_pinned  # type: ignore[attr-defined]
    cupyx.scatter_add = lambda a, slices, value: cupy.add.at(a, slices, value)  # type: ignore[attr-defined]
    return {
        "cupy": cupy,
        "cupy.cuda": cuda,
        "cupy.cuda.memory": cuda.memory,
        "cupy.cuda.runtime": cuda.runtime,
        "cupyx": cupyx,
    }


def _forwarded(function: Any) -> Any:
    def forwarded(*args: Any, out: Any = None, **kwargs: Any) -> Any:
        return running.run(function, args, kwargs, out)

    forwarded.__name__ = function.__name__
    return forwarded


def _cuda() -> Any:
    cuda: Any = ModuleType("cupy.cuda")
    cuda.__path__ = []
    cuda.__dict__.update(
        Device=streams.Device,
        Event=streams.Event,
        ExternalStream=streams.ExternalStream,
        Memory=memory.Memory,
        MemoryPointer=memory.MemoryPointer,
        Stream=streams.Stream,
        alloc=memory.alloc,
        alloc_pinned_memory=memory.alloc_pinned_memory,
        get_current_stream=streams.get_current_stream,
        get_device_id=devices.current_device,
        is_available=lambda: devices.installed() is not None,
        memory=_memory(),
        runtime=_runtime(),
    )
    return cuda


def _memory() -> Any:
    found: Any = ModuleType("cupy.cuda.memory")
    found.__dict__.update(
        Memory=memory.Memory,
        MemoryPointer=memory.MemoryPointer,
        OutOfMemoryError=memory.OutOfMemoryError,
        alloc=memory.alloc,
    )
    return found


def _runtime() -> Any:
    runtime: Any = ModuleType("cupy.cuda.runtime")
    runtime.__dict__.update(
        CUDARuntimeError=devices.CUDARuntimeError,
        check_status=devices.check_status,
        getDeviceCount=lambda: devices.machine().devices,
        getDevice=devices.current_device,
        setDevice=devices.set_device,
        deviceGetPCIBusId=lambda device: streams.Device(device).pci_bus_id,
        deviceCanAccessPeer=lambda device, peer: 0,
        deviceSynchronize=lambda: streams.Device().synchronize(),
        eventQuery=streams.event_query,
        streamIsCapturing=streams.stream_is_capturing,
        streamCaptureModeGlobal=captures.GLOBAL,
        streamCaptureModeThreadLocal=captures.THREAD_LOCAL,
        streamCaptureModeRelaxed=captures.RELAXED,
        streamSynchronize=streams.stream_synchronize,
        memGetInfo=lambda: streams.Device().mem_info,
        getDeviceProperties=_properties,
        runtimeGetVersion=lambda: 13000,
        driverGetVersion=lambda: 13000,
        is_hip=False,
    )
    return runtime


def _properties(device: int) -> dict[str, Any]:
    return {
        "name": b"Pretended GPU",
        "totalGlobalMem": 1 << 34,
        "multiProcessorCount": 4,
        "major": 9,
        "minor": 0,
        "pciBusID": device + 1,
        "pciDeviceID": 0,
        "pciDomainID": 0,
    }
