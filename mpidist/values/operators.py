"""Operators of objects that stand for an array, which the array's library carries out."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import DTypeLike

from mpidist.arrays.device_ops import device_name, is_device_array
from mpidist.arrays.dtypes import Array
from mpidist.values.placement import on_host, place_of, place_of_operands

_WRITERS = {"copyto", "put", "place", "putmask", "put_along_axis", "fill_diagonal"}


def as_operand(value: object) -> Any:
    """Return ``value``, or the array that it stands for."""
    return value.as_array() if isinstance(value, ReadsAsArray) else value


def _as_operands(value: object) -> Any:
    """Return arguments of a NumPy function with arrays in place of their stand-ins."""
    if isinstance(value, (list, tuple)):
        parts = [_as_operands(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if isinstance(value, dict):
        return {key: _as_operands(part) for key, part in value.items()}
    return as_operand(value)


class ReadsAsArray(NDArrayOperatorsMixin):
    """Mixin: arithmetic, comparison, indexing and NumPy functions act on ``as_array()``.

    An array on a device is computed with there, and never copied to the host unasked.
    """

    def as_array(self) -> Array:
        """Return the array that stands for this object in the current context."""
        raise NotImplementedError

    def _is_on_device(self) -> bool:
        """Return whether ``as_array()`` returns an array on a device."""
        raise NotImplementedError

    def numpy(self) -> Array:
        """Return the value as a NumPy array of the caller's own, from wherever it is."""
        array = self.as_array()
        return on_host(array) if is_device_array(array) else np.array(array)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> Array:
        array = self.as_array()
        if is_device_array(array):
            raise TypeError(
                f"{type(self).__name__} is on {device_name(array)}, and NumPy computes on the host; copy it there with "
                "variable.numpy(), or compute on the device: cupy.asarray(variable)"
            )
        if dtype is not None and array.dtype != dtype:
            if copy is False:
                raise ValueError(f"a copy is needed to convert {array.dtype} to {np.dtype(dtype)}")
            return array.astype(dtype)
        return array.copy() if copy else array

    @property
    def __cupy_get_ndarray__(self) -> Callable[[], Array]:
        # CuPy asks whatever it is given for this; there is none of it where the array is NumPy's.
        if not self._is_on_device():
            raise AttributeError(f"{type(self).__name__} is not on a device")
        return self.as_array

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: object, **kwargs: Any) -> Any:
        if "out" in kwargs and any(isinstance(out, ReadsAsArray) for out in kwargs["out"]):
            raise self._unwritable(f"numpy.{ufunc.__name__}")
        if method == "at" and isinstance(inputs[0], ReadsAsArray):
            raise self._unwritable(f"numpy.{ufunc.__name__}.at")
        operands = [as_operand(value) for value in inputs]
        with place_of_operands(operands).current():
            return getattr(ufunc, method)(*operands, **kwargs)

    def __array_function__(
        self, func: Callable[..., object], types: object, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> Any:
        writes = func.__name__ in _WRITERS and args and isinstance(args[0], ReadsAsArray)
        if writes or isinstance(kwargs.get("out"), ReadsAsArray):
            raise self._unwritable(f"numpy.{func.__name__}")
        args, kwargs = _as_operands(args), _as_operands(kwargs)
        # The arrays of np.concatenate and the like come in a list.
        listed = ((value if isinstance(value, (list, tuple)) else (value,)) for value in (*args, *kwargs.values()))
        with place_of_operands(chain.from_iterable(listed)).current():
            return func(*args, **kwargs)

    def _unwritable(self, function: str) -> TypeError:
        return TypeError(
            f"{type(self).__name__} cannot be written by {function}; "
            "use assign(), assign_add() or assign_sub() on the variable"
        )

    def __getitem__(self, key: object) -> Any:
        return picked(self.as_array(), as_operand(key))

    def __len__(self) -> int:
        return len(self.as_array())

    def __iter__(self) -> Iterator[Any]:
        array = self.as_array()
        return iter(array) if not is_device_array(array) else (self[i] for i in range(len(array)))

    def __bool__(self) -> bool:
        return bool(self.as_array())

    def __float__(self) -> float:
        return float(self.as_array())

    def __int__(self) -> int:
        return int(self.as_array())

    def __index__(self) -> int:
        return operator.index(on_host(self.as_array())[()])

    def __format__(self, spec: str) -> str:
        return format(on_host(self.as_array())[()], spec) if spec else str(self)

    def __complex__(self) -> complex:
        return complex(self.as_array())


def picked(array: Array, key: Any) -> Any:
    """Return ``array[key]`` of an array that a variable has given out, which nobody may write."""
    with place_of(array).current():
        part = array[key]
        # CuPy has no read-only views: what shares memory with a variable would be a way around its assign().
        return part.copy() if is_device_array(part) and part.base is not None else part
