"""Casts of the GPU kernels, values for them, and NumPy's results."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpidist.arrays.dtypes import as_dtype
from mpidist.arrays.kernels import kernel_name

NAMES = [f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)]
NAMES += ["bool", "float16", "bfloat16", "float32", "float64", "complex64", "complex128"]


def dtype_of(name: str) -> np.dtype[Any]:
    return as_dtype(name)


# What collectives ask for: packing any dtype, wider sums, means of integers.
CASTS = [(name, name) for name in NAMES]
CASTS += [("float16", "float32"), ("bfloat16", "float32"), ("float32", "float16"), ("float32", "bfloat16")]
CASTS += [("int16", "int32"), ("int32", "int16"), ("uint16", "uint32"), ("uint32", "uint16")]
CASTS += [(name, "float64") for name in NAMES[:8]]
DIVISIONS = [(name, name) for name in ("float32", "float64", "complex64", "complex128")]
DIVISIONS += [("float32", "float16"), ("float32", "bfloat16")]
KERNELS = sorted(
    {kernel_name(dtype_of(source), dtype_of(target), False) for source, target in CASTS}
    | {kernel_name(dtype_of(source), dtype_of(target), True) for source, target in DIVISIONS}
)


def sample(name: str, size: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """Any bits at all: not-a-numbers, infinities, denormals, and numbers half-way between two of a narrower dtype."""
    rng = np.random.default_rng(seed)
    dtype = dtype_of(name)
    if name == "bool":
        return rng.integers(0, 2, size).astype(bool)
    if name in ("float16", "bfloat16"):
        return (np.arange(size) * 40503 % 65536).astype(np.uint16).view(dtype)  # all of them, from 65536 on
    if dtype.kind in "fc":
        part = np.dtype(f"float{dtype.itemsize * (8 if dtype.kind == 'f' else 4)}")
        count = size * dtype.itemsize // part.itemsize
        values = rng.integers(0, 256, count * part.itemsize, np.uint8).view(part)
        with np.errstate(all="ignore"):
            halves = (np.arange(count) % 65536).astype(np.uint16).view(np.float16).astype(part)
            between = halves * part.type(1 + 2**-11)
            ties = values.copy()
            words = ties.view(np.uint16).reshape(count, part.itemsize // 2)
            words[:, :-2], words[:, -2] = 0, 0x8000
            chosen = np.choose(rng.integers(0, 4, count), [values, halves, between, ties])
        return chosen.astype(part).view(dtype)
    values = rng.integers(0, 256, size * dtype.itemsize, np.uint8).view(dtype)
    values[: min(size, 4)] = [0, 1, np.iinfo(dtype).max, np.iinfo(dtype).min][: min(size, 4)]
    return values


def expected(values: np.ndarray[Any, Any], target: str, divisor: float | None = None) -> np.ndarray[Any, Any]:
    """What NumPy makes of it, halves in float32."""
    with np.errstate(all="ignore"):
        if values.dtype.name in ("float16", "bfloat16") and (divisor is not None or target != values.dtype.name):
            values = values.astype(np.float32)
        if divisor is not None:
            values = np.true_divide(values, divisor)
        return values.astype(dtype_of(target))


def assert_same_bits(actual: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any]) -> None:
    """Equal in all bits; not-a-numbers are one as good as the other."""
    assert actual.dtype == wanted.dtype
    if wanted.dtype.kind == "c":
        part = np.dtype(f"float{wanted.dtype.itemsize * 4}")
        actual, wanted = actual.view(part), wanted.view(part)
    word = np.dtype(f"uint{wanted.dtype.itemsize * 8}")
    same = actual.view(word) == wanted.view(word)
    if wanted.dtype.kind in "fV":
        with np.errstate(invalid="ignore"):  # ml_dtypes minds signalling ones
            same |= np.isnan(actual) & np.isnan(wanted)
    wrong = np.flatnonzero(~same)
    assert not wrong.size, f"{wrong.size} wrong, first {wrong[0]}: {actual[wrong[0]]!r}, {wanted[wrong[0]]!r}"
