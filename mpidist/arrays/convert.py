"""Arrays of other libraries into NumPy and back, without a copy where that is possible.

Whatever speaks DLPack or the buffer protocol on the CPU goes in (PyTorch tensors, JAX arrays, array.array);
results come out as the kind that went in. Buffers of no array library come out as NumPy arrays.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Restore = Callable[[Array], Any]

_NUMBERS = (bool, int, float, complex, np.generic)


def is_array_like(value: object) -> bool:
    """Whether ``value`` is a number, or an array of any library."""
    return (
        isinstance(value, (np.ndarray, *_NUMBERS))
        or hasattr(value, "__array__")
        or hasattr(value, "__dlpack__")
        or isinstance(value, (memoryview, bytearray))
    )


def to_array(value: Any, what: str = "value") -> Array:
    """Return ``value`` as a NumPy array that shares its memory where possible.

    Python numbers become 0-d arrays of float64, int64, complex128 or bool, as NumPy has it.

    Args:
        value: Array, number, or any object with DLPack, ``__array__`` or the buffer protocol, on the CPU.
        what: What to call it in an error.

    Raises:
        TypeError: It is none of these, or lies on another device.

    >>> to_array(1.5).dtype
    dtype('float64')
    """
    if type(value) is np.ndarray:
        return value
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{what} is a masked array, whose mask would be lost; say what counts there: {what}.filled(0)")
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, _NUMBERS):
        return np.asarray(value)
    if _is_torch(value):
        return _from_torch(value, what)
    if hasattr(value, "__array__"):
        array = np.asarray(value)
    elif hasattr(value, "__dlpack__"):
        try:
            array = np.from_dlpack(value)
        except (BufferError, RuntimeError) as error:
            raise TypeError(f"{what} of type {_type_name(value)} cannot be read on the CPU: {error}") from error
    else:
        try:
            array = np.asarray(memoryview(value))
        except TypeError:
            raise TypeError(
                f"{what} is of type {_type_name(value)}; expected a number, a NumPy array, or an array on the "
                "CPU that speaks DLPack or the buffer protocol; wrap it in numpy.asarray(...)"
            ) from None
    if array.dtype.hasobject:
        raise TypeError(f"{what} of type {_type_name(value)} holds Python objects; expected numbers")
    return array


def restorer(value: Any) -> Restore | None:
    """Return the function that turns a NumPy result into the kind of ``value``; None where it is NumPy already.

    A number, or a NumPy scalar, gives a NumPy scalar.

    >>> restorer(1.5)(np.array(3.0))
    np.float64(3.0)
    """
    if isinstance(value, np.ndarray):
        return None
    if isinstance(value, _NUMBERS):
        return _to_scalar
    if _is_torch(value):
        return _to_torch
    if hasattr(value, "__array_namespace__") and hasattr(value, "__dlpack__"):
        namespace = value.__array_namespace__()
        return lambda array: namespace.from_dlpack(_writable(array))
    return None


def _to_scalar(array: Array) -> Any:
    return array[()]


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _is_torch(value: object) -> bool:
    # A tensor can only exist where torch has been imported, so this never imports it.
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _writable(array: Array) -> Array:
    # DLPack has no read-only arrays in the versions that libraries agree on.
    return array if array.flags.writeable else array.copy()


def _from_torch(tensor: Any, what: str) -> Array:
    torch = sys.modules["torch"]
    if tensor.device.type != "cpu":
        raise TypeError(f"{what} is a torch.Tensor on {tensor.device}; expected one on the CPU: {what}.cpu()")
    tensor = tensor.detach()
    if tensor.dtype == torch.bfloat16:
        import ml_dtypes

        bits: Array = tensor.view(torch.int16).numpy()
        return bits.view(ml_dtypes.bfloat16)
    try:
        array: Array = tensor.numpy()
    except RuntimeError as error:
        raise TypeError(f"{what} is a torch.Tensor that NumPy cannot read: {error}") from error
    return array


def _to_torch(array: Array) -> Any:
    torch = sys.modules["torch"]
    array = _writable(array)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
