"""Functions of ``cupy`` that make arrays or take them in, and those that need more than running NumPy's."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support.fake_cupy import running
from tests.support.fake_cupy.devices import current_device, on_device
from tests.support.fake_cupy.memory import MemoryPointer, UnownedMemory, bytes_at, is_pinned
from tests.support.fake_cupy.ndarray import check_dtype, ndarray
from tests.support.fake_cupy.streams import current_worker, get_current_stream


def empty(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    return ndarray(shape, dtype, order=order)


def zeros(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    made = ndarray(shape, dtype, order=order)
    made.data.memset_async(0, made.nbytes)
    return made


def ones(shape: Any, dtype: Any = float, order: str = "C") -> ndarray:
    return full(shape, 1, dtype, order)


def full(shape: Any, fill_value: Any, dtype: Any = None, order: str = "C") -> ndarray:
    if dtype is None:
        dtype = fill_value.dtype if isinstance(fill_value, ndarray) else np.array(fill_value).dtype
    made = ndarray(shape, dtype, order=order)
    made.fill(fill_value)
    return made


def empty_like(prototype: Any, dtype: Any = None, order: str = "K", subok: Any = None, shape: Any = None) -> ndarray:
    if subok is not None:
        raise TypeError("subok is not supported yet")
    fortran = order == "F" or (order in "KA" and prototype.flags.f_contiguous and not prototype.flags.c_contiguous)
    shape = prototype.shape if shape is None else shape
    return ndarray(shape, prototype.dtype if dtype is None else dtype, order="F" if fortran else "C")


def zeros_like(a: Any, dtype: Any = None, order: str = "K", subok: Any = None, shape: Any = None) -> ndarray:
    made = empty_like(a, dtype, order, subok, shape)
    made.data.memset_async(0, made.nbytes)
    return made


def ones_like(a: Any, dtype: Any = None, order: str = "K", subok: Any = None, shape: Any = None) -> ndarray:
    return full_like(a, 1, dtype, order, subok, shape)


def full_like(
    a: Any, fill_value: Any, dtype: Any = None, order: str = "K", subok: Any = None, shape: Any = None
) -> ndarray:
    made = empty_like(a, dtype, order, subok, shape)
    made.fill(fill_value)
    return made


def array(
    obj: Any,
    dtype: Any = None,
    copy: Any = True,
    order: Any = "K",
    subok: bool = False,
    ndmin: int = 0,
    *,
    blocking: bool = False,
) -> ndarray:
    if subok:
        raise NotImplementedError
    if hasattr(obj, "__cupy_get_ndarray__"):
        obj = obj.__cupy_get_ndarray__()
    if isinstance(obj, ndarray):
        here = obj if obj.data.device_id == current_device() else obj.copy(order or "K")
        return here.astype(dtype or obj.dtype, order=order or "K", copy=bool(copy) and here is obj)
    if hasattr(obj, "__cuda_array_interface__"):
        return _of_interface(obj)
    if isinstance(obj, (list, tuple)) and _holds_device_arrays(obj):
        return running.run(np.array, (obj,), {"dtype": dtype})
    host = np.array(obj, dtype=dtype, copy=None, ndmin=ndmin)
    check_dtype(host.dtype)
    made = ndarray(host.shape, host.dtype, order="F" if order != "C" and host.flags.fnc else "C")
    # Pinned memory is read when the stream comes to it, other memory before the call returns.
    late = host.ndim > 0 and host.flags.c_contiguous and is_pinned(host.ctypes.data)
    source = host if late else host.copy()
    target = made.host_view()
    current_worker().enqueue(lambda: np.copyto(target, source))
    if blocking:
        get_current_stream().synchronize()
    return made


def asarray(a: Any, dtype: Any = None, order: Any = None, *, copy: Any = None, blocking: bool = False) -> ndarray:
    return array(a, dtype, bool(copy), order or "K", blocking=blocking)


def ascontiguousarray(a: Any, dtype: Any = None) -> ndarray:
    made = asarray(a, dtype)
    return made if made.flags.c_contiguous else made.copy("C")


def arange(start: Any, stop: Any = None, step: Any = 1, dtype: Any = None) -> ndarray:
    return array(np.arange(start, dtype=dtype) if stop is None else np.arange(start, stop, step, dtype))


def asnumpy(a: Any, stream: Any = None, order: str = "C", out: Any = None, *, blocking: bool = True) -> np.ndarray:
    if isinstance(a, ndarray):
        return a.get(stream, order, out, blocking)
    return np.asarray(a)


def get_array_module(*args: Any) -> Any:
    import sys

    return sys.modules["cupy"] if any(isinstance(value, ndarray) for value in args) else np


def copyto(dst: Any, src: Any, casting: Any = "same_kind", where: Any = None) -> None:
    if not isinstance(dst, ndarray):
        raise TypeError(f"Unsupported type {type(dst)}")
    if isinstance(src, np.ndarray):
        if src.size != 1:
            raise ValueError("non-scalar numpy.ndarray cannot be used for copyto")
        src = src.reshape(())[()]
    if isinstance(src, ndarray) and src.data.device_id != dst.data.device_id:
        if src.shape != dst.shape or src.dtype != dst.dtype or where is not None:
            raise ValueError("copyto between devices takes arrays of one shape and dtype")
        dst.data.copy_from_device_async(src.data, src.nbytes)
        return
    mask = {} if where is None else {"where": True}
    given = (src,) if where is None else (src, where)
    running.run_into(
        dst,
        lambda view, value, *masks: np.copyto(view, value, casting, **({"where": masks[0]} if mask else {})),
        given,
    )


def may_share_memory(a: ndarray, b: ndarray, max_work: Any = None) -> bool:
    if max_work is not None:
        raise NotImplementedError("Only supported for `max_work` is `None`")
    return a.data.device_id == b.data.device_id and np.may_share_memory(a.host_view(), b.host_view())


def from_dlpack(array: Any, *, device: Any = None, copy: Any = None) -> ndarray:
    kind, number = array.__dlpack_device__()
    if kind not in (2, 13):
        raise TypeError(
            "CPU arrays cannot be directly imported to CuPy. Use `cupy.array(numpy.from_dlpack(input))` instead."
        )
    with on_device(number):
        stream = get_current_stream().ptr or 1
        try:
            capsule = array.__dlpack__(stream=stream, max_version=(1, 0), copy=copy)
        except TypeError:
            capsule = array.__dlpack__(stream=stream)
    if isinstance(capsule, running.Capsule):
        return capsule.array.view()
    return _of_host(np.from_dlpack(_OnHost(capsule)), number, array)


class _OnHost:
    """A capsule as NumPy takes it: what a test pretends to lie on a GPU lies on the host."""

    def __init__(self, capsule: Any) -> None:
        self.capsule = capsule

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)


def _of_host(seen: np.ndarray, device: int, owner: Any) -> ndarray:
    first = seen.ctypes.data
    low = first + sum(min(0, (n - 1) * step) for n, step in zip(seen.shape, seen.strides, strict=True))
    high = first + sum(max(0, (n - 1) * step) for n, step in zip(seen.shape, seen.strides, strict=True))
    buffer = bytes_at(low, high - low + seen.itemsize if seen.size else 0, (seen, owner))
    memory = UnownedMemory(buffer, device, (seen, owner))
    return ndarray(seen.shape, seen.dtype, MemoryPointer(memory, first - low if seen.size else 0), seen.strides)


def _of_interface(obj: Any) -> ndarray:
    class _Host:
        __array_interface__ = {
            name: value for name, value in obj.__cuda_array_interface__.items() if name in _INTERFACE
        } | {"version": 3}

    return _of_host(np.asarray(_Host()), current_device(), obj)


_INTERFACE = ("data", "shape", "typestr", "strides")


def _holds_device_arrays(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(_holds_device_arrays(part) for part in value)
    return isinstance(value, ndarray)
