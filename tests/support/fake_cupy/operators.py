"""The operators, reductions and other methods of the array class that NumPy carries out."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.support.fake_cupy import running

_BINARY = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "truediv": np.true_divide, "floordiv": np.floor_divide,
    "mod": np.remainder, "pow": np.power, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
    "lshift": np.left_shift, "rshift": np.right_shift, "matmul": np.matmul,
}  # fmt: skip
_COMPARISONS = {
    "lt": np.less, "le": np.less_equal, "eq": np.equal, "ne": np.not_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
_UNARY = {"neg": np.negative, "pos": np.positive, "abs": np.absolute, "invert": np.invert}


def _reduction(name: str) -> Any:
    function = getattr(np, name)

    def method(self: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: bool = False) -> Any:
        given = {"axis": axis, "keepdims": keepdims}
        if dtype is not None:
            given["dtype"] = dtype
        return running.run(function, (self,), given, out)

    def prod(self: Any, axis: Any = None, dtype: Any = None, out: Any = None, keepdims: Any = None) -> Any:
        return method(self, axis, dtype, out, bool(keepdims))

    def without_dtype(self: Any, axis: Any = None, out: Any = None, keepdims: bool = False) -> Any:
        return running.run(function, (self,), {"axis": axis, "keepdims": keepdims}, out)

    chosen = prod if name == "prod" else method if name in ("sum", "mean") else without_dtype
    chosen.__name__ = name
    return chosen


def _elementwise(name: str, function: Any) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return running.run(function, (self, *args), kwargs, kwargs.pop("out", None))

    method.__name__ = name
    return method


def _operator(kind: type, name: str, function: Any) -> None:
    def forward(self: Any, other: Any) -> Any:
        return running.binary(function, self, other, reflected=False)

    def reflected(self: Any, other: Any) -> Any:
        return running.binary(function, self, other, reflected=True)

    def in_place(self: Any, other: Any) -> Any:
        running.run(function, (self, other), {}, self)
        return self

    setattr(kind, f"__{name}__", forward)
    setattr(kind, f"__r{name}__", reflected)
    setattr(kind, f"__i{name}__", in_place)


def add_operators(kind: type) -> None:
    """Give the array class its operators, and the methods that NumPy carries out."""
    for name in ("sum", "mean", "prod", "max", "min", "any", "all"):
        setattr(kind, name, _reduction(name))
    for name in ("std", "var", "argmax", "argmin", "cumsum", "cumprod", "clip", "round", "argsort", "repeat", "conj"):
        setattr(kind, name, _elementwise(name, getattr(np, name)))
    for name, function in _BINARY.items():
        _operator(kind, name, function)
    for name, function in _COMPARISONS.items():
        setattr(kind, f"__{name}__", lambda self, other, _f=function: running.binary(_f, self, other, False))
    for name, function in _UNARY.items():
        setattr(kind, f"__{name}__", lambda self, _f=function: running.run(_f, (self,), {}))
    kind.__hash__ = None  # type: ignore[assignment]
