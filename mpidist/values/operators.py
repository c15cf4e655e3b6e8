"""Operators of things that stand for an array: each asks ``_read()`` for the array and lets NumPy do the rest."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from mpidist.arrays.convert import Array


def _as_operand(value: Any) -> Any:
    return value._read() if isinstance(value, ReadsAsArray) else value


class ReadsAsArray(NDArrayOperatorsMixin):
    """Mixin: arithmetic, comparison, indexing and NumPy functions act on what ``_read()`` returns."""

    def _read(self) -> Array:
        """Return the array that stands for this object in the current context."""
        raise NotImplementedError

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        array = np.asarray(self._read())
        if dtype is not None and array.dtype != dtype:
            if copy is False:
                raise ValueError(f"a copy is needed to convert {array.dtype} to {np.dtype(dtype)}")
            return array.astype(dtype)
        return array.copy() if copy else array

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if "out" in kwargs and any(isinstance(out, ReadsAsArray) for out in kwargs["out"]):
            raise TypeError(
                f"{type(self).__name__} cannot be written by numpy.{ufunc.__name__}; "
                "use assign(), assign_add() or assign_sub() on the variable"
            )
        return getattr(ufunc, method)(*(_as_operand(x) for x in inputs), **kwargs)

    def __getitem__(self, key: Any) -> Any:
        return self._read()[_as_operand(key)]

    def __len__(self) -> int:
        return len(self._read())

    def __iter__(self) -> Iterator[Any]:
        return iter(self._read())

    def __bool__(self) -> bool:
        return bool(self._read())

    def __float__(self) -> float:
        return float(self._read())

    def __int__(self) -> int:
        return int(self._read())

    def __index__(self) -> int:
        return operator.index(self._read()[()])

    def __format__(self, spec: str) -> str:
        return format(self._read()[()], spec) if spec else str(self)

    def __complex__(self) -> complex:
        return complex(self._read())


def refusal(message: Callable[[Any], str]) -> Callable[..., Any]:
    """Return a method that raises ValueError with ``message(self)``."""

    def refuse(self: Any, *_: Any, **__: Any) -> Any:
        raise ValueError(message(self))

    return refuse
