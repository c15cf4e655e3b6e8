"""The array class: a NumPy buffer that belongs to a device and is reached through streams only."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

from tests.support.fake_cupy import running
from tests.support.fake_cupy.devices import current_device, machine, on_device
from tests.support.fake_cupy.memory import MemoryPointer, alloc, is_pinned
from tests.support.fake_cupy.operators import add_operators
from tests.support.fake_cupy.streams import BaseStream, Device, get_current_stream, worker_of

_REFUSED = (
    "Implicit conversion to a NumPy array is not allowed. Please use `.get()` to construct a NumPy array explicitly."
)


class Flags:
    """``cupy.ndarray.flags``: there is no ``writeable``."""

    def __init__(self, c_contiguous: bool, f_contiguous: bool, owndata: bool) -> None:
        self.c_contiguous = c_contiguous
        self.f_contiguous = f_contiguous
        self.owndata = owndata

    @property
    def fnc(self) -> bool:
        return self.f_contiguous and not self.c_contiguous

    @property
    def forc(self) -> bool:
        return self.f_contiguous or self.c_contiguous

    def __getitem__(self, name: str) -> bool:
        names = {"C_CONTIGUOUS": self.c_contiguous, "F_CONTIGUOUS": self.f_contiguous, "OWNDATA": self.owndata}
        return names[name]


class ndarray:  # noqa: N801 - the name it has in CuPy
    """``cupy.ndarray``."""

    __array_priority__ = 100

    def __init__(
        self,
        shape: Any,
        dtype: Any = float,
        memptr: MemoryPointer | None = None,
        strides: Any = None,
        order: str = "C",
    ) -> None:
        shape = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
        self.dtype = np.dtype(dtype)
        if memptr is None:
            check_dtype(self.dtype)
        self.shape = tuple(int(length) for length in shape)
        if any(length < 0 for length in self.shape):
            raise ValueError("Negative dimensions are not allowed")
        self.strides = _strides(self.shape, self.dtype.itemsize, order) if strides is None else tuple(strides)
        self.size = int(np.prod(self.shape, dtype=np.int64))
        self.data = alloc(self.size * self.dtype.itemsize) if memptr is None else memptr
        self.base: ndarray | None = None

    # What NumPy sees of it: for this package only.

    def host_view(self) -> np.ndarray:
        """Return the device's memory as a NumPy array, without waiting for any stream."""
        offset = self.data.ptr - self.data.mem.ptr
        buffer = self.data.mem.buffer if self.size else np.empty(0, np.uint8)
        return np.ndarray(self.shape, self.dtype, buffer, offset if self.size else 0, self.strides)

    def view_of(self, seen: np.ndarray) -> ndarray:
        """Return a part of this array's memory, given as a NumPy view of it, as an array."""
        memory = self.data.mem
        offset = seen.__array_interface__["data"][0] - memory.ptr if seen.size else 0
        part = ndarray(seen.shape, seen.dtype, MemoryPointer(memory, offset), seen.strides)
        part.base = self if self.base is None else self.base
        return part

    # Properties.

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    @property
    def flags(self) -> Flags:
        flags = self.host_view().flags
        return Flags(flags.c_contiguous, flags.f_contiguous, self.base is None)

    @property
    def device(self) -> Device:
        return self.data.device

    @property
    def T(self) -> ndarray:  # noqa: N802
        return self.transpose()

    @property
    def real(self) -> Any:
        return self.view_of(self.host_view().real) if self.dtype.kind == "c" else self

    @property
    def imag(self) -> Any:
        return self.view_of(self.host_view().imag) if self.dtype.kind == "c" else running.run(np.imag, (self,), {})

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        stream = get_current_stream()
        return {
            "shape": self.shape,
            "typestr": self.dtype.str,
            "descr": self.dtype.descr,
            "data": (self.data.ptr, False),
            "strides": None if self.flags.c_contiguous else self.strides,
            "version": 3,
            "stream": stream.ptr or 1,
        }

    # Into other libraries.

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        raise TypeError(_REFUSED)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        out = kwargs.pop("out", (None,))
        if len(out) != 1:
            raise ValueError("The 'out' parameter must have exactly one array value")
        for value in (*inputs, *out):
            if not (value is None or isinstance(value, (ndarray, np.ndarray, *running.SCALARS))):
                return NotImplemented
        return running.run(ufunc if method == "__call__" else getattr(ufunc, method), inputs, kwargs, out[0])

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        if not all(issubclass(kind, (ndarray, np.ndarray)) for kind in types):
            return NotImplemented
        offered = running.offered(func)
        return NotImplemented if offered is None else offered(*args, **kwargs)

    def __dlpack__(
        self, *, stream: Any = None, max_version: Any = None, dl_device: Any = None, copy: Any = None
    ) -> Any:
        if dl_device not in (None, self.__dlpack_device__()):
            raise BufferError("unsupported device requested.")
        # The stream of the current device, wherever the array lies, as in CuPy.
        consumer = 1 if stream is None else stream
        if consumer != -1 and consumer != (get_current_stream().ptr or 1):
            BaseStream(consumer, -1).wait_event(get_current_stream().record())
        return running.Capsule(self)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, self.data.device_id)

    # Between host and device.

    def get(
        self, stream: Any = None, order: str = "C", out: np.ndarray | None = None, blocking: bool = True
    ) -> np.ndarray:
        stream = get_current_stream() if stream is None else stream
        if out is None:
            out = np.empty(self.shape, self.dtype, order="F" if order == "A" and self.flags.fnc else "C")
        elif not isinstance(out, np.ndarray):
            raise TypeError("Only numpy.ndarray can be obtained fromcupy.ndarray")
        elif self.dtype != out.dtype:
            raise TypeError(f"{out.dtype} array cannot be obtained from {self.dtype} array")
        elif self.shape != out.shape:
            raise ValueError(f"Shape mismatch. Expected shape: {self.shape}, actual shape: {out.shape}")
        target, source = out, self.host_view()
        with on_device(self.data.device_id):
            worker = worker_of(stream)
            worker.enqueue(lambda: np.copyto(target, source))
            if blocking:
                machine().counts.add("synchronizations")
                worker.drain()
        return out

    def set(self, arr: np.ndarray, stream: Any = None) -> None:
        if not isinstance(arr, np.ndarray):
            raise TypeError("Only numpy.ndarray can be set to cupy.ndarray")
        if self.dtype != arr.dtype:
            raise TypeError(f"{arr.dtype} array cannot be set to {self.dtype} array")
        if self.shape != arr.shape:
            raise ValueError(f"Shape mismatch. Old shape: {self.shape}, new shape: {arr.shape}")
        if not self.flags.forc:
            raise RuntimeError("Cannot set to non-contiguous array")
        with on_device(self.data.device_id):
            worker = worker_of(stream)
            target, source = self.host_view(), arr
            if not is_pinned(arr.ctypes.data):
                machine().counts.add("synchronizations")
                worker.drain()
                source = arr.copy()
            worker.enqueue(lambda: np.copyto(target, source))

    def item(self, *args: Any) -> Any:
        return self.get().item(*args)

    def tolist(self) -> Any:
        return self.get().tolist()

    def tobytes(self, order: str = "C") -> bytes:
        return self.get().tobytes()

    def __bool__(self) -> bool:
        if self.size != 1:
            raise ValueError(
                "The truth value of an array with more than one element is ambiguous. Use a.any() or a.all()"
            )
        return bool(self.get())

    def __int__(self) -> int:
        return int(self.get())

    def __float__(self) -> float:
        return float(self.get())

    def __complex__(self) -> complex:
        return complex(self.get())

    def __repr__(self) -> str:
        return repr(self.get())

    def __str__(self) -> str:
        return str(self.get())

    def __format__(self, format_spec: str) -> str:
        return format(self.get(), format_spec)

    def __reduce__(self) -> Any:
        from tests.support.fake_cupy.creation import array

        return array, (self.get(order="A"),)

    # Views.

    def view(self, dtype: Any = None, type: Any = None) -> ndarray:  # noqa: A002
        return self.view_of(self.host_view().view(self.dtype if dtype is None else np.dtype(dtype)))

    def reshape(self, *shape: Any, order: str = "C", copy: Any = None) -> ndarray:
        if len(shape) == 1 and not isinstance(shape[0], (int, np.integer)):
            shape = tuple(shape[0])
        return self._rearranged(np.reshape, shape, order=order)

    def ravel(self, order: str = "C") -> ndarray:
        return self._rearranged(np.ravel, order=order)

    def flatten(self, order: str = "C") -> ndarray:
        return self.copy(order).ravel(order)

    def transpose(self, *axes: Any) -> ndarray:
        return self.view_of(self.host_view().transpose(*axes))

    def swapaxes(self, axis1: int, axis2: int) -> ndarray:
        return self.view_of(self.host_view().swapaxes(axis1, axis2))

    def squeeze(self, axis: Any = None) -> ndarray:
        return self.view_of(self.host_view().squeeze(axis))

    def diagonal(self, offset: int = 0, axis1: int = 0, axis2: int = 1) -> ndarray:
        return self.view_of(self.host_view().diagonal(offset, axis1, axis2))

    def _rearranged(self, function: Any, *args: Any, **kwargs: Any) -> ndarray:
        seen = function(self.host_view(), *args, **kwargs)
        if not self.size or np.may_share_memory(seen, self.data.mem.buffer):
            return self.view_of(seen)
        return running.run(function, (self, *args), kwargs)

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of unsized object")
        return self.shape[0]

    def __iter__(self) -> Any:
        if not self.shape:
            raise TypeError("iteration over a 0-d array")
        return (self[index] for index in range(self.shape[0]))

    def __getitem__(self, key: Any) -> Any:
        keys = key if isinstance(key, tuple) else (key,)
        if all(_is_basic(part) for part in keys):
            # With an ellipsis NumPy gives a 0-d view where it would give a number, as CuPy does.
            return self.view_of(self.host_view()[keys if Ellipsis in keys else (*keys, ...)])
        return running.run(operator.getitem, (self, keys), {}, host_operands=True)

    def __setitem__(self, key: Any, value: Any) -> None:
        if isinstance(value, np.ndarray) and value.ndim:
            raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
        running.run_into(self, lambda view, keys, values: operator.setitem(view, keys, values), (key, value))

    # Copies.

    def copy(self, order: str = "C") -> ndarray:
        if self.data.device_id == current_device():
            return self.astype(self.dtype, order=order)
        with on_device(self.data.device_id):
            source = self.astype(self.dtype, order=order, copy=False)
        target = ndarray(source.shape, source.dtype, strides=source.strides)
        target.data.copy_from_device_async(source.data, source.nbytes)
        return target

    __copy__ = copy

    def __deepcopy__(self, memo: Any) -> ndarray:
        with on_device(self.data.device_id):
            return self.copy()

    def astype(
        self, dtype: Any, order: str = "K", casting: Any = None, subok: Any = None, copy: bool = True
    ) -> ndarray:
        if casting is not None or subok is not None:
            raise TypeError("casting is not supported yet")
        dtype = np.dtype(dtype)
        flags = self.flags
        if not copy and dtype == self.dtype and (order == "K" or (flags.c_contiguous if order == "C" else flags.forc)):
            return self
        return running.run(np.ndarray.astype, (self, dtype), {"order": order})

    def fill(self, value: Any) -> None:
        if isinstance(value, (np.ndarray, ndarray)) and value.shape != ():
            raise ValueError("non-scalar numpy.ndarray cannot be used for fill")
        running.run_into(self, lambda view, number: view.fill(number), (value,))

    # Reductions and the like.

    def take(self, indices: Any, axis: Any = None, out: Any = None) -> Any:
        return running.run(np.take, (self, indices), {"axis": axis}, out, host_operands=True)

    def nonzero(self) -> Any:
        return running.run(np.nonzero, (self,), {})

    def dot(self, b: Any, out: Any = None) -> Any:
        return running.run(np.dot, (self, b), {}, out)


def _strides(shape: tuple[int, ...], itemsize: int, order: str) -> tuple[int, ...]:
    strides = []
    step = itemsize
    for length in shape if order == "F" else reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(strides if order == "F" else reversed(strides))


def check_dtype(dtype: np.dtype) -> None:
    """Raise for dtypes that CuPy does not have."""
    if (dtype.kind in "biufc" and dtype.itemsize <= 16 and dtype.char not in "gG" and dtype.isnative) or (
        dtype.name == "bfloat16"
    ):
        return
    raise ValueError(f"Unsupported dtype {dtype}")


def _is_basic(key: Any) -> bool:
    return (
        key is None
        or key is Ellipsis
        or isinstance(key, slice)
        or (isinstance(key, (int, np.integer)) and not isinstance(key, bool))
    )


add_operators(ndarray)
